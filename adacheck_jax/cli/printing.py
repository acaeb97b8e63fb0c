"""The terminal, and tables of plain text on it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text


def screen() -> Console:
    """The terminal; for a file or a pipe, lines long enough to keep a row on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 200))


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines.

    Args:
        columns: titles of the columns.
        right: titles of those that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: object) -> None:
    """Add cells as plain text: a shape such as ``[4]`` is not rich's markup.

    Args:
        table: the table.
        cells: one value a column; None is empty.
    """
    table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))
