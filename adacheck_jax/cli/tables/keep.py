"""Tables of the commands that keep a root sound and small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.text import Text

from adacheck_jax.cli.printing import (
    add_row,
    counted,
    new_table,
    print_rows,
    print_text,
    screen,
    tell_deleted,
)
from adacheck_jax.store.steps.lineage import shown_steps

if TYPE_CHECKING:  # the modules of some import JAX, which ``adacheck ls`` does not need
    from adacheck_jax.tools.audit import RootReport
    from adacheck_jax.tools.compaction import CompactionReport
    from adacheck_jax.tools.upkeep.repair import RepairReport


def show_verification(report: RootReport) -> None:
    """Print the result of each step, every cause of damage once, and a verdict."""
    several = len({step.item.rpartition("/")[2] for step in report.steps}) > 1
    rows = []
    for step in report.steps:
        result = "ok"
        if step.damage:
            result = "DAMAGED"
        elif step.not_checked:
            result = "ok, but not recomputed"
        elif step.rounded:
            result = f"ok, {counted(len(step.rounded), 'leaf', 'leaves')} to rounding"
        if step.stale and not step.damage:
            result += f", {counted(len(step.stale), 'leaf', 'leaves')} stale"
        number = "?" if step.step is None else step.step
        item = step.item if several or step.step is None else None
        rows.append((number, item, step.kind or "?", ", ".join(step.checked), result))
    print_rows(("step", "item", "kind", "checked", "result"), rows, right=("step",))
    console = screen()
    for each in report.causes:
        file = each.file.removeprefix(f"{report.root}/")
        steps = f"steps {shown_steps(each.steps)}" if len(each.steps) > 1 else "step "
        steps += "" if len(each.steps) > 1 else f"{each.steps[0] if each.steps else '?'}"
        concerned = ": ".join(part for part in (steps, _leaves(each.leaves)) if part)
        print_text(f"{concerned}: {file}: {each.message}")
    for reason in dict.fromkeys(step.not_checked for step in report.steps if step.not_checked):
        console.print(Text(f"Not recomputed: {reason}"))
    tell_deleted(report.deleted)
    for each in report.leftovers:
        console.print(Text(f"Note: {each.path}: {each.why}"))
    console.print(_verdict(report), highlight=False)
    if report.not_looked_at:
        print_text(f"Not looked at: {', '.join(report.not_looked_at)}.")


def _leaves(paths: Sequence[str]) -> str:
    """One leaf path, or how many there are."""
    return "" if not paths else paths[0] if len(paths) == 1 else f"{len(paths)} leaves"


def _verdict(report: RootReport) -> str:
    total = len(report.steps)
    if report.deleted and not total:
        return "No step was left to verify."
    steps = counted(total, "step", "steps")
    found = f"{steps} verified" if not report.damaged_count else ""
    if report.damaged_count:
        found = f"{report.damaged_count} of {steps} damaged"
    replayed = sum("replay" in step.checked for step in report.steps)
    read = "every stored byte was read" if report.data_count == total else "no array was read"
    if report.data_count < total and (report.data_count or report.subset):
        read = f"of {total - report.data_count} no array was read"
        if report.subset:
            read += f" ({report.subset:.3g} of the steps chosen with seed {report.seed})"
    again = "" if not replayed else f", and {counted(replayed, 'was', 'were')} recomputed"
    return f"{found}: {read}{again}."


def show_repair(report: RepairReport) -> None:
    """Print removed and kept directories."""
    console = screen()
    table = new_table(
        "remove" if report.is_dry_run else "removed", "frees", "why", right=("frees",)
    )
    for each in report.removals:
        add_row(table, each.path, decimal(each.freed_bytes), each.why)
    if report.removals:
        console.print(table)
        console.print()
    for each in report.kept:
        console.print(Text(f"Kept {each.path}: {each.why}"))
    for path in report.cleared:
        what = "would lose" if report.is_dry_run else "has lost"
        console.print(Text(f"{path} {what} what an interrupted compaction left in it"))
    count = counted(len(report.removals), "directory", "directories")
    done = "would be removed" if report.is_dry_run else "removed"
    left = counted(report.step_count, "step", "steps")
    console.print(
        f"{count} {done}, {decimal(report.freed_bytes)} freed; {left} left.", highlight=False
    )
    if report.not_looked_at:
        print_text(f"Not looked at: {', '.join(report.not_looked_at)}.")


def show_compaction(report: CompactionReport) -> None:
    """Print what became of a step."""
    deltas = counted(report.delta_count, "delta", "deltas")
    is_now = "would be" if report.is_dry_run else "is"
    sentences = [
        f"Step {report.step} {is_now} a base of {decimal(report.state_bytes)}; restoring it read "
        f"base {report.base} and {deltas}.",
        f"{decimal(report.freed_bytes)} {'would be' if report.is_dry_run else 'were'} freed; what "
        "other steps link stays.",
    ]
    if report.lost_steps:
        held = "holds" if report.is_dry_run else "held"
        sentences.append(
            f"Gone with it, since it alone {held} them: steps {shown_steps(report.lost_steps)}."
        )
    screen().print(" ".join(sentences), highlight=False)
