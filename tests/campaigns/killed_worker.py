"""One process of a run of several in which one is killed at a chosen moment of a save.

Usage: killed_worker.py MODE PROCESS PROCESSES PORT ROOT OUT DEVICES HEARTBEAT

MODE is save:PHASE:VICTIM, which saves two steps, kills the victim in the save of the third, and
prints as JSON what this process saw; or restore, which restores the second step of each root that
ROOT/cells.json names, and compares it with what was saved.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.one_process import own, write  # isort: skip

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import adacheck_jax as adacheck
from adacheck_jax.adapter.processes import ServiceExchange
from adacheck_jax.save import commit, share
from adacheck_jax.store.steps import manifest_file
from tests import support
from tests.campaigns.children import tell

LAST_WHOLE = 2
PIDS = Path(f"{own.out}-pids")
MARK = Path(f"{own.out}-killed")


def kill(victim: int) -> None:
    """Kills a process of the run, this one too, and notes when."""
    with MARK.open("x") as file:
        file.write(str(time.time()))
    os.kill(int((PIDS / str(victim)).read_text()), signal.SIGKILL)


def until_killed() -> None:
    """Holds a process up until the victim is gone."""
    while not MARK.exists():
        time.sleep(0.01)
    time.sleep(0.2)


def patch(owner: Any, name: str, act: Callable[[], None], *, after: bool = False) -> None:
    """Acts before, or after, each call of a function."""
    inner = getattr(owner, name)

    def acted(*args: Any, **options: Any) -> Any:
        if not after:
            act()
        result = inner(*args, **options)
        if after:
            act()
        return result

    setattr(owner, name, acted)


def arm(phase: str, victim: int) -> None:
    """Puts the kill into the save that begins next."""

    def die() -> None:
        kill(victim)

    is_victim = own.process == victim
    if phase == "before" and is_victim:
        patch(share, "write", die)
    if phase == "written" and is_victim:
        patch(ServiceExchange, "agree", die)
    if phase == "waiting" and is_victim:
        patch(ServiceExchange, "_gather", die)
        patch(ServiceExchange, "_answer", die)
    if phase == "waiting" and not is_victim:
        patch(share, "write", until_killed)
    if phase == "commit":  # by process 0
        patch(manifest_file, "write", die)
    if phase == "committed":
        patch(commit, "commit", die, after=True)


def save(phase: str, victim: int) -> None:
    PIDS.mkdir(exist_ok=True)
    (PIDS / str(own.process)).write_text(str(os.getpid()))
    run = support.dict_run(mesh)
    options = ocp.AsyncOptions(barrier_sync_fn=adacheck.wait_for_processes)
    handler = adacheck.AdaCheckHandler(run.recorder)
    manager = support.manager_of(own.root, handler, async_options=options)
    for _ in range(LAST_WHOLE):
        run.advance()
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
    write(run.state, "saved")
    run.advance()
    jax.block_until_ready(run.state)
    arm(phase, victim)
    error = ""
    try:
        manager.save(run.count, args=adacheck.SaveArgs(run.state))
        manager.wait_until_finished()
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
    tell({"at": time.time(), "error": error})
    os._exit(0)  # JAX's own shutdown would wait for the dead


def restore() -> None:
    """Compares bits on all processes, and tells of every root that differs."""
    wrong = []
    run = support.dict_run(mesh)
    for cell in json.loads(Path(own.root, "cells.json").read_text()):
        with support.manager_of(f"{cell}/run", adacheck.AdaCheckHandler(run.recorder)) as manager:
            target = adacheck.RestoreArgs(support.abstract(run.state))
            found = manager.restore(LAST_WHOLE, args=target)
        gathered = multihost_utils.process_allgather(found, tiled=True)
        with np.load(f"{cell}/out-saved.npz") as saved:
            pairs = zip(jax.tree.leaves(gathered), saved.values(), strict=True)
            if any(np.asarray(a).tobytes() != b.tobytes() for a, b in pairs):
                wrong.append(cell)
    tell({"wrong": wrong})


mesh = support.mesh_of((jax.device_count() // 2, 2))
if own.mode == "restore":
    restore()
else:
    _, phase, victim = own.mode.split(":")
    save(phase, int(victim))
