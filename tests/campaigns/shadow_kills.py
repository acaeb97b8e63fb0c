"""Kills a training run whose shadow lies in a file, and has the next process recover from it.

    python -m tests.campaigns.shadow_kills --count 500

trains a small model that records most steps and saves the others, and sends SIGKILL at random
moments, many of them in the middle of a fold: chunks are small, and a pause lies between two. Each
process recovers what the last one left, compares every bit with a run that was never interrupted,
trains on from there, and is killed in its turn; some are killed while they recover. What a process
said to be in the file has to be found by the next one. With ``--records`` the file has a base and
the records since, which devices replay, in so little memory that it is used up now and then.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from etils import epath

import adacheck_jax as adacheck
from adacheck_jax.memory.files import record_log
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.step_file import StepFile
from adacheck_jax.update.elements import host_fold
from tests.campaigns import command
from tests.campaigns.crashes import Child, digest, fork
from tests.support import compile_once

CHUNK_ELEMENTS = 1 << 12
PAUSE_S = 2e-4
"""Pause after each chunk, so that a fold takes as long as that of a larger state."""
REFERENCE_STEPS = 120
"""Length of a run; then the next one begins in a new root."""
KEPT_STEPS, MAX_DELTAS = 3, 12
RECORDS_BYTES = 5 << 20
"""Memory of a file with records: of about a dozen."""
STEPS = (0, 1, 2, 3, 5, 8)
"""A kill comes after one of these numbers of steps."""
LONGEST_S, START_S = 0.1, 120.0


class Run:
    """A training run with leaves of all kinds: computed, recorded, passed on, and others."""

    def __init__(self, memory: Path | None, *, records: bool = False) -> None:
        recorder = adacheck.Recorder(optax.adamw(1e-2), dtype=jnp.bfloat16)
        self._chain = optax.chain(optax.clip_by_global_norm(1.0), recorder)
        shadow = adacheck.Shadow(directory=memory)
        if records:
            shadow = adacheck.Shadow(directory=memory, records=True, bytes=RECORDS_BYTES)
        self.handler = adacheck.AdaCheckHandler(recorder, max_deltas=MAX_DELTAS, shadow=shadow)
        self.new_state = jax.jit(self._initial)
        self.advance = jax.jit(self._train_step, donate_argnums=0)

    def _initial(self) -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(3), 2)
        params = {
            "in": jax.random.normal(keys[0], (128, 512)) * 0.2,
            "bias": jnp.zeros(4096 + 17),
            "out": jax.random.normal(keys[1], (512, 96)) * 0.2,
            "scale": jnp.ones(()),
        }
        return {
            "params": params,
            "opt_state": self._chain.init(params),
            "statistics": {"mean": jnp.zeros((300, 7)), "count": jnp.int32(0)},
            "frozen": jnp.arange(1000, dtype=jnp.int32),
            "key": jax.random.key_data(jax.random.key(11)),
        }

    def _train_step(self, state: dict[str, Any]) -> dict[str, Any]:
        statistics = state["statistics"]
        number = statistics["count"].astype(jnp.float32)
        params = state["params"]
        grads = jax.tree.map(lambda p: jnp.sin(3 * p + number) * jnp.cos(number * 7 + p), params)
        updates, opt_state = self._chain.update(grads, state["opt_state"], params)
        key = jax.random.split(jax.random.wrap_key_data(state["key"]))[0]
        return state | {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "statistics": {
                "mean": statistics["mean"] * 0.9 + number,
                "count": statistics["count"] + 1,
            },
            "key": jax.random.key_data(key),
        }

    def open_manager(self, root: Path) -> ocp.CheckpointManager:
        """A stock manager."""
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_STEPS)
        return ocp.CheckpointManager(epath.Path(root), item_handlers=self.handler, options=options)


# What a process tells, one line each:
#   recovered STEP CHUNKS   it has the state of a step from memory, after so many chunks or records
#   refused REASON          it has none
#   restored STEP           it read that step from storage; 0 for none
#   wrong STEP              a state has other bits than the reference's
#   has STEP, lifted        the file holds a step, or says that it has none; told afterwards
#   over                    the run has all steps


def train(
    directory: Path, root: Path, seed: int, tell: Callable[[str], None], *, records: bool
) -> None:
    """Recovers, and trains until it is killed or the run is over."""
    digests = json.loads((directory / "reference.json").read_text())
    rng, run = random.Random(seed), Run(directory / "memory", records=records)
    reasons: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: reasons.append(record.getMessage())
    logger = logging.getLogger("adacheck_jax.adapter.training_run")
    logger.setLevel(logging.INFO)  # a first run is told no louder that nothing is there
    logger.addHandler(handler)
    chunks = slow_down(tell)
    with run.open_manager(root) as manager:
        state = run.new_state()
        found = run.handler.recover(root, jax.eval_shape(run.new_state))
        step = 0
        if found is not None:
            step, state = found
            tell(f"recovered {step} {chunks[0]}")
        else:
            (reason,) = [each for each in reasons if "not recovered" in each]
            tell(f"refused {reason}")
            newest = manager.latest_step()
            if newest is not None:
                state = manager.restore(newest, args=adacheck.RestoreArgs(state))
                step = newest
            tell(f"restored {step}")
        if step and digest(state) != digests[step]:
            tell(f"wrong {step}")
        while step < REFERENCE_STEPS:
            step += 1
            state = run.advance(state)
            if run.handler.record_step(state, step) and rng.random() < 0.8:
                continue
            manager.save(step, args=adacheck.SaveArgs(state))
            if rng.random() < 0.3:
                manager.wait_until_finished()
    tell("over")


def slow_down(tell: Callable[[str], None]) -> list[int]:
    """Pauses after each chunk, and tells of each header; the number of chunks so far."""
    chunks, note, lift = [0], Journal.note, StepFile.lift
    fill, resume = record_log.fill, RecordLog.resume

    def slow(self: Journal, count: int) -> None:
        note(self, count)
        chunks[0] += count > 0
        time.sleep(PAUSE_S)

    def told(begin: Callable[..., None]) -> Any:
        def tells(self: StepFile, step: int, *arguments: Any, **options: Any) -> None:
            begin(self, step, *arguments, **options)
            tell(f"has {step}")

        return tells

    def lifted(self: StepFile) -> None:
        tell("lifted")
        lift(self)

    def filled(*arguments: Any) -> None:
        fill(*arguments)
        time.sleep(PAUSE_S)

    def resumed(self: RecordLog, step: int | None = None) -> Any:
        found = resume(self, step)
        chunks[0] += len(found.records)
        return found

    Journal.note, StepFile.lift = slow, lifted
    Journal.begin, RecordLog.begin = told(Journal.begin), told(RecordLog.begin)
    record_log.fill, RecordLog.resume = filled, resumed
    return chunks


def write_reference(path: Path) -> None:
    """Trains without saving anything, and writes the digest of every step."""
    run = Run(None)
    state, digests = run.new_state(), [""]
    for _ in range(REFERENCE_STEPS):
        state = run.advance(state)
        digests.append(digest(state))
    path.write_text(json.dumps(digests))


@dataclass
class Tally:
    """Findings of a campaign.

    Attributes:
        kills: SIGKILLs sent.
        recovered: states that were recovered from memory.
        in_fold: those of them whose fold had been stopped in the middle, or with records to replay.
        newer: those that were newer than the newest step in storage.
        refused: reasons of the others, and how often each.
        wrong: recovered or restored states with other bits than the reference's.
        lost: steps that the file was said to hold, and that were not found, nor newer ones.
        failures: anything else.
        runs: whole runs.
    """

    kills: int = 0
    recovered: int = 0
    in_fold: int = 0
    newer: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    runs: int = 0

    def problems(self) -> list[str]:
        """All that must not be."""
        return [*self.wrong, *self.lost, *self.failures]


class Killer:
    """Kills one process after the other.

    Args:
        directory: to work in.
        seed: of the moments.
        records: True for files with records.
    """

    def __init__(self, directory: Path, seed: int, *, records: bool) -> None:
        self._records, self._directory, self._rng = records, directory, random.Random(seed)
        self._root, self._held = directory / "root-0", 0
        self.tally = Tally()

    def _forked(self, task: Callable[[Callable[[str], None]], None]) -> Child:
        def begin(tell: Callable[[str], None]) -> None:
            compile_once(self._directory / "compiled")
            jax.config.update("jax_num_cpu_devices", 1)
            host_fold.CHUNK_ELEMENTS = CHUNK_ELEMENTS
            task(tell)

        return fork(begin, self._directory / "log")

    def prepare(self) -> None:
        """Makes the reference."""
        self._directory.mkdir(parents=True, exist_ok=True)
        child = self._forked(lambda _: write_reference(self._directory / "reference.json"))
        if child.end(kill=False):
            raise RuntimeError(f"no reference; see {self._directory}/log")

    def kill_once(self) -> None:
        """Starts a process, and kills it somewhen."""
        seed, newest = self._rng.randrange(1 << 30), self._newest()
        child = self._forked(
            lambda tell: train(self._directory, self._root, seed, tell, records=self._records)
        )
        deadline_s = time.monotonic() + START_S
        steps = self._rng.choice(STEPS)
        while child.read(0.02) and time.monotonic() < deadline_s:
            words = [line.split()[0] for line in child.lines]
            if ("recovered" in words or "restored" in words) and words.count("has") >= steps:
                break
            if self._rng.random() < 0.0005:  # while it recovers
                break
        self._watch(child, self._rng.random() * LONGEST_S)
        self.tally.kills += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        status = child.end(kill=False)
        if not os.WIFSIGNALED(status) and "over" not in child.lines:
            self.tally.failures.append(f"{self._root}: a process failed; see the log")
        self._judge(child.lines, newest)

    def _watch(self, child: Child, seconds: float) -> None:
        stop_s = time.monotonic() + seconds
        while (left_s := stop_s - time.monotonic()) > 0 and child.read(left_s):
            pass

    def _newest(self) -> int:
        """The newest step in storage."""
        names = os.listdir(self._root) if self._root.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _judge(self, lines: list[str], newest: int) -> None:
        tally = self.tally
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "recovered":
                step, chunks = map(int, rest.split())
                tally.recovered += 1
                tally.in_fold += chunks > 0
                tally.newer += step > newest
                if step < self._held:
                    tally.lost.append(f"{self._root}: had {self._held}, recovered {step}")
                self._held = step
            elif word == "refused":
                reason = rest.rpartition(": ")[2].replace(str(self._root), "its root")
                reason = re.sub(r"step \d+", "step N", reason.replace(str(self._directory), ""))
                tally.refused[reason] += 1
                if self._held and "and storage has step" not in rest:
                    tally.lost.append(f"{self._root}: had {self._held}, {line}")
                    self._held = 0
            elif word == "restored":
                if int(rest) < self._held:
                    tally.lost.append(f"{self._root}: had {self._held}, restored {rest}")
                self._held = 0
            elif word == "has":
                self._held = int(rest)
            elif word == "lifted":
                self._held = 0
            elif word == "wrong":
                tally.wrong.append(f"{self._root}: step {rest}")
        if "over" in lines:
            tally.runs += 1
            shutil.rmtree(self._root)
            shutil.rmtree(self._directory / "memory")
            self._root, self._held = self._directory / f"root-{tally.runs}", 0


def table(tally: Tally) -> str:
    """What was found."""
    rows = [
        ("SIGKILLs", tally.kills),
        ("states recovered from memory", tally.recovered),
        ("of them stopped in the middle of a fold, or replayed", tally.in_fold),
        ("of them newer than storage", tally.newer),
        *((f"refused: {reason}", count) for reason, count in tally.refused.items()),
        ("states with wrong bits", len(tally.wrong)),
        ("steps lost that the file held", len(tally.lost)),
        ("other failures", len(tally.failures)),
        (f"whole runs of {REFERENCE_STEPS} steps", tally.runs),
    ]
    return command.table(("what", "number"), rows)


def main() -> int:
    """Reads the command line, kills, and prints a table."""
    options = {"seed": 0, "minutes": math.inf, "directory": None, "json": False}
    parser = command.parser(__doc__, count=500, **options)
    parser.add_argument("--records", action="store_true", help="keep records in the file")
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="shadow-kills-", dir="/dev/shm"))
    killer, problems = Killer(directory, args.seed, records=args.records), []
    with command.workplace(directory, problems):
        killer.prepare()
        for _ in command.trials(args.count, args.minutes):
            killer.kill_once()
        problems += killer.tally.problems()
    text = "" if args.json else table(killer.tally)
    return command.finish({"seed": args.seed, **vars(killer.tally)}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
