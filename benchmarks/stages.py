"""Where the time of a save and of a restore goes.

    python -m benchmarks.stages
    python -m benchmarks.stages --mb 2000 --restored-deltas 50

Saves deltas of a state in 301 arrays, one after the other, and restores one of them; prints for
each stage its wall time and the CPU time of the thread that it ran on, as medians. Stages that are
indented are parts of the one above; those on other threads overlap. What a stage's CPU time does
not show runs on the threads of XLA and tensorstore: the first line has all of it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.adapter import handler
from adacheck_jax.adapter.restoring import finding, restorer
from adacheck_jax.adapter.stock import base_checkpoint, descriptions
from adacheck_jax.device import transfer
from adacheck_jax.device.loops import programs
from adacheck_jax.restore import check, compiled_update
from adacheck_jax.restore import replay as replaying
from adacheck_jax.restore.deltas import delta_reader
from adacheck_jax.save import commit, copies, pending, saver, share, staging
from adacheck_jax.save.line import planner
from adacheck_jax.store import delta_writer, links
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.storage import posix
from adacheck_jax.update import exported_program
from benchmarks.common import environment
from benchmarks.speed import states

WHOLE = "all"

SAVE = [
    ("async_save, on the caller's thread", handler.AdaCheckHandler, "async_save"),
    ("  begin", saver.Saver, "begin"),
    ("    take the state apart", planner.Snapshots, "take"),
    ("    plan", planner.Planner, "plan_save"),
    ("    stage", staging.Stager, "stage"),
    ("      copy", copies, "take_copies"),
    ("      compare", planner.Planner, "confirmed"),
    ("      dispatch copies, fingerprints and samples", programs.Gathering, "dispatch"),
    ("write, in the background", share, "write"),
    ("  wait for the record and the counters", pending.Pending, "settled"),
    ("  wait for fingerprints", pending.Pending, "sums"),
    ("  link ancestors", links, "link_ancestors"),
    ("  pack", delta_writer.DeltaWriter, "packed"),
    ("  store and sync the pack", delta_writer, "write"),
    ("commit", commit, "commit"),
    ("  write the manifest", manifest_file, "write"),
    ("  sync, that of the pack included", posix.Posix, "sync"),
]
RESTORE = [
    ("restore, without Orbax's manager", handler.AdaCheckHandler, "restore"),
    ("  find and check the lineage", finding, "resolve"),
    ("  check what describes the base", descriptions, "damaged_descriptions"),
    ("  read what describes the base", base_checkpoint.StockCheckpoints, "described"),
    ("  hold the wishes against it", restorer, "Target"),
    ("  read the base", base_checkpoint.StockCheckpoints, "read"),
    ("  replay", replaying, "replay_onto"),
    ("    wait for the program", compiled_update.CompiledUpdates, "get"),
    ("    read records ahead, on threads", transfer, "place_all"),
    ("      read boxes", delta_reader.DeltaReader, "read"),
    ("  compare fingerprints", check, "check_bits"),
    ("load the update, on a thread", exported_program, "load"),
    ("compile it, on a thread", jax.stages.Lowered, "compile"),
]
Stages = Sequence[tuple[str, Any, str]]


@dataclass
class Taken:
    """What the calls of one stage took, during one save or restore."""

    calls: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Watch:
    """Measures calls of some functions, from when it is asked to until it is asked again."""

    rounds: list[dict[str, Taken]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_round(self) -> None:
        """Begins a new save or restore."""
        self.rounds.append({})

    def add(self, label: str, wall_s: float, cpu_s: float) -> None:
        """Notes a call."""
        with self.lock:
            taken = self.rounds[-1].setdefault(label, Taken())
            taken.calls += 1
            taken.wall_s += wall_s
            taken.cpu_s += cpu_s

    @contextlib.contextmanager
    def timed(
        self, label: str, cpu_clock: Callable[[], float] = time.thread_time
    ) -> Iterator[None]:
        """Measures a block."""
        wall_s, cpu_s = time.perf_counter(), cpu_clock()
        try:
            yield
        finally:
            self.add(label, time.perf_counter() - wall_s, cpu_clock() - cpu_s)

    @contextlib.contextmanager
    def watching(self, stages: Stages) -> Iterator[None]:
        """Measures the functions of some stages."""
        with contextlib.ExitStack() as stack:
            for label, owner, name in stages:
                original = getattr(owner, name)
                stack.callback(setattr, owner, name, original)
                setattr(owner, name, self._watched(original, label))
            yield

    def _watched(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def watched_async(*args: Any, **kwargs: Any) -> Any:
                with self.timed(label):
                    return await function(*args, **kwargs)

            return watched_async

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.timed(label):
                return function(*args, **kwargs)

        return watched

    def medians(self, labels: Sequence[str]) -> list[dict[str, Any]]:
        """Of all rounds; stages that were never reached are left out."""
        found = []
        for label in labels:
            rounds = [each[label] for each in self.rounds if label in each]
            if rounds:
                found.append(
                    {
                        "stage": label,
                        "calls": statistics.median(each.calls for each in rounds),
                        "wall_ms": statistics.median(1e3 * each.wall_s for each in rounds),
                        "cpu_ms": statistics.median(1e3 * each.cpu_s for each in rounds),
                    }
                )
        return found


def measure(root: Path, params: int, saves: int, restored_deltas: int) -> dict[str, Any]:
    """Saves and restores.

    Args:
        root: an empty directory.
        params: how many.
        saves: deltas that are measured, after some to warm up.
        restored_deltas: that lie between the base and the step that is restored.
    """
    warm = 5
    recorder = states.recorder()
    state = states.train_state(params, 100, recorder)
    step, saving, restores = states.train_step_of(recorder), Watch(), Watch()
    depth = max(warm + saves, restored_deltas)
    own = adacheck.AdaCheckHandler(recorder, max_deltas=depth)
    durable, blocking = f"{WHOLE}, until durable", "manager.save, on the caller's thread"
    with ocp.CheckpointManager(root, item_handlers=own) as manager:
        for number in range(depth + 1):
            state = jax.block_until_ready(step(state))
            saving.next_round()
            with saving.watching(SAVE), saving.timed(durable, time.process_time):
                with saving.timed(blocking):
                    manager.save(number, args=adacheck.SaveArgs(state))
                manager.wait_until_finished()
        saving.rounds = saving.rounds[1 + warm : 1 + warm + saves]
    like = states.abstract(state)
    del state
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler()) as manager:
        for _ in range(4):  # the first one loads libraries
            restores.next_round()
            with restores.watching(RESTORE), restores.timed(WHOLE, time.process_time):
                args = adacheck.RestoreArgs(like)
                jax.block_until_ready(manager.restore(restored_deltas, args=args))
        restores.rounds.pop(0)
    return {
        "a delta": saving.medians([durable, blocking, *(label for label, *_ in SAVE)]),
        f"a restore of {restored_deltas} deltas": restores.medians(
            [WHOLE, *(label for label, *_ in RESTORE)]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--mb", type=float, default=100, help="size of params and moments")
    parser.add_argument("--saves", type=int, default=10, help="that are measured")
    parser.add_argument("--restored-deltas", type=int, default=10, help="that are replayed")
    arguments = parser.parse_args()
    params = int(arguments.mb * 1e6) // 12
    with tempfile.TemporaryDirectory(prefix="stages.") as root:
        found = measure(Path(root), params, arguments.saves, arguments.restored_deltas)
    print(json.dumps(environment()))
    for what, rows in found.items():
        print(f"\n{what}\n{'':40} {'calls':>6} {'wall ms':>9} {'CPU ms':>9}")
        for row in rows:
            print("{stage:40} {calls:6.0f} {wall_ms:9.2f} {cpu_ms:9.2f}".format(**row))


if __name__ == "__main__":
    main()
