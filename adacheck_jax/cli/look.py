"""Commands about the steps under a root: ls, inspect, verify and repair."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from adacheck_jax.cli.command import (
    DryRun,
    Item,
    Last,
    Root,
    command,
    progress_bar,
    root_of,
    step_of,
)
from adacheck_jax.cli.printing import (
    counted,
    print_facts,
    print_rows,
    shown_age,
    shown_bytes,
    tell_deleted,
)
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.tools import inspection, listing
from adacheck_jax.tools.inspection import StepDetails
from adacheck_jax.tools.listing import FOREIGN, STOCK, RootSummary, saved_at

if TYPE_CHECKING:  # which import JAX
    from adacheck_jax.tools.audit import RootReport, StepReport
    from adacheck_jax.tools.repair import RepairReport

_LOOK, _KEEP = "Look at steps", "Keep a root sound"


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
        if told := row.error or row.note:
            typer.echo(f"{row.item if row.step is None else f'step {row.step}'}: {told}")
    typer.echo("; ".join(_totals(summary)))


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


@command(_LOOK, _show_root, lambda summary: bool(summary.damaged_count))
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
    typer.echo("")
    groups: dict[str, list[int]] = {}
    for leaf in details.leaves:
        groups.setdefault(leaf.group, []).append(leaf.leaf_bytes)
    rows = [(name, len(sizes), decimal(sum(sizes))) for name, sizes in groups.items()]
    print_rows(("group", "leaves", "bytes"), rows, right=("leaves", "bytes"))
    typer.echo("")
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


@command(_LOOK, _show_step, has_steps=True)
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


def _show_verification(report: RootReport) -> None:
    """Print the result of each step, every cause of damage once, and a verdict."""
    several = len({step.item.rpartition("/")[2] for step in report.steps}) > 1
    rows = []
    for step in report.steps:
        number = "?" if step.step is None else step.step
        item = step.item if several or step.step is None else None
        rows.append((number, item, step.kind or "?", ", ".join(step.checked), _result(step)))
    print_rows(("step", "item", "kind", "checked", "result"), rows, right=("step",))
    for each in report.causes:
        steps = "steps" if len(each.steps) > 1 else "step"
        words = [f"{steps} {shown_steps(each.steps) if each.steps else '?'}"]
        if each.leaves:
            several = len(each.leaves) > 1
            words.append(f"{len(each.leaves)} leaves" if several else each.leaves[0])
        file = each.file.removeprefix(f"{report.root}/")
        typer.echo(": ".join([*words, file, each.message]))
    for reason in dict.fromkeys(step.not_checked for step in report.steps if step.not_checked):
        typer.echo(f"Not recomputed: {reason}")
    tell_deleted(report.deleted)
    for each in report.leftovers:
        typer.echo(f"Note: {each.path}: {each.why}")
    typer.echo(_verdict(report))
    _tell_not_looked_at(report.not_looked_at)


def _result(step: StepReport) -> str:
    if step.damage:
        return "DAMAGED"
    result = "ok"
    if step.not_checked:
        result = "ok, but not recomputed"
    elif step.rounded:
        result = f"ok, {counted(len(step.rounded), 'leaf', 'leaves')} to rounding"
    return result + (f", {counted(len(step.stale), 'leaf', 'leaves')} stale" if step.stale else "")


def _verdict(report: RootReport) -> str:
    total = len(report.steps)
    if not total:
        return "No step was left to verify." if report.deleted else "No step has been saved yet."
    steps = counted(total, "step")
    found = f"{report.damaged_count} of {steps} damaged"
    replayed = sum("replay" in step.checked for step in report.steps)
    read = "every stored byte was read"
    if report.data_count < total:
        read = f"of {total - report.data_count} no array was read"
        read = read if report.data_count else "no array was read"
    again = f", and {counted(replayed, 'was', 'were')} recomputed" if replayed else ""
    return f"{found if report.damaged_count else f'{steps} verified'}: {read}{again}."


def _tell_not_looked_at(parts: tuple[str, ...]) -> None:
    if parts:
        typer.echo(f"Not looked at: {', '.join(parts)}.")


def _verified(report: RootReport) -> int:
    if report.damaged_count:
        return 1
    is_unchecked = any(each.not_checked for each in report.steps)
    return 2 if is_unchecked or not (report.steps or report.deleted) else 0


@command(_KEEP, _show_verification, _verified, has_steps=True)
def verify(
    root: Root,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step; all if left out.")
    ] = None,
    item: Item = None,
    read_data: Annotated[bool, typer.Option("--read-data", help="Read every stored byte.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="Recompute every step, and compare every leaf.")
    ] = False,
) -> RootReport:
    """Look for damage in the steps under ROOT.

    \b
    Examples:
      adacheck verify checkpoints --read-data
      adacheck verify checkpoints latest --replay

    Without options the structure: manifests and what they say of each other, update programs, and
    that every file and every chunk of an array is there. --read-data checks the checksum of every
    chunk, and of what is stored whole the fingerprint. --replay restores each step on one device.

    Exit code 1 if there is damage, 2 if a step cannot be recomputed on this machine, or there is
    none.

    With --json: the fields of adacheck_jax.tools.audit.RootReport.
    """
    from adacheck_jax.tools import audit

    place, number = root_of(root), step_of(step)
    with progress_bar() as progress:
        return audit.verify_root(
            place, number, item, read_data=read_data, replay=replay, progress=progress
        )


def _show_repair(report: RepairReport) -> None:
    """Print removed and kept directories."""
    would = report.is_dry_run
    rows = [(each.path, each.why) for each in report.removals]
    print_rows(("remove" if would else "removed", "why"), rows)
    for each in report.kept:
        typer.echo(f"Kept {each.path}: {each.why}")
    for path in report.cleared:
        lost = "would lose" if would else "has lost"
        typer.echo(f"{path} {lost} what an interrupted compaction left in it")
    typer.echo(
        f"{counted(len(report.removals), 'directory', 'directories')} "
        f"{'would be removed' if would else 'removed'}; {counted(report.step_count, 'step')} left."
    )
    _tell_not_looked_at(report.not_looked_at)


@command(_KEEP, _show_repair)
def repair(
    root: Root,
    dry_run: DryRun = False,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Look for damage in every stored byte.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also where a temporary directory is new.")
    ] = False,
) -> RepairReport:
    """Remove from ROOT what cannot be restored and what no step needs.

    \b
    Example: adacheck repair checkpoints --dry-run

    That is: what interrupted saves left, and steps that fail verification, if restoring them was
    tried and failed too. A step that another one builds on stays, and what this machine cannot
    judge. Stop the training run first: exit code 2 if a save may be under way.

    With --json: the fields of adacheck_jax.tools.repair.RepairReport.
    """
    from adacheck_jax.tools import repair as repairs

    with progress_bar() as progress:
        return repairs.repair(
            root_of(root), read_data=read_data, dry_run=dry_run, force=force, progress=progress
        )
