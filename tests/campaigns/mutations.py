"""Plant faults in the package, one at a time, and tell which of them no test finds.

    python -m tests.campaigns.mutations --count 40 --seed 0 --only store --outcomes before.jsonl
    python -m tests.campaigns.mutations --again before.jsonl --outcomes after.jsonl
    python -m tests.campaigns.mutations --count 0 --renew tests/store
    python -m tests.campaigns.mutations --count 40 --without tests/store/test_volumes.py

A fault is one small edit of one expression: a swapped comparison, a number that is one too large, a
dropped ``+ 1``, ``and`` for ``or``, a condition that is negated, a call that is not made. The same
seed plants the same faults in the same sources. Each is planted in a copy of the repository, where
few of the quick tests look for it: those that execute its line, as a record of all of them tells
(:mod:`tests.campaigns.executed`). The record is made where there is none, which takes three times
as long as these tests; ``--renew`` makes it anew for tests that have changed. A fault that makes
tests run too long counts as found. Some faults change nothing that a caller could see, so survivors
are a list to read, and not a number to bring to zero.

``--again`` plants the faults of earlier outcomes in the present sources, wherever their code is
still there, and lists those that were found before and are not now. ``--without`` plants faults
where the tests of one file or directory run, and lists those that they alone find: where there are
none among many, the others do without them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from tests.campaigns import command
from tests.campaigns.executed import PACKAGE, RECORD, ROOT, Record, file_of, recorded
from tests.campaigns.forked import End, Server, server

NOT_MUTATED = ("cli",)
"""Rooms in which no fault is planted."""
COPIED = ("adacheck_jax", "benchmarks", "docs", "examples", "tests")
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
FIRST = 3
"""Files of tests that run before those of all others are imported."""
SILENT = ("_log.", "logging.")
"""Beginnings of calls whose loss no caller sees."""


@dataclass(frozen=True)
class Fault:
    """One edit of one source file.

    Attributes:
        file: path of the source, relative to the repository.
        line: number of the line that the edit begins in, from 1.
        kind: name of the kind of fault.
        start: offset of the first byte that is replaced.
        stop: offset behind the last one.
        before: source text that is replaced.
        after: source text in its place.
        at_import: True if it is outside of functions.
        text: the line that the edit begins in.
        nth: number of earlier places in the file at which text, kind, before and after are these.
    """

    file: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str
    at_import: bool
    text: str
    nth: int = 0

    @property
    def code(self) -> tuple[str, ...]:
        """What tells the place from all others but for ``nth``, wherever its line has moved to."""
        return self.file, self.text, self.kind, self.before, self.after

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.kind}: {self.before!r} -> {self.after!r}"

    def applied(self, source: bytes) -> bytes:
        """The source with this fault in it."""
        return source[: self.start] + self.after.encode() + source[self.stop :]


@dataclass(frozen=True)
class Outcome:
    """The end of one fault.

    Attributes:
        fault: the fault.
        found_by: the test that failed, or another :attr:`End.by`; empty if it survived.
        tests: number of tests that ran.
        seconds: time that they took.
    """

    fault: Fault
    found_by: str
    tests: int
    seconds: float


class _Finder(ast.NodeVisitor):
    """Collects the places of one source where a fault may be planted.

    Annotations and decorators are left out, and docstrings are no expression of any kind below.
    """

    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Fault] = []
        self._times = Counter[tuple[str, ...]]()
        self._file, self._source, self._functions = file, source, 0
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, start: int, stop: int, after: str) -> None:
        before = self._source[start:stop].decode()
        line = self._source.count(b"\n", 0, start) + 1
        text = self._source.splitlines()[line - 1].decode().strip()
        at_import = not self._functions
        fault = Fault(self._file, line, kind, start, stop, before, after, at_import, text)
        self.found.append(replace(fault, nth=self._times[fault.code]))
        self._times[fault.code] += 1

    def _replace_between(self, kind: str, left: ast.expr, right: ast.expr, pair: tuple[str, str]):
        """Replaces an operator that stands between two expressions."""
        start, stop = self._span(left)[1], self._span(right)[0]
        between = self._source[start:stop].decode()
        if between.count(pair[0]) == 1:
            at = start + len(between[: between.index(pair[0])].encode())
            self._add(kind, at, at + len(pair[0]), pair[1])

    def _negate(self, test: ast.expr) -> None:
        start, stop = self._span(test)
        self._add("negated condition", start, stop, f"not ({self._source[start:stop].decode()})")

    def visit_Compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            self._replace_between("comparison", left, right, COMPARISONS[type(operator)])
            left = right
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pair = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between("and/or", left, right, pair)
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_one = isinstance(node.right, ast.Constant) and node.right.value == 1
        if is_one and isinstance(node.op, ast.Add | ast.Sub):
            _, stop = self._span(node)
            self._add("dropped one", self._span(node.left)[1], stop, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._add("off by one", *self._span(node), str(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        start, stop = self._span(node)
        silent = self._source[start:stop].decode().startswith(SILENT)
        if isinstance(node.value, ast.Call) and not silent:
            self._add("call not made", start, stop, "pass")
        if not silent:
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages of errors are no place for faults."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts are no place for faults either, and Python 3.11 does not know where they begin."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for each in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(each)
        self._functions += 1
        for each in node.body:
            self.visit(each)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for each in node.body:
            self.visit(each)


def places(root: Path, only: Sequence[str] = ()) -> list[Fault]:
    """All faults that can be planted.

    Args:
        root: directory of the repository.
        only: rooms to plant faults in; all but those of the command line if none is named.
    """
    found = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        file, source = str(path.relative_to(root)), path.read_bytes()
        room = Path(file).parts[1]
        if room in only or (not only and room not in NOT_MUTATED):
            finder = _Finder(file, source)
            finder.visit(ast.parse(source))
            found += finder.found
    return found


def chosen(found: Sequence[Fault], root: Path, count: int, seed: int) -> list[Fault]:
    """So many faults, chosen at random among those that leave a source which can be parsed."""
    kept: list[Fault] = []
    for each in random.Random(seed).sample(found, len(found)):
        if len(kept) < count and _is_python(each.applied((root / each.file).read_bytes())):
            kept.append(each)
    return kept


def _is_python(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def copy_of(root: Path, directory: Path) -> Path:
    """A copy of what the tests need of a repository, in a directory."""
    ignore = shutil.ignore_patterns("*.pyc", ".*")  # what numba has compiled is taken along
    for name in COPIED:
        shutil.copytree(root / name, directory / name, ignore=ignore)
    for path in root.iterdir():
        if path.suffix in {".md", ".toml"} or path.name == "LICENSE":
            shutil.copy(path, directory)
    return directory


class Campaign:
    """Plants faults in a copy of the repository.

    Args:
        repository: the copy.
        server: runs tests in it.
        record: the tests that may be run.
        count: largest number of tests of one fault.
        seconds: recorded time of all of them.
    """

    def __init__(
        self, repository: Path, server: Server, record: Record, count: int, seconds: float
    ) -> None:
        self._repository, self._server, self._record = repository, server, record
        self._count, self._seconds = count, seconds
        self._trusted = set[str]()
        self._planted = 0

    def plant(self, fault: Fault) -> Outcome:
        """Plants a fault, runs tests, and mends it again."""
        begun, ran, found_by = time.monotonic(), 0, ""
        for tests in self._parts_of(fault):
            with self._planted_in(fault) as compiles:
                end = self._run(tests, compiles=compiles)
            ran += end.ran
            if end.by and (end.by == "import" or self._trusts(end, tests)):
                found_by = end.by
                break
        return Outcome(fault, found_by, ran, round(time.monotonic() - begun, 1))

    def _parts_of(self, fault: Fault) -> Iterator[list[str]]:
        """The tests of one fault: those of few files first, as most faults are found by these."""
        place = fault.file, fault.line, fault.at_import
        tests = self._record.chosen(*place, self._count, self._seconds)
        first = [*dict.fromkeys(map(file_of, tests))][:FIRST]
        for is_first in (True, False):
            part = [test for test in tests if (file_of(test) in first) == is_first]
            if part := [test for test in part if test in self._record.seconds]:
                yield part

    def _run(self, tests: Iterable[str], *, compiles: bool = False) -> End:
        seconds = sum(self._record.seconds[test] for test in tests)
        limit_s = 30 + 3 * seconds + 60 * compiles
        return self._server.run([*tests], limit_s, compiles=compiles)

    def _trusts(self, end: End, tests: Sequence[str]) -> bool:
        """True if what found a fault finds nothing without it; otherwise it is run no more."""
        suspects = {end.by} if end.by in tests else {*tests}
        if suspects <= self._trusted or not self._run(suspects).by:
            self._trusted |= suspects
            return True
        print("fails without a fault:", *suspects, file=sys.stderr, flush=True)
        for test in suspects:
            del self._record.seconds[test]
        return False

    @contextmanager
    def _planted_in(self, fault: Fault) -> Iterator[bool]:
        """Has a fault in the copy; true if numba compiles the source, or has others from there.

        Python and numba keep what they have compiled by the second in which a file was written and
        by its size, so each fault has a second of its own.
        """
        path = self._repository / fault.file
        source, written = path.read_bytes(), int(path.stat().st_mtime)
        self._planted += 1
        own = written - self._planted
        path.write_bytes(fault.applied(source))
        os.utime(path, (own, own))
        try:
            yield b"numba" in source
        finally:
            path.write_bytes(source)
            os.utime(path, (written, written))


def read(path: Path) -> list[Outcome]:
    """The outcomes of an earlier run."""
    every = map(json.loads, path.read_text().splitlines())
    return [Outcome(**{**each, "fault": Fault(**each["fault"])}) for each in every]


def again(earlier: Iterable[Outcome], found: Iterable[Fault]) -> dict[Fault, Outcome]:
    """Present places of the faults of an earlier run; without those whose code is gone."""
    places = {(each.code, each.nth): each for each in found}
    keys = [((each.fault.code, each.fault.nth), each) for each in earlier]
    return {places[key]: each for key, each in keys if key in places}


def _record_of(arguments: argparse.Namespace, repository: Path) -> Record:
    path, workers = arguments.record, arguments.workers
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded(repository, [], workers).write(path)
    elif arguments.renew:
        new = recorded(repository, arguments.renew, workers)
        Record.read(path, ROOT).renewed(new, arguments.renew).write(path)
    return Record.read(path, ROOT)


def main() -> None:
    """Reads the command line, plants faults, and prints the survivors."""
    parser = command.parser(__doc__, count=40, seed=0)
    add = parser.add_argument
    add("--only", nargs="*", default=(), metavar="ROOM", help="rooms to plant in")
    add("--tests", type=int, default=40, help="tests of one fault (default %(default)s)")
    add("--seconds", type=float, default=15, help="of these tests (default %(default)s)")
    add("--record", type=Path, default=RECORD, help="file of executed lines (default %(default)s)")
    add("--renew", nargs="+", default=(), metavar="PATH", help="tests to record again")
    add("--workers", type=int, default=2, help="processes that record (default %(default)s)")
    add("--outcomes", type=Path, default=Path(os.devnull), help="file to add outcomes to")
    add("--again", type=Path, help="outcomes of a run whose faults are planted again")
    add("--without", metavar="PATH", help="list the faults that tests of this path alone find")
    add("--list", action="store_true", help="print the faults, and plant none")
    arguments = parser.parse_args()
    if arguments.without and arguments.again:
        parser.error("expected one of --without and --again, found both")
    every = places(ROOT, arguments.only)
    earlier = read(arguments.again) if arguments.again else []
    before = again(earlier, every)
    faults = [*before] if earlier else chosen(every, ROOT, arguments.count, arguments.seed)
    if arguments.list:
        print(*faults, f"of {len(every)} places", sep="\n")
        return
    cache = str(ROOT / ".pytest_cache/compiled")  # and not the copy's
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    with tempfile.TemporaryDirectory() as directory, arguments.outcomes.open("a") as file:
        repository = copy_of(ROOT, Path(directory))
        record = _record_of(arguments, repository)
        limits = arguments.tests, arguments.seconds
        with server(repository) as runs:
            if arguments.without:
                own, others = record.parted(arguments.without)
                here = [each for each in every if own.at(each.file, each.line)]
                faults = chosen(here, ROOT, arguments.count, arguments.seed)
                parts = [Campaign(repository, runs, each, *limits) for each in (own, others)]
                _tell_alone(faults, *parts)
            else:
                _tell_survivors(
                    faults, Campaign(repository, runs, record, *limits), earlier, before, file
                )


def _tell_survivors(
    faults: Sequence[Fault],
    campaign: Campaign,
    earlier: Sequence[Outcome],
    before: Mapping[Fault, Outcome],
    file: TextIO,
) -> None:
    """Plants faults, writes their outcomes to a file, and prints those that no test finds."""
    survivors, lost = list[Fault](), list[str]()
    for fault in faults:
        found = campaign.plant(fault)
        print(json.dumps(asdict(found)), file=file, flush=True)
        end = f"found by {found.found_by}" if found.found_by else "SURVIVED"
        print(f"{end} ({found.seconds} s): {fault}", file=sys.stderr, flush=True)
        if not found.found_by:
            survivors.append(fault)
            if fault in before and before[fault].found_by:
                lost.append(f"{fault} (by {before[fault].found_by})")
    print(f"{len(faults) - len(survivors)} of {len(faults)} faults were found; survivors:")
    print(*survivors, sep="\n")
    if earlier:
        print(f"{len(earlier) - len(before)} earlier faults have no place any more")
        print("found before, and not now:", *lost, sep="\n")


def _tell_alone(faults: Sequence[Fault], own: Campaign, others: Campaign) -> None:
    """Plants faults that some tests execute, and prints those that these alone find."""
    found_count, alone = 0, list[str]()
    for fault in faults:
        if by := own.plant(fault).found_by:
            found_count += 1
            other = others.plant(fault).found_by
            print(f"{by}; {other or 'NOBODY ELSE'}: {fault}", file=sys.stderr, flush=True)
            if not other:
                alone.append(f"{fault} (by {by})")
    print(f"{found_count} of {len(faults)} faults were found; by no other test:")
    print(*alone, sep="\n")


if __name__ == "__main__":
    main()
