"""Tables of plain text on the terminal, and quantities as people read them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence

import typer
from rich.console import Console
from rich.filesize import decimal

from adacheck_jax.store.steps.lineage import shown_steps

_READABLE = 36
"""Characters of a long column that are shown before optional columns are."""


def print_rows(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    right: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> None:
    """Print a table whose rows are one line each, however many there are.

    A rich table of 300 rows takes as long as all else that a listing does. Columns without any
    value are left out. On a terminal that is too narrow optional ones are, and the widest one is
    shortened; what is piped stays whole.

    Args:
        columns: titles of the columns.
        rows: one value a column; None is empty.
        right: titles of those that are aligned to the right.
        optional: titles of those that a narrow terminal lacks, the first to be left out first.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    used = [i for i in range(len(columns)) if any(row[i] for row in cells)]
    lines = [list(columns), *cells]
    widths = {i: max(len(line[i]) for line in lines) for i in used}
    if sys.stdout.isatty():
        used = _fitting(used, widths, [columns.index(title) for title in optional])
        widest = max(used, key=widths.__getitem__, default=0)
        too_much = _excess(used, widths)
        if too_much > 0:
            widths[widest] = max(widths[widest] - too_much, 10)
            for line in lines:
                line[widest] = _shortened(line[widest], widths[widest])
    for n, line in enumerate(lines if used else ()):
        text = "  ".join(
            line[i].rjust(widths[i]) if columns[i] in right else line[i].ljust(widths[i])
            for i in used
        ).rstrip()
        bold = n == 0 and sys.stdout.isatty()
        sys.stdout.write(f"\x1b[1m{text}\x1b[0m\n" if bold else f"{text}\n")


def _excess(used: Sequence[int], widths: Mapping[int, int]) -> int:
    """Characters by which a row of these columns is too long for the terminal."""
    return sum(widths[i] for i in used) + 2 * (len(used) - 1) - Console().width


def _fitting(used: list[int], widths: Mapping[int, int], optional: Sequence[int]) -> list[int]:
    """The columns without as many optional ones as a readable row has no room for."""
    readable = {i: min(width, _READABLE) for i, width in widths.items()}
    for column in optional:
        if _excess(used, readable) <= 0:
            break
        used = [i for i in used if i != column]
    return used


def _shortened(text: str, width: int) -> str:
    """A text that is cut where it tells least: of a path the beginning, else the end."""
    if len(text) <= width:
        return text
    is_path = "/" in text and " " not in text
    return f"…{text[len(text) - width + 1 :]}" if is_path else f"{text[: width - 1]}…"


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names with what there is to be said of each, which a terminal's width wraps."""
    indent = max(len(name) for name, _ in facts) + 2
    for name, fact in facts:
        lines = [fact]
        if sys.stdout.isatty():
            lines = textwrap.wrap(fact, max(Console().width - indent, 10))
        for n, line in enumerate(lines):
            typer.echo(f"{'' if n else name:{indent}}{line}")


def tell_deleted(steps: Sequence[int]) -> None:
    """Print the numbers of steps that were deleted while a command looked, if there are any."""
    if steps:
        what = f"Step {steps[0]} was" if len(steps) == 1 else f"Steps {shown_steps(steps)} were"
        typer.echo(f"{what} deleted meanwhile.")


def tell_more(count: int, what: str) -> None:
    """Print the number of things that a table has no rows for, if there are any."""
    if count > 0:
        typer.echo(f"and {count:,} more {what}, which --json lists")


def shown_bytes(count: int | None) -> str:
    """A size; a mark where an object store does not tell it."""
    return "?" if count is None else decimal(count)


def counted(number: int, one: str, several: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def shown_age(seconds: float) -> str:
    """A length of time in its largest unit."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
