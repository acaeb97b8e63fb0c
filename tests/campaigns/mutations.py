"""Plant faults in the package, one at a time, and tell which of them no test finds.

    python -m tests.campaigns.mutations --count 40 --seed 0
    python -m tests.campaigns.mutations --count 10 --only store

A fault is one small edit of one expression: a swapped comparison, a number that is one too large, a
dropped ``+ 1``, ``and`` for ``or``, a condition that is negated, a call that is not made. The same
seed plants the same faults in the same sources. Each is planted in a copy of the repository, where
the tests that run by default look for it: those of its room first, then the others. A fault that
makes them run too long counts as found. Some faults change nothing that a caller could see, so
survivors are a list to read, and not a number to bring to zero.
"""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.campaigns import command

ROOT = Path(__file__).parents[2]
PACKAGE = "adacheck_jax"
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
    """

    file: str
    line: int
    kind: str
    start: int
    stop: int
    before: str
    after: str

    @property
    def room(self) -> str:
        """The room of the source; empty for a module outside of all rooms."""
        parts = Path(self.file).parts
        return parts[1] if len(parts) > 2 else ""

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
        found_by: its room, "others" or "timeout"; empty if it survived.
        seconds: time that its tests took.
    """

    fault: Fault
    found_by: str
    seconds: float


class _Finder(ast.NodeVisitor):
    """Collects the places of one source where a fault may be planted.

    Annotations and decorators are left out, and docstrings are no expression of any kind below.
    """

    def __init__(self, file: str, source: bytes) -> None:
        self.found: list[Fault] = []
        self._file, self._source = file, source
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
        self.found.append(Fault(self._file, line, kind, start, stop, before, after))

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
        for each in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(each)

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
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in COPIED:
        shutil.copytree(root / name, directory / name, ignore=ignore)
    for path in root.iterdir():
        if path.suffix in {".md", ".toml"} or path.name == "LICENSE":
            shutil.copy(path, directory)
    return directory


def passes(repository: Path, arguments: Sequence[str], limit_s: float) -> bool:
    """True if the tests of a copy pass.

    Raises:
        TimeoutError: they take longer than the limit.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    cache = str(ROOT / ".pytest_cache" / "compiled")
    environ = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        **os.environ,
        "PYTHONPATH": str(repository),
        "PYTHONDONTWRITEBYTECODE": "1",  # an edit may leave the time and the size of a file
    }
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=repository, env=environ, stdout=quiet, stderr=quiet, start_new_session=True
    ) as process:
        try:
            status = process.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the tests took longer than {limit_s:.0f} s") from None
        finally:  # the workers of pytest, and what they started
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if status not in (0, 1, 2, 5):  # 2: what a fault keeps from being imported; 5: no tests
        raise RuntimeError(f"pytest ended with status {status}: {' '.join(command)}")
    return status in (0, 5)


def plant(repository: Path, fault: Fault, workers: int, limit_s: float) -> Outcome:
    """Plants a fault in a copy of the repository, runs the tests, and mends it again."""
    path, begun = repository / fault.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(fault.applied(source))
    of_room = f"tests/{fault.room}"
    parts = {fault.room: [of_room], "others": ["tests", f"--ignore={of_room}"]}
    if not fault.room or not (repository / of_room).is_dir():
        parts = {"others": ["tests"]}
    found_by = ""
    try:
        for name, arguments in parts.items():
            left_s = limit_s - (time.monotonic() - begun)
            if not passes(repository, ["-n", str(workers), *arguments], left_s):
                found_by = name
                break
    except TimeoutError:
        found_by = "timeout"
    finally:
        path.write_bytes(source)
    return Outcome(fault, found_by, time.monotonic() - begun)


def campaign(
    faults: Sequence[Fault], directory: Path, workers: int, limit_s: float
) -> Iterator[Outcome]:
    """Plants faults one after the other.

    Raises:
        RuntimeError: the tests fail or take too long before any fault is planted.
    """
    repository = copy_of(ROOT, directory)
    if not passes(repository, ["-n", str(workers)], limit_s):
        raise RuntimeError("the tests fail without any fault")
    for fault in faults:
        yield plant(repository, fault, workers, limit_s)


def main() -> None:
    """Reads the command line, plants faults, and prints the survivors."""
    parser = command.parser(__doc__, count=40, seed=0, json=False)
    parser.add_argument("--minutes", type=float, default=10, help="limit of each fault")
    parser.add_argument("--only", nargs="*", default=(), metavar="ROOM", help="rooms to plant in")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default 2)")
    parser.add_argument("--list", action="store_true", help="print the faults, and plant none")
    arguments = parser.parse_args()
    every = places(ROOT, arguments.only)
    faults = chosen(every, ROOT, arguments.count, arguments.seed)
    if arguments.list:
        print(*faults, f"of {len(every)} places", sep="\n")
        return
    outcomes = []
    with tempfile.TemporaryDirectory() as directory:
        limit_s = 60 * arguments.minutes
        for each in campaign(faults, Path(directory), arguments.workers, limit_s):
            outcomes.append(each)
            end = f"found by {each.found_by}" if each.found_by else "SURVIVED"
            print(f"{end} ({each.seconds:.0f} s): {each.fault}", file=sys.stderr, flush=True)
    survivors = [each.fault for each in outcomes if not each.found_by]
    if arguments.json:
        found = {"places": len(every), "seed": arguments.seed}
        print(json.dumps({**found, "outcomes": [asdict(each) for each in outcomes]}))
    else:
        print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} faults were found; survivors:")
        print(*survivors, sep="\n")


if __name__ == "__main__":
    main()
