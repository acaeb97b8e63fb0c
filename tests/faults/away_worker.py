"""One process of a run whose storage is away for a while, in some processes or in all.

Usage: away_worker.py POINT-WHERE-WHAT[-OPTION] PROCESS PROCESSES PORT ROOT OUT DEVICES

At POINT (a key of ``test_storage_away.POINTS``) storage of process WHERE, or of all, refuses or
hangs. OPTION is base: the save that fails is one; close: nobody waits before the manager is closed;
late: Orbax waits in vain for a directory; full: process 1 has no memory for steps; broken: a save
fails for another reason; crash: process 1 leaves the loop by an error; leaf: process 1 is given a
leaf that cannot be kept; left: process 1 closes its manager, and process 0 saves; raise: an error
ends the loop of all processes, or of process 1.
``any-SEED-at-random`` has storage leave at any point of any process, again and again. Writes the
states that were saved, and what the process found.
"""

from __future__ import annotations

import json
import random
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tests.one_process import own, write  # isort: skip

import jax
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint._src.multihost import multihost

import adacheck_jax as adacheck
from adacheck_jax.adapter.away import outage
from adacheck_jax.plan import situation
from adacheck_jax.save.line import backlog as keeping
from adacheck_jax.store.steps import lookup
from tests import support
from tests.faults.test_storage_away import POINTS, Clock, Storage

point, where, what, *options = own.mode.split("-")
outage.PATIENCE_S, outage.CLOSING_S, outage.RETRY_S = 60.0, 3.0, 0.1
if (
    what == "refuse" or point == "any"
):  # else threads that wait for a directory would wait for 300 s
    multihost._DEFAULT_BARRIER_TIMEOUT = 5
if "late" in options:
    multihost._DEFAULT_BARRIER_TIMEOUT = 1
patch = pytest.MonkeyPatch()
run = support.dict_run(support.mesh_of((jax.device_count(), 1)))
points = [*POINTS] if point == "any" else [point]
storages = [Storage(patch, each, what) for each in points]
storage = storages[0]
found: dict[str, Any] = {"errors": {}, "by step": {}, "reads": []}
most: Any = {"max_deltas": 3} if "base" in options else {}
follow = lookup.follow


def followed(*args: Any) -> Any:
    """Notes what the loop's own thread reads of the step before."""
    if threading.current_thread() is threading.main_thread():
        found["reads"].append(run.count)
    return follow(*args)


patch.setattr(lookup, "follow", followed)
manager = adacheck.checkpoint_manager(own.root, run.recorder, max_to_keep=None, **most)
clock = Clock(manager)
meet = multihost_utils.sync_global_devices


def step(count: int = 1) -> None:
    for _ in range(count):
        run.advance()
        try_to_save(run.state)
        found["by step"][run.count] = kept()
        write(run.state, f"saved{run.count}")


def try_to_save(state: Any) -> None:
    try:
        assert manager.save(run.count, args=adacheck.SaveArgs(state))
    except adacheck.AdaCheckError as error:
        found["errors"][run.count] = f"{type(error).__name__}: {error}"


def kept() -> list[int]:
    return [*manager._sink.acknowledged.lag.steps]


def until_ended() -> None:
    """Waits until no process has a save in flight."""
    if (thread := manager._finalize_thread.get()) is not None:
        threading.Thread.join(thread, 60)
        assert not thread.is_alive()
    meet("ended")


def leave() -> None:
    meet("leaving")
    if where in ("all", str(own.process)):
        storage.leave()
    meet("left")


def come_back() -> None:
    meet("coming back")
    storage.come_back()
    meet("came back")


def refused() -> None:
    """Storage refuses, is tried again, and refuses that too."""
    until_ended()
    step(3)
    found["kept"] = kept()
    clock.s += 60
    step()
    until_ended()
    step()
    found["kept later"] = kept()


def full() -> None:
    """Memory is full in one process: the save waits in all."""
    patch.setattr(situation, "_LEAST_BYTES", 0)
    if own.process:
        base_bytes = situation.most_bytes(manager._sink.acknowledged.lag.plan.structure)
        patch.setattr(keeping, "free_bytes", lambda: 2 * base_bytes)
    clock.s += 61
    threading.Timer(4.0, storage.come_back).start()
    step(12)


def broken() -> None:
    """What the others wait for fails in process 0, and not by storage."""

    def mistaken(*_args: Any, **_kwargs: Any) -> Any:
        raise ValueError("a mistake")

    clock.s += 61
    step(2)
    if own.process == 0:
        patch.setattr("adacheck_jax.save.commit._committed", mistaken)
    come_back()
    until_ended()
    step()
    until_ended()  # step 5, which is the one that fails
    patch.undo()
    step()


def odd() -> None:
    """Process 1 alone is given a leaf that cannot be kept."""
    run.advance()
    try_to_save({**run.state, "odd": object()} if own.process else run.state)


def left() -> None:
    """Storage is back, and process 1 has left the loop."""
    come_back()
    run.advance()
    if own.process:
        manager.close()
    else:
        try_to_save(run.state)


def raised() -> None:
    """An error of the loop leaves the block, and process 0 may save once more."""
    outage.PATIENCE_S, outage.CLOSING_S = 3.0, 10.0
    run.advance()
    try:
        with manager:
            if own.process or where == "all":
                raise ZeroDivisionError("of the loop")
            try_to_save(run.state)
    except Exception as error:
        found["errors"]["loop"] = "".join(traceback.format_exception(error))
    come_back()


def at_random() -> None:
    """Storage leaves and comes back as all processes choose alike."""
    outage.PATIENCE_S, outage._SLOWER = 0.0, 0.0
    chance, away = random.Random(int(where)), False
    for _ in range(40):
        clock.s += chance.choice([0, 1, 10])
        event = chance.choices(["save", "leave", "back", "wait"], [12, 3, 3, 1])[0]
        among = chance.choice([[0], [1], [0, 1]])
        number, mode = chance.randrange(len(points)), chance.choice(["refuse", "hang"])
        if event == "save":
            step()
        elif event == "leave" and not away and run.count:
            away, storages[number].mode = True, mode
            if own.process in among:
                storages[number].leave()
        elif event == "back":
            away = False
            for each in storages:
                each.come_back()
        elif event == "wait" and not away:
            manager.wait_until_finished()
    for each in storages:
        each.come_back()
    manager.close()


if point == "any":
    at_random()
    Path(f"{own.out}-found{own.process}").write_text(json.dumps(found))
    raise SystemExit
with manager:
    step(4 if "base" in options else 2)
    manager.wait_until_finished()
    leave()
    step()
    if "full" in options:
        full()
    elif "broken" in options:
        broken()
    elif what == "refuse":
        refused()
    else:
        clock.s += 61
        step(5)
        found["kept"] = kept()
        time.sleep(3 if "late" in options else 0)
    if "leaf" in options:
        odd()
    if "left" in options:
        left()
    elif "raise" in options:
        raised()
    elif "crash" in options:
        try:
            if own.process == 0:
                time.sleep(6)
            manager.close()
        except adacheck.AdaCheckError as error:
            found["errors"]["close"] = str(error)
        come_back()
    else:
        come_back()
        until_ended()
        for _ in range(4):
            clock.s += 60
            step()
            until_ended()
        step()
        if "close" not in options:
            manager.wait_until_finished()
            assert not kept()
Path(f"{own.out}-found{own.process}").write_text(json.dumps(found))
