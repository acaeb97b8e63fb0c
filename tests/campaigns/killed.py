"""Kills one process of several in every phase of a save, and tells what the others saw, and when.

    python -m tests.campaigns.killed --size small          # two processes, two cells
    python -m tests.campaigns.killed --size full --jobs 3  # the table of the docs

Each cell is a run of its own: two steps are saved, and in the save of the third one process is sent
SIGKILL. What the others saw is an error that the save raised, or that JAX ended them; and how many
seconds after the kill. Afterwards the step before has to restore exactly, from every cell, on one,
two and four processes.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.common import environment, free_port
from tests.campaigns import command
from tests.campaigns.children import PREFIX

ROOT = Path(__file__).parents[2]
WORKER = "tests.campaigns.killed_worker"
DEVICES = 4
"""Devices of all processes of a cell together."""
PHASES = {
    "before": "before its share is written",
    "written": "after its share is written",
    "waiting": "while it waits for the others",
    "commit": "while process 0 commits",
    "committed": "after process 0 has committed",
}
SETTINGS = {
    "default": (100, False),
    "10 s": (10, False),
    "recoverable": (100, True),
    "recoverable, 10 s": (10, True),
}
"""Seconds of the heartbeat timeout, and whether JAX lets the others go on."""
_START_S = 120.0


@dataclass(frozen=True)
class Cell:
    """One kill.

    Attributes:
        processes: number of processes.
        setting: name of what is set in JAX, in ``SETTINGS``.
        phase: moment of the kill, in ``PHASES``.
        victim: index of the process that is killed.
    """

    processes: int
    setting: str
    phase: str
    victim: int

    @property
    def limit_s(self) -> float:
        """Time after which the others are said to hang."""
        return SETTINGS[self.setting][0] + 30.0

    @property
    def name(self) -> str:
        """Name of its directory."""
        words = map(str, (self.processes, self.setting, self.phase, self.victim))
        return re.sub(r"\W+", "-", "-".join(words))


@dataclass(frozen=True)
class Seen:
    """The end of a save as one survivor saw it.

    Attributes:
        what: "error", if it is this library's and names the process that was killed; or another
            one; "ended by JAX", "saved", "crashed" or "hangs".
        after_s: seconds after the kill.
        text: the error.
    """

    what: str
    after_s: float
    text: str = ""


def cells(size: str) -> list[Cell]:
    """The cells of a campaign."""
    if size == "small":
        hits = (("written", 1), ("waiting", 0))
        return [Cell(2, "recoverable", phase, victim) for phase, victim in hits]
    counts = ((2, (0, 1)), (4, (0, 2)))
    return [
        Cell(count, setting, phase, victim)
        for (count, victims), setting, phase in itertools.product(counts, SETTINGS, PHASES)
        for victim in victims
    ]


def run(cell: Cell, directory: Path) -> list[Seen]:
    """Runs a cell in a directory of its own; what the survivors saw."""
    place = directory / cell.name
    place.mkdir()
    mode = f"save:{cell.phase}:{cell.victim}"
    children, logs = _start(mode, cell, str(place / "run"), place)
    found: dict[int, Seen] = {}
    mark, killed_s, until_s = place / "out-killed", 0.0, time.time() + _START_S
    while len(found) < cell.processes - 1 and time.time() < until_s:
        time.sleep(0.05)
        if not killed_s and mark.exists() and (text := mark.read_text()):
            killed_s = float(text)
            until_s = killed_s + cell.limit_s
        for process, child in enumerate(children):
            if process == cell.victim or process in found or child.poll() is None:
                continue
            found[process] = _seen(logs[process].read_text(), killed_s, cell.victim)
    for process, child in enumerate(children):
        if process != cell.victim and process not in found:
            found[process] = Seen("hangs" if killed_s else "never got there", cell.limit_s)
        child.kill()
        child.wait()
    return [found[process] for process in sorted(found)]


def restored(places: Sequence[Path], processes: int, directory: Path) -> int:
    """Restores the step before in all roots; the number of those that are exact."""
    (directory / "cells.json").write_text(json.dumps([str(each) for each in places]))
    cell = Cell(processes, "default", "restore", 0)
    children, logs = _start("restore", cell, str(directory), directory)
    codes = [child.wait(600) for child in children]
    if any(codes):
        raise RuntimeError("\n".join(log.read_text()[-3000:] for log in logs))
    (line,) = [each for each in logs[0].read_text().splitlines() if each.startswith(PREFIX)]
    return len(places) - len(json.loads(line.removeprefix(PREFIX))["wrong"])


def _start(
    mode: str, cell: Cell, root: str, place: Path
) -> tuple[list[subprocess.Popen[bytes]], list[Path]]:
    heartbeat_s, is_recoverable = SETTINGS[cell.setting]
    environ = {**os.environ, "JAX_ENABLE_RECOVERABILITY": str(int(is_recoverable))}
    port, children, logs = free_port(), [], []
    for process in range(cell.processes):
        values = (process, cell.processes, port, root, place / "out")
        more = (DEVICES // cell.processes, heartbeat_s)
        logs.append(place / f"log-{process}")
        with logs[-1].open("wb") as log:
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", WORKER, mode, *map(str, (*values, *more))],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                    env=environ,
                )
            )
    return children, logs


def _seen(log: str, killed_s: float, victim: int) -> Seen:
    lines = [each.removeprefix(PREFIX) for each in log.splitlines() if each.startswith(PREFIX)]
    if not lines:
        what = "ended by JAX" if "Terminating process because" in log else "crashed"
        return Seen(what, time.time() - killed_s, log[-1000:])
    told = json.loads(lines[-1])
    return Seen(_kind_of(told["error"], victim), told["at"] - killed_s, told["error"])


def _kind_of(error: str, victim: int) -> str:
    if not error:
        return "saved"
    if "AdaCheckError" in error and f"process {victim}" in error:
        return "error"
    if "AdaCheckError" in error and "coordination service" in error:
        return "error of the service"
    return "error of a collective" if "gloo" in error.lower() else "another error"


def table(found: dict[Cell, list[Seen]]) -> str:
    """A Markdown table: a row for each phase, victim and setting, a column for each count."""
    counts = sorted({cell.processes for cell in found})
    lines = []
    rows = dict.fromkeys((cell.phase, bool(cell.victim), cell.setting) for cell in found)
    for phase, is_other, setting in rows:
        columns = []
        for count in counts:
            each = [
                seen
                for cell, seen in found.items()
                if (cell.processes, cell.phase, bool(cell.victim), cell.setting)
                == (count, phase, is_other, setting)
            ]
            columns.append(_shown(itertools.chain(*each)))
        who = "another" if is_other else "process 0"
        lines.append([who, PHASES[phase], setting, *columns])
    return command.table(["killed", "when", "setting", *(f"{n} processes" for n in counts)], lines)


def _shown(seen: Iterable[Seen]) -> str:
    after: dict[str, list[float]] = {}
    for each in seen:
        after.setdefault(each.what, []).append(each.after_s)
    shown = []
    for what, seconds in sorted(after.items()):
        low, high = round(min(seconds)), round(max(seconds))
        shown.append(f"{what}, {low if low == high else f'{low} to {high}'} s")
    return "; ".join(shown)


def main() -> int:
    """Runs the campaign, and prints its table."""
    parser = command.parser(__doc__, size="small")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time")
    parser.add_argument("--output", type=Path, help="file of raw results, as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory, chosen = Path(name), cells(arguments.size)
        # Those that wait long come first, and beside others: they wait and compute nothing.
        chosen.sort(key=lambda each: -each.limit_s)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = {}
            for cell, seen in zip(
                chosen, pool.map(lambda each: run(each, directory), chosen), strict=True
            ):
                found[cell] = seen
                print(cell.name, [f"{each.what} {each.after_s:.1f}" for each in seen], flush=True)
        found = {cell: found[cell] for cell in cells(arguments.size)}
        places = [directory / cell.name for cell in found]
        exact = {n: restored(places, n, directory) for n in (1, 2, 4)}
    if arguments.output:
        rows = [{**asdict(cell), "seen": [*map(asdict, seen)]} for cell, seen in found.items()]
        result = {"environment": environment(), "cells": rows, "exact": exact}
        arguments.output.write_text(json.dumps(result, indent=1))
    told = f"the step before, exact of {len(found)}, by number of processes: {exact}"
    return command.finish({}, text=f"{table(found)}\n\n{told}")


if __name__ == "__main__":
    sys.exit(main())
