"""``adacheck cp``, between disks and object stores: a copy has its original's bits, whole or not.

Most stores are in memory; those with a URL are servers on this machine.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.schemes import SCHEMES
from adacheck_jax.store.steps import manifest_file, marks, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from adacheck_jax.store.storage.posix import Posix
from adacheck_jax.tools import audit
from adacheck_jax.tools.handover import copy_steps, copying
from tests import support
from tests.support import (
    abstract,
    assert_same_bits,
    assert_steps,
    manager_of,
    save_steps,
    saved_run,
)

COPIED, THERE, REFUSED = copy_steps.COPIED, copy_steps.THERE, copy_steps.REFUSED


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["cp", *map(str, arguments)])


def results_of(report: copying.CopyReport) -> dict[str, str]:
    return {row.name: row.result for row in report.steps}


def disk_bytes(root: Path) -> int:
    """Bytes of all files, each hard-linked one counted once."""
    found = [path.lstat() for path in root.rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_size for each in found}.values())


def contents(root: AnyPath) -> dict[str, bytes]:
    return {each.below(at(root)): each.read() for each in at(root).list()}


def links(root: Path) -> set[frozenset[str]]:
    """Groups of paths that are hard links to one file."""
    groups: dict[int, set[str]] = {}
    for path in root.rglob("*"):
        if path.is_file():
            groups.setdefault(path.lstat().st_ino, set()).add(str(path.relative_to(root)))
    return {frozenset(each) for each in groups.values()}


def in_memory() -> Location:
    return Location(KvStore(f"memory://{uuid.uuid4().hex}"), "run")


def verified(root: AnyPath) -> list[int]:
    """Numbers of the steps, all of which are whole, to the last bit."""
    if at(root).storage.shown("").startswith("memory"):  # which Orbax cannot read: a copy of it is
        assert not [step for step in roots.steps_of(root) if step.error]
        with tempfile.TemporaryDirectory() as folder:
            copying.copy(root, Path(folder) / "copy")
            return verified(Path(folder) / "copy")
    found = audit.verify_root(root, read_data=True, replay=True)
    assert [each.damage for each in found.steps] == [()] * len(found.steps)
    assert not found.leftovers
    return [each.step for each in found.steps if each.step is not None]


def carried(root: Location) -> set[str]:
    """Steps in a store that hold files of the steps that they build on."""
    return {
        each.below(root).partition("/")[0] for each in root.list() if f"/{LINEAGE}/" in each.key
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[int, Any]]:
    """A root with base 1 and deltas 2 to 4, and base 5; the last state, and those of all steps."""
    root = tmp_path_factory.mktemp("saved") / "run"
    trained, states = saved_run(root, 5, max_deltas=3)
    return root, trained.state, states


@pytest.fixture
def retained(tmp_path: Path) -> Any:
    """A run that keeps two steps, which build on deleted ones; its manager is open."""
    trained = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(tmp_path / "run", handler, max_to_keep=2) as manager:
        save_steps(manager, trained, 4)
        yield tmp_path / "run", manager, trained


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, support.Run, Any]:
    """A root of which steps 3, 6 and 8 are left, of one lineage that begins at 1; and step 8."""
    root = tmp_path_factory.mktemp("gappy") / "run"
    trained = support.dict_run(support.mesh_of((1, 1)))
    policy = AnyPreservationPolicy([LatestN(1), EveryNSteps(3)])
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(root, handler, preservation_policy=policy) as manager:
        return root, trained, save_steps(manager, trained, 8)[8]


# From disk to disk.


def test_a_copy_has_the_bytes_and_the_links_and_later_steps_are_linked_to_it(saved, tmp_path):
    root, state, states = saved
    copy = tmp_path / "copy"
    shutil.copytree(root, tmp_path / "before", copy_function=os.link)
    shutil.rmtree(tmp_path / "before/4")
    shutil.rmtree(tmp_path / "before/5")
    first = copying.copy(tmp_path / "before", copy)
    assert results_of(first) == dict.fromkeys("123", COPIED)
    done = run(root, copy, "--json")
    second = json.loads(done.output)
    found = {step["name"]: step["result"] for step in second["steps"]}
    assert (done.exit_code, second["not_copied"]) == (0, [])
    assert found == {**dict.fromkeys("123", THERE), **dict.fromkeys("45", COPIED)}
    assert contents(copy) == contents(root)
    assert links(copy) == links(root)
    assert disk_bytes(copy) == disk_bytes(root) == first.written_bytes + second["written_bytes"]
    assert_steps(copy, states, state)
    assert "Every file was read back." in " ".join(run(root, copy).output.split())


@pytest.mark.slow
def test_without_hard_links_steps_come_with_those_that_they_refer_to(tmp_path, monkeypatch):
    monkeypatch.setattr(Posix, "adopt", lambda *_: False)
    trained, keep = support.dict_run(support.mesh_of((4, 2))), adacheck.KeepLineage(LatestN(3))
    handler = adacheck.AdaCheckHandler(trained.recorder, keep_lineage=keep)
    with manager_of(tmp_path / "run", handler, preservation_policy=keep) as manager:
        states = save_steps(manager, trained, 3)
    monkeypatch.undo()
    report = copying.copy(tmp_path / "run", tmp_path / "copy")
    assert results_of(report) == dict.fromkeys("123", COPIED)
    assert_steps(tmp_path / "copy", states, trained.state)
    (tmp_path / "run/2/default/adacheck/manifest.json").write_text("{}")
    report = copying.copy(tmp_path / "run", tmp_path / "other")
    assert results_of(report) == {"1": COPIED, "2": REFUSED, "3": REFUSED}


def test_a_file_system_without_links_gets_whole_files(saved, tmp_path, monkeypatch):
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refused)
    report = copying.copy(saved[0], tmp_path / "copy")
    assert report.written_bytes == sum(map(len, contents(saved[0]).values()))
    assert contents(tmp_path / "copy") == contents(saved[0])


def test_steps_that_cannot_be_copied_have_a_row_and_the_others_are_copied(saved, tmp_path):
    root = tmp_path / "run"
    copying.copy(saved[0], root)
    (root / "2/default/adacheck/manifest.json").unlink()
    (root / "2/default/adacheck/manifest.json").write_text("{}")
    os.symlink("/etc/passwd", root / "4/default/x")
    (root / "metadata").mkdir()
    (root / f"9{roots.TMP_SUFFIX}-1").mkdir()
    with manager_of(root, None) as manager:
        manager.save(8, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
    assert run(root, tmp_path / "copy").exit_code == 1
    report = copying.copy(root, tmp_path / "other")
    assert results_of(report) == {**dict.fromkeys("135", COPIED), **dict.fromkeys("248", REFUSED)}
    why = {row.name: row.why for row in report.steps if row.why}
    assert "manifest" in why["2"]
    assert "symbolic link" in why["4"]
    assert "stock Orbax saved it" in why["8"]
    assert report.not_copied == ("metadata",)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["1", "3", "5"]


@pytest.mark.parametrize("to_store", [False, True])
def test_a_step_that_is_compacted_meanwhile_is_not_copied(tmp_path, monkeypatch, to_store):
    root, place = tmp_path / "run", in_memory() if to_store else at(tmp_path / "copy")
    saved_run(root, 3)
    copy_file, done = copy_steps.copy_file, [False]

    def change(source: Location, target: Location) -> Any:
        found = copy_file(source, target)
        if not done[0] and source.key.startswith(f"{root / '3'}/"):
            done[0] = True
            support.compact(root, 3)
        return found

    monkeypatch.setattr(copy_steps, "copy_file", change)
    monkeypatch.setattr(copy_steps, "THREADS", 1)
    report = copying.copy(root, place)
    assert results_of(report) == {"1": COPIED, "2": COPIED, "3": REFUSED}
    assert "meanwhile" in (report.steps[2].why or "")
    assert [step.step for step in roots.steps_of(place)] == [1, 2]
    assert to_store or sorted(place.folders()) == ["1", "2"]


def test_a_copy_is_not_linked_to_files_that_have_changed(saved, tmp_path):
    root, copy = saved[0], tmp_path / "copy"
    copying.copy(root, copy)
    shutil.rmtree(copy / "5")
    for path in (copy / "1").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(support.with_flipped_data(path.read_bytes()))
    copying.copy(root, copy)
    assert contents(copy / "5") == contents(root / "5")


# To and from stores.


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", SCHEMES)
def test_a_run_moves_to_a_bucket_and_back_and_goes_on_in_each(saved, tmp_path, request, kind):
    root, state, states = saved
    url = f"{request.getfixturevalue(kind).url}/{uuid.uuid4().hex}"
    assert run(root, url).exit_code == 0
    trained = support.dict_run(support.mesh_of((4, 2)))
    trained.count = 5
    with adacheck.checkpoint_manager(url, trained.recorder, max_to_keep=None) as manager:
        for step, expected in states.items():
            found = manager.restore(step, args=adacheck.RestoreArgs(abstract(state)))
            assert_same_bits(found, expected)
        trained.state = found
        states = states | save_steps(manager, trained, 1)
    assert isinstance(roots.steps_of(located(url))[-1].manifest, DeltaManifest)
    assert verified(located(url)) == [1, 2, 3, 4, 5, 6]
    back = tmp_path / "back"
    assert run(url, back).exit_code == 0
    assert_steps(back, states, state)
    if SCHEMES[kind].orbax_reads:  # where stock Orbax reads what it wrote
        base = ocp.StandardCheckpointer().restore(epath.Path(url) / "5/default")
        stock = ocp.StandardCheckpointer().restore(root / "5/default")
        assert_same_bits(base, support.host_copy(stock))
    kept = {each for each in links(back) if not any(path.startswith("6") for path in each)}
    assert {each for each in links(root) if not any(p.startswith("5") for p in each)} <= kept
    shutil.rmtree(back / "5")  # as retention would
    with manager_of(back, adacheck.AdaCheckHandler(trained.recorder)) as manager:
        trained.state = manager.restore(6, args=adacheck.RestoreArgs(abstract(state)))
        assert_same_bits(trained.state, states[6])
        save_steps(manager, trained, 1)
    assert verified(back) == [1, 2, 3, 4, 6, 7]


@pytest.mark.slow
def test_ancestors_that_live_as_links_are_carried_once(retained):
    root, manager, trained = retained
    store = in_memory()
    report = copying.copy(root, store)
    assert results_of(report) == {"3": COPIED, "4": COPIED}
    assert carried(store) == {"3"}
    assert disk_bytes(root) <= report.written_bytes < disk_bytes(root) + 2000
    save_steps(manager, trained, 2)
    report = copying.copy(root, store)
    assert results_of(report) == {"5": COPIED, "6": COPIED}
    assert carried(store) == {"3"}, "what an earlier call copied is referred to"
    assert verified(store) == [3, 4, 5, 6]
    told: list[tuple[int, int, str]] = []
    copying.copy(store, other := in_memory(), lambda *each: told.append(each))
    assert contents(other) == contents(store), "between stores steps stay as they are"
    assert told == [(n, 4, f"copying {n + 3}") for n in range(4)]
    back = root.with_name("back")
    copying.copy(store, back)
    assert verified(back) == [3, 4, 5, 6]
    for step in "34":
        shutil.rmtree(back / step)
    assert verified(back) == [5, 6]
    own = {name: data for name, data in contents(root).items() if not name.endswith("temp")}
    assert own.items() <= contents(back).items()


@pytest.mark.slow
def test_between_kept_steps_only_what_has_no_directory_is_carried_and_kept(gappy, tmp_path, gs):
    run, trained, newest = gappy
    trained = dataclasses.replace(trained)
    url = f"{gs.url}/{uuid.uuid4().hex}"
    report = copying.copy(run, root := located(url))
    assert results_of(report) == dict.fromkeys("368", COPIED)
    assert report.written_bytes < disk_bytes(run) + 2000
    names = {each.below(root).split("/lineage/")[-1] for each in root.list() if LINEAGE in each.key}
    assert {int(re.split(r"[./]", each)[0]) for each in names} == {1, 2, 4, 5, 7}
    with adacheck.checkpoint_manager(url, trained.recorder, max_to_keep=1) as manager:
        args = adacheck.RestoreArgs(abstract(trained.state))
        trained.state = manager.restore(8, args=args)
        assert_same_bits(trained.state, newest)
        save_steps(manager, trained, 2)
        assert list(manager.all_steps()) == [3, 6, 8, 9, 10], "each builds on those before"
    assert verified(root) == [3, 6, 8, 9, 10]
    copying.copy(root, back := tmp_path / "back")
    assert contents(back).items() >= contents(run).items()
    for step in "36":
        shutil.rmtree(back / step)
    assert verified(back) == [8, 9, 10]


@pytest.mark.slow
def test_without_hard_links_a_copy_of_a_store_refers_to_other_steps_too(
    retained, gappy, tmp_path, monkeypatch
):
    copying.copy(retained[0], store := in_memory())
    copying.copy(gappy[0], other := in_memory())
    monkeypatch.setattr(Posix, "adopt", lambda *_: False)
    report = copying.copy(store, tmp_path / "copy")
    assert results_of(report) == {"3": COPIED, "4": COPIED}
    assert contents(tmp_path / "copy") == contents(store)
    assert verified(tmp_path / "copy") == [3, 4]
    report = copying.copy(other, tmp_path / "second")
    assert results_of(report) == {"3": COPIED, "6": REFUSED, "8": REFUSED}
    assert "cannot link the rest" in (report.steps[1].why or "")


def test_a_step_whose_parent_goes_meanwhile_carries_its_links(retained, monkeypatch):
    root, _, _ = retained
    store, copy = in_memory(), copy_steps.copy_file

    def deleting(source: Location, target: Location) -> Any:
        shutil.rmtree(root / "3", ignore_errors=True)
        return copy(source, target)

    monkeypatch.setattr(copy_steps, "copy_file", deleting)
    report = copying.copy(root, store)
    assert results_of(report) == {"3": "deleted meanwhile", "4": COPIED}
    assert carried(store) == {"4"}
    assert verified(store) == [4]


class Interrupted(BaseException):
    """A process that ends."""


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.first(3, slow=5)
@pytest.mark.parametrize(
    ("way", "number", "end"),
    [
        ("to store", 25, Interrupted()),
        ("to disk", 30, FULL),
        ("from store", 25, Interrupted()),
        ("to disk", 0, FULL),
        ("to disk", 25, Interrupted()),
        *(("to store", number, Interrupted()) for number in range(0, 48, 4)),
    ],
)
def test_a_copy_that_is_called_again_goes_on_at_the_step_that_it_was_at(
    saved, tmp_path, monkeypatch, way, number, end
):
    root, _, _ = saved
    source: AnyPath = root
    if way == "from store":
        copying.copy(root, source := in_memory())
    place: AnyPath = in_memory() if way == "to store" else tmp_path / "copy"
    copy, copied = copy_steps.copy_file, list[str]()

    def counted(one: Location, other: Location) -> Any:
        if len(copied) >= number:
            if at(place).on_file_system:
                Path(other.key).write_bytes(b"half")
            raise end
        copied.append(one.key)
        return copy(one, other)

    with monkeypatch.context() as patch:
        patch.setattr(copy_steps, "copy_file", counted)
        patch.setattr(copy_steps, "THREADS", 1)
        if end is FULL:
            found = results_of(copying.copy(source, place))
            assert {*found.values()} <= {COPIED, REFUSED}
            assert found["5"] == REFUSED
        else:
            with pytest.raises(Interrupted):
                copying.copy(source, place)
    half = [step.step for step in roots.steps_of(place)] if at(place).exists else []
    assert half == [1, 2, 3, 4, 5][: len(half)]
    if end is FULL:
        there = [path.name for path in place.iterdir()] if place.exists() else []
        assert sorted(there) == [*map(str, half)]
    if way != "to store":  # as where a killed process cleared nothing
        (at(place) / f"{len(half) + 1}{roots.TMP_SUFFIX}-copy/x").write(b"")
    report = copying.copy(source, place)
    assert [*results_of(report).values()].count(THERE) == len(half)
    assert REFUSED not in results_of(report).values()
    whole = in_memory() if way == "to store" else tmp_path / "whole"
    copying.copy(source, whole)
    assert contents(whole) == contents(place)
    assert way != "from store" or verified(place) == [1, 2, 3, 4, 5]


def test_what_makes_a_step_exist_is_written_last(saved, monkeypatch):
    copying.copy(saved[0], first := in_memory())
    write, written = KvStore.write, list[str]()

    def noted(self: KvStore, key: str, *data: Any, **condition: Any) -> Any:
        written.append(key)
        return write(self, key, *data, **condition)

    monkeypatch.setattr(KvStore, "write", noted)
    for source in (saved[0], first):
        written.clear()
        copying.copy(source, in_memory())
        for step in "12345":
            ranks = [rank_of(key[6:]) for key in written if key.startswith(f"run/{step}/")]
            assert ranks == sorted(ranks)
            assert ranks[-1] == 3 > ranks[-2] >= 1 > ranks[0]


def rank_of(path: str) -> int:
    """The place of a file among those of its step: data, manifests, marks of items, and its own."""
    ends = marks.COMMIT_MARK, marks.FINALIZED
    return 3 if path == ends[0] else 2 if path.endswith(ends) else path == MANIFEST


MANIFEST = f"default/{manifest_file.FILE}"


@pytest.mark.slow
def test_what_lies_beside_the_state_travels_too(tmp_path, s3):
    trained = support.dict_run(support.mesh_of((1, 1)))
    items = {"data": ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    url = f"{s3.url}/{uuid.uuid4().hex}"

    def manager(root: Any) -> Any:
        return adacheck.checkpoint_manager(root, trained.recorder, items=items, options=options)

    with manager(tmp_path / "run") as opened:
        for step in (1, 2):
            state = adacheck.SaveArgs(trained.advance())
            data = ocp.args.JsonSave({"batches": step})
            both = ocp.args.Composite(state=state, data=data)
            opened.save(step, args=both, metrics={"loss": 1.0})
    assert run(tmp_path / "run", url).exit_code == run(url, tmp_path / "back").exit_code == 0
    wanted = ocp.args.Composite(
        state=adacheck.RestoreArgs(abstract(trained.state)), data=ocp.args.JsonRestore()
    )
    for root in (url, tmp_path / "back"):
        with manager(root) as opened:
            found = opened.restore(opened.latest_step(), args=wanted)
            assert found["data"] == {"batches": 2}
            assert opened.metrics(2) == {"loss": 1.0}
            assert_same_bits(found["state"], support.host_copy(trained.state))


def test_another_step_of_that_name_and_a_part_of_one_stay(saved):
    root, _, _ = saved
    store = in_memory()
    copying.copy(root, store)
    for step in "2345":
        (store / step).delete()
    mark = store / "1" / marks.COMMIT_MARK
    (store / "1/default" / manifest_file.FILE).write(b"{}")
    (store / "2/default/d/other").write(b"")  # of a save under way
    before = contents(store)
    report = copying.copy(root, store)
    assert results_of(report) == {"1": REFUSED, "2": REFUSED, **dict.fromkeys("345", COPIED)}
    assert all("another step of this name" in (row.why or "") for row in report.steps[:2])
    assert before.items() <= contents(store).items()
    mark.delete()
    assert results_of(copying.copy(root, store))["1"] == REFUSED
    assert before.keys() - {"1/commit_success.txt"} <= contents(store).keys()


def test_a_value_that_reads_back_otherwise_is_no_step(saved, monkeypatch):
    store, read = in_memory(), KvStore.read

    def damaged(self: KvStore, key: str, *place: Any) -> bytes:
        found = read(self, key, *place)
        return found[:-1] + b"?" if "2/default/adacheck/delta" in key else found

    with monkeypatch.context() as patch:
        patch.setattr(KvStore, "read", damaged)
        report = copying.copy(saved[0], store)
    assert results_of(report)["2"] == REFUSED
    assert "found others" in (report.steps[1].why or "")
    steps = [step.step for step in roots.steps_of(store)]
    assert 2 not in steps
    assert {1, 5} <= {*steps}


def test_a_store_that_stops_answering_ends_the_copy(saved, monkeypatch):
    write, number = KvStore.write, [0]

    def refusing(self: KvStore, key: str, *data: Any, **condition: Any) -> Any:
        number[0] += 1
        if number[0] > 30:
            raise OSError(errno.EREMOTEIO, "PERMISSION_DENIED", key)
        return write(self, key, *data, **condition)

    monkeypatch.setattr(KvStore, "write", refusing)
    with pytest.raises(OSError, match="PERMISSION_DENIED"):
        copying.copy(saved[0], in_memory())


def test_wrong_inputs_are_told(saved, tmp_path, s3):
    root, _, _ = saved
    url = f"{s3.url}/{uuid.uuid4().hex}"
    (located(url) / "file").write(b"")
    for arguments, told in (
        ((f"{url}/none", tmp_path / "x"), "found nothing there"),
        ((f"{url}/file", tmp_path / "x"), "expected a checkpoint root, found a file"),
        ((root, f"{url}/file"), "found a file"),
        ((url, f"{url}/x"), "expected steps saved by"),
    ):
        done = run(*arguments)
        assert (done.exit_code, told in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert not (tmp_path / "x").exists()
    copying.copy(root, located(f"{url}/run"))
    for source, place in ((f"{url}/run", f"{url}/run/x"), (f"{url}/run", url)):
        assert "expected a place apart" in " ".join(run(source, place).stderr.split())
