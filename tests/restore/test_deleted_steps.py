"""Steps that are deleted while somebody reads them, told from damaged ones."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
import uuid

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    StepDeletedError,
)
from adacheck_jax.store.steps import deletion, folders, manifest_file
from adacheck_jax.store.storage.location import located
from tests import support

STEPS = 5
FILE_CALLS = {"stat", "lstat", "open", "scandir", "__enter__", "read", "result"}
"""Names of the calls of the operating system and of tensorstore that restores are made of."""
ORDERS = ("first file first", "at once", "last file first")


class Tiny:
    """A run without a program to compile: differences of bits."""

    def __init__(self):
        self.count = 0
        self.state = {"x": jnp.arange(300.0), "y": {"z": jnp.ones((4, 5), jnp.bfloat16)}}

    def advance(self):
        self.count += 1
        self.state = jax.tree.map(lambda each: each * (1 + 2.0**-6), self.state)
        return self.state


def saved_run(root, steps=STEPS, **options):
    run, keep = Tiny(), options.get("preservation_policy")
    handler = adacheck.AdaCheckHandler(delta="bits", max_deltas=2, keep_lineage=keep)
    with support.manager_of(root, handler, **options) as manager:
        return run, support.save_steps(manager, run, steps)


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    """Steps with links to all that they build on, and what each of them was."""
    root = tmp_path_factory.mktemp("linked")
    return root, *saved_run(root)


@pytest.fixture(scope="module")
def referring(tmp_path_factory):
    """The same where there are no hard links: the last step builds on the directory before it."""
    root = tmp_path_factory.mktemp("referring")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("adacheck_jax.store.links.can_link", lambda _: False)
        keep = adacheck.KeepLineage(ocp.checkpoint_managers.LatestN(9))
        return root, *saved_run(root, preservation_policy=keep)


class Deletion:
    """Deletes steps from one call on that a restore makes, at once or a file at each call."""

    def __init__(self, steps, begin, order):
        self.calls, self._begin, self._lock = 0, begin, threading.Lock()
        files = [path for step in steps for path in sorted(step.rglob("*")) if path.is_file()]
        if order == "last file first":
            files.reverse()
        self._left = [] if order == "at once" else files
        self._left += steps

    def __enter__(self):
        threading.setprofile(self._called)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)
        with self._lock:  # threads that go on keep calling
            self._left = []

    def _called(self, _, event, function):
        if event != "c_call" or function.__name__ not in FILE_CALLS:
            return
        if not self._lock.acquire(blocking=False):  # a call that deletes
            return
        self.calls += 1
        if self.calls >= self._begin and self._left:
            path = self._left.pop(0)
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._lock.release()


def copied(root, tmp_path, name):
    return shutil.copytree(root, tmp_path / name, copy_function=os.link)


def restore(root, run, step=STEPS, **options):
    handler = adacheck.AdaCheckHandler()
    args = adacheck.RestoreArgs(support.abstract(run.state), **options)
    return handler.restore(root / str(step) / "default", args), handler.restored.step


def deletions(root, tmp_path, run, doomed, order, stride, read=restore):
    """Roots, and the deletion that begins at each call of a restore, or at every so many."""
    whole = copied(root, tmp_path, "whole")
    with Deletion([], 0, order) as counted:
        read(whole, run)
    assert counted.calls > 50
    for begin in range(1, counted.calls, stride):
        copy = copied(root, tmp_path, f"{begin}")
        yield copy, Deletion([copy / str(each) for each in doomed], begin, order)
        shutil.rmtree(copy)


WAYS = [
    ("linked", (5,), "first file first", 13),
    ("referring", (4, 5), "at once", 13),
    *(
        (*layout, order, 1)
        for layout in (("linked", (5,)), ("referring", (4, 5)))
        for order in ORDERS
    ),
]


@pytest.mark.first(2)
@pytest.mark.parametrize(("layout", "doomed", "order", "stride"), WAYS)
def test_a_deletion_at_any_call_is_told_and_another_step_is_taken_if_asked(
    layout, doomed, order, stride, tmp_path, request
):
    root, run, saved = request.getfixturevalue(layout)
    told, found = 0, set()
    for skips in (False, True):
        (top := tmp_path / f"{skips}").mkdir()
        for copy, deleted in deletions(root, top, run, doomed, order, stride):
            try:
                with deleted:
                    state, step = restore(copy, run, skip_damaged=skips)
            except StepDeletedError:
                assert not skips
                told += 1
                continue
            support.assert_same_bits(state, saved[step])
            found.add(step)
            assert skips or step == STEPS
    assert told > 5
    assert found == {STEPS, STEPS - len(doomed)}


def v0_manager(root):
    options = ocp.CheckpointManagerOptions(read_only=True)
    return adacheck.checkpoint_manager(root, options=options)


READS = {
    "restore": lambda m, s, n: m.restore(n, args=adacheck.RestoreArgs(s)),
    "newest": lambda m, s, n: m.restore(None, args=adacheck.RestoreArgs(s)),
    "item_metadata": lambda m, s, n: m.item_metadata(n),
    "metadata": lambda m, s, n: m.metadata(n),
}
V1_READS = {
    "v1.load": lambda m, s, n: m.load(n, s, checkpointable_name="default"),
    "v1.load_checkpointables": lambda m, s, n: m.load_checkpointables(n, {"default": s}),
    "v1.metadata": lambda m, s, n: m.metadata(n),
    "v1.checkpointables_metadata": lambda m, s, n: m.checkpointables_metadata(n),
}
v1_checkpointer = functools.partial(adacheck.v1.checkpointer, checkpointable_name="default")
DOORS = {
    name: (make, read)
    for make, reads in ((v0_manager, READS), (v1_checkpointer, V1_READS))
    for name, read in reads.items()
}
"""Calls of managers that read a step: what makes the manager, and the call."""


@pytest.mark.parametrize("door", DOORS)
def test_a_manager_tells_the_deletion_of_a_step_that_it_knows(door, linked, tmp_path):
    root, run, _ = linked
    root, (make, read) = copied(root, tmp_path, "copy"), DOORS[door]
    state = support.abstract(run.state)
    with make(root) as manager:
        shutil.rmtree(root / f"{STEPS}")
        with pytest.raises(StepDeletedError, match=f"/{STEPS}: .* there now: 1 to {STEPS - 1}"):
            read(manager, state, STEPS)
        if door != "newest":
            with pytest.raises(FileNotFoundError) as error:
                read(manager, state, 77)
            assert not isinstance(error.value, StepDeletedError)


@pytest.mark.parametrize("door", ["restore", "item_metadata", "v1.load"])
@pytest.mark.parametrize("lost", ["default/manifest.ocdbt", "default/adacheck"])
def test_to_a_manager_damage_stays_damage(door, lost, linked, tmp_path):
    root, run, _ = linked
    root, (make, read) = copied(root, tmp_path, "copy"), DOORS[door]
    with make(root) as manager:
        (root / "1" / lost).rename(tmp_path / "lost")
        with pytest.raises((AdaCheckError, KeyError, ValueError)) as error:
            read(manager, support.abstract(run.state), 1)
    assert not isinstance(error.value, StepDeletedError)


def test_a_step_that_lost_all_of_its_item_is_told_and_passed_over(linked, tmp_path):
    """As a deletion leaves it that was cut off behind the item, or a copy before it."""
    root, run, saved = linked
    root = copied(root, tmp_path, "copy")
    shutil.rmtree(root / f"{STEPS}" / "default")
    state = support.abstract(run.state)
    with v0_manager(root) as manager:
        with pytest.raises(
            StepDeletedError, match=f"there now: 1 to {STEPS - 1}. .*newest of these"
        ):
            manager.restore(STEPS, args=adacheck.RestoreArgs(state))
        with pytest.raises(StepDeletedError, match="skip_damaged"):
            manager.restore_newest(state)
        for step in (STEPS, None):
            found = manager.restore(step, args=adacheck.RestoreArgs(state, skip_damaged=True))
            support.assert_same_bits(found, saved[STEPS - 1])


def emptied(step):
    for path in step.rglob("*"):
        if path.is_file():
            path.unlink()


def test_a_newest_step_of_which_no_file_is_left_is_none_and_is_saved_again(linked, tmp_path):
    root, run, saved = linked
    root, state = copied(root, tmp_path, "copy"), support.abstract(run.state)
    emptied(root / f"{STEPS}")
    with adacheck.checkpoint_manager(root, delta="bits", max_to_keep=None) as manager:
        assert manager.latest_step() == STEPS - 1
        step, found = manager.restore_newest(state)
        support.assert_same_bits(found, saved[STEPS - 1])
        assert manager.save(step + 1, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
        emptied(root / "1")
        manager.reload()
        assert manager.all_steps() == [*range(1, STEPS + 1)]  # else retention would leave it
        support.assert_same_bits(manager.restore_newest(state)[1], saved[STEPS])


def test_a_step_may_go_while_a_manager_lists_steps_anew(linked, tmp_path, monkeypatch):
    root, _, _ = linked
    root = copied(root, tmp_path, "copy")
    with v0_manager(root) as manager:
        metrics = type(manager).metrics

        def late(self, step):
            if step == 1 and (root / "1").exists():
                shutil.rmtree(root / "1")
                raise FileNotFoundError(root / "1")
            return metrics(self, step)

        monkeypatch.setattr(type(manager), "metrics", late)
        manager.reload()
        assert manager.all_steps() == [*range(2, STEPS + 1)]
        shutil.rmtree(root / "3")
        monkeypatch.setattr(type(manager), "metrics", lambda *_: (root / "3").stat())
        with pytest.raises(FileNotFoundError):
            manager.reload()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("order", "stride"),
    [
        ("at once", 29),
        *(pytest.param(order, 3, marks=pytest.mark.slow) for order in ORDERS),
    ],
)
@pytest.mark.parametrize("door", sorted({*DOORS} - {"v1.metadata"}))  # it finds no v0 delta
def test_a_manager_tells_a_deletion_at_any_call(door, order, stride, linked, tmp_path):
    root, run, _ = linked
    make, read = DOORS[door]
    state = support.abstract(run.state)

    def opened(root, _):
        with make(root) as manager:
            return read(manager, state, STEPS)

    for copy, deleted in deletions(root, tmp_path, run, (STEPS,), order, stride, opened):
        with make(copy) as manager, contextlib.suppress(StepDeletedError), deleted:
            read(manager, state, STEPS)


def test_a_step_that_was_deleted_before(linked, tmp_path):
    root, run, saved = linked
    root = copied(root, tmp_path, "copy")
    for step in (1, 2, 3):
        shutil.rmtree(root / str(step))
    with pytest.raises(StepDeletedError, match="/3/default: expected a step to read"):
        restore(root, run, 3)
    with pytest.raises(FileNotFoundError, match=r"manager\.reload"):
        adacheck.AdaCheckHandler().metadata(root / "3" / "default")
    state, step = restore(root, run, 3, skip_damaged=True)
    assert step == STEPS  # no older one is left, as retention leaves them
    support.assert_same_bits(state, saved[STEPS])
    shutil.rmtree(root / "4")
    shutil.rmtree(root / "5")
    with pytest.raises(StepDeletedError, match="/5/default"):
        restore(root, run, skip_damaged=True)


@pytest.mark.slow
def test_damage_stays_damage(linked, tmp_path):
    root, run, _ = linked
    root = copied(root, tmp_path, "copy")
    item = root / str(STEPS) / "default"
    (item / manifest_file.FILE).unlink()
    with pytest.raises(FormatError):
        restore(root, run)
    assert deletion.first_deleted([item]) is None
    shutil.rmtree(item)  # the step is there
    with pytest.raises(FormatError):
        restore(root, run)
    shutil.rmtree(root / "3/default" / folders.LINEAGE)
    shutil.rmtree(root / "2")
    with pytest.raises(LineageError, match="found nothing there") as error:
        restore(root, run, 3)
    assert not isinstance(error.value, StepDeletedError)


def test_wrong_bits_are_told_without_waiting(linked, tmp_path, monkeypatch):
    root, run, _ = linked
    root = shutil.copytree(root, tmp_path / "copy")
    path = max(support.pack_files(root / "5/default"), key=lambda each: each.stat().st_size)
    path.write_bytes(support.with_flipped_data(path.read_bytes()))
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(IntegrityError):
        restore(root, run)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(("order", "stride"), [(ORDERS[0], 13), *((each, 1) for each in ORDERS)])
def test_a_parent_that_goes_alone_is_no_damage(referring, order, stride, tmp_path):
    root, run, saved = referring
    for copy, deleted in deletions(root, tmp_path, run, (4,), order, stride):
        try:
            with deleted:
                state, _ = restore(copy, run)
        except LineageError:  # a StepDeletedError, if it went while it was read
            continue
        support.assert_same_bits(state, saved[STEPS])


@pytest.mark.slow
def test_in_an_object_store(gs):
    root = epath.Path(f"{gs.url}/{uuid.uuid4().hex}")
    keep = adacheck.KeepLineage(ocp.checkpoint_managers.LatestN(9))
    run, saved = saved_run(root, preservation_policy=keep)
    located(str(root / "5")).delete()
    with pytest.raises(StepDeletedError):
        restore(root, run)
    state, step = restore(root, run, skip_damaged=True)
    assert step == 4
    support.assert_same_bits(state, saved[4])


@pytest.mark.slow
def test_a_reader_beside_retention(tmp_path):
    """It reads the oldest step that is there, which goes next."""
    run, saved, found, is_done = Tiny(), {}, [], threading.Event()
    abstract = support.abstract(run.state)

    def read():
        while not is_done.is_set():
            there = sorted(int(each) for each in os.listdir(tmp_path) if each.isdecimal())
            for step in there[:1]:
                handler = adacheck.AdaCheckHandler()
                path = tmp_path / str(step) / "default"
                try:
                    state = handler.restore(path, adacheck.RestoreArgs(abstract))
                    found.append((step, support.host_copy(state)))
                except BaseException as error:
                    found.append((step, error))

    with support.manager_of(
        tmp_path, adacheck.AdaCheckHandler(delta="bits", max_deltas=2), max_to_keep=2
    ) as manager:
        saved |= support.save_steps(manager, run, 2)
        reader = threading.Thread(target=read)
        reader.start()
        saved |= support.save_steps(manager, run, 25)
        is_done.set()
        reader.join()
    states = [(step, each) for step, each in found if isinstance(each, list)]
    errors = [each for _, each in found if not isinstance(each, list)]
    assert states
    for step, bits in states:
        assert [each.tobytes() for each in bits] == [each.tobytes() for each in saved[step]]
    assert [each for each in errors if not isinstance(each, StepDeletedError)] == []


def test_where_a_deletion_was_interrupted_the_steps_that_are_whole_are_named(tmp_path):
    """Also where nothing is left that tells an item's directory from a step's."""
    run, _ = saved_run(tmp_path, steps=3)
    (tmp_path / "3/_CHECKPOINT_METADATA").unlink()
    (tmp_path / "3/default" / folders.LINEAGE / f"2.{manifest_file.NAME}").unlink()
    with (
        support.manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager,
        pytest.raises(LineageError, match=r"Steps that can be restored: 1, 2\."),
    ):
        manager.restore(3, args=adacheck.RestoreArgs(run.state))
