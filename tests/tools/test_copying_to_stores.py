"""``adacheck cp`` from and to object stores: each step keeps its bits, and a kill costs little.

Most tests take a store in memory; those with a URL take servers on this machine.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN
from typer.testing import CliRunner

import adacheck_jax as adacheck
from adacheck_jax.cli.main import app
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import manifest_file, marks, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from adacheck_jax.store.storage.posix import Posix
from adacheck_jax.tools import audit
from adacheck_jax.tools.handover import copy_steps, copying
from tests import support
from tests.end_to_end.test_compaction import check_steps, saved_run, stock_leaves
from tests.support import abstract, assert_same_bits, manager_of, save_steps
from tests.tools.test_copying import contents, disk_bytes, links, results, run


def in_memory() -> Location:
    return Location(KvStore(f"memory://{uuid.uuid4().hex}"), "run")


def contents_of(root: AnyPath) -> dict[str, bytes]:
    return {each.below(at(root)): each.read() for each in at(root).list()}


def results_of(report: copying.CopyReport) -> dict[str, str]:
    return {row.name: row.result for row in report.steps}


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
    """A root with base 1 and deltas 2 to 4, and base 5."""
    root = tmp_path_factory.mktemp("saved") / "run"
    trained, states = saved_run(root, 5, max_deltas=3)
    return root, abstract(trained.state), states


@pytest.fixture
def retained(tmp_path: Path) -> Any:
    """A run that keeps two steps, which build on deleted ones; its manager is open."""
    trained = support.dict_run(support.mesh_of((1, 1)))
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(tmp_path / "run", handler, max_to_keep=2) as manager:
        save_steps(manager, trained, 4)
        yield tmp_path / "run", manager, trained


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("kind", ["gcs", "s3"])
def test_a_run_moves_to_a_bucket_and_back_and_goes_on_in_each(saved, tmp_path, request, kind):
    root, target, states = saved
    url = f"{request.getfixturevalue(kind).url}/{uuid.uuid4().hex}"
    done = run(root, url, "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert results(report) == dict.fromkeys("12345", "copied")
    assert disk_bytes(root) <= report["written_bytes"] < disk_bytes(root) + 2000, "no link twice"
    trained = support.dict_run(support.mesh_of((4, 2)))
    trained.count = 5
    with adacheck.checkpoint_manager(url, trained.recorder, max_to_keep=None) as manager:
        for step, expected in states.items():
            found = manager.restore(step, args=adacheck.RestoreArgs(target))
            assert_same_bits(found, expected)
        trained.state = found
        states = states | save_steps(manager, trained, 1)
    assert isinstance(roots.steps_of(located(url))[-1].manifest, DeltaManifest)
    assert verified(located(url)) == [1, 2, 3, 4, 5, 6]
    back = tmp_path / "back"
    assert run(url, back).exit_code == 0
    check_steps(back, target, states)
    if kind == "gcs":  # where stock Orbax reads what it wrote
        base = ocp.StandardCheckpointer().restore(epath.Path(url) / "5/default")
        found = sorted(x.tobytes() for x in support.host_copy(base))
        assert found == sorted(x.tobytes() for x in stock_leaves(root, 5))
    kept = {each for each in links(back) if not any(path.startswith("6") for path in each)}
    assert {each for each in links(root) if not any(p.startswith("5") for p in each)} <= kept
    shutil.rmtree(back / "5")  # as retention would
    with manager_of(back, adacheck.AdaCheckHandler(trained.recorder)) as manager:
        trained.state = manager.restore(6, args=adacheck.RestoreArgs(target))
        assert_same_bits(trained.state, states[6])
        save_steps(manager, trained, 1)
    assert verified(back) == [1, 2, 3, 4, 6, 7]


@pytest.mark.slow
def test_ancestors_that_live_as_links_are_carried_once(retained):
    root, manager, trained = retained
    store = in_memory()
    report = copying.copy(root, store)
    assert results_of(report) == {"3": "copied", "4": "copied"}
    assert carried(store) == {"3"}
    assert disk_bytes(root) <= report.written_bytes < disk_bytes(root) + 2000
    save_steps(manager, trained, 2)
    report = copying.copy(root, store)
    assert results_of(report) == {"5": "copied", "6": "copied"}
    assert carried(store) == {"3"}, "what an earlier call copied is referred to"
    assert verified(store) == [3, 4, 5, 6]
    told: list[tuple[int, int, str]] = []
    copying.copy(store, other := in_memory(), lambda *each: told.append(each))
    assert contents_of(other) == contents_of(store), "between stores steps stay as they are"
    assert told == [(n, 4, f"copying {n + 3}") for n in range(4)]
    back = root.with_name("back")
    copying.copy(store, back)
    assert verified(back) == [3, 4, 5, 6]
    for step in "34":
        shutil.rmtree(back / step)
    assert verified(back) == [5, 6]
    own = {name: data for name, data in contents(root).items() if not name.endswith("temp")}
    assert own.items() <= contents(back).items()


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, support.Run, Any]:
    """A root of which steps 3, 6 and 8 are left, of one lineage that begins at 1; and step 8."""
    root = tmp_path_factory.mktemp("gappy") / "run"
    trained = support.dict_run(support.mesh_of((1, 1)))
    policy = AnyPreservationPolicy([LatestN(1), EveryNSteps(3)])
    handler = adacheck.AdaCheckHandler(trained.recorder)
    with manager_of(root, handler, preservation_policy=policy) as manager:
        return root, trained, save_steps(manager, trained, 8)[8]


@pytest.mark.slow
def test_between_kept_steps_only_what_has_no_directory_is_carried(gappy, tmp_path):
    run, _, _ = gappy
    report = copying.copy(run, root := in_memory())
    assert results_of(report) == dict.fromkeys("368", "copied")
    assert report.written_bytes < disk_bytes(run) + 2000
    names = {each.below(root).split("/lineage/")[-1] for each in root.list() if LINEAGE in each.key}
    assert {int(re.split(r"[./]", each)[0]) for each in names} == {1, 2, 4, 5, 7}
    assert verified(root) == [3, 6, 8]
    copying.copy(root, back := tmp_path / "back")
    assert contents(back).items() >= contents(run).items()
    for step in "36":
        shutil.rmtree(back / step)
    assert verified(back) == [8]


@pytest.mark.slow
def test_a_manager_keeps_what_steps_with_carried_links_refer_to(gappy, gcs):
    run, trained, newest = gappy
    trained = dataclasses.replace(trained)
    url = f"{gcs.url}/{uuid.uuid4().hex}"
    copying.copy(run, root := located(url))
    with adacheck.checkpoint_manager(url, trained.recorder, max_to_keep=1) as manager:
        args = adacheck.RestoreArgs(abstract(trained.state))
        trained.state = manager.restore(8, args=args)
        assert_same_bits(trained.state, newest)
        save_steps(manager, trained, 2)
        assert list(manager.all_steps()) == [3, 6, 8, 9, 10], "each builds on those before"
    assert verified(root) == [3, 6, 8, 9, 10]


@pytest.mark.slow
def test_without_hard_links_a_copy_refers_to_other_steps_too(
    retained, gappy, tmp_path, monkeypatch
):
    root, _, _ = retained
    copying.copy(root, store := in_memory())
    copying.copy(gappy[0], other := in_memory())
    monkeypatch.setattr(Posix, "adopt", lambda *_: False)
    report = copying.copy(store, tmp_path / "copy")
    assert results_of(report) == {"3": "copied", "4": "copied"}
    assert contents_of(tmp_path / "copy") == contents_of(store)
    assert verified(tmp_path / "copy") == [3, 4]
    report = copying.copy(other, tmp_path / "second")
    assert results_of(report) == {"3": "copied", "6": "refused", "8": "refused"}
    assert "cannot link the rest" in (report.steps[1].why or "")


def test_a_step_whose_parent_goes_meanwhile_carries_its_links(retained, monkeypatch):
    root, _, _ = retained
    store, copy = in_memory(), copy_steps.copy_file

    def deleting(source: Location, target: Location) -> Any:
        shutil.rmtree(root / "3", ignore_errors=True)
        return copy(source, target)

    monkeypatch.setattr(copy_steps, "copy_file", deleting)
    report = copying.copy(root, store)
    assert results_of(report) == {"3": "deleted meanwhile", "4": "copied"}
    assert carried(store) == {"4"}
    assert verified(store) == [4]


class Interrupted(BaseException):
    """A process that ends."""


@pytest.mark.parametrize(
    ("way", "number"), [("to store", 25), ("to disk", 3), ("to disk", 25), ("from store", 25)]
)
def test_a_copy_that_is_called_again_goes_on_at_the_step_that_it_was_at(
    saved, tmp_path, monkeypatch, way, number
):
    root, _, _ = saved
    source: AnyPath = root
    if way == "from store":
        copying.copy(root, source := in_memory())
    place: AnyPath = in_memory() if way == "to store" else tmp_path / "copy"
    copy, copied = copy_steps.copy_file, list[str]()

    def counted(one: Location, other: Location) -> Any:
        if len(copied) == number:
            raise Interrupted
        copied.append(one.key)
        return copy(one, other)

    monkeypatch.setattr(copy_steps, "copy_file", counted)
    monkeypatch.setattr(copy_steps, "THREADS", 1)
    with pytest.raises(Interrupted):
        copying.copy(source, place)
    half = [step.step for step in roots.steps_of(place)] if at(place).exists else []
    assert half == [1, 2, 3, 4, 5][: len(half)]
    if way != "to store":  # as where a killed process cleared nothing
        (at(place) / f"{len(half) + 1}{roots.TMP_SUFFIX}-copy/x").write(b"")
    number = -1
    report = copying.copy(source, place)
    assert [*results_of(report).values()].count("there") == len(half)
    assert "refused" not in results_of(report).values()
    assert verified(place) == [1, 2, 3, 4, 5]
    whole = in_memory() if way == "to store" else tmp_path / "whole"
    copying.copy(source, whole)
    assert contents_of(whole) == contents_of(place)


def test_a_half_copied_step_is_no_step_to_a_manager(saved, gcs, monkeypatch):
    root, target, states = saved
    url, mark = f"{gcs.url}/{uuid.uuid4().hex}", ("3", marks.COMMIT_MARK)
    copy = copy_steps.copy_file

    def ending(one: Location, other: Location) -> Any:
        if (other.parent.name, other.name) == mark:
            raise Interrupted
        return copy(one, other)

    monkeypatch.setattr(copy_steps, "copy_file", ending)
    with pytest.raises(Interrupted):
        copying.copy(root, located(url))
    monkeypatch.undo()
    assert (located(url) / "3/default" / manifest_file.FILE).exists
    listed = json.loads(CliRunner().invoke(app, ["ls", url, "--json"]).stdout)
    assert [step["step"] for step in listed["steps"]] == [1, 2]
    with adacheck.checkpoint_manager(url) as manager:
        assert list(manager.all_steps()) == [1, 2]
        assert_same_bits(manager.restore(2, args=adacheck.RestoreArgs(target)), states[2])
    copying.copy(root, located(url))
    assert [step.step for step in roots.steps_of(located(url))] == [1, 2, 3, 4, 5]


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
            opened.save(
                step, args=ocp.args.Composite(state=state, data=data), metrics={"loss": 1.0}
            )
    assert run(tmp_path / "run", url).exit_code == 0
    assert run(url, tmp_path / "back").exit_code == 0
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
    before = contents_of(store)
    report = copying.copy(root, store)
    assert results_of(report) == {"1": "refused", "2": "refused", **dict.fromkeys("345", "copied")}
    assert all("another step of this name" in (row.why or "") for row in report.steps[:2])
    assert before.items() <= contents_of(store).items()
    mark.delete()
    assert results_of(copying.copy(root, store))["1"] == "refused"
    assert before.keys() - {"1/commit_success.txt"} <= contents_of(store).keys()


def test_a_value_that_reads_back_otherwise_is_no_step(saved, monkeypatch):
    root, _, _ = saved
    store, read = in_memory(), KvStore.read

    def damaged(self: KvStore, key: str, *place: Any) -> bytes:
        found = read(self, key, *place)
        return found[:-1] + b"?" if "2/default/adacheck/delta" in key else found

    with monkeypatch.context() as patch:
        patch.setattr(KvStore, "read", damaged)
        report = copying.copy(root, store)
    assert results_of(report)["2"] == "refused"
    assert "found others" in (report.steps[1].why or "")
    steps = [step.step for step in roots.steps_of(store)]
    assert 2 not in steps
    assert {1, 5} <= {*steps}


def test_a_store_that_stops_answering_ends_the_copy(saved, monkeypatch):
    root, _, _ = saved
    store, write, number = in_memory(), KvStore.write, [0]

    def refusing(self: KvStore, key: str, *data: Any, **condition: Any) -> Any:
        number[0] += 1
        if number[0] > 30:
            raise OSError(121, "PERMISSION_DENIED", key)
        return write(self, key, *data, **condition)

    with monkeypatch.context() as patch:
        patch.setattr(KvStore, "write", refusing)
        with pytest.raises(OSError, match="PERMISSION_DENIED"):
            copying.copy(root, store)
    copying.copy(root, store)
    assert verified(store) == [1, 2, 3, 4, 5]


def test_wrong_inputs_are_told(saved, tmp_path, s3):
    root, _, _ = saved
    url = f"{s3.url}/{uuid.uuid4().hex}"
    (located(url) / "file").write(b"")
    for arguments, told in (
        ((root, "http://host/x"), "found another URL"),
        ((f"{url}/none", tmp_path / "x"), "found nothing there"),
        ((f"{url}/file", tmp_path / "x"), "expected a checkpoint root, found a file"),
        ((root, f"{url}/file"), "found a file"),
        ((url, f"{url}/x"), "expected steps saved by"),
    ):
        done = run(*arguments)
        assert (done.exit_code, told in " ".join(done.stderr.split())) == (2, True), done.stderr
    copying.copy(root, located(f"{url}/run"))
    for source, place in ((f"{url}/run", f"{url}/run/x"), (f"{url}/run", url)):
        assert "expected a place apart" in " ".join(run(source, place).stderr.split())
    assert not (tmp_path / "x").exists()
