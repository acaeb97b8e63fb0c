"""Tables of the commands that look at steps."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

from adacheck_jax.cli.printing import (
    add_row,
    counted,
    new_table,
    print_rows,
    print_text,
    screen,
    shown_age,
    shown_bytes,
)
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.tools.listing import FOREIGN, saved_at

if TYPE_CHECKING:  # the modules of some import JAX, which ``adacheck ls`` does not need
    from adacheck_jax.tools.inspection import StepDetails
    from adacheck_jax.tools.listing import RootSummary, StepSummary
    from adacheck_jax.tools.statistics import RootStatistics


def show_root(summary: RootSummary, *, fold: bool = False) -> None:
    """Print the steps under a root, and why some of them cannot be restored.

    Args:
        summary: the steps.
        fold: True for one row a lineage.
    """
    now, years = datetime.now(UTC), {_year(row) for row in summary.steps} - {None}
    items = {row.item.rpartition("/")[2] for row in summary.steps if row.kind != FOREIGN}
    groups = _lineages(summary.steps) if fold else [[row] for row in summary.steps]
    print_rows(
        ("step", "item", "saved", "age", "kind", "with", "new", "size", "unique", "checked"),
        [_row(group, now, is_dated=len(years) > 1, has_item=len(items) > 1) for group in groups],
        right=("step", "age", "new", "size", "unique"),
        optional=("unique", "size", "age"),
    )
    for row in summary.steps:
        if row.error is not None:
            place = row.item if row.step is None else f"step {row.step}"
            print_text(f"{place}: {row.error}")
    print_text(_total(summary))


def _row(
    rows: Sequence[StepSummary], now: datetime, *, is_dated: bool, has_item: bool
) -> tuple[object, ...]:
    """The cells of one step, or of a base and its deltas."""
    first, last = rows[0], rows[-1]
    when = saved_at(last)
    written = None
    if when is not None:
        written = when.astimezone().strftime("%Y-%m-%d %H:%M" if is_dated else "%d %b %H:%M")
    number: object = "?" if last.step is None else last.step
    kind = _kind(last)
    if len(rows) > 1:
        number = f"{first.step} to {last.step}"
        deltas = len(rows) - (first.kind == "base")
        kind = f"{'base + ' if first.kind == 'base' else ''}{counted(deltas, 'delta', 'deltas')}"
    deferred = sum(len(row.recorded) for row in rows)
    checks = dict.fromkeys(row.checked for row in rows if row.checked)
    damaged = any(row.error is not None for row in rows)
    return (
        number,
        last.item if has_item else None,
        written,
        None if when is None else shown_age((now - when).total_seconds()),
        kind,
        f"{deferred:,} deferred" if deferred else None,
        *(_bytes(rows, name) for name in ("new_bytes", "size_bytes", "unique_bytes")),
        "DAMAGED" if damaged else " + ".join(map(str, checks)) or _UNCHECKED.get(last.kind or ""),
    )


_UNCHECKED = {"stock": "no", "foreign": "no"}


def _bytes(rows: Sequence[StepSummary], name: str) -> str | None:
    """A size of one row; of several the sum of what each added, or what the newest holds."""
    found = [getattr(row, name) for row in rows]
    known = [size for size in found if size is not None]
    if not known or rows[-1].kind == "foreign":
        return None
    return shown_bytes(known[-1] if name == "size_bytes" else sum(known))


def _kind(row: StepSummary) -> str:
    return f"delta {row.depth}" if row.kind == "delta" and row.depth else row.kind or "?"


def _year(row: StepSummary) -> int | None:
    when = saved_at(row)
    return None if when is None else when.astimezone().year


def _lineages(rows: Sequence[StepSummary]) -> list[list[StepSummary]]:
    """Rows of steps that build on one base, together."""
    groups: dict[object, list[StepSummary]] = {}
    for n, row in enumerate(rows):
        known = row.error is None and row.depth is not None and row.update_count is not None
        name = row.item.rpartition("/")[2]
        base = (name, row.update_count - row.depth) if known else n  # type: ignore[operator]
        groups.setdefault(base, []).append(row)
    return list(groups.values())


def _total(summary: RootSummary) -> str:
    """Sums over all steps, with those that are not listed."""
    shown, total = len(summary.steps), summary.step_count
    count = counted(total, "step", "steps")
    parts = [f"the newest {shown:,} of {count}" if shown < total else count]
    if summary.disk_bytes is not None:
        parts.append(f"{decimal(summary.disk_bytes)} on disk, each hard-linked file counted once")
    if summary.damaged_count:
        parts.append(f"{summary.damaged_count:,} cannot be restored")
    if summary.stock_steps:
        parts.append("what stock Orbax saved cannot be verified")
    return "; ".join(parts)


def show_step(details: StepDetails) -> None:
    """Print one step, its groups of leaves, and its leaves."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    add_row(facts, "step", f"{details.step} ({details.kind}: {details.reason})")
    add_row(facts, "directory", details.directory)
    if details.parent is not None:
        add_row(facts, "builds on", f"step {details.parent}, delta {details.depth} of its lineage")
        if details.recorded:
            add_row(facts, "recorded with it", f"steps {shown_steps(details.recorded)}")
        counts = (("delta", details.depth), ("update", details.replayed_count))
        deltas, updates = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts)
        add_row(facts, "restore reads", f"base {details.base} and {deltas}; replays {updates}")
        add_row(facts, "checked when saved", _shown_checks(details))
    add_row(
        facts,
        "updates so far",
        "no recorder" if details.update_count is None else details.update_count,
    )
    replayable = "yes" if details.problem is None else f"no: {details.problem}"
    add_row(facts, "updates replayed", replayable)
    add_row(facts, "new bytes", shown_bytes(details.new_bytes))
    add_row(facts, "written by", ", ".join(f"{k} {v}" for k, v in details.versions.items()))
    groups = new_table("group", "leaves", "bytes", right=("leaves", "bytes"))
    for group in details.groups:
        add_row(groups, group.name, group.leaf_count, decimal(group.leaf_bytes))
    console = screen()
    for table in (facts, groups):
        console.print(table)
        console.print()
    print_rows(
        ("leaf path", "type", "update", "restored", "boxes", "fingerprint"),
        [
            (x.path, x.description, x.exactness, x.source, x.box_count, x.fingerprint)
            for x in details.leaves
        ],
        right=("boxes",),
        optional=("fingerprint", "boxes", "update"),
    )


_CHECKS = {
    "full": "in full",
    "sample": "by sample",
    "identity": "by identity",
    "stored": "all stored",
    "": "not checked",
}


def _shown_checks(details: StepDetails) -> str:
    """Checks of the deltas, grouped by kind of check."""
    kinds: dict[str, list[int]] = {}
    for each in details.checks:
        kinds.setdefault(each.checked, []).append(each.step)
    return ", ".join(
        f"step{'' if len(steps) == 1 else 's'} {shown_steps(steps)} {_CHECKS.get(kind, kind)}"
        for kind, steps in kinds.items()
    )


def show_statistics(report: RootStatistics, leaf_count: int) -> None:
    """Print files by kind, bytes by redundancy, and the leaves that take most.

    Args:
        report: the statistics.
        leaf_count: number of leaves to print.
    """
    numbers = ("names", "files", "bytes", "named bytes")
    rows = [
        (f.kind, f.name_count, f.file_count, decimal(f.file_bytes), decimal(f.named_bytes))
        for f in report.files
    ]
    if rows:
        counts = [sum(each) for each in zip(*((r[1], r[2]) for r in rows), strict=True)]
        sums = [sum(f.file_bytes for f in report.files), sum(f.named_bytes for f in report.files)]
        print_rows(("kind", *numbers), [*rows, ("all", *counts, *map(decimal, sums))], numbers)
        print_text("")
    rows = [
        (name, decimal(count), f"{count / report.full_bytes:.1%}")
        for name, count in report.redundancy.items()
    ]
    right = ("bytes", "share")
    print_rows(("states in full", *right), [*rows, ("all", decimal(report.full_bytes), "")], right)
    print_text("")
    right = ("in one state", "in bases", "in deltas")
    rows = [
        (leaf.path, *map(decimal, (leaf.state_bytes, leaf.base_bytes, leaf.delta_bytes)))
        for leaf in report.leaves[:leaf_count]
    ]
    if rows:
        print_rows(("leaf", *right), rows, right)
    if len(report.leaves) > leaf_count:
        print_text(f"and {len(report.leaves) - leaf_count:,} more leaves, which --json lists")
    print_text(
        f"{counted(report.recorded_count, 'recorded step', 'recorded steps')}: "
        f"{counted(report.base_count, 'base', 'bases')} and "
        f"{counted(report.delta_count, 'delta', 'deltas')}."
    )
    if report.skipped:
        print_text(f"Left out, since they cannot be restored: steps {shown_steps(report.skipped)}.")
