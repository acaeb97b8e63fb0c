"""Everything that is done to checkpoints on purpose, what is promised then, and what was found.

    python -m tests.campaigns.faults --size small                     # minutes on two cores
    python -m tests.campaigns.faults --size full --directory FAULTS   # two to three hours
    python -m tests.campaigns.faults --size full --directory FAULTS --only kills-one-process
    python -m tests.campaigns.faults --directory FAULTS --table

runs campaigns one after the other, and prints one Markdown table. Each campaign writes
``NAME.json`` into the directory (hardware, versions, command, seed, rows, raw numbers) and
``NAME.log``, so that a long series can be run in pieces, also at the same time; ``--table`` runs
nothing, and prints the table of what is there. A campaign that this machine cannot run has a row
that says so.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.common import environment
from tests.campaigns import command, profiles

ROOT = Path(__file__).parents[2]
SIZES = ("small", "full")
_TELL_EVERY_S = 15.0


@dataclass(frozen=True)
class Row:
    """What one kind of fault gave. Counts of what does not apply are None.

    Attributes:
        fault: what was done.
        promise: what must come of it.
        tried: how often.
        lost: steps that were committed, and are gone or cannot be restored.
        wrong: states that were restored with other bits than were saved.
        crashed: processes that crashed or hung.
        other: anything else that was not promised.
        note: what else there is to say.
    """

    fault: str
    promise: str
    tried: int | None = None
    lost: int | None = None
    wrong: int | None = None
    crashed: int | None = None
    other: int | None = None
    note: str = ""

    @property
    def is_good(self) -> bool:
        """Whether all that was tried gave what is promised."""
        return not any((self.lost, self.wrong, self.crashed, self.other))


Found = dict[str, Any]
"""What a campaign's own program prints as JSON."""


@dataclass(frozen=True)
class Campaign:
    """A program that does one kind of fault again and again.

    Attributes:
        name: on the command line, and of its files.
        fault: what it does, for the table.
        promise: what must come of it.
        module: that is run.
        arguments: of the program, for each size; ``{seed}`` and ``{work}`` (an empty folder) are
            filled in.
        rows: what the table says of what was found.
        limit_minutes: after which it has hung, for each size.
    """

    name: str
    fault: str
    promise: str
    module: str
    arguments: dict[str, str]
    rows: Callable[[Campaign, Found], list[Row]]
    limit_minutes: dict[str, float] = field(default_factory=lambda: {"small": 10, "full": 180})

    def row(self, **counts: Any) -> Row:
        """A row of this campaign."""
        return Row(**{"fault": self.fault, "promise": self.promise, **counts})

    def command(self, size: str, seed: int, work: Path | str) -> list[str]:
        """The command line that runs it."""
        arguments = self.arguments[size].format(seed=seed, work=work)
        return [sys.executable, "-m", self.module, *shlex.split(arguments)]


def machine_rows(campaign: Campaign, found: Found) -> list[Row]:
    """All that a profile of the machine tells."""
    counts = {name: len(found[name]) for name in ("lost", "wrong", "crashed", "other")}
    note = ", ".join(f"{count:,} {what}" for what, count in sorted(found["counts"].items()))
    return [campaign.row(tried=found["tried"], **counts, note=note)]


def fuzz_rows(campaign: Campaign, found: Found) -> list[Row]:
    failed = {name: found["outcomes"][name] for name in found["failures"]}
    hangs = sum(count for name, count in failed.items() if name.startswith("Hang"))
    note = f"{found['outcomes'].get('accepted', 0):,} accepted"
    other = sum(failed.values()) - hangs
    return [campaign.row(tried=found["inputs"], crashed=hangs, other=other, note=note)]


def update_rows(campaign: Campaign, found: Found) -> list[Row]:
    """Each batch has a process of its own, which nothing may end."""
    (row,) = fuzz_rows(campaign, found)
    note = f"{row.note}; {found['outcomes'].get('ParserEnded', 0):,} ended the process that parses"
    return [replace(row, crashed=(row.crashed or 0) + len(found["ended"]), note=note)]


_CHEAP = "refused cheaply, or accepted and consistent"


def _machine(name: str, small: int, full: int, more: str = "") -> Campaign:
    profile = profiles.PROFILES[name]
    common = f"--profile {name} --json --seed {{seed}} --directory {{work}}/run {more}"
    return Campaign(
        f"{name}{more.replace('--store ', '-')}",
        profile.does,
        profile.promise,
        "tests.campaigns.machine",
        {
            "small": f"{common} --count {small} --minutes 5",
            "full": f"{common} --count {full} --minutes 120",
        },
        machine_rows,
    )


def _fuzz(
    name: str, words: str, small: int, full: int, rows: Any = fuzz_rows, promise: str = _CHEAP
) -> Campaign:
    common = "--json --seed {seed} --keep {work}/failures --count"
    return Campaign(
        name,
        words,
        promise,
        f"tests.fuzz.{name.removeprefix('fuzz-').removesuffix('s')}",
        {"small": f"{common} {small}", "full": f"{common} {full}"},
        rows,
    )


CAMPAIGNS: tuple[Campaign, ...] = (
    _machine("crashes", 8, 500),
    _machine("together", 4, 250),
    _machine("shadow", 8, 500),
    _machine("hosts", 6, 500),
    _machine("operations", 8, 1000),
    _machine("disk", 4, 150),
    _machine("outages", 2, 60),
    _machine("phases", 4, 100),
    _machine("damage", 1, 40),
    _machine("beside", 1, 20),
    Campaign(
        profiles.ANY_ORDER,
        "saves, deletions, moves, crashes, restores in any order",
        "what is there is exact; what is missed is named",
        "tests.campaigns.machine",
        {
            size: f"--profile {profiles.ANY_ORDER} --json --seed {{seed}} --count {count}"
            for size, count in {"small": 10, "full": 500}.items()
        },
        machine_rows,
    ),
    _fuzz("fuzz-manifests", "a manifest that nobody wrote", 20_000, 1_000_000),
    _fuzz(
        "fuzz-updates",
        "an update program that nobody exported",
        500,
        20_000,
        update_rows,
    ),
)
"""In the order of the table."""


@dataclass(frozen=True)
class Result:
    """What one run of a campaign found; its JSON file.

    Attributes:
        name: of the campaign.
        size: one of :data:`SIZES`.
        seed: of its random numbers.
        command: that was run.
        minutes: of wall time.
        environment: hardware and versions.
        rows: for the table.
        found: all that its program told.
    """

    name: str
    size: str
    seed: int
    command: str
    minutes: float
    environment: dict[str, Any]
    rows: list[Row]
    found: Found

    def write(self, directory: Path) -> None:
        """Writes its JSON file."""
        text = json.dumps(asdict(self), indent=1)
        (directory / f"{self.name}.json").write_text(f"{text}\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Reads a JSON file."""
        body = json.loads(path.read_text())
        return cls(**{**body, "rows": [Row(**row) for row in body["rows"]]})


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_line(path: Path) -> str:
    """The last thing that a log says; better one that is no warning of a fault that was made."""
    lines = [line for line in path.read_text(errors="replace").split("\n") if line.strip()]
    told = [line for line in lines if not line.startswith(("WARNING:", "ERROR:"))]
    return next(reversed(told or lines), "")[:300]


def wait(process: subprocess.Popen[bytes], campaign: Campaign, log: Path, limit_s: float) -> bool:
    """Waits for a program, tells how it gets on, and ends it after a time.

    Returns:
        Whether it ended by itself.
    """
    start_s, told = time.monotonic(), ""
    while (spent_s := time.monotonic() - start_s) < limit_s:
        try:
            process.wait(min(_TELL_EVERY_S, limit_s - spent_s))
            return True
        except subprocess.TimeoutExpired:
            line = last_line(log)
            if line != told:
                tell(f"{campaign.name}, {time.monotonic() - start_s:.0f} s: {line}")
            told = line
    os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own
    process.wait()
    return False


def run(campaign: Campaign, size: str, seed: int, directory: Path) -> Result:
    """Runs a campaign, and writes what it found.

    Args:
        campaign: one of :data:`CAMPAIGNS`.
        size: one of :data:`SIZES`.
        seed: of its random numbers.
        directory: for its JSON and its log; must exist.
    """
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as work:
        command = campaign.command(size, seed, work)
        tell(f"{campaign.name}: {shlex.join(command)}")
        limit_s = campaign.limit_minutes[size] * 60
        rows, found = _run_program(campaign, command, limit_s, directory)
    minutes = round((time.monotonic() - start_s) / 60, 2)
    told = shlex.join(campaign.command(size, seed, "WORK"))
    result = Result(campaign.name, size, seed, told, minutes, environment(), rows, found)
    result.write(directory)
    return result


def _run_program(
    campaign: Campaign,
    command: Sequence[str],
    limit_s: float,
    directory: Path,
) -> tuple[list[Row], Found]:
    log = directory / f"{campaign.name}.log"
    with open(log, "wb") as errors, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,
        )
        ended = wait(process, campaign, log, limit_s)
        output.seek(0)
        text = output.read().decode(errors="replace")
    try:
        found = json.loads(text[text.index("{") :])
    except ValueError:
        why = f"exit status {process.returncode}" if ended else "did not end in time"
        note = f"{why}: {last_line(log)}"
        return [campaign.row(crashed=1, note=note)], {"failed": note, "output": text[-5000:]}
    if "not_tried" in found:
        return [campaign.row(note=f"not tried: {found['not_tried']}")], found
    return campaign.rows(campaign, found), found


def read_all(directory: Path) -> list[Result]:
    """What is in a directory, in the order of the table."""
    paths = (directory / f"{campaign.name}.json" for campaign in CAMPAIGNS)
    return [Result.read(path) for path in paths if path.exists()]


_HEAD = (
    "what happens",
    "promised",
    "tried",
    "committed steps lost",
    "wrong bits",
    "crash, hang",
    "other failures",
    "minutes",
    "besides",
)


def table(results: Sequence[Result]) -> str:
    """Markdown: one row for each kind of fault, and what the numbers hold for."""
    rows = [(row, result) for result in results for row in result.rows]
    lines = [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|"]
    told: set[str] = set()
    for row, result in rows:
        minutes = "" if result.name in told else f"{result.minutes:.1f}"
        told.add(result.name)
        counts = (row.tried, row.lost, row.wrong, row.crashed, row.other)
        cells = [row.fault, row.promise, *map(_count, counts), minutes, row.note]
        lines.append(f"| {' | '.join(cells)} |")
    holds = {json.dumps({"size": r.size, "seed": r.seed, **r.environment}): r.name for r in results}
    return "\n".join([*lines, "", *holds])


def _count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, runs campaigns, and prints the table.

    Returns:
        The exit status: 0 if all that was promised was found.
    """
    names = [campaign.name for campaign in CAMPAIGNS]
    parser = command.parser(__doc__, size="small", seed=0)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--directory", type=Path, help="for what is found; a new one by default")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the campaigns")
    options = parser.parse_args(arguments)
    if options.list:
        print(*names, sep="\n")
        return 0
    directory = options.directory or Path(tempfile.mkdtemp(prefix="faults-found-"))
    directory.mkdir(parents=True, exist_ok=True)
    for campaign in CAMPAIGNS:
        if campaign.name in options.only and not options.table:
            result = run(campaign, options.size, options.seed, directory)
            tell(f"{campaign.name}: {result.minutes:.1f} minutes")
    results = read_all(directory)
    print(table(results))
    tell(f"All that was found lies in {directory}.")
    return int(not all(row.is_good for result in results for row in result.rows))


if __name__ == "__main__":
    sys.exit(main())
