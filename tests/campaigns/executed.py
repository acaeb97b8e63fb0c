"""Which quick tests execute which lines of the package, and how long each of them takes.

    python -m tests.campaigns.executed

names in ``tests/spare.txt`` the tests that wait for their slice, as slow ones do: those that take
long, and two other tests execute each of their lines, one of them of the line's room if there is
one. Of tests that execute the same the quicker ones stay. The record is that of
:mod:`tests.campaigns.mutations`, and holds the spare ones too.

This module is a plugin of pytest too, by which :func:`recorded` has the tests measured. Functions
that keep what they have computed, and programs that JAX has traced, are forgotten where the next
file of tests begins; in one file, a line may count for the first test alone that executes it.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
from coverage import Coverage, CoverageData

from tests.slices import MEASURED, SPARE

PACKAGE = "adacheck_jax"
ROOT = Path(__file__).parents[2]
RECORD = ROOT / ".pytest_cache/executed.json"
QUICK_S = 0.4
"""CPU time of a test that is worth while whatever it executes."""
LEFT = 2
"""Tests that are left to each line, if so many execute it."""
OF_ROOM = 1
"""Tests of its own room that are left to it, which look at what it does most closely."""
FILE_S = 0.4
"""CPU time in which pytest imports and collects one more file of tests."""


@dataclass(frozen=True)
class Record:
    """Tests that passed, and the lines that each executed.

    Attributes:
        seconds: CPU time of each test by its node ID, with its fixtures.
        sources: text of each source file, by its path in the repository.
        lines: for each file and number of a line, the tests that executed it. A line that was
            executed outside of tests alone, as its module was imported, has none.
    """

    seconds: dict[str, float]
    sources: dict[str, str]
    lines: dict[str, dict[int, list[str]]]

    def write(self, path: Path) -> None:
        """Writes a file, in which tests are named by their index."""
        index = {test: n for n, test in enumerate(self.seconds)}
        lines = {
            file: {line: [index[test] for test in tests] for line, tests in found.items()}
            for file, found in self.lines.items()
        }
        path.write_text(json.dumps({**asdict(self), "lines": lines}, separators=(",", ":")))

    @classmethod
    def read(cls, path: Path, root: Path) -> Record:
        """Reads a file, and moves its lines to where the repository has them now."""
        found = json.loads(path.read_text())
        names, lines = [*found["seconds"]], {}
        for file, recorded in found["lines"].items():
            if (root / file).exists():
                moved = _moved(found["sources"][file], (root / file).read_text())
                lines[file] = {
                    moved[int(line)]: [names[n] for n in tests]
                    for line, tests in recorded.items()
                    if int(line) in moved
                }
        return cls(found["seconds"], found["sources"], lines)

    def renewed(self, other: Record, paths: Sequence[str]) -> Record:
        """The record in which the tests of some files or directories are those of another one."""
        kept = {
            test: seconds
            for test, seconds in self.seconds.items()
            if not any(_is_below(test, path) for path in paths)
        }
        lines = {
            file: {
                line: [test for test in self.lines.get(file, {}).get(line, ()) if test in kept]
                + other.lines.get(file, {}).get(line, [])
                for line in self.lines.get(file, {}).keys() | other.lines.get(file, {}).keys()
            }
            for file in other.sources
        }
        return Record({**kept, **other.seconds}, other.sources, lines)

    def parted(self, path: str) -> tuple[Record, Record]:
        """The record of the tests of a file or directory, and that of all others."""
        own = {test: seconds for test, seconds in self.seconds.items() if _is_below(test, path)}
        others = {test: seconds for test, seconds in self.seconds.items() if test not in own}
        first, second = (
            {
                file: {line: [x for x in tests if x in kept] for line, tests in lines.items()}
                for file, lines in self.lines.items()
            }
            for kept in (own, others)
        )
        return Record(own, self.sources, first), Record(others, self.sources, second)

    def at(self, file: str, line: int) -> list[str]:
        """The tests that execute a line, or the statement that it stands in."""
        lines = self.lines.get(file, {})
        above = max((each for each in lines if each <= line), default=0)
        return [test for test in lines.get(above, ()) if self._has(test)]

    def chosen(
        self, file: str, line: int, at_import: bool, count: int, seconds: float
    ) -> list[str]:
        """The tests that most probably find a fault, in the order in which they shall run.

        Those that execute the line, the quickest first, and those of the tested room in turn with
        all others; then tests of their files that execute most of the same module. For a line that
        runs at import, or in no test, or is compiled by numba: tests that execute most of its
        module, others of their files, and those of the room.

        Args:
            file: path of the source.
            line: number of the line.
            at_import: True for a line outside of functions.
            count: largest number of tests.
            seconds: CPU time of all tests and their imports; the quickest is chosen in any case.
        """
        lines = self.lines.get(file, {})
        here = () if at_import else self.at(file, line)
        times = Counter(test for tests in lines.values() for test in tests if self._has(test))
        files = {file_of(test) for test in here or times}
        near = [test for test in times if file_of(test) in files]
        beside = [] if here else [test for test in self.seconds if file_of(test) in files]
        room = f"tests/{Path(file).parts[1]}"
        of_room = [test for test in self.seconds if not here and _is_below(test, room)]
        found = dict.fromkeys(_in_turn(here, room, self.seconds.__getitem__))
        found |= dict.fromkeys(_in_turn(near, room, lambda test: -times[test]))
        for more in (beside, of_room, [] if found else self.seconds):
            found |= dict.fromkeys(_in_turn(more, room, self.seconds.__getitem__))
        kept, left_s, opened = list[str](), seconds, set[str]()
        for test in found:
            needed_s = self.seconds[test] + FILE_S * (file_of(test) not in opened)
            if len(kept) < count and needed_s <= left_s:
                kept.append(test)
                left_s -= needed_s
                opened.add(file_of(test))
        kept = kept or [min(found, key=lambda test: self.seconds[test])]
        costs = Counter[str]()
        for test in kept:
            costs[file_of(test)] += self.seconds[test]  # pyright: ignore[reportArgumentType]
        return sorted(
            kept, key=lambda test: (costs[file_of(test)], file_of(test), self.seconds[test])
        )

    def _has(self, test: str) -> bool:
        return test in self.seconds


def spare(record: Record) -> list[str]:
    """The tests that take long, and leave each of their lines to so many others as it needs."""
    executed: dict[str, list[int]] = {test: [] for test in record.seconds}
    counts = list[int]()

    def need(tests: set[str], count: int) -> None:
        for test in tests:
            executed[test].append(len(counts))
        counts.append(min(count, len(tests)))

    for file, lines in record.lines.items():
        room = f"tests/{Path(file).parts[1]}"
        for tests in map(set, lines.values()):
            need(tests, LEFT)
            need({test for test in tests if _is_below(test, room)}, OF_ROOM)

    def take(test: str) -> None:
        for line in executed[test]:
            counts[line] -= 1

    def worth(test: str) -> float:
        return -sum(counts[line] > 0 for line in executed[test]) / record.seconds[test]

    slow = [test for test, seconds in record.seconds.items() if seconds >= QUICK_S]
    for test in record.seconds.keys() - {*slow}:
        take(test)
    left, taken = [(worth(test), test) for test in slow], list[str]()
    heapq.heapify(left)
    while left and left[0][0]:
        _, test = heapq.heappop(left)
        now = worth(test)
        if left and now > left[0][0]:  # others have executed its lines meanwhile
            heapq.heappush(left, (now, test))
        else:
            take(test)
            taken.append(test)
    found = [test for _, test in left]
    for test in sorted(taken, key=record.seconds.__getitem__, reverse=True):
        if all(counts[line] < 0 for line in executed[test]):  # later ones do without it
            found.append(test)
            for line in executed[test]:
                counts[line] += 1
    return sorted(found)


def file_of(test: str) -> str:
    """The file of a test."""
    return test.partition("::")[0]


def _is_below(test: str, path: str) -> bool:
    return Path(file_of(test)).is_relative_to(path)


def _in_turn(tests: Iterable[str], room: str, key: Callable[[str], float]) -> Iterator[str]:
    """First cases of all tests before second ones; one of a room, one of another, and so on."""
    cases = Counter[str]()
    ranked = list[tuple[int, str]]()
    for test in sorted(tests, key=key):
        name = test.partition("[")[0]
        ranked.append((cases[name], test))
        cases[name] += 1
    ordered = [test for _, test in sorted(ranked, key=lambda each: each[0])]
    own = [test for test in ordered if _is_below(test, room)]
    others = [test for test in ordered if not _is_below(test, room)]
    return (test for pair in zip_longest(own, others) for test in pair if test is not None)


def _moved(before: str, after: str) -> dict[int, int]:
    """Numbers of the lines of a text that another one has too, by their numbers in the first."""
    old, new = before.splitlines(), after.splitlines()
    if old == new:
        return {n: n for n in range(1, len(old) + 1)}
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {a + n + 1: b + n + 1 for a, b, size in blocks for n in range(size)}


def recorded(root: Path, paths: Sequence[str], workers: int) -> Record:
    """Runs quick tests, and tells what they execute.

    Args:
        root: directory of the repository.
        paths: files or directories of the tests; all directories if none is named. The files beside
            these have tests of pages, examples and benchmarks, which run in other processes.
        workers: processes that run tests.

    Raises:
        RuntimeError: pytest ends otherwise than after all tests.
    """
    paths = paths or sorted(
        f"tests/{path.parent.name}" for path in root.glob("tests/*/__init__.py")
    )
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pytest", "-p", __name__, "-n", str(workers), *paths]
        environ = {**os.environ, MEASURED: directory, "PYTHONPATH": str(root)}
        status = subprocess.run(command, cwd=root, env=environ, stdout=sys.stderr, check=False)
        if status.returncode not in (0, 1):
            raise RuntimeError(f"pytest ended with status {status.returncode}")
        seconds, lines = dict[str, float](), dict[str, dict[int, list[str]]]()
        for path in Path(directory).glob("*.json"):
            seconds |= json.loads(path.read_text())
        for path in Path(directory).glob("*.lines"):
            data = CoverageData(str(path))
            data.read()
            for name in data.measured_files():
                found = lines.setdefault(str(Path(name).relative_to(root)), {})
                for line, tests in data.contexts_by_lineno(name).items():
                    found.setdefault(line, []).extend(test for test in tests if test in seconds)
    sources = {str(each.relative_to(root)): each for each in (root / PACKAGE).rglob("*.py")}
    return Record(seconds, {name: each.read_text() for name, each in sources.items()}, lines)


class _Executed:
    """Measures the tests of one process."""

    def __init__(self, directory: Path, name: str) -> None:
        source = [str(ROOT / PACKAGE)]
        data_file = str(directory / f"{name}.lines")
        self._coverage = Coverage(data_file, config_file=False, source=source, messages=False)
        self._coverage.set_option("run:core", "ctrace")  # the one that knows contexts
        self._seconds = dict[str, float]()
        self._not_passed = set[str]()
        self._path, self._file = directory / f"{name}.json", Path()
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self._file != item.path:
            _forget()
            self._file = item.path
        if sys.gettrace() is None:  # a test has put its own in its place
            self._coverage.stop()
            self._coverage.start()
        begun_s = _cpu_s()
        self._coverage.switch_context(item.nodeid)
        result = yield
        self._coverage.switch_context("")
        self._seconds[item.nodeid] = round(_cpu_s() - begun_s, 3)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._not_passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        passed = {k: v for k, v in self._seconds.items() if k not in self._not_passed}
        self._path.write_text(json.dumps(passed))


def _cpu_s() -> float:
    """CPU time of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _forget() -> None:
    """Empties what functions of the package and of tests have kept, and what JAX has traced."""
    import jax

    jax.clear_caches()
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in (PACKAGE, "tests"):
            for each in [*vars(module).values()]:
                if isinstance(each, functools._lru_cache_wrapper):
                    each.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    """Measures in the processes that run tests."""
    directory = os.environ.get(MEASURED)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if directory and (worker or not config.option.numprocesses):
        config.pluginmanager.register(_Executed(Path(directory), worker or "alone"))


if __name__ == "__main__":
    found = spare(Record.read(RECORD, ROOT))
    SPARE.write_text("".join(f"{test}\n" for test in found))
    print(f"{SPARE}: {len(found)} tests")
