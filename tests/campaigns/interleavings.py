"""Saves with a scheduler that decides, at random, which thread goes on next.

    nice python -m tests.campaigns.places --scheduled --minutes 60

The runs are those of :mod:`tests.campaigns.places`, most of whose changes are left out. The threads
of a save (the caller's, the line's worker, the shadow, the writer, the manager's two, the one that
makes a base) stop at each of ``POINTS``, and one at a time is let go, drawn from the run's seed.
The next one goes when that has come to its next point, or a moment later: it may wait for another
thread.

Every step that was reported as saved has to be restored, bit by bit; every move of a step has to be
one of ``pending.MOVES``; and no run may stand still: after two minutes the stacks of all threads
are printed, and the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import orbax.checkpoint as ocp

from adacheck_jax.adapter.away.opening import Opener
from adacheck_jax.adapter.away.orbax_manager import AdaCheckManager
from adacheck_jax.adapter.saving.saves import Saves
from adacheck_jax.memory.shadow_state import ShadowState
from adacheck_jax.save import commit, share
from adacheck_jax.save.background_bases import BackgroundBases
from adacheck_jax.save.copies import HostCopies
from adacheck_jax.save.line.backlog import Backlog
from adacheck_jax.save.line.planner import Planner
from adacheck_jax.save.pending import MOVES, Pending, Phase
from adacheck_jax.save.resuming import Resumer
from adacheck_jax.save.saver import Saver
from adacheck_jax.save.staging import Stager
from tests.campaigns import places

POINTS: tuple[tuple[Any, str], ...] = (
    *((Planner, name) for name in ("plan_save", "plan_deferred", "learn", "settle_deferred")),
    *((Stager, name) for name in ("stage", "prepare_next", "export")),
    *((Saver, name) for name in ("begin", "defer", "returns")),
    *((Resumer, name) for name in ("follow", "forget")),
    *((HostCopies, "wait"), (Saves, "write"), (Saves, "commit")),
    *((AdaCheckManager, "save"), (Opener, "begin"), (Opener, "wait")),
    *((Pending, name) for name in ("begin", "packed", "release", "_reached")),
    *(
        (Pending, name)
        for name in ("_bring", "_settled", "_with_spare", "_prove", "_move", "_fail")
    ),
    *((ShadowState, name) for name in ("load", "follow")),
    *((share, name) for name in ("write", "_write")),
    *((BackgroundBases, name) for name in ("take", "put", "_write")),
    *((commit, "commit"), (Backlog, "end"), (ocp.CheckpointManager, "_finalize")),
)
"""Functions before and behind which a thread stops."""
_MOMENT_S = 0.002
LONGEST_S = 120.0


class Scheduler:
    """Lets one of the threads go on that have stopped, drawn at random.

    Attributes:
        turns: number of times that each point was passed.
        choices: number of times that more than one thread had stopped.
    """

    def __init__(self, seed: int) -> None:
        self._rng, self._change = random.Random(seed), threading.Condition()
        self._stopped = dict[int, tuple[str, threading.Event]]()
        self._ends = False
        self.turns, self.choices = Counter[str](), 0
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self._thread.start()

    def stop(self, point: str) -> None:
        """Stops the thread that calls, until it is let go."""
        go = threading.Event()
        with self._change:
            if self._ends:
                return
            self._stopped[threading.get_ident()] = point, go
            self._change.notify_all()
        go.wait()

    def end(self) -> None:
        """Lets all threads go, from now on."""
        with self._change:
            self._ends = True
            self._change.notify_all()
        self._thread.join()

    def _run(self) -> None:
        last = 0
        while True:
            with self._change:
                # Who was let go comes to its next point, or waits for somebody.
                self._change.wait_for(lambda of=last: of in self._stopped or self._ends, _MOMENT_S)
                self._change.wait_for(lambda: self._stopped or self._ends)
                if self._ends:
                    for _, go in self._stopped.values():
                        go.set()
                    return
                self.choices += len(self._stopped) > 1
                last = self._rng.choice(sorted(self._stopped))
                point, go = self._stopped.pop(last)
                self.turns[point] += 1
            go.set()


@contextlib.contextmanager
def scheduled(seed: int) -> Iterator[Scheduler]:
    """Has a scheduler decide which thread of a save goes on."""
    scheduler = Scheduler(seed)

    def stopping(function: Any, point: str) -> Any:
        @functools.wraps(function)
        def called(*args: Any, **named: Any) -> Any:
            scheduler.stop(f"before {point}")
            try:
                return function(*args, **named)
            finally:
                scheduler.stop(f"behind {point}")

        return called

    with contextlib.ExitStack() as stack:
        for owner, name in POINTS:
            where = f"{owner.__name__.rpartition('.')[2]}.{name}"
            made = stopping(getattr(owner, name), where)
            stack.enter_context(mock.patch.object(owner, name, made))
        try:
            yield scheduler
        finally:
            scheduler.end()


@contextlib.contextmanager
def watched_phases(problems: list[str]) -> Iterator[None]:
    """Notes each move of a step that is not in the table."""
    phases = dict[int, tuple[Pending, Phase]]()

    def moved(pending: Pending, name: str, value: Any) -> None:
        if name == "phase":
            before = phases.get(id(pending))
            if before is not None and value not in MOVES[before[1]]:
                problems.append(f"step {pending.plan.step} moved from {before[1]} to {value}")
            phases[id(pending)] = pending, value  # which keeps the id from being given again
        object.__setattr__(pending, name, value)

    with mock.patch.object(Pending, "__setattr__", moved, create=True):
        yield


def plan_of(seed: int, length: int) -> places.Plan:
    """A run of which few steps change the place or the structure of the state."""
    plan, rng = places.Plan.drawn(seed, length), random.Random(seed)
    steps = (
        dataclasses.replace(
            each, change=each.change if rng.random() < 0.2 else "", waits=rng.random() < 0.1
        )
        for each in plan.steps
    )
    return dataclasses.replace(plan, steps=tuple(steps))


def run(seed: int, root: Path, length: int = 24) -> tuple[places.Outcome, Scheduler]:
    """Makes a run under the scheduler, and restores its steps."""
    moves = list[str]()
    with watched_phases(moves), scheduled(seed) as scheduler:
        outcome = places.run(plan_of(seed, length), root)
    outcome.problems += moves
    return outcome, scheduler
