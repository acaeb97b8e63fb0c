"""``adacheck cp``: a copy is as large as its original, whole, and never half a step."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
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
from adacheck_jax.tools.handover import copy_steps
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
    assert report["not_copied"] == []
    check_steps(tmp_path / "copy", target, states)
    assert "Every file was read back." in " ".join(run(root, tmp_path / "other").output.split())


@contextlib.contextmanager
def without(root: Path, *steps: int) -> Iterator[None]:
    """A root before some of its steps were saved."""
    for step in steps:
        (root / str(step)).rename(root.parent / str(step))
    try:
        yield
    finally:
        for step in steps:
            (root.parent / str(step)).rename(root / str(step))


def test_later_steps_are_linked_to_those_that_are_there(saved, tmp_path):
    root, target, states = saved
    with without(root, 4, 5):
        first = copied(root, tmp_path / "copy")
    assert results(first) == dict.fromkeys("123", "copied")
    check_steps(tmp_path / "copy", target, {n: states[n] for n in (1, 2, 3)})
    second = copied(root, tmp_path / "copy")
    assert results(second) == {**dict.fromkeys("123", "there"), **dict.fromkeys("45", "copied")}
    check_steps(tmp_path / "copy", target, states)
    assert links(tmp_path / "copy") == links(root)
    assert second["written_bytes"] < first["written_bytes"]


@pytest.mark.slow
def test_without_hard_links_steps_come_with_those_that_they_refer_to(tmp_path, monkeypatch):
    monkeypatch.setattr(Posix, "adopt", lambda *_: False)
    trained, keep = support.dict_run(support.mesh_of((4, 2))), adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(trained.recorder, keep_lineage=keep)
    with manager_of(tmp_path / "run", handler, preservation_policy=keep) as manager:
        states = support.save_steps(manager, trained, 3)
    monkeypatch.undo()
    report = copied(tmp_path / "run", tmp_path / "copy")
    assert results(report) == dict.fromkeys("123", "copied")
    check_steps(tmp_path / "copy", abstract(trained.state), states)
    (tmp_path / "run/2/default/adacheck/manifest.json").write_text("{}")
    report = copied(tmp_path / "run", tmp_path / "other")
    assert results(report) == {"1": "copied", "2": "refused", "3": "refused"}


def test_a_file_system_without_links_gets_whole_files(saved, tmp_path, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    root, target, states = saved
    monkeypatch.setattr(os, "link", refused)
    report = copied(root, tmp_path / "copy")
    assert report["written_bytes"] == sum(map(len, contents(root).values()))
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 30])
def test_a_full_disk_leaves_whole_steps_and_nothing_else(saved, tmp_path, monkeypatch, number):
    root, _, _ = saved
    count, copy_file = [0], copy_steps.copy_file

    def full(source: Location, target: Location) -> Any:
        count[0] += 1
        if count[0] > number:
            Path(target.key).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        return copy_file(source, target)

    monkeypatch.setattr(copy_steps, "copy_file", full)
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


@pytest.mark.parametrize("is_gone", [True, False], ids=["deleted", "compacted"])
def test_a_step_that_changes_meanwhile_is_not_copied(tmp_path, monkeypatch, is_gone):
    root = tmp_path / "run"
    saved_run(root, 3)
    copy_file, done = copy_steps.copy_file, [False]

    def change(source: Location, target: Location) -> Any:
        found = copy_file(source, target)
        if not done[0] and source.key.startswith(f"{root / '3'}/"):
            done[0] = True
            shutil.rmtree(root / "3") if is_gone else support.compact(root, 3)
        return found

    monkeypatch.setattr(copy_steps, "copy_file", change)
    monkeypatch.setattr(copy_steps, "THREADS", 1)
    report = copied(root, tmp_path / "copy")
    last = "deleted meanwhile" if is_gone else "refused"
    assert results(report) == {"1": "copied", "2": "copied", "3": last}
    assert is_gone or "meanwhile" in report["steps"][2]["why"]
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["1", "2"]


def test_a_copy_is_not_linked_to_files_that_have_changed(saved, tmp_path):
    root, target, states = saved
    with without(root, 4, 5):
        copied(root, tmp_path / "copy")
    for path in (tmp_path / "copy/1").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(support.with_flipped_data(path.read_bytes()))
    copied(root, tmp_path / "copy")
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
