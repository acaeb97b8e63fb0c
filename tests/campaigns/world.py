"""One root and the lives that it has: what is done between them, and what each has to find."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adacheck_jax.schemes import SCHEMES
from benchmarks.common import free_port
from tests.campaigns import beside, command, shim
from tests.campaigns.profiles import Profile
from tests.processes import Child, forked

LAYOUTS = ("replicated", "halves", "cut")
START_S, LIMIT_S = 180.0, 300.0
"""Longest silence before a life begins to train, and longest life."""
_ENDED_BY_JAX = "JAX distributed service detected fatal errors"
"""What JAX prints before it ends a process by SIGABRT, since another one has died."""
_REFUSED = re.compile(r"step (\d+): replaying [^,]* state that was trained, in ([^.]*)\.")
"""A step that was refused, and its leaves, in its error."""
_TMPFS_BYTES, _TMPFS_INODES = 64 << 20, 4000
PHASES = {
    "before": "before its share is written",
    "written": "after its share is written",
    "waiting": "while it waits for the others",
    "commit": "while process 0 commits",
    "committed": "after process 0 has committed",
}
SETTINGS = {
    **{"default": (100, "0"), "10 s": (10, "0")},
    **{"recoverable": (100, "1"), "recoverable, 10 s": (10, "1")},
}
"""Seconds of the heartbeat timeout, and whether JAX lets the others go on."""


@dataclass
class Tally:
    """Findings of a campaign.

    Attributes:
        tried: lives, damaged files or commands.
        counts: what else was counted.
        lost, wrong, crashed, other: all that must not be.
    """

    tried: int = 0
    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        """All that must not be."""
        return [*self.lost, *self.wrong, *self.crashed, *self.other]


Lines = list[list[str]]


class World:
    """One root, and the lives that it has.

    Args:
        profile: what is done to it.
        place: directory to work in; must exist.
        compiled: directory of compiled programs.
        seed: seed of all choices.
        tally: takes what is found.
        url: root in an object store; empty for one on the disk.
        server: whose outages it has; None for those of the disk.
    """

    def __init__(
        self,
        profile: Profile,
        place: Path,
        compiled: Path,
        seed: int,
        tally: Tally,
        url: str = "",
        server: Server | None = None,
    ) -> None:
        self.profile, self._place, self._compiled, self.tally = profile, place, compiled, tally
        self._rng, self._server = random.Random(seed), server
        self._options = self._rng.choice(profile.worlds)
        self._layout = self._rng.choice(LAYOUTS) if profile.memory else ""
        (place / "disk").mkdir()
        self._root = url or str(place / "disk" / "root")
        self._is_local = not url
        self._kept = {**profile.life, **self._options}.get("kept")
        self._digests: dict[int, str] = {}
        self._committed, self._deleted, self._lives = list[int](), set[int](), 0
        self._inside, self._begun = dict[int, list[int]](), set[int]()
        self._lines: list[Lines] = []
        self._expected, self._wiped, self._each, self._examined = 0, set[int](), 1, 0
        self._name = f"seed {seed}"
        if profile.needs == "tmpfs":
            options = f"size={_TMPFS_BYTES},nr_inodes={_TMPFS_INODES}"
            mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(place / "disk")]
            subprocess.run(mount, check=True)

    def close(self) -> None:
        """Frees what it took."""
        if self.profile.needs == "tmpfs":
            subprocess.run(["umount", "-l", str(self._place / "disk")], check=True)

    # One life.

    def live(self, kind: str) -> None:
        """One life, and its end."""
        self.tally.counts[kind] += 1
        if kind == "bare":
            shutil.rmtree(self._root, ignore_errors=True)
        newest, fault = self._newest(), self._fault()
        children, order = self._start(kind, **fault)
        victim = self._rng.randrange(len(children)) // self._each
        ends = kind == "ends" or bool(fault)
        try:
            if kind == "early":
                time.sleep(self._rng.random())
            elif not self._until_training(children, fault):
                return
            if ends:
                self._until_the_end(children, fault)
            else:
                self._kill(children, self._interfere(kind, children, order, victim))
        finally:
            codes = [_ended(each, self._place / f"said-{n}") for n, each in enumerate(children)]
        self._lines = self._read(len(children))
        self._judge_codes(codes, fault, ends)
        begun = [_begin(own) for own in self._lines]
        if all(each is not None for each in begun):
            self._judge_beginning([each for each in begun if each is not None], newest)
        self._judge_storage()
        self._note_saves(is_clean=ends and not any(codes))
        if fault:
            self._judge_fault(fault)
        self._go_on(kind, victim)

    def _go_on(self, kind: str, victim: int) -> None:
        """Does what happens between two lives."""
        if self.profile.memory:
            self._note_memory(self._to_wipe(kind, victim))
            self._tell_warnings()
            if kind == "corrupt":
                self._corrupt(victim)
            if kind == "newer":
                self._save_elsewhere()
        if self._rng.random() < self.profile.repairs:
            self._repair()
        if self.profile.damages:
            self._examine()
        self.tally.tried += not (self.profile.damages or self.profile.commands)

    def die_in_a_save(self) -> None:
        """One life of several processes, of which one is killed in a phase of its third save."""
        rng, self._each = self._rng, 1
        setting, phase = rng.choice([*SETTINGS]), rng.choice([*PHASES])
        heartbeat_s, recoverable = SETTINGS[setting]
        # Process 0 is what commits.
        victim = rng.choice([0, 1])
        more = {"dies_in": [phase, victim], "steps": 3, "barrier": True}
        environment = {**os.environ, "JAX_ENABLE_RECOVERABILITY": recoverable}
        children, order = self._start("phase", heartbeat_s, environment=environment, **more)
        mark, dead, until_s = self._place / "out.killed", order.index(victim), time.time() + START_S
        ended_s = dict[int, float]()
        while len(ended_s) < len(children) - 1 and time.time() < until_s:
            time.sleep(0.05)
            if mark.exists() and (text := mark.read_text()):
                until_s = float(text) + heartbeat_s + 30
            for host, child in enumerate(children):
                if host != dead and child.returncode is not None:
                    ended_s.setdefault(host, time.time())
        killed_s = float(mark.read_text()) if mark.exists() else math.inf
        for host, child in enumerate(children):
            _ended(child, self._place / f"said-{host}")
        self._lines = self._read(len(children))
        who = "another" if victim else "process 0"
        for host in {*range(len(children))} - {dead}:
            what, after_s = self._seen(host, victim, ended_s.get(host))
            seen = f"{who}, {PHASES[phase]}, {setting}: {what}"
            self.tally.counts[seen] += 1
            most, late_s = f"{seen}, seconds at most", after_s - killed_s
            if math.isfinite(late_s):
                self.tally.counts[most] = max(self.tally.counts[most], round(late_s))
            is_late = phase in ("waiting", "committed") and what == "saved"
            if what not in _expected(victim, phase, setting) and not is_late:
                self.tally.other.append(f"{self._name}: {seen}; see {self._place}/said-{host}")
        self._judge_storage()
        self._note_saves(is_clean=False)
        self.tally.tried += 1

    def _seen(self, host: int, victim: int, ended_s: float | None) -> tuple[str, float]:
        """The end of a save as a process saw it that was not killed, and when."""
        for words in self._lines[host]:
            if words[0] == "failed" and ended_s is not None:
                error = " ".join(words[5:])
                if "AdaCheckError" in error and f"process {victim}" in error:
                    return "error", float(words[4])
                if "AdaCheckError" in error and "coordination service" in error:
                    return "error of the service", float(words[4])
                is_gloo = "gloo" in error.lower()
                return "error of a collective" if is_gloo else "another error", float(words[4])
        if ended_s is None:
            return "hangs", math.inf
        if ["over"] in self._lines[host]:
            return "saved", ended_s
        said = (self._place / f"said-{host}").read_text(errors="replace")
        is_jax = "Terminating process because" in said
        return "ended by JAX" if is_jax else "crashed", ended_s

    def _fault(self) -> dict[str, Any]:
        if not self.profile.faults:
            return {}
        kind, rng = self._rng.choice(self.profile.faults), self._rng
        if self._server is not None:
            return {"steps": 60, "fault_at": 10**6, "fault": {"kind": kind, "at": 0}}
        if kind in ("hangs", "refuses"):
            seconds = rng.choice([0.5, 1.0, 3.0])
            fault = {"kind": kind, "at": rng.randrange(3000), "seconds": seconds}
            return {"fault": fault, "fault_at": 3, "steps": 30 + int(seconds * 10)}
        most = {"once": 160, "full": 160, "exit": 320, "bytes": 1 << 19, "inodes": 60}.get(kind, 1)
        fault = {"kind": kind, "at": rng.randrange(most) + (most < 400)}
        span = 3 if kind == "exit" else 1
        return {"fault": fault, "fault_at": rng.randint(1, 4), "span": span}

    def _start(
        self,
        kind: str,
        heartbeat_s: int = 100,
        last: int = 10**6,
        environment: Mapping[str, str] = os.environ,
        **more: Any,
    ) -> tuple[list[Child], list[int]]:
        profile, rng = self.profile, self._rng
        self._each = 2 if kind == "more" else 1
        counts = [n for n in profile.processes if n > 1 or "dies_in" not in more]
        count, port = rng.choice(counts) * self._each, free_port()
        order = rng.sample(range(count), count)
        memory = "elsewhere" if last < 10**6 else "memory"
        shared = {
            **{"copies": 1, "chunk_s": 0.0, "pause_s": 0.15 if kind == "skew" else 0.0},
            **{"compiled": str(self._compiled), "last": last, **profile.life, **self._options},
            "layout": self._layout or rng.choice(LAYOUTS),
            "seed": rng.randrange(1 << 20),
            "memory": str(self._place / memory) if profile.memory else None,
            "dies": [rng.randrange(count), rng.randrange(1, 6)] if kind == "base" else None,
            **more,
        }
        if not profile.memory:
            shared["inside"] = self._inside
        if last < 10**6:
            shared["recorded"] = 0.0
        before = self._place / f"life-{self._lives}"  # what the last one told, to be read
        for each in [*self._place.glob("out*"), *self._place.glob("said-*")]:
            before.mkdir(exist_ok=True)
            each.rename(before / each.name)
        self._lives += 1
        arguments = (count, port, self._root, self._place / "out", max(profile.devices // count, 1))
        children = [
            forked(
                "tests.campaigns.life",
                json.dumps({**shared, "host": n, "machine": n // self._each}),
                *(index, *arguments, heartbeat_s),
                environment=environment,
            )
            for n, index in enumerate(order)
        ]
        return children, order

    def _read(self, count: int) -> list[Lines]:
        """The whole lines of all processes, as words."""
        found = list[Lines]()
        for host in range(count):
            path = Path(f"{self._place}/out-{host}")
            text = path.read_text() if path.exists() else ""
            found.append([line.split(" ") for line in text[: text.rfind("\n") + 1].splitlines()])
        return found

    def _until_training(self, children: Sequence[Child], fault: Mapping[str, Any]) -> bool:
        """True once all processes have trained a step."""
        until_s, told = time.monotonic() + START_S, 0
        while time.monotonic() < until_s:
            lines = self._read(len(children))
            if (count := sum(map(len, lines))) > told:  # it restores what is there
                until_s, told = time.monotonic() + START_S, count
            if all(any(words[0] == "state" for words in own) for own in lines):
                return True
            if any(each.returncode is not None for each in children):
                break
            time.sleep(0.02)
        self.tally.crashed.append(f"{self._name}: did not begin; see {self._place}/said-0")
        return False

    def _until_the_end(self, children: Sequence[Child], fault: Mapping[str, Any]) -> None:
        if self._server is not None:
            time.sleep(self._rng.uniform(0, 3))
            self._server.leave(fault["fault"]["kind"])
            time.sleep(self._rng.choice([0.5, 1.0, 3.0]))
            self._server.come_back()
        until_s = time.monotonic() + LIMIT_S
        while any(each.returncode is None for each in children) and time.monotonic() < until_s:
            time.sleep(0.1)
            is_outage = fault.get("fault", {}).get("kind") in ("hangs", "refuses")
            if is_outage and all(["over"] in own for own in self._read(len(children))):
                time.sleep(2.0)  # Orbax's threads may hold up the end of a process for ten minutes
                return
        if any(each.returncode is None for each in children):
            self.tally.crashed.append(f"{self._name}: hangs with {fault}; see {self._place}")

    def _interfere(
        self, kind: str, children: Sequence[Child], order: Sequence[int], victim: int
    ) -> int:
        """Lets a life go on for a while; the host that is to be killed first."""
        if self.profile.commands:
            self._run_commands()
        if kind == "base":
            given = [words for words in self._read(len(children)) if words]
            children[self._dying(children)].process.join(START_S if given else 0)
        elif kind != "early":
            self._wait_for_steps(len(children))
        return order.index(0) // self._each if kind == "first" else victim

    def _dying(self, children: Sequence[Child]) -> int:
        """The process that is to kill itself."""
        until_s = time.monotonic() + 20
        while time.monotonic() < until_s:
            for number, each in enumerate(children):
                if each.returncode is not None:
                    return number
            time.sleep(0.02)
        return 0

    def _wait_for_steps(self, count: int) -> None:
        word = "stored" if self.profile.memory else "saving"
        steps, until_s = self._rng.choice([0, 1, 2, 3, 5, 8, 12]), time.monotonic() + 20
        while time.monotonic() < until_s:
            if min(sum(words[0] == word for words in own) for own in self._read(count)) >= steps:
                break
            time.sleep(0.005)
        time.sleep(self._rng.choice([0.02, 0.1, 0.4]) * self._rng.random())

    def _kill(self, children: Sequence[Child], victim: int) -> None:
        own = [each for n, each in enumerate(children) if n // self._each == victim]
        for number, each in enumerate([*own, *(x for x in children if x not in own)]):
            if each.returncode is None and each.process.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # ended by JAX, since a host died
                    os.kill(each.process.pid, signal.SIGKILL)
            if number == len(own) - 1:
                time.sleep(self._rng.choice([0, 0, 0.1, 0.5]))

    # What storage has.

    def _newest(self) -> int:
        names = os.listdir(self._root) if self._is_local and os.path.isdir(self._root) else []
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def _judge_codes(self, codes: Sequence[int], fault: Mapping[str, Any], ends: bool) -> None:
        allowed = {0, 77} if fault.get("fault", {}).get("kind") == "exit" else {0}
        for number, code in enumerate(codes):
            where = f"{self._name}: {fault or ''} see {self._place}/said-{number}"
            if code < 0 and code != -signal.SIGKILL:
                said = (self._place / f"said-{number}").read_text(errors="replace")
                if -signal.SIGKILL not in codes or _ENDED_BY_JAX not in said:
                    last = said.strip().rpartition("\n")[2]
                    self.tally.crashed.append(f"{where}: signal {-code}: {last[:300]}")
            elif code > 0 and code not in allowed and (ends or len(codes) == 1):
                self.tally.other.append(f"{where}: a process failed")
            elif code and ends and len(codes) == 1 and ["over"] not in self._lines[0]:
                self.tally.crashed.append(f"{where}: ended with {code}")

    def _judge_beginning(self, begun: Sequence[tuple[str, int, str]], newest: int) -> None:
        """Compares what all processes began with to what storage and memory held."""
        tally = self.tally
        if len(set(begun)) > 1:
            tally.wrong.append(f"{self._name}: hosts began with {sorted(set(begun))}")
            return
        what, step, found = begun[0]
        if step and found != self._digests.get(step):
            tally.wrong.append(f"{self._name}: step {step} has other bits where it goes on")
        why = next((" ".join(w) for w in self._lines[0] if w[0] == "refused"), "")
        if step < max(self._expected, newest if self.profile.memory else 0):
            tally.lost.append(f"{self._name}: had {self._expected}, {newest}; {what} {step} {why}")
        if what == "recovered":
            tally.counts["recovered from memory"] += 1
            tally.counts["newer than storage"] += step > newest

    def _judge_storage(self) -> None:
        """Compares all that a life found in storage with what was saved."""
        for own in self._lines:
            for words in own:
                if words[0] == "found":
                    self.tally.counts["restored and compared"] += own is self._lines[0]
                    if words[2] != self._digests.get(int(words[1])):
                        self.tally.wrong.append(f"{self._name}: step {words[1]} has other bits")
        if self.profile.memory or not any(_begin(own) for own in self._lines):
            return
        found = {int(words[1]) for words in self._lines[0] if words[0] == "found"}
        damaged = {int(w[1]): " ".join(w[2:]) for w in self._lines[0] if w[0] == "damaged"}
        recorded = {step for steps in self._inside.values() for step in steps}
        saves = sorted({*found, *damaged} - recorded)
        kept = {*saves[-(self._kept or 10**6) :]}
        kept |= {step for save in kept for step in self._inside.get(save, ())}
        for step, error in damaged.items():
            if step in kept:
                self.tally.lost.append(f"{self._name}: step {step} of {saves}: {error}")
            self.tally.counts["half deleted, refused"] += step not in kept
        for step in self._committed:
            newer = sum(save > step for save in saves)
            is_old = self._kept is not None and newer >= self._kept
            if step not in saves and step not in self._deleted and not is_old:
                self.tally.lost.append(f"{self._name}: step {step} is not among {saves}")
        self._committed = [step for step in self._committed if step in saves]
        self._inside = {save: steps for save, steps in self._inside.items() if save in saves}

    def _note_saves(self, *, is_clean: bool) -> None:
        """Notes what this life has trained and saved."""
        for own in self._lines:
            self._digests |= {int(w[1]): w[2] for w in own if w[0] == "state"}
        pending, failed = list[int](), False
        recorded = {step for steps in self._inside.values() for step in steps}
        saved = {int(words[1]) for words in self._lines[0] if words[0] == "found"} - recorded
        for words in self._lines[0]:
            what, step = words[0], int(words[1]) if words[1:] and words[1].isdecimal() else 0
            if what == "recorded":
                pending.append(step)
            elif what == "saving":
                self._inside[step], pending = pending, []
                self._begun.add(step)
                saved.add(step)
            elif what == "committed":
                self._committed.append(step)
                self._begun.discard(step)
                self.tally.counts["reported as saved"] += 1
            elif what == "deleted":
                # All that was begun has ended by then, and retention has had its turn.
                saved = {*sorted(saved)[-(self._kept or 10**6) :]} - {step}
                self._deleted |= {step, *self._committed} - saved
            elif what == "looked" and words[2] != self._digests.get(step):
                self.tally.wrong.append(f"{self._name}: step {step} has other bits where looked at")
            elif what in ("said", "unsaved"):  # a warning; or an error of the step behind them
                lost = command.steps_given_up(" ".join(words[1 + (what == "unsaved") :]))
                self._inside = {k: [x for x in v if x not in lost] for k, v in self._inside.items()}
                pending = [x for x in pending if x not in lost]
                self.tally.counts["recorded steps given up, told"] += len(lost)
            if what in ("failed", "unsaved"):
                failed = True
                saved.discard(step)
        unsaved, told = [words for words in self._lines[0] if words[0] == "unsaved"], {}
        for words in unsaved:  # a leaf that was told is stored from then on
            found = _REFUSED.findall(" ".join(words))
            if not found or any(int(x) > told.get(leaves, math.inf) for x, leaves in found):
                self.tally.other.append(f"{self._name}: refused twice: {' '.join(words)}")
            told = {leaves: int(words[1]) for _, leaves in found} | told
        self.tally.counts["edits found too late, and refused"] += len(unsaved)
        if is_clean and not failed and self._is_local and not self.profile.memory:
            self._judge_left()

    def _judge_left(self) -> None:
        """Nothing is left behind by a life that has ended well."""
        names = os.listdir(self._root)
        # Orbax leaves what it had begun of a step whose save failed, and that is not saved again.
        begun = {f"{step}.orbax-checkpoint-tmp" for step in self._begun}
        strange = [name for name in names if not name.isdecimal() and name not in begun]
        strange += [
            str(path)
            for path in Path(self._root).rglob(".*")
            if path.name.endswith((".tmp", ".__lock"))
        ]
        if strange or (self._kept and sum(map(str.isdecimal, names)) > self._kept):
            self.tally.other.append(f"{self._name}: left behind: {strange or sorted(names)}")

    def _judge_fault(self, fault: Mapping[str, Any]) -> None:
        """A save that fails raises once; the saves behind it succeed."""
        kind, own = fault["fault"]["kind"], self._lines[0]
        name = f"{self._name}: {fault['fault']}"
        failed = [words for words in own if words[0] == "failed"]
        self.tally.counts[f"saves that raised: {kind}"] += len(failed)
        hits = [int(words[2]) for words in own if words[0] == "disarmed"]
        self.tally.counts[f"{kind}, and no operation was met"] += hits == [0]
        if twice := [words for words in failed if words[2] != "1"]:
            self.tally.other.append(f"{name}: raised more than once: {' '.join(twice[0])}")
        late = [words for words in failed if words[3] == "0"]
        # Orbax's manager, with any handler, may tell of a failed save once more at the next one.
        if len(late) > 1 or (late and kind in ("hangs", "refuses")) or (failed and kind == "log"):
            self.tally.other.append(f"{name}: a later save failed: {' '.join(late[-1])}")
        if kind in ("hangs", "refuses") and failed:
            self.tally.other.append(f"{name}: {' '.join(failed[0])}")
        longest = max((float(words[1]) for words in own if words[0] == "call"), default=0)
        most = "longest call of save, ms"
        self.tally.counts[most] = max(self.tally.counts[most], round(1000 * longest))
        if kind == "log" and hits:
            self._judge_durable(fault)

    def _judge_durable(self, fault: Mapping[str, Any]) -> None:
        """All of an item is synced before the rename that commits it."""
        saved = [int(words[1]) for words in self._lines[0] if words[0] == "saving"]
        suffix, step = ".orbax-checkpoint-tmp", saved[fault["fault_at"] - 1]
        item = Path(self._root) / f"{step}{suffix}" / f"default{suffix}"
        left = shim.volatile(self._place / "out.calls" / "log", item)
        # Orbax's own, and written last; what it holds does not matter.
        if bad := {*left} - {str(item), str(item / "commit_success.txt")}:
            self.tally.lost.append(f"{self._name}: may be lost with the power: {sorted(bad)}")

    def _repair(self) -> None:
        """Repairs what this life has left; then all that is there belongs to a step."""
        from adacheck_jax.store.steps import roots
        from adacheck_jax.store.storage.location import at, located
        from adacheck_jax.tools import repair

        top = at(located(self._root))
        if not top.folders():
            return
        repair.repair(top, force=True)
        steps = {str(each.step) for each in roots.steps_of(top) if each.error is None}
        self.tally.counts["repairs"] += 1
        left = {each.below(top).partition("/")[0] for each in top.list()} - steps
        if self._kept:  # retention was killed in the midst of those, and goes on with the next save
            kept = sorted(map(int, steps))[-self._kept :]
            left = {
                x for x in left if not x.isdecimal() or len(kept) < self._kept or int(x) > kept[0]
            }
        if left := {name for name in left if not name.startswith(".adacheck-")}:  # empty files
            self.tally.other.append(f"{self._name}: a repair has left {sorted(left)}")

    # What memory has.

    def _to_wipe(self, kind: str, victim: int) -> set[int]:
        """The hosts whose memory is lost."""
        hosts = len(self._lines) // self._each
        if kind == "all":
            return {*range(hosts)}
        if kind == "several":
            others = [host for host in range(hosts) if host != victim]
            return {victim, *self._rng.sample(others, self._rng.choice([1, 2]))}
        return {victim} if hosts > 1 and kind != "newer" and self._rng.random() < 0.75 else set()

    def _note_memory(self, wiped: set[int]) -> None:
        """Wipes the memory of hosts, and notes which step is left whole."""
        self.tally.counts["memories wiped"] += len(wiped)
        for host in wiped:
            shutil.rmtree(self._place / "memory" / str(host), ignore_errors=True)
        stored = [_steps(own, "stored") for own in self._lines]
        passed = [_steps(own, "passed") for own in self._lines]
        left = [each for each in range(len(stored)) if each // self._each not in wiped]
        known = max((x for host in left for x in passed[host]), default=0)
        if known == 0 and not all(any(w[0] == "lifted" for w in own) for own in self._lines):
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

    def _tell_warnings(self) -> None:
        """Notes what no kill explains: a copy that differs, or a process that does not follow.

        What a killed host did not send is told too, and then no step passes the gate any more.
        """
        told = ("keeps no copies", "Nothing can be recovered", "are checked by sample")
        for own in self._lines:
            for number, words in enumerate(own):
                said = " ".join(words[1:]) if words[0] == "said" else ""
                is_last = not any(later[0] == "passed" for later in own[number:])
                if any(each in said for each in told) and not (is_last and "not sent" in said):
                    self.tally.other.append(f"{self._name}: {said}")

    def _corrupt(self, victim: int) -> None:
        """Flips bits in what another host has in memory."""
        others = [host for host in range(len(self._lines)) if host != victim]
        for path in sorted((self._place / "memory" / str(self._rng.choice(others))).glob("*")):
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
        children, _ = self._start("newer", last=max(self._expected, self._newest()) + 3)
        for each in children:
            each.process.join(START_S)
        codes = [_ended(each, self._place / f"said-{n}") for n, each in enumerate(children)]
        if any(codes):
            self.tally.other.append(f"{self._name}: a run without memory failed")
        self._lines = self._read(len(children))
        self._digests |= {int(w[1]): w[2] for own in self._lines for w in own if w[0] == "state"}
        shutil.rmtree(self._place / "elsewhere", ignore_errors=True)

    # Commands, and damage.

    def _run_commands(self) -> None:
        def steps() -> list[int]:
            return [int(each) for each in os.listdir(self._root) if each.isdecimal()]

        until_s = time.monotonic() + START_S
        while len(steps()) < 2 and time.monotonic() < until_s:
            time.sleep(0.05)
        for _ in range(self.profile.commands):
            time.sleep(self._rng.uniform(0, 0.2))
            name = [*beside.VERBS][self.tally.tried % len(beside.VERBS)]
            root, out = Path(self._root), self._place / "command"
            found = beside.attempt(name, root, out, min(steps()))
            self.tally.tried += 1
            self.tally.counts["commands that told of a deletion"] += bool(found.told)
            if not found.is_right:
                self.tally.other.append(f"{found.verb}, {found.code}: {found.told}")

    def _examine(self) -> None:
        """Damages files of a copy of the root, one by one, and has each touched step restored."""
        copy, digests = self._place / "copy", self._place / "digests.json"
        digests.write_text(json.dumps(self._digests))
        first, last = self._examined, self._examined + self.profile.damages
        while first < last:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self._root, copy, copy_function=os.link)
            root, self._root = self._root, str(copy)
            (child,), _ = self._start("ends", examines=[first, last], digests=str(digests))
            self._root = root
            silent_s, heard = time.monotonic(), 0
            while child.returncode is None and time.monotonic() - silent_s < START_S:
                time.sleep(0.05)
                if (count := len(self._read(1)[0])) != heard:
                    silent_s, heard = time.monotonic(), count
            hangs, code = child.returncode is None, _ended(child, self._place / "said-0")
            (own,) = self._read(1)
            kind = place = ""
            for words in own:
                if words[0] == "damage":
                    first, kind, place = int(words[1]) + 1, words[2], " ".join(words[3:])
                    self.tally.counts[f"damage: {kind}"] += 1
                elif words[0] == "outcome":
                    self.tally.tried += 1
                    self.tally.counts[words[3]] += 1
                    why = f"{self._name}: {kind} of {place}: {' '.join(words[2:])}"
                    if words[3] == "wrong":
                        self.tally.wrong.append(why)
                    elif words[3] == "unclear":
                        self.tally.other.append(why)
            if ["over"] not in own:
                what = "hangs" if hangs else f"ended with {code}; see {self._place}/said-0"
                self.tally.crashed.append(f"{self._name}: {kind} of {place}: {what}")
                first += not kind
        self._examined = last


def _expected(victim: int, phase: str, setting: str) -> set[str]:
    """What processes may see of the death of another one."""
    found = {"error", "error of the service"}
    if phase == "before" or not victim:
        found |= {"error of a collective"}
    if not victim:  # its service ends with it: JAX ends the others, or a call of theirs fails
        return found - {"error"} | {"ended by JAX"}
    return found if "recoverable" in setting else found | {"ended by JAX"}


def _ended(child: Child, said: Path) -> int:
    """The exit status of a process, which is killed if it goes on; what it printed is kept."""
    if child.returncode is None:
        child.process.kill()
    child.process.join()
    shutil.move(child.output, said)
    return child.returncode or 0


def _begin(own: Lines) -> tuple[str, int, str] | None:
    """What a process began with; None if it did not come to it."""
    for words in own:
        if words[0] in ("recovered", "restored"):
            return words[0], int(words[1]), words[2]
        if words[0] == "state":
            return "nothing", 0, ""
    return None


def _steps(own: Lines, word: str) -> list[int]:
    """The steps that lie in a file since it was overwritten last."""
    found = list[int]()
    for words in own:
        if words[0] == "lifted":
            found.clear()
        elif words[0] == word:
            found.append(int(words[1]))
    return found


class Server:
    """An object store in a process of its own, which can be stopped, or refuse all requests.

    One for all worlds, since clients remember it.
    """

    def __init__(self, kind: str) -> None:
        parts = [sys.executable, "-m", "tests.object_stores", kind]
        environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(parts, env=environment, text=True, **pipes)
        assert self._process.stdout is not None
        self.url, found = json.loads(self._process.stdout.readline())
        self._endpoint = found[SCHEMES[kind].endpoint]
        os.environ.update(found)

    def leave(self, does: str) -> None:
        """Takes storage away: it ``hangs`` or ``refuses``."""
        if does == "hangs":
            self._process.send_signal(signal.SIGSTOP)
        else:
            self._answer(503)

    def come_back(self) -> None:
        """Brings storage back."""
        self._process.send_signal(signal.SIGCONT)
        self._answer(0)

    def _answer(self, status: int) -> None:
        with urllib.request.urlopen(f"{self._endpoint}/proxy-control/status{status}"):
            pass

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait()
