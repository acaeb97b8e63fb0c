"""Commands that keep a root sound and small: verify and repair."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from adacheck_jax.cli.command import (
    DryRun,
    Item,
    Root,
    command,
    progress_bar,
    root_of,
    step_of,
)
from adacheck_jax.cli.printing import counted, print_rows, print_text, tell_deleted
from adacheck_jax.store.steps.lineage import shown_steps

if TYPE_CHECKING:  # which import JAX
    from adacheck_jax.tools.audit import RootReport, StepReport
    from adacheck_jax.tools.repair import RepairReport

_GROUP = "Keep a root sound"


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
        print_text(": ".join([*words, file, each.message]))
    for reason in dict.fromkeys(step.not_checked for step in report.steps if step.not_checked):
        print_text(f"Not recomputed: {reason}")
    tell_deleted(report.deleted)
    for each in report.leftovers:
        print_text(f"Note: {each.path}: {each.why}")
    print_text(_verdict(report))
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
        print_text(f"Not looked at: {', '.join(parts)}.")


def _verified(report: RootReport) -> int:
    if report.damaged_count:
        return 1
    is_unchecked = any(each.not_checked for each in report.steps)
    return 2 if is_unchecked or not (report.steps or report.deleted) else 0


@command(_GROUP, _show_verification, _verified, has_steps=True)
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
        print_text(f"Kept {each.path}: {each.why}")
    for path in report.cleared:
        lost = "would lose" if would else "has lost"
        print_text(f"{path} {lost} what an interrupted compaction left in it")
    print_text(
        f"{counted(len(report.removals), 'directory', 'directories')} "
        f"{'would be removed' if would else 'removed'}; {counted(report.step_count, 'step')} left."
    )
    _tell_not_looked_at(report.not_looked_at)


@command(_GROUP, _show_repair)
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
