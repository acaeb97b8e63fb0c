"""``adacheck cp``: a copy is as large as its original, whole, and never half a step."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.checkpoint_managers import LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import Location
from adacheck_jax.store.storage.posix import Posix
from adacheck_jax.tools.handover import copy_files, copy_steps, copy_to_disk
from tests import support
from tests.cli.test_packaging import COMMAND, large_packages_after
from tests.end_to_end.test_compaction import check_steps, item, saved_run
from tests.support import abstract, manager_of


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["cp", *map(str, arguments)])


def copied(*arguments: Any) -> dict[str, Any]:
    return json.loads(run(*arguments, "--json").output)


def results(report: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["result"] for step in report["steps"]}


def disk_bytes(root: Path) -> int:
    """Bytes of all files, each hard-linked one counted once."""
    found = [path.lstat() for path in root.rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_size for each in found}.values())


def contents(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def links(root: Path) -> set[frozenset[str]]:
    """Groups of paths that are hard links to one file."""
    groups: dict[int, set[str]] = {}
    for path in root.rglob("*"):
        if path.is_file():
            groups.setdefault(path.lstat().st_ino, set()).add(str(path.relative_to(root)))
    return {frozenset(each) for each in groups.values()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    trained, states = saved_run(root, 5)
    return root, abstract(trained.state), states


@pytest.mark.slow
def test_a_copy_of_a_root_has_its_bytes_and_its_links(saved, tmp_path):
    root, target, states = saved
    before = contents(root)
    report = copied(root, tmp_path / "copy")
    assert results(report) == dict.fromkeys("12345", "copied")
    assert contents(tmp_path / "copy") == contents(root) == before
    assert links(tmp_path / "copy") == links(root)
    assert disk_bytes(tmp_path / "copy") == disk_bytes(root) == report["written_bytes"]
    assert report["plain_bytes"] == sum(map(len, before.values())) > 2 * report["written_bytes"]
    assert report["not_copied"] == []
    check_steps(tmp_path / "copy", target, states)
    assert "Every file was read back." in " ".join(run(root, tmp_path / "other").output.split())


def test_steps_are_copied_with_what_they_build_on_and_the_next_ones_are_linked(saved, tmp_path):
    root, target, states = saved
    first = copied(root / "3", tmp_path / "copy")
    assert results(first) == {"3": "copied"}
    check_steps(tmp_path / "copy", target, {3: states[3]})
    second = copied(root / "5", root / "3", tmp_path / "copy")
    assert results(second) == {"3": "there", "5": "copied"}
    check_steps(tmp_path / "copy", target, {n: states[n] for n in (3, 5)})
    both = links(root)
    expected = {frozenset(x for x in each if x[0] in "35") for each in both} - {frozenset()}
    assert links(tmp_path / "copy") == expected
    assert second["written_bytes"] < first["written_bytes"] / 2
    assert results(copied(root, tmp_path / "copy"))["5"] == "there"
    assert links(tmp_path / "copy") == both


@pytest.mark.slow
def test_without_hard_links_the_steps_that_it_refers_to_are_copied_too(tmp_path, monkeypatch):
    monkeypatch.setattr(Posix, "adopt", lambda *_: False)
    trained, keep = support.dict_run(support.mesh_of((4, 2))), adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(trained.recorder, keep_lineage=keep)
    with manager_of(tmp_path / "run", handler, preservation_policy=keep) as manager:
        states = support.save_steps(manager, trained, 3)
    monkeypatch.undo()
    report = copied(tmp_path / "run/3", tmp_path / "copy")
    assert results(report) == dict.fromkeys("123", "copied")
    assert [step["is_added"] for step in report["steps"]] == [True, True, False]
    check_steps(tmp_path / "copy", abstract(trained.state), states)
    (tmp_path / "run/2/default/adacheck/manifest.json").write_text("{}")
    report = copied(tmp_path / "run/3", tmp_path / "other")
    assert results(report) == {"3": "refused"}
    assert not (tmp_path / "other").exists()


def test_a_file_system_without_links_gets_whole_files(saved, tmp_path, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    root, target, states = saved
    monkeypatch.setattr(os, "link", refused)
    report = copied(root, tmp_path / "copy")
    assert report["written_bytes"] == report["plain_bytes"]
    assert contents(tmp_path / "copy") == contents(root)
    check_steps(tmp_path / "copy", target, states)


def test_steps_that_cannot_be_copied_have_a_row_and_the_others_are_copied(saved, tmp_path):
    root = tmp_path / "run"
    copied(saved[0], root)
    (root / "2/default/adacheck/manifest.json").unlink()
    (root / "2/default/adacheck/manifest.json").write_text("{}")
    os.symlink("/etc/passwd", root / "4/default/x")
    (root / "metadata").mkdir()
    (root / f"9{roots.TMP_SUFFIX}-1").mkdir()
    with manager_of(root, None) as manager:
        manager.save(8, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    done = run(root, tmp_path / "copy", "--json")
    report = json.loads(done.output)
    assert done.exit_code == 1
    assert results(report) == {
        **dict.fromkeys("135", "copied"),
        **dict.fromkeys("248", "refused"),
    }
    why = {step["name"]: step["why"] for step in report["steps"] if step["why"]}
    assert "manifest" in why["2"]
    assert "symbolic link" in why["4"]
    assert "stock Orbax saved it" in why["8"]
    assert report["not_copied"] == ["metadata"]
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["1", "3", "5"]


def test_another_step_of_that_name_stays_as_it_is(saved, tmp_path):
    root, _, _ = saved
    with manager_of(tmp_path / "copy", adacheck.AdaCheckHandler(delta="bits")) as manager:
        manager.save(2, args=adacheck.SaveArgs({"w": jnp.ones(2)}))
    before = contents(tmp_path / "copy")
    report = copied(root / "2", root / "3", tmp_path / "copy")
    assert results(report) == {"2": "refused", "3": "copied"}
    assert "another step of this name" in report["steps"][0]["why"]
    shutil.rmtree(tmp_path / "copy/3")
    assert contents(tmp_path / "copy") == before


def test_wrong_inputs_are_refused(saved, tmp_path):
    root, _, _ = saved
    (tmp_path / "file").write_text("")
    saved_run(tmp_path / "second", 1)
    for arguments, told in (
        ((root,), "found one path"),
        ((root / "9", tmp_path / "x"), "found nothing there. Steps there: 1, 2, 3, 4, 5"),
        ((tmp_path / "none", tmp_path / "x"), "found nothing there"),
        ((root, root / "x"), "expected a place apart"),
        ((root, root.parent), "expected a place apart"),
        ((root, tmp_path / "file"), "found a file"),
        ((root, tmp_path / "no/x"), "expected a directory, found none"),
        ((root / "1", tmp_path / "second", tmp_path / "x"), "expected steps of one root"),
        ((tmp_path, tmp_path.parent / "x"), "expected steps saved by AdaCheckHandler"),
    ):
        done = run(*arguments)
        assert (done.exit_code, told in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "second"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 7, 30])
def test_a_full_disk_leaves_whole_steps_and_nothing_else(saved, tmp_path, monkeypatch, number):
    root, _, _ = saved
    count, copy_file = [0], copy_to_disk.copy_file

    def full(source: Location, target: Location) -> Any:
        count[0] += 1
        if count[0] > number:
            Path(target.key).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy_file(source, target)

    monkeypatch.setattr(copy_to_disk, "copy_file", full)
    done = run(root, tmp_path / "copy", "--json")
    found = results(json.loads(done.output))
    assert done.exit_code == 1
    assert found["5"] == "refused"
    whole = [name for name, result in found.items() if result == "copied"]
    there = tmp_path / "copy"
    assert sorted(x.name for x in there.iterdir()) == whole if there.exists() else not whole
    monkeypatch.undo()
    assert "refused" not in results(copied(root, there)).values()
    assert contents(there) == contents(root)


def test_other_bytes_in_a_copy_are_found(saved, tmp_path, monkeypatch):
    root, _, _ = saved
    monkeypatch.setattr(copy_files, "digest", lambda file: (0, file.key))
    report = copied(root / "1", tmp_path / "copy")
    assert results(report) == {"1": "refused"}
    assert "found others" in report["steps"][0]["why"]
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("is_gone", [True, False], ids=["deleted", "compacted"])
def test_a_step_that_changes_meanwhile_is_not_copied(tmp_path, monkeypatch, is_gone):
    root = tmp_path / "run"
    saved_run(root, 3)
    copy_file, done = copy_to_disk.copy_file, [False]

    def change(source: Location, target: Location) -> Any:
        found = copy_file(source, target)
        if not done[0]:
            done[0] = True
            shutil.rmtree(root / "3") if is_gone else support.compact(root, 3)
        return found

    monkeypatch.setattr(copy_to_disk, "copy_file", change)
    monkeypatch.setattr(copy_to_disk, "THREADS", 1)
    report = copied(root / "3", tmp_path / "copy")
    assert results(report) == {"3": "deleted meanwhile" if is_gone else "refused"}
    assert is_gone or "meanwhile" in report["steps"][0]["why"]
    assert not (tmp_path / "copy").exists()


def test_a_copy_is_not_linked_to_files_that_have_changed(saved, tmp_path):
    root, target, states = saved
    copied(root / "3", tmp_path / "copy")
    for path in (tmp_path / "copy/3").rglob("*"):
        if path.is_file() and path.stat().st_nlink == 1 and path.parent.name == "d":
            path.write_bytes(support.with_flipped_data(path.read_bytes()))
    copied(root / "5", tmp_path / "copy")
    check_steps_of_5 = {"5/" + k: v for k, v in contents(root / "5").items()}
    found = {k: v for k, v in contents(tmp_path / "copy").items() if k.startswith("5/")}
    assert found == check_steps_of_5
    with manager_of(tmp_path / "copy", adacheck.AdaCheckHandler()) as manager:
        support.assert_same_bits(manager.restore(5, args=adacheck.RestoreArgs(target)), states[5])


def test_a_copy_imports_nothing_large(saved, tmp_path):
    arguments = ["cp", str(saved[0]), str(tmp_path / "copy")]
    assert not large_packages_after(f"{COMMAND}; app({arguments}, standalone_mode=False)")
    assert item(tmp_path / "copy", 3).is_dir()
    assert copy_steps.COPIED == "copied"
