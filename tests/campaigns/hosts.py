"""Kills hosts of a run of several, wipes their memory, and compares what the next run recovers.

    python -m tests.campaigns.hosts --count 100

A run has four processes, each a host of its own: a directory for its memory, and a failure domain.
In each round all are started, with other indices than before; at a random moment one host is sent
SIGKILL, and then the others, as JAX ends them. Mostly the memory of the killed one is wiped. The
next round has to recover the newest step that the files held whole, on all processes, with the bits
that it had when it was trained.

What the files held is told by the processes as it is stored. A copy of each box is left where one
host is wiped: of a state that each host has (replicated), that two have in halves, and of one cut
in four, whose copies are sent. A step counts as held once it has passed the gate in a host that is
left, or, where nothing was wiped, once all hosts have stored it.

Kinds of rounds: plain; skew, with pauses around all that is stored; first, in which the host that
is killed has process 0; corrupt, in which bits are flipped in the file of another host; newer,
in which storage has a newer step than memory; more, in which each host has two processes; base, in
which a host dies between two exchanges of a base; several and all, in which the memory of two or
three hosts, or of all, is wiped, so that storage may be all there is; bare, before which storage
loses all.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import free_port
from tests.campaigns import command
from tests.processes import Child, forked

HOSTS = 4
KINDS = {
    "plain": 1,
    "skew": 3,
    "first": 1,
    "corrupt": 1,
    "newer": 1,
    "more": 1,
    "base": 1,
    "several": 1,
    "all": 0.5,
    "bare": 0.5,
}
"""How often each kind of round is drawn."""
LAYOUTS = ("replicated", "halves", "cut")
START_S = 90.0
"""Longest wait for a round to begin to train."""
ROUNDS = 6
"""Rounds of a root, before another one begins."""


@dataclass
class Tally:
    """Findings of a campaign.

    Attributes:
        kills: rounds of each kind, which ended by kills.
        wiped: rounds after which a host's memory was wiped.
        recovered: rounds that began with a state from memory.
        newer: those of them whose step storage did not have.
        storage: rounds that began from storage, as they had to.
        refused: reasons of the rounds that did not recover, and how often each.
        took_s: seconds that recoveries took.
        read_bytes: bytes of arrays that they read from storage.
        wrong: states with other bits than those that were trained, or of two steps.
        lost: steps that memory held whole and that were not recovered.
        failures: anything else.
    """

    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    wiped: int = 0
    recovered: int = 0
    newer: int = 0
    storage: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    took_s: list[float] = field(default_factory=list)
    read_bytes: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """All that must not be."""
        return [*self.wrong, *self.lost, *self.failures]


class Hosts:
    """Four hosts that share a root.

    Args:
        directory: to work in.
        seed: of all that is random.
        layout: name of the layout of the state.
        records: True for files with records.
    """

    def __init__(
        self, directory: Path, seed: int, layout: str, tally: Tally, *, records: bool
    ) -> None:
        self._records = records or None
        self._rng, self._layout, self.tally = random.Random(f"{seed} {layout}"), layout, tally
        self._place = directory / f"{layout}-{seed}"
        self._place.mkdir()
        self._compiled = directory / "compiled"
        self._digests: dict[int, str] = {}
        self._lines: list[list[list[str]]] = []
        self._expected, self._why = 0, ""
        self._wiped, self._each, self._victim = set[int](), 1, 0

    def round(self, kind: str) -> None:
        """One start, and its end."""
        if kind == "bare":
            shutil.rmtree(self._place / "root", ignore_errors=True)
        name, newest = f"{self._place.name}, {kind}", self._newest()
        children, order = self._start(kind, "memory")
        try:
            if not self._until_training(children):
                self.tally.failures.append(f"{name}: did not begin; see {self._place}")
                return
            self._judge(name, newest)
            victim = self._victim
            if kind == "first":
                victim = order.index(0) // self._each
            if kind == "base":
                children[victim].process.join(START_S)
            else:
                self._wait_for_steps()
            self._kill(children, victim)
        finally:
            for each in children:
                each.process.kill()
                each.process.join()
                each.output.unlink(missing_ok=True)
        self._lines = self._read()
        self._tell_warnings(name)
        self.tally.kills[kind] += 1
        self._note(self._to_wipe(kind, victim))
        if kind == "corrupt":
            self._corrupt(victim)
        if kind == "newer":
            self._save_elsewhere()

    def _start(self, kind: str, memory: str, last: int = 10**6) -> tuple[list[Child], list[int]]:
        self._each = 2 if kind == "more" else 1
        self._victim = self._rng.randrange(HOSTS)
        count, port = HOSTS * self._each, free_port()
        order = self._rng.sample(range(count), count)
        shared = {
            "layout": self._layout,
            "records": self._records,
            "seed": self._rng.randrange(1 << 20),
            "last": last,
            "copies": 1,
            "pause_s": 0.15 if kind == "skew" else 0.0,
            "chunk_s": 0.001,
            "recorded": 0.0 if last < 10**6 else 0.6,
            "compiled": str(self._compiled),
            "memory": str(self._place / memory),
            "dies": [self._victim, self._rng.randrange(1, 6)] if kind == "base" else None,
        }
        for each in self._place.glob("out-*"):
            each.unlink()
        worker, root, out = (
            "tests.campaigns.hosts_worker",
            self._place / "root",
            self._place / "out",
        )
        given = (
            json.dumps({**shared, "host": each, "machine": each // self._each})
            for each in range(count)
        )
        children = [
            forked(worker, mode, index, count, port, root, out, 1, 10)
            for mode, index in zip(given, order, strict=True)
        ]
        return children, order

    def _log(self, host: int) -> Path:
        return Path(f"{self._place}/out-{host}")

    def _read(self) -> list[list[list[str]]]:
        """The whole lines of all processes, as words."""
        found = []
        for host in range(HOSTS * self._each):
            text = self._log(host).read_text() if self._log(host).exists() else ""
            found.append([line.split() for line in text[: text.rfind("\n") + 1].splitlines()])
        return found

    def _until_training(self, children: Sequence[Child]) -> bool:
        """True once all hosts have trained a step."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            self._lines = self._read()
            if all(any(words[0] == "state" for words in own) for own in self._lines):
                return True
            if any(each.returncode is not None for each in children):
                break
            time.sleep(0.05)
        for host, each in enumerate(children):
            shutil.copy(each.output, self._place / f"said-{host}")
        return False

    def _wait_for_steps(self) -> None:
        count, until_s = self._rng.choice([0, 1, 2, 3, 5, 8, 12]), time.monotonic() + 20
        while time.monotonic() < until_s:
            lines = self._read()
            if min(sum(words[0] == "stored" for words in own) for own in lines) >= count:
                break
            time.sleep(0.005)
        time.sleep(self._rng.random() * 0.3)

    def _kill(self, children: Sequence[Child], victim: int) -> None:
        hosts = [each // self._each for each in range(len(children))]
        own = [each for each, host in zip(children, hosts, strict=True) if host == victim]
        for number, each in enumerate([*own, *(x for x in children if x not in own)]):
            pid = each.process.pid
            if pid is not None and each.returncode is None:
                with contextlib.suppress(ProcessLookupError):  # ended by JAX, since a host died
                    os.kill(pid, signal.SIGKILL)
            if number == len(own) - 1:
                time.sleep(self._rng.choice([0, 0, 0.1, 0.5]))
        for each in children:
            each.process.join()

    def _to_wipe(self, kind: str, victim: int) -> set[int]:
        """The hosts whose memory is lost."""
        if kind == "all":
            return set(range(HOSTS))
        if kind == "several":
            others = [host for host in range(HOSTS) if host != victim]
            return {victim, *self._rng.sample(others, self._rng.choice([1, 2]))}
        return {victim} if kind != "newer" and self._rng.random() < 0.75 else set()

    def _note(self, wiped: set[int]) -> None:
        """Wipes the memory of hosts, and notes which step is left whole."""
        for own in self._lines:
            self._digests |= {int(w[1]): w[2] for w in own if w[0] == "state"}
        self.tally.wiped += bool(wiped)
        for host in wiped:
            shutil.rmtree(self._place / "memory" / str(host), ignore_errors=True)
        stored = [_steps(own, "stored") for own in self._lines]
        passed = [_steps(own, "passed") for own in self._lines]
        left = [each for each in range(len(stored)) if each // self._each not in wiped]
        known = max((x for host in left for x in passed[host]), default=0)
        if known == 0 and not all(self._has_begun(own) for own in self._lines):
            # The files of the run before are still there.
            self._wiped |= wiped
            self._expected = self._expected if len(self._wiped) <= 1 else 0
            return
        self._wiped = wiped
        if not wiped and all(stored):
            known = max(known, min(max(each) for each in stored))
        # A whole state that replaces another is on its way: then no file may have a step.
        is_gap = any(not stored[host] for host in left)
        self._expected = 0 if is_gap or len(wiped) > 1 else known

    def _tell_warnings(self, name: str) -> None:
        """Notes what no kill explains: a copy that differs, or a process that does not follow.

        What a killed host did not send is told too, and then no step passes the gate any more.
        """
        told = ("keeps no copies", "Nothing can be recovered", "are checked by sample")
        for own in self._lines:
            for number, words in enumerate(own):
                said = " ".join(words[1:]) if words[0] == "said" else ""
                is_last = not any(later[0] == "passed" for later in own[number:])
                if any(each in said for each in told) and not (is_last and "not sent" in said):
                    self.tally.failures.append(f"{name}: {said}")

    def _has_begun(self, own: Sequence[Sequence[str]]) -> bool:
        return any(words[0] == "lifted" for words in own)

    def _newest(self) -> int:
        root = self._place / "root"
        names = os.listdir(root) if root.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _judge(self, name: str, newest: int) -> None:
        """Compares what all hosts began with to what memory held."""
        tally, begun = self.tally, [_begin(own) for own in self._lines]
        if len(set(begun)) > 1:
            tally.wrong.append(f"{name}: hosts began with {sorted(set(begun))}")
            return
        what, step, digest = begun[0]
        if step and digest != self._digests.get(step):
            tally.wrong.append(f"{name}: step {step} has other bits")
        if step < max(self._expected, newest):
            why = next((" ".join(w) for w in self._lines[0] if w[0] == "refused"), "")
            tally.lost.append(
                f"{name}: had {self._expected}, {newest} in storage, {what} {step} {why}"
            )
        if what == "recovered":
            tally.recovered += 1
            tally.newer += step > newest
            tally.took_s += [float(w[1]) for w in self._lines[0] if w[0] == "took"]
            tally.read_bytes += sum(int(w[1]) for own in self._lines for w in own if w[0] == "read")
        else:
            tally.storage += 1
            reason = next((" ".join(w[11:]) for w in self._lines[0] if w[0] == "refused"), "")
            words = [each for each in reason.split() if "/" not in each]
            tally.refused["".join("N" if c.isdigit() else c for c in " ".join(words))] += 1

    def _corrupt(self, victim: int) -> None:
        """Flips bits in what another host has in memory."""
        others = [host for host in range(HOSTS) if host != victim]
        host = self._rng.choice(others)
        files = sorted((self._place / "memory" / str(host)).glob("*"))
        for path in files:
            size = path.stat().st_size
            with path.open("r+b") as file:
                for _ in range(3):
                    file.seek(self._rng.randrange(size // 4, size))
                    at, byte = file.tell(), file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << self._rng.randrange(8)]))
        self._expected = 0 if self._wiped else self._expected

    def _save_elsewhere(self) -> None:
        """Saves newer steps, in a run whose memory is elsewhere."""
        last = max(self._expected, self._newest()) + 3
        children, _ = self._start("newer", "elsewhere", last)
        for host, each in enumerate(children):
            each.process.join(START_S)
            if each.returncode != 0:
                self.tally.failures.append(f"{self._place.name}: a run without memory failed")
                shutil.copy(each.output, self._place / f"said-{host}")
            each.process.kill()
            each.process.join()
        for own in self._read():
            self._digests |= {int(w[1]): w[2] for w in own if w[0] == "state"}
        shutil.rmtree(self._place / "elsewhere", ignore_errors=True)


def _steps(own: Sequence[Sequence[str]], word: str) -> list[int]:
    """The steps that lie in a file since it was overwritten last."""
    found = list[int]()
    for words in own:
        if words[0] == "lifted":
            found.clear()
        elif words[0] == word:
            found.append(int(words[1]))
    return found


def _begin(own: Sequence[Sequence[str]]) -> tuple[str, int, str]:
    for words in own:
        if words[0] in ("recovered", "restored"):
            return words[0], int(words[1]), words[2]
    return "nothing", 0, ""


def table(tally: Tally) -> str:
    """What was found."""
    took = sorted(tally.took_s) or [math.nan]
    rows = [
        ("rounds that ended by SIGKILL of all hosts", tally.kills.total()),
        *((f"of them: {kind}", count) for kind, count in tally.kills.most_common()),
        ("of them with the memory of hosts wiped", tally.wiped),
        ("states recovered from memory", tally.recovered),
        ("of them newer than storage", tally.newer),
        ("began from storage, or with nothing", tally.storage),
        *((f"because: {reason}", count) for reason, count in tally.refused.most_common()),
        ("seconds of a recovery, median (longest)", f"{took[len(took) // 2]} ({took[-1]})"),
        ("bytes of arrays read from storage for them", tally.read_bytes),
        ("states with wrong bits, or of two steps", len(tally.wrong)),
        ("steps lost that memory held whole", len(tally.lost)),
        ("other failures", len(tally.failures)),
    ]
    return command.table(("what", "number"), rows)


def main() -> int:
    """Reads the command line, kills, and prints a table."""
    options: dict[str, Any] = {"seed": 0, "minutes": math.inf, "directory": None, "json": False}
    parser = command.parser(__doc__, count=100, **options)
    parser.add_argument("--records", action="store_true", help="keep records in the files")
    args = parser.parse_args()
    directory = args.directory or Path(tempfile.mkdtemp(prefix="hosts-", dir="/dev/shm"))
    tally, hosts, problems = Tally(), list[Hosts](), list[str]()
    rng = random.Random(args.seed)
    with command.workplace(directory, problems):
        for number in command.trials(args.count, args.minutes):
            if number % ROUNDS == 0:
                layout = LAYOUTS[number // ROUNDS % len(LAYOUTS)]
                seed = args.seed + number
                hosts.append(Hosts(directory, seed, layout, tally, records=args.records))
            drawn = rng.choices([*KINDS], [*KINDS.values()])[0]
            hosts[-1].round("plain" if number % ROUNDS == 0 else drawn)
        problems += tally.problems()
    text = "" if args.json else table(tally)
    return command.finish({"seed": args.seed, **vars(tally)}, problems, text)


if __name__ == "__main__":
    sys.exit(main())
