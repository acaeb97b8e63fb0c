"""Commands that look at steps: ls and inspect."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.filesize import decimal

from adacheck_jax.cli.command import Item, Last, Root, command, root_of, step_of
from adacheck_jax.cli.printing import (
    counted,
    print_facts,
    print_rows,
    print_text,
    shown_age,
    shown_bytes,
)
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.tools import inspection, listing
from adacheck_jax.tools.inspection import StepDetails
from adacheck_jax.tools.listing import FOREIGN, STOCK, RootSummary, saved_at

_GROUP = "Look at steps"


def _show_root(summary: RootSummary) -> None:
    now = datetime.now(UTC)
    dates = [None if (when := saved_at(x)) is None else when.astimezone() for x in summary.steps]
    form = "%d %b %H:%M" if len({x.year for x in dates if x}) < 2 else "%Y-%m-%d %H:%M"
    items = {row.item.rpartition("/")[2] for row in summary.steps if row.kind != FOREIGN}
    rows = []
    for row, when in zip(summary.steps, dates, strict=True):
        sizes = (row.new_bytes, row.size_bytes, row.unique_bytes)
        cells = (
            "?" if row.step is None else row.step,
            row.item if len(items) > 1 else None,
            when and when.strftime(form),
            when and shown_age((now - when).total_seconds()),
            f"delta {row.depth}" if row.kind == "delta" and row.depth else row.kind or "?",
            f"{len(row.recorded):,} deferred" if row.recorded else None,
            *(None if x is None or row.kind == FOREIGN else shown_bytes(x) for x in sizes),
            "DAMAGED" if row.error else "no" if row.kind in (STOCK, FOREIGN) else row.checked,
        )
        rows.append(cells)
    print_rows(
        ("step", "item", "saved", "age", "kind", "with", "new", "size", "unique", "checked"),
        rows,
        right=("step", "age", "new", "size", "unique"),
        optional=("unique", "size", "age"),
    )
    for row in summary.steps:
        if row.error is not None:
            print_text(f"{row.item if row.step is None else f'step {row.step}'}: {row.error}")
    print_text("; ".join(_totals(summary)))


def _totals(summary: RootSummary) -> list[str]:
    """Sums over all steps, with those that are not listed."""
    count, shown = counted(summary.step_count, "step"), len(summary.steps)
    parts = [count if shown == summary.step_count else f"the newest {shown:,} of {count}"]
    if summary.disk_bytes is not None:
        parts.append(f"{decimal(summary.disk_bytes)} on disk, each hard-linked file counted once")
    if summary.damaged_count:
        parts.append(f"{summary.damaged_count:,} cannot be restored")
    if summary.stock_steps:
        parts.append("what stock Orbax saved cannot be verified")
    return parts


@command(_GROUP, _show_root, lambda summary: bool(summary.damaged_count))
def ls(root: Root, last: Last = None) -> RootSummary:
    """List the steps under ROOT: when each was saved, its kind, sizes, and how it was checked.

    \b
    Examples:
      adacheck ls checkpoints --last 10
      adacheck ls gs://bucket/run --json | jq .steps[-1]

    new is what a step added, size all that its directory holds with the links to what it builds
    on, unique what deleting it alone would free. Deltas were compared with the state when they were
    saved: in full; by sample, where a leaf of more than 4,096 elements was not compared whole; or
    not, because nothing is replayed (stored). A step that cannot be restored has a row that says
    why, and so has what stock Orbax saved. Array data is not read: adacheck verify does that.

    Exit code 1 if a step cannot be restored, listed or not.

    With --json: the fields of adacheck_jax.tools.listing.RootSummary.
    """
    return listing.summarize_root(root_of(root), last)


def _show_step(details: StepDetails) -> None:
    facts = [
        ("step", f"{details.step} ({details.kind}: {details.reason})"),
        ("directory", details.directory),
    ]
    if details.parent is not None:
        deltas, updates = counted(details.depth, "delta"), counted(details.replayed_count, "update")
        facts.append(("builds on", f"step {details.parent}, delta {details.depth} of its lineage"))
        if details.recorded:
            facts.append(("recorded with it", f"steps {shown_steps(details.recorded)}"))
        facts += [
            ("restore reads", f"base {details.base} and {deltas}; replays {updates}"),
            ("checked when saved", _shown_checks(details)),
        ]
    count = details.update_count
    facts += [
        ("updates so far", "no recorder" if count is None else f"{count}"),
        ("updates replayed", "yes" if details.problem is None else f"no: {details.problem}"),
        ("new bytes", shown_bytes(details.new_bytes)),
        ("written by", ", ".join(f"{k} {v}" for k, v in details.versions.items())),
    ]
    print_facts(facts)
    print_text("")
    groups: dict[str, list[int]] = {}
    for leaf in details.leaves:
        groups.setdefault(leaf.group, []).append(leaf.leaf_bytes)
    rows = [(name, len(sizes), decimal(sum(sizes))) for name, sizes in groups.items()]
    print_rows(("group", "leaves", "bytes"), rows, right=("leaves", "bytes"))
    print_text("")
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
    for step, kind in details.checks.items():
        kinds.setdefault(kind, []).append(step)
    return ", ".join(
        f"step{'' if len(steps) == 1 else 's'} {shown_steps(steps)} {_CHECKS.get(kind, kind)}"
        for kind, steps in kinds.items()
    )


@command(_GROUP, _show_step, has_steps=True)
def inspect(
    root: Root,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step; the newest if left out.")
    ] = None,
    item: Item = None,
) -> StepDetails:
    """Show what one step, saved or deferred, is made of, and how each of its leaves is restored.

    \b
    Example: adacheck inspect checkpoints 1200

    A leaf is replayed (computed by the update), recorded (the update consumed it), kept as
    differences of its bits, or stored. What the update computes is exact on every mesh if it is
    element-wise, and on the mesh that it was saved on if it is reducing.

    Each delta that it builds on was checked when it was saved: in full, by sample, by identity of
    the arrays that the update returned, or not at all (by an earlier release).

    With --json: the fields of adacheck_jax.tools.inspection.StepDetails.
    """
    return inspection.describe_step(root_of(root), step_of(step), item)
