"""Kills publishers, damages and prunes what they wrote, and has followers read all the while.

    python -m tests.campaigns.publishing --count 1000

Each trial begins with a publisher on a root that all trials share, and does one of ``FAULTS`` to it
or to the root. Meanwhile a process follows without a pause: with one follower that goes on as long
as there is no other trouble, and with new ones that join late. Every params that they are given are
compared, bit by bit, with what was published under that version's number. In the end a publisher
writes until there is a base, and all followers have to reach the newest version.
"""

from __future__ import annotations

import collections
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from adacheck_jax.errors import AdaCheckError, StorageError
from adacheck_jax.format import byte_loops
from adacheck_jax.publish.follower import Follower
from adacheck_jax.publish.publisher import Publisher
from tests.campaigns import command

LINES = 1024
"""A version's number is a count, times this, plus the number of its publisher modulo this."""
BASE_EVERY, KEEP = 4, 3
FAULTS = ("kill", "flip", "cut", "remove", "stopped", "two", "prune")
_RNG = np.random.default_rng(0)
_BITS = {
    "a": _RNG.integers(0, 2**16, (40, 250), np.uint16),
    "b/c": _RNG.integers(0, 2**16, (3000,), np.uint16),
    "b/d": _RNG.integers(0, 2**16, (7,), np.uint16),
}
_PHASES = {name: _RNG.integers(0, 2**16, x.shape, np.uint32) for name, x in _BITS.items()}
_RATES = {name: _RNG.integers(0, 2**13, x.shape, np.uint32) for name, x in _BITS.items()}


def weights_of(version: int) -> dict[str, np.ndarray]:
    """The weights of a version: about 6 % of the bits move a count, and some differ by the line."""
    count, line = divmod(version, LINES)
    found = {}
    for name, bits in _BITS.items():
        moved = bits + ((count * _RATES[name] + _PHASES[name]) >> 16).astype(np.uint16)
        moved.reshape(-1)[line % bits.size] ^= 0x155
        found[name] = moved
    return found


_running: set[int] = set()
"""Processes that were started and not waited for."""


def _forked(run: Callable[[], Any]) -> int:
    """Starts a process that has imported all that this one has."""
    pid = os.fork()
    if pid:
        _running.add(pid)
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int, options: int = 0) -> int | None:
    """A process's status once it ended, or nothing where it was not to be waited for."""
    found, status = os.waitpid(pid, options)
    if not found:
        return None
    _running.discard(pid)
    return status


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    _ended(pid)


def publish(root: Path, line: int, until: Callable[[int], bool]) -> None:
    """Publishes version after version, until it is told to end, or another one took over.

    Args:
        root: the root.
        line: number of the publisher.
        until: function from the number of versions so far.
    """
    publisher = Publisher(root, base_every=BASE_EVERY, keep_versions=KEEP)
    count = 0 if publisher.version is None else publisher.version // LINES + 1
    made = 0
    while not until(made):
        version = (count + made) * LINES + line % LINES
        try:
            publisher.publish(weights_of(version), version=version)
            made += 1
        except StorageError as error:
            if "taken it over" in str(error):
                return
            raise
    publisher.wait()


def observe(root: Path, orders: Path, report: Path) -> None:
    """Follows until the file of orders names a version that all followers have reached."""
    counts: collections.Counter[str] = collections.Counter()
    abstract, wrong = weights_of(0), []
    lasting, late = Follower(root, abstract, poll_s=0.0), None
    seen = {}
    while True:
        goal = int(orders.read_text() or -1) if orders.exists() else None
        late = late or Follower(root, abstract, poll_s=0.0)
        for name, follower in (("lasting", lasting), ("late", late)):
            before = follower.version
            try:
                if not follower.update():
                    continue
                params = follower.params
            except AdaCheckError as error:
                counts[f"{name}: {type(error).__name__}"] += 1
                continue
            version = follower.version
            assert version is not None
            counts[f"{name} served"] += 1
            expected = weights_of(version)
            bad = [k for k in expected if np.asarray(params[k]).tobytes() != expected[k].tobytes()]
            if bad or (before is not None and version <= before):
                wrong.append([name, before, version, bad])
        seen = {"lasting": lasting.version, "late": late.version}
        if goal is not None and all((each or -1) >= goal for each in seen.values()):
            break
        if goal is not None and goal < 0:
            break
        if goal is None and late.version is not None and counts["late served"] % 3 == 0:
            late = None
        time.sleep(0.001)
    counts["bases read by the lasting follower"] = lasting.bases_read
    text = {"counts": counts, "wrong": wrong, "seen": seen, "problem": lasting.problem}
    report.write_text(json.dumps(text))


class Trials:
    """Faults done to one root.

    Args:
        directory: to work in.
        seed: seed of all choices.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.root, self._directory = directory / "root", directory
        self._random, self._line = random.Random(seed), 0
        self.done: collections.Counter[str] = collections.Counter()

    def _begun(self, until: Callable[[int], bool] = lambda _: False) -> int:
        self._line += 1
        line, root = self._line, self.root
        return _forked(lambda: publish(root, line, until))

    def _pause(self, most_s: float = 0.3) -> None:
        time.sleep(self._random.uniform(0.0, most_s))

    def _wait_for_versions(self) -> None:
        """Waits until somebody has published something since, or a moment has passed."""
        folder, end_s = self.root / "versions", time.monotonic() + 10
        before = {*os.listdir(folder)} if folder.exists() else set()
        while time.monotonic() < end_s:
            if folder.exists() and {*os.listdir(folder)} - before:
                return
            time.sleep(0.002)

    def trial(self, fault: str) -> None:
        """Has a publisher begin, and does one thing."""
        pid = self._begun()
        if self._random.random() < 0.8:
            self._wait_for_versions()
        self._pause()
        if fault in ("flip", "cut", "remove"):
            for _ in range(self._random.randint(1, 3)):
                self._damage(fault)
            self._pause()
        elif fault == "two":
            other = self._begun()
            self._pause(0.6)
            _kill(other)
        elif fault == "stopped":  # and wakes up when others have gone on
            os.kill(pid, signal.SIGSTOP)
            other = self._begun(lambda made: made >= 12)
            _ended(other)
            os.kill(pid, signal.SIGCONT)
            self._pause(0.2)
        elif fault == "prune":
            self._prune()
        _kill(pid)
        self.done[fault] += 1

    def _files(self, *folders: str) -> list[Path]:
        # Publishers delete folders meanwhile, which `Path.rglob` takes for an error.
        found = [each for name in folders for each in os.walk(self.root / name)]
        return sorted(Path(folder, file) for folder, _, files in found for file in files)

    def _damage(self, fault: str) -> None:
        kinds = ("deltas", "parts", "versions", "bases", "leaves", "publishers")
        files = self._files(self._random.choices(kinds, (4, 3, 2, 2, 0.3, 0.3))[0])
        try:
            path = self._random.choice(files[-4:])
            if fault == "remove":
                path.unlink()
                return
            data = bytearray(path.read_bytes())
            at = self._random.randrange(len(data))
            if fault == "cut":
                path.write_bytes(data[:at])
                return
            data[at] ^= 1 << self._random.randrange(8)
            path.write_bytes(data)
        except (OSError, IndexError, ValueError):
            return  # the publisher deleted it meanwhile, or there is none

    def _prune(self) -> None:
        """Deletes the older half of everything, by hand and in no order."""
        files = self._files("versions", "deltas", "bases", "parts")
        for path in self._random.sample(files, len(files) // 2):
            path.unlink(missing_ok=True)
            self._pause(0.002)

    def healed(self) -> int:
        """Publishes until there is a base at the end; gives the newest version's number."""
        pid = self._begun(lambda made: made >= 2 * BASE_EVERY)
        assert _ended(pid) == 0, "the last publisher failed"
        publisher = Publisher(self.root)
        version = publisher.version
        publisher.close()
        return -1 if version is None else version


def campaign(directory: Path, count: int, seed: int, minutes: float = math.inf) -> dict[str, Any]:
    """Does some faults to a root, one after another.

    Args:
        directory: to work in.
        count: number of trials.
        seed: seed of all choices.
        minutes: minutes after which no trial begins.
    """
    byte_loops.fingerprint_of(weights_of(0)["a"])
    byte_loops.wait_until_compiled()  # for all children
    orders, report = directory / "orders", directory / "report"
    observer = _forked(lambda: observe(directory / "root", orders, report))
    trials, start_s = Trials(directory, seed), time.monotonic()
    for number in command.trials(count, minutes):
        trials.trial(FAULTS[number % len(FAULTS)])
        if _ended(observer, os.WNOHANG) is not None:
            raise AssertionError("the process that follows ended")
    goal = trials.healed()
    (directory / "orders.new").write_text(str(goal))
    (directory / "orders.new").rename(orders)
    end_s = time.monotonic() + 60
    while not report.exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    is_stuck = not report.exists()
    if is_stuck:
        orders.write_text("-1")
    _ended(observer)
    found = json.loads(report.read_text())
    return {
        "trials": dict(trials.done),
        "newest": goal // LINES,
        "stuck": is_stuck,
        "seconds": round(time.monotonic() - start_s),
        **found,
    }


def main() -> int:
    """Reads the command line, and prints what was found."""
    options = command.parser(__doc__, count=1000, seed=0, minutes=math.inf).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        try:
            found = campaign(Path(directory), options.count, options.seed, options.minutes)
        finally:  # whoever reads what this one prints waits for all who could print there
            for pid in [*_running]:
                _kill(pid)
    return command.finish(found, [*found["wrong"], *["stuck"] * found["stuck"]])


if __name__ == "__main__":
    sys.exit(main())
