"""Items, threads and processes of one run at once: none of them harms another."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import StorageError
from adacheck_jax.save import share
from adacheck_jax.store import base_writer, delta_writer, volumes
from adacheck_jax.store.packs import writer
from adacheck_jax.store.steps import roots
from adacheck_jax.tools import audit
from tests import support
from tests.processes import launch, leaves, outputs, start
from tests.support import (
    abstract,
    assert_same_bits,
    host_copy,
    kinds_of,
    manager_of,
    mesh_of,
    save_steps,
)

WORKER = "tests.end_to_end.concurrency_worker"


def until(condition):
    while not condition():
        time.sleep(0.005)


@functools.cache
def compiled_run():
    return support.dict_run(mesh_of((2, 1)))


def new_run(count=0):
    """A run like the others, compiled once."""
    run = compiled_run()
    return dataclasses.replace(run, state=jax.tree.map(jnp.copy, run.state), count=count)


class Pair:
    """Two runs that are saved as two items of each step: replayed updates, and differences."""

    def __init__(self, max_deltas: int = 20) -> None:
        disc = new_run()
        self.runs = {"disc": disc, "gen": new_run(count=50)}
        self.handlers = {
            "disc": adacheck.AdaCheckHandler(disc.recorder, max_deltas=max_deltas),
            "gen": adacheck.AdaCheckHandler(delta="bits", max_deltas=max_deltas),
        }
        self.saved: dict[int, dict[str, list[np.ndarray]]] = {}

    def save(self, manager, step, **others):
        """Trains both runs by a step, and begins to save them."""
        states = {name: run.advance() for name, run in self.runs.items()}
        self.saved[step] = {name: host_copy(state) for name, state in states.items()}
        items = {name: adacheck.SaveArgs(state) for name, state in states.items()}
        manager.save(step, args=ocp.args.Composite(**others, **items))

    def assert_exact(self, root):
        """All steps are listed, and those since just before the failure restore to their bits."""
        with manager_of(root, {name: adacheck.AdaCheckHandler() for name in self.runs}) as manager:
            assert list(manager.all_steps()) == sorted(self.saved)
            for step, states in [*self.saved.items()][-3:]:
                targets = {n: adacheck.RestoreArgs(abstract(r.state)) for n, r in self.runs.items()}
                found = manager.restore(step, args=ocp.args.Composite(**targets))
                for name, expected in states.items():
                    assert_same_bits(found[name], expected)

    def kinds(self, root):
        return {name: kinds_of(root, name) for name in self.runs}


def fail_item(patch, name):
    """Lets the writes of one item fail: ours, or that of Orbax's own handler."""
    for owner in (base_writer.BaseWriter, delta_writer):

        def write(self, directory, *args, inner=owner.write):
            if any(part.startswith(f"{name}.") for part in directory.parts):
                raise OSError(28, "No space left on device")
            return inner(self, directory, *args)

        patch.setattr(owner, "write", write)

    async def full():
        raise OSError(28, "No space left on device")

    async def async_save(self, directory, args):
        return [ocp.future.CommitFutureAwaitingContractedSignals(full())]

    if name == "json":
        patch.setattr(ocp.JsonCheckpointHandler, "async_save", async_save)


@pytest.mark.first(0, slow=1)
@pytest.mark.parametrize(
    ("failing", "max_deltas", "kinds", "again"),
    [
        ("disc", 20, "BDBD", False),
        ("json", 20, "BDBD", True),
        ("gen", 0, "BBBB", True),
        ("json", 0, "BBBB", False),
    ],
)
def test_an_item_that_fails_takes_the_step_and_no_other(
    tmp_path, monkeypatch, failing, max_deltas, kinds, again
):
    """Whether the caller goes on with the next step, or saves the same one again."""
    pair = Pair(max_deltas)
    note = {"json": ocp.args.JsonSave({"n": 1})}
    with manager_of(tmp_path, {"json": ocp.JsonCheckpointHandler(), **pair.handlers}) as manager:
        for step in (1, 2):
            pair.save(manager, step, **note)
        manager.wait_until_finished()
        with monkeypatch.context() as patch:
            fail_item(patch, failing)
            pair.save(manager, 3, **note)
            kind = OSError if failing == "json" else StorageError
            with pytest.raises(kind, match="No space left"):
                manager.wait_until_finished()
        assert 3 not in manager.all_steps()
        assert 3 not in manager.all_steps(read=True)
        del pair.saved[3]
        for step in (3, 4) if again else (4, 5):
            pair.save(manager, step, **note)
        manager.wait_until_finished()
    # The item that did not fail was not committed either, so nothing may build on it.
    assert pair.kinds(tmp_path) == {"disc": kinds, "gen": kinds}
    pair.assert_exact(tmp_path)


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("max_deltas", [20, 0], ids=["delta", "base"])
def test_a_step_is_saved_again_while_its_first_attempt_is_being_written(
    tmp_path, monkeypatch, max_deltas
):
    """Orbax gives up when one item fails, and does not wait for the others."""
    pair, go_on, writing = Pair(max_deltas), threading.Event(), threading.Semaphore()
    overlaps, made_room = [], threading.Event()

    def slow(write):
        return lambda *args: slowly(write, *args)  # binds, as a method

    def slowly(write, *args):
        directory = next(each for each in args if hasattr(each, "parts"))
        if "gen.orbax-checkpoint-tmp" not in directory.parts:
            made_room.set()  # only the second attempt gets so far
            return write(*args)
        overlaps.append(not writing.acquire(blocking=False))
        assert go_on.wait(60)
        try:
            return write(*args)
        finally:
            writing.release()

    with manager_of(tmp_path, pair.handlers) as manager:
        for step in (1, 2):
            pair.save(manager, step)
        manager.wait_until_finished()
        for owner, name in ((writer, "write_pack"), (volumes.Volume, "write")):
            monkeypatch.setattr(owner, name, slow(getattr(owner, name)))
        with monkeypatch.context() as patch:
            fail_item(patch, "disc")
            pair.save(manager, 3)
            with pytest.raises(StorageError, match="No space left"):
                manager.wait_until_finished()
        until(lambda: overlaps)
        pair.save(manager, 3)
        # What the first attempt writes from here on comes into the second one's directory.
        assert made_room.wait(60)
        go_on.set()
        manager.wait_until_finished()
        assert not any(overlaps)
        pair.save(manager, 4)
        manager.wait_until_finished()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4"]
    pair.assert_exact(tmp_path)


@pytest.fixture
def restless():
    """Threads change at almost every instruction."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def restore_on(manager, step, target, expected):
    assert_same_bits(manager.restore(step, args=adacheck.RestoreArgs(target)), expected)


@pytest.mark.slow
def test_older_steps_are_restored_while_another_thread_saves(tmp_path, restless):
    """By another manager with the same handler: Orbax's restore joins the save's thread."""
    run = new_run()
    target, handler = abstract(run.state), adacheck.AdaCheckHandler(run.recorder)
    with manager_of(tmp_path, handler) as manager:
        saved = save_steps(manager, run, 2)
        reader = manager_of(tmp_path, handler, read_only=True)
        with ThreadPoolExecutor(3) as threads:
            training = threads.submit(save_steps, manager, run, 8)
            while not training.done():
                looks = [
                    threads.submit(restore_on, reader, step, target, saved[step]) for step in (1, 2)
                ]
                for look in looks:
                    look.result()
            saved |= training.result()
        restore_on(reader, 10, target, saved[10])
    # None of those restores made a save forget the step before it.
    assert kinds_of(tmp_path) == "B" + "D" * 9


def test_one_handler_serves_the_managers_of_several_threads(tmp_path, restless):
    handler, turn = adacheck.AdaCheckHandler(delta="bits"), threading.Lock()

    def train(name, rows):
        states = {step: {name: np.full((rows, 64), step, np.float32)} for step in range(6)}
        with manager_of(tmp_path / name, handler) as manager:
            for step, state in states.items():
                with turn:  # Orbax mixes up the directories of saves that begin at once
                    manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            for step, state in states.items():
                restore_on(manager, step, state, host_copy(state))
        return kinds_of(tmp_path / name)

    with ThreadPoolExecutor(3) as threads:
        for kinds in threads.map(train, ("a", "b", "c"), (3, 5, 7)):
            assert kinds == "BDDDDD"


@pytest.mark.first(1)
@pytest.mark.parametrize("fails", [False, True])
def test_several_threads_wait_for_one_save(tmp_path, monkeypatch, fails):
    run, go_on = new_run(), threading.Event()
    target, write = abstract(run.state), share.write

    def slowly(save, directory, layout):
        assert go_on.wait(60)
        if fails:
            raise OSError(28, "No space left on device")
        write(save, directory, layout)

    manager = manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder))
    saved = save_steps(manager, run, 1)
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as threads:
        patch.setattr(share, "write", slowly)
        saved[2] = host_copy(run.advance())
        manager.save(2, args=adacheck.SaveArgs(run.state))
        leave = manager.wait_until_finished if fails else manager.close
        waiting = [threads.submit(w) for w in (manager.wait_until_finished, leave)]
        go_on.set()
        errors = [each.exception() for each in waiting]
    if not fails:
        assert errors == [None, None]
        manager = manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder))
        restore_on(manager, 2, target, saved[2])
    else:  # each thread is told once, this one too
        assert [type(error) for error in errors] == [OSError, OSError]
        with pytest.raises(OSError, match="No space left"):
            manager.wait_until_finished()
    with manager:
        saved |= save_steps(manager, run, 1)
        assert list(manager.all_steps()) == ([1, 3] if fails else [1, 2, 3])
        restore_on(manager, 3, target, saved[3])


def told(out, processes=2):
    return [json.loads(Path(f"{out}-{index}.json").read_text()) for index in range(processes)]


def preempt(mode, root, out, processes):
    """Tells one of some processes to end, once all have got so far; the step with which they do."""
    children = start(mode, processes, root, out, 2, WORKER)
    try:
        held = [Path(f"{out}-held{index}") for index in range(processes)]
        while not all(path.exists() for path in held):
            assert all(each.returncode is None for each in children)
            time.sleep(0.005)
        os.kill(children[-1].process.pid, signal.SIGTERM)
        Path(f"{out}-go-on").touch()
    finally:
        outputs(children)
    found = told(out, processes)
    step = found[0]["step"]
    assert found == [{"step": step, "latest": step}] * processes
    # One process restores the last step, which a run of several has written beside it too.
    restored = support.restored(root, step, abstract(support.dict_run(mesh_of((2, 2))).state))
    bits = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(restored)]
    assert bits == leaves(Path(f"{out}-saved.npz"))
    return step


@pytest.mark.slow
def test_a_run_of_two_processes_is_preempted_while_it_saves(tmp_path):
    """One of them is told; both save the step that they agree on, and leave."""
    step = preempt("preempted", tmp_path / "run", tmp_path / "out", 2)
    assert 3 < step < 2000
    assert [each.step for each in roots.steps_of(tmp_path / "run")] == list(range(1, step + 1))


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize("processes", [2, 1])
def test_what_is_deferred_is_saved_when_a_run_is_told_to_end(tmp_path, processes):
    """Twice: the second run is resumed, so that its steps begin far from 0."""
    root, before = tmp_path / "run", 0
    for turn in range(2):
        step = preempt("deferring", root, tmp_path / f"out{turn}", processes)
        assert before + 7 <= step < before + 2000
        assert not audit.verify_root(root, read_data=True).damaged_count
        (newest,) = (each for each in roots.steps_of(root) if each.step == step)
        deferred = {each.step for each in newest.manifest.recorded}
        assert deferred >= {*range(newest.manifest.parent.step + 1, step)}
        before = step


@pytest.mark.slow
def test_both_processes_tell_which_one_could_not_write(tmp_path):
    launch("failing", 2, tmp_path / "run", tmp_path / "out", 2, WORKER)
    for index, summary in enumerate(told(tmp_path / "out")):
        for failed, error in zip((1, 0), summary["errors"], strict=True):
            assert "No space left on device" in error
            assert ("StorageError" if index == failed else f"process {failed} could not") in error
        assert summary["listed"] == [1, 2, 4, 5]
        assert summary["exact"] == [2, 5]
    assert kinds_of(tmp_path / "run") == "BDBD"
