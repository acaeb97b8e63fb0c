"""What an outage of storage does to a training loop that saves every step.

    python -m tests.campaigns.outages --count 15 --seconds 1 5 20      # needs a C compiler

Each trial trains and saves, and takes its storage away for some seconds from a random moment on: a
directory whose writes hang or fail (EIO), by the library in front of the disk (``disk_shim.c``), or
a server of S3 that is stopped (SIGSTOP) or answers 503. After the outage the loop goes on until
nothing is left in memory. Then a new manager restores the steps for which ``save`` returned True,
and compares them bit by bit: all, or 100 evenly spread ones, while the others are replayed and
compared with their fingerprints.

With ``--processes 2`` two processes train together, of which the disk of one or both is away.

Told are the seconds that ``save`` took beyond its median, in all and the longest, and the largest
memory of steps that were kept.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import at, located
from adacheck_jax.tools import audit
from tests.campaigns import command, shim
from tests.campaigns.disk import Run
from tests.campaigns.operations import FULL, HANG, Disk
from tests.processes import outputs, start

PACE_S = {"disk": 0.2, "s3": 0.5}
"""Seconds of a step, at least."""
RESTORED = 100
"""Steps of a trial that are restored at most: each replays all since its base."""
KINDS = ["disk hangs", "disk refuses", "s3 hangs", "s3 refuses"]


@dataclass(frozen=True)
class Storage:
    """A root, and what takes its storage away and brings it back."""

    root: str
    leave: Callable[[], None]
    come_back: Callable[[], Any]


@contextlib.contextmanager
def on_disk(root: Path | str, log: Path | str, does: str) -> Iterator[Storage]:
    disk, there, out = Disk(), Path(root), Path(log)
    mode, error = (HANG, 0) if does == "hangs" else (FULL, errno.EIO)
    try:
        yield Storage(str(root), lambda: disk.arm(there, out, mode, 1, error), disk.disarm)
    finally:
        disk.disarm()


class Server:
    """A server of S3 in a process of its own; one for all trials, since clients remember it."""

    def __init__(self) -> None:
        parts = [sys.executable, "-m", "tests.object_stores", "s3"]
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(parts, env=environment, text=True, **pipes)
        assert self._process.stdout is not None
        self._url, found = json.loads(self._process.stdout.readline())
        self._endpoint = found["AWS_ENDPOINT_URL"]
        os.environ.update(found)

    def storage(self, number: int, does: str) -> Storage:
        """A root of its own for each trial."""
        root, send = f"{self._url}/run{number}", self._process.send_signal
        if does == "hangs":
            stop, go_on = signal.SIGSTOP, signal.SIGCONT
            return Storage(root, lambda: send(stop), lambda: send(go_on))
        return Storage(root, lambda: self._answer(503), lambda: self._answer(0))

    def _answer(self, status: int) -> None:
        with urllib.request.urlopen(f"{self._endpoint}/proxy-control/status{status}"):
            pass

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait()


@dataclass
class Trial:
    """A training loop through one outage.

    Attributes:
        pace_s: seconds of a step, at least.
        digests: of each process's part of the state, of each step for which ``save`` returned True.
        calls_s: seconds of each call of ``save``.
        healthy: number of calls before the outage.
        errors: what ``save`` and ``close`` raised.
        kept_bytes, most_bytes: largest memory of kept steps, and what they might have taken.
    """

    run: Run
    pace_s: float
    digests: dict[int, list[str]] = field(default_factory=dict)
    calls_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    kept_bytes: int = 0
    most_bytes: int = 0
    healthy: int = 0

    def step(self, manager: Any) -> None:
        begin_s, run = time.monotonic(), self.run
        state = run.advance()
        digest = digest_of(run.saved.pop(run.step))
        call_s = time.monotonic()
        try:
            if manager.save(run.step, args=adacheck.SaveArgs(state)):
                self.digests[run.step] = [digest]
        except Exception as error:
            self.errors.append(f"step {run.step}: {type(error).__name__}: {error}"[:400])
        self.calls_s.append(time.monotonic() - call_s)
        kept = manager._keeping.promised.kept
        if kept.taken_bytes > self.kept_bytes:
            self.kept_bytes, self.most_bytes = kept.taken_bytes, kept.most_bytes
        time.sleep(max(begin_s + self.pace_s - time.monotonic(), 0))


def digest_of(leaves: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in leaves)).hexdigest()


def part(leaf: np.ndarray, process: int, processes: int) -> np.ndarray:
    """The rows of a leaf that one of several processes has."""
    return np.split(leaf, processes)[process] if leaf.ndim else leaf


def trained(
    storage: Storage, pace_s: float, seconds: float, chance: random.Random, **options: Any
) -> Trial:
    trial = Trial(Run(), pace_s)
    manager = adacheck.checkpoint_manager(
        storage.root, trial.run.recorder, max_to_keep=None, **options
    )

    def outage() -> None:
        trial.healthy = len(trial.calls_s)
        storage.leave()
        time.sleep(seconds)
        storage.come_back()

    with manager:
        for _ in range(10):
            trial.step(manager)
        thread = threading.Timer(chance.uniform(0, 3), outage)
        thread.start()
        while thread.is_alive():
            trial.step(manager)
        until_s = time.monotonic() + 120
        while manager._keeping.promised.kept.steps and time.monotonic() < until_s:
            trial.step(manager)
        for _ in range(3):
            trial.step(manager)
        try:
            manager.wait_until_finished()
        except Exception as error:
            trial.errors.append(f"{type(error).__name__}: {error}"[:400])
    return trial


def copied(root: str, target: Path) -> str:
    """A root, or a copy on the disk of one that lies in a bucket: each step is restored from it."""
    place = located(root)
    if at(place).on_file_system:
        return root
    for each in at(place).list():
        path = target / each.below(at(place))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(each.read())
    return str(target)


def spread(steps: list[int], count: int) -> list[int]:
    """Some steps, evenly spread, the first and the last among them; all of a few."""
    if len(steps) <= count:
        return steps
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def harmed(root: str, trial: Trial) -> list[str]:
    """Steps that were reported as saved and cannot be restored, or have other bits."""
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), trial.run.state
    )
    wrong, held = list[str](), set[int]()
    for each in roots.steps_of(located(root)):
        if each.error is None and each.manifest is not None:
            recorded = () if isinstance(each.manifest, BaseManifest) else each.manifest.recorded
            held |= {each.step, *(x.step for x in recorded)}
    wrong += [f"step {step}: lost" for step in trial.digests if step not in held]
    if len(trial.digests) > RESTORED:
        report = audit.verify_root(located(root), replay=True)
        wrong += [f"step {each.step}: {each.damage}" for each in report.steps if each.damage]
    asked = {step: trial.digests[step] for step in spread([*trial.digests], RESTORED)}
    with adacheck.checkpoint_manager(root, max_to_keep=None) as manager:
        for step, digests in asked.items():
            try:
                found = manager.restore(step, args=adacheck.RestoreArgs(target))
            except Exception as error:
                wrong.append(f"step {step}: not restored: {type(error).__name__}: {error}"[:300])
                continue
            leaves, count = [np.asarray(leaf) for leaf in jax.tree.leaves(found)], len(digests)
            parts = ([part(x, n, count) for x in leaves] for n in range(count))
            if [digest_of(each) for each in parts] != digests:
                wrong.append(f"step {step}: other bits")
    return wrong


def tried(
    number: int, kind: str, seconds: float, chance: random.Random, server: Server | None
) -> dict[str, Any]:
    place, _, does = kind.partition(" ")
    options = {"max_deltas": 8} if number % 2 else {}
    with tempfile.TemporaryDirectory(prefix="outages-") as work:
        opened = on_disk(Path(work) / "root", Path(work) / "log", does)
        if server is not None and place == "s3":
            opened = contextlib.nullcontext(server.storage(number, does))
        with opened as storage:
            trial = trained(storage, PACE_S[place], seconds, chance, **options)
            wrong = harmed(copied(storage.root, Path(work) / "copy"), trial)
    return found(kind, seconds, trial, wrong)


def tried_together(
    number: int, kind: str, seconds: float, chance: random.Random, server: Server | None, count: int
) -> dict[str, Any]:
    """The same in several processes; of a disk one of them loses it, or all do."""
    place, _, does = kind.partition(" ")
    where = chance.choice([[0], [1], [*range(count)]])
    options = {"max_deltas": 8} if number % 2 else {}
    given = {"pace_s": PACE_S[place], "seconds": seconds, "delay_s": chance.uniform(0, 3)}
    given |= {"options": options, "where": where, "does": does if place == "disk" else ""}
    with tempfile.TemporaryDirectory(prefix="outages-") as work:
        root, out = str(Path(work) / "root"), Path(work) / "out"
        storage = server.storage(number, does) if server is not None and place == "s3" else None
        root = root if storage is None else storage.root
        children = start(json.dumps(given), count, root, out, 1, "tests.campaigns.outages_worker")
        while storage is not None and not Path(f"{out}-ready0").exists():
            assert children[0].returncode is None, children[0].ended()
            time.sleep(0.01)
        if storage is not None:
            time.sleep(given["delay_s"])
            storage.leave()
            time.sleep(seconds)
            storage.come_back()
        outputs(children)
        told = [json.loads(Path(f"{out}-{n}").read_text()) for n in range(count)]
        answers = [[*each["digests"]] for each in told]
        first = Trial(Run(), **{k: v for k, v in told[0].items() if k not in ("digests", "errors")})
        first.errors = [f"process {n}: {x}" for n, each in enumerate(told) for x in each["errors"]]
        first.digests = {
            int(step): [digest for each in told for digest in each["digests"].get(step, [])]
            for step in answers[0]
        }
        wrong = harmed(copied(root, Path(work) / "copy"), first)
        wrong += [] if all(each == answers[0] for each in answers) else ["answers differ"]
    return {"where": where, **found(kind, seconds, first, wrong)}


def found(kind: str, seconds: float, trial: Trial, wrong: list[str]) -> dict[str, Any]:
    median_s = statistics.median(trial.calls_s)
    beyond_s = [x - median_s for x in trial.calls_s[trial.healthy :] if x > 4 * median_s]
    return {
        "kind": kind,
        "seconds": seconds,
        "steps": len(trial.digests),
        "harmed": wrong,
        "errors": trial.errors,
        "median_s": median_s,
        "stood_s": sum(beyond_s),
        "longest_s": max(beyond_s, default=0.0),
        "kept_bytes": trial.kept_bytes,
        "most_bytes": trial.most_bytes,
    }


def table(results: list[dict[str, Any]]) -> str:
    head = ["outage", "seconds", "trials", "steps", "harmed", "errors raised"]
    head += ["stood still (s)", "longest call (s)", "kept (MiB)", "of (MiB)"]
    rows = []
    for (kind, seconds), group in itertools.groupby(
        sorted(results, key=lambda x: (x["kind"], x["seconds"])),
        key=lambda x: (x["kind"], x["seconds"]),
    ):
        found = [*group]
        most = max(found, key=lambda x: x["kept_bytes"])
        rows.append(
            [
                *(kind, seconds, len(found), sum(x["steps"] for x in found)),
                *(sum(len(x[name]) for x in found) for name in ("harmed", "errors")),
                f"{statistics.median(x['stood_s'] for x in found):.2f}"
                f" ({max(x['stood_s'] for x in found):.2f})",
                f"{max(x['longest_s'] for x in found):.2f}",
                *(f"{most[name] / 2**20:.1f}" for name in ("kept_bytes", "most_bytes")),
            ]
        )
    return command.table(head, rows)


def arguments_of(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command.parser(__doc__, count=15, seed=0, minutes=7.0, json=False)
    parser.add_argument("--seconds", type=float, nargs="+", default=[1.0, 5.0, 20.0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    return parser.parse_args(argv)


def main() -> int:
    """Reads the command line, and prints what was found."""
    arguments = arguments_of()
    if shim.VARIABLE not in os.environ:
        with tempfile.TemporaryDirectory() as work:
            if (library := shim.build(Path(work))) is None:
                return command.finish({"not_tried": "there is no C compiler here"})
            again = [sys.executable, "-m", "tests.campaigns.outages", *sys.argv[1:]]
            variables = os.environ | shim.loading(library)
            return subprocess.run(again, env=variables, check=False).returncode
    results, cases = [], itertools.cycle(itertools.product(arguments.seconds, arguments.kinds))
    server = Server() if any(each.startswith("s3") for each in arguments.kinds) else None
    try:
        for number in command.trials(arguments.count, arguments.minutes):
            seconds, kind = next(cases)
            chance = random.Random(1000 * arguments.seed + number)
            trial = number, kind, seconds, chance, server
            count = arguments.processes
            results.append(tried(*trial) if count == 1 else tried_together(*trial, count))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    finally:
        if server is not None:
            server.close()
    problems = [x for x in results if x["harmed"]]
    text = "" if arguments.json else table(results)
    return command.finish({"trials": results}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
