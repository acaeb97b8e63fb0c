"""One process of a run that is preempted, or in which one process cannot write.

Usage: concurrency_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES

MODE is preempted: trains until it is told to leave, and holds up the save of step 3 until OUT-go-on
exists; deferring: the same with most steps deferred, as the guide has it; or failing: saves of
which one process cannot write its share.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.one_process import own, write  # isort: skip

import jax
import numpy as np
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.save import share
from adacheck_jax.save.one_save import Save
from adacheck_jax.store import base_writer, delta_writer
from tests import support

mode, process, root, out = own.mode, own.process, own.root, own.out
HELD_STEP, LAST_STEP = 3, 2000


def save(manager: Any) -> None:
    manager.save(run.count, args=adacheck.SaveArgs(run.state))


def hold(step: int) -> None:
    """Lets the save of a step wait for the test."""
    write_share = share.write

    def held(save: Save, directory: Path, layout: Any) -> None:
        if save.own.step == step:
            Path(f"{out}-held{process}").touch()
            while not Path(f"{out}-go-on").exists():
                time.sleep(0.01)
        write_share(save, directory, layout)

    share.write = held


def train_until_preempted() -> dict[str, Any]:
    hold(HELD_STEP)
    with support.manager_of(root, handler) as manager:
        while run.count < LAST_STEP:
            run.advance()
            save(manager)
            if manager.reached_preemption(run.count):
                break
        manager.wait_until_finished()
        write(run.state, "saved")
        return {"step": run.count, "latest": manager.latest_step()}


def train_deferring() -> dict[str, Any]:
    """A loop of the guide, in a single process with a signal handler of its own."""
    options, heard = ocp.CheckpointManagerOptions(save_interval_steps=20), threading.Event()
    if own.processes == 1:
        signal.signal(signal.SIGTERM, lambda *_: heard.set())
    ending = False
    with adacheck.checkpoint_manager(root, run.recorder, options=options) as manager:
        if (newest := manager.latest_step()) is not None:
            run.state = manager.restore(newest, args=adacheck.RestoreArgs(run.state))
            run.count = newest
        begun = run.count
        while run.count < LAST_STEP and not ending:
            run.advance()
            if run.count == begun + 7:
                Path(f"{out}-held{process}").touch()
            step = run.count
            ending = manager.reached_preemption(step) or heard.is_set()
            due = ending or manager.should_save(step)
            if due or not manager.handler.record_step(run.state, step):
                manager.save(step, args=adacheck.SaveArgs(run.state), force=True)
        manager.wait_until_finished()
        write(run.state, "saved")
        return {"step": run.count, "latest": manager.latest_step()}


def fail_next() -> None:
    """Lets this process fail to write its next share."""
    todo = [OSError(28, "No space left on device")]
    for owner in (base_writer.BaseWriter, delta_writer):

        def write_share(*args: Any, inner: Any = owner.write) -> Any:
            if todo:
                raise todo.pop()
            return inner(*args)

        owner.write = write_share


def error_of(task: Callable[..., Any], *args: Any) -> str:
    try:
        task(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def blocks(state: Any) -> list[bytes]:
    """What lies on this process's devices."""
    leaves = jax.tree.leaves(state)
    return [np.asarray(s.data).tobytes() for leaf in leaves for s in leaf.addressable_shards]


def save_while_one_fails() -> dict[str, Any]:
    """Process 1 cannot write step 3, a delta, nor process 0 step 4, the base that follows."""
    target, states = adacheck.RestoreArgs(support.abstract(run.state)), {}
    with support.manager_of(root, handler) as manager:
        for step in (1, 2, 3):
            states[step] = blocks(run.advance())
            manager.wait_until_finished()
            if step == 3 and process == 1:
                fail_next()
            save(manager)
        states[4] = blocks(run.advance())
        errors = [error_of(save, manager)]
        if process == 0:
            fail_next()
        save(manager)
        errors.append(error_of(manager.wait_until_finished))
        save(manager)
        states[5] = blocks(run.advance())
        save(manager)
        manager.wait_until_finished()
        listed = list(manager.all_steps(read=True))
        exact = [s for s in (2, 5) if blocks(manager.restore(s, args=target)) == states[s]]
    return {"errors": errors, "listed": listed, "exact": exact}


mesh = support.mesh_of((jax.device_count() // 2, 2))
run = support.dict_run(mesh)
handler = adacheck.AdaCheckHandler(run.recorder)
modes = {
    "preempted": train_until_preempted,
    "deferring": train_deferring,
    "failing": save_while_one_fails,
}
summary = modes[mode]()
Path(f"{out}-{process}.json").write_text(json.dumps(summary))
