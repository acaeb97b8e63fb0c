"""Tables and sentences for people: the output of the commands without ``--json``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from adacheck_jax.cli.printing import add_row as _add_row
from adacheck_jax.cli.printing import new_table as _table
from adacheck_jax.cli.printing import screen as _console
from adacheck_jax.store.steps.lineage import shown_steps

if TYPE_CHECKING:  # the modules of some import JAX, which ``adacheck ls`` does not need
    from adacheck_jax.tools.audit import RootReport
    from adacheck_jax.tools.compaction import CompactionReport
    from adacheck_jax.tools.goodput.simulation import GoodputReport
    from adacheck_jax.tools.inspection import RootSummary, StepDetails
    from adacheck_jax.tools.plan import Balance, RedundancyReport
    from adacheck_jax.tools.repair import RepairReport


def _bytes(count: int | None) -> str:
    """A size; a mark where an object store does not tell it."""
    return "?" if count is None else decimal(count)


def show_root(summary: RootSummary) -> None:
    """Print the steps under a root."""
    numbers = ("step", "updates", "depth", "new bytes")
    several = len({Path(step.item).name for step in summary.steps}) > 1
    is_recorded = any(step.recorded for step in summary.steps)
    names = ("step", *(("item",) if several else ()), "kind", "updates", "parent", "depth")
    names = (*names, *(("recorded",) if is_recorded else ()), "checked")
    table = _table(*names, "new bytes", "status", right=numbers)
    for step in summary.steps:
        number = "?" if step.step is None else step.step
        parent = None if step.parent is None else f"on {step.parent}"
        _add_row(
            table,
            *((number, step.item) if several else (number,)),
            step.kind or "?",
            step.update_count,
            parent,
            step.depth,
            *((shown_steps(step.recorded) if step.recorded else None,) if is_recorded else ()),
            step.checked,
            _bytes(step.new_bytes),
            "ok" if step.error is None else _first_sentence(step.error),
        )
    console = _console()
    console.print(table)
    total = f"{_bytes(summary.disk_bytes)} on disk, each hard-linked file counted once"
    console.print(total, style="dim", highlight=False)
    if summary.stock_steps:
        shown = shown_steps(summary.stock_steps)
        console.print(f"saved by stock Orbax, not verified: steps {shown}", highlight=False)


def _first_sentence(message: str) -> str:
    return re.split(r"(?<=\.)\s", message, maxsplit=1)[0]


def show_step(details: StepDetails) -> None:
    """Print one step, its groups of leaves, and its leaves."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    _add_row(facts, "step", f"{details.step} ({details.kind}: {details.reason})")
    _add_row(facts, "directory", details.directory)
    if details.parent is not None:
        _add_row(facts, "builds on", f"step {details.parent}, delta {details.depth} of its lineage")
        if details.recorded:
            _add_row(facts, "recorded with it", f"steps {shown_steps(details.recorded)}")
        counts = (("delta", details.depth), ("update", details.replayed_count))
        deltas, updates = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts)
        _add_row(facts, "restore reads", f"base {details.base} and {deltas}; replays {updates}")
        _add_row(facts, "checked when saved", _shown_checks(details))
    _add_row(
        facts,
        "updates so far",
        "no recorder" if details.update_count is None else details.update_count,
    )
    replayable = "yes" if details.problem is None else f"no: {details.problem}"
    _add_row(facts, "updates replayed", replayable)
    _add_row(facts, "new bytes", _bytes(details.new_bytes))
    _add_row(facts, "written by", ", ".join(f"{k} {v}" for k, v in details.versions.items()))
    groups = _table("group", "leaves", "bytes", right=("leaves", "bytes"))
    for group in details.groups:
        _add_row(groups, group.name, group.leaf_count, decimal(group.leaf_bytes))
    names = ("leaf path", "type", "update", "restored", "boxes", "fingerprint")
    leaves = _table(*names, right=("boxes",))
    for leaf in details.leaves:
        cells = (leaf.path, leaf.description, leaf.exactness, leaf.source, leaf.box_count)
        _add_row(leaves, *cells, leaf.fingerprint)
    console = _console()
    for table in (facts, groups, leaves):
        console.print(table)
        console.print()


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


def show_verification(report: RootReport) -> None:
    """Print the result of each step, all damage, and a verdict."""
    table = _table("step", "item", "kind", "checked", "result", right=("step",))
    for step in report.steps:
        result = "ok"
        if step.damage:
            result = f"damaged ({len(step.damage)})"
        elif step.not_checked:
            result = "ok, but not recomputed"
        elif step.rounded:
            result = f"ok, {_count(len(step.rounded), 'leaf', 'leaves')} to rounding"
        if step.stale and not step.damage:
            result += f", {_count(len(step.stale), 'leaf', 'leaves')} stale"
        number = "?" if step.step is None else step.step
        _add_row(table, number, step.item, step.kind or "?", ", ".join(step.checked), result)
    console = _console()
    console.print(table)
    console.print()
    details = _table("step", "file", "leaf", "damage", right=("step",))
    for step in report.steps:
        for each in step.damage:
            file = each.file.removeprefix(f"{report.root}/")
            _add_row(details, step.step, file, each.leaf, each.message)
    if report.damaged_count:
        console.print(details)
        console.print()
    for reason in dict.fromkeys(step.not_checked for step in report.steps if step.not_checked):
        console.print(Text(f"Not recomputed: {reason}"))
    for each in report.leftovers:
        console.print(Text(f"Note: {each.path}: {each.why}"))
    console.print(_verdict(report), highlight=False)
    if report.not_looked_at:
        console.print(Text(f"Not looked at: {', '.join(report.not_looked_at)}."))


def _verdict(report: RootReport) -> str:
    total = len(report.steps)
    steps = _count(total, "step", "steps")
    found = f"{steps} verified" if not report.damaged_count else ""
    if report.damaged_count:
        found = f"{report.damaged_count} of {steps} damaged"
    replayed = sum("replay" in step.checked for step in report.steps)
    read = "every stored byte was read" if report.data_count == total else "no array was read"
    if report.data_count < total and (report.data_count or report.subset):
        read = f"of {total - report.data_count} no array was read"
        if report.subset:
            read += f" ({report.subset:.3g} of the steps chosen with seed {report.seed})"
    again = "" if not replayed else f", and {_count(replayed, 'was', 'were')} recomputed"
    return f"{found}: {read}{again}."


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def show_repair(report: RepairReport) -> None:
    """Print removed and kept directories."""
    console = _console()
    table = _table("remove" if report.is_dry_run else "removed", "frees", "why", right=("frees",))
    for each in report.removals:
        _add_row(table, each.path, decimal(each.freed_bytes), each.why)
    if report.removals:
        console.print(table)
        console.print()
    for each in report.kept:
        console.print(Text(f"Kept {each.path}: {each.why}"))
    for path in report.cleared:
        what = "would lose" if report.is_dry_run else "has lost"
        console.print(Text(f"{path} {what} what an interrupted compaction left in it"))
    count = _count(len(report.removals), "directory", "directories")
    done = "would be removed" if report.is_dry_run else "removed"
    left = _count(report.step_count, "step", "steps")
    console.print(
        f"{count} {done}, {decimal(report.freed_bytes)} freed; {left} left.", highlight=False
    )


def show_compaction(report: CompactionReport) -> None:
    """Print what became of a step."""
    deltas = _count(report.delta_count, "delta", "deltas")
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
    _console().print(" ".join(sentences), highlight=False)


def show_plan(report: RedundancyReport) -> None:
    """Print bytes of each kind of save, and of each kind of redundancy."""
    console = _console()
    counts = (
        (report.leaf_count, "leaves"),
        (report.device_count, "devices"),
        (report.process_count, "processes"),
    )
    console.print(", ".join(f"{count:,} {what}" for count, what in counts), highlight=False)
    console.print()
    saves = _table("a save", "bytes", "times less", "each process", right=("bytes", "times less"))
    for name, size_bytes, balance in (
        ("all that each device holds", report.held_bytes, None),
        ("stock Orbax", report.state_bytes, None),
        ("base", report.base_bytes, report.base),
        ("delta", report.delta_bytes, report.delta),
        (f"mean of 1 base, {report.max_deltas} deltas", report.amortised_bytes, None),
    ):
        if size_bytes is not None:
            less = _ratio(report.held_bytes / size_bytes) if size_bytes else None
            _add_row(saves, name, decimal(round(size_bytes)), less, _share(balance))
    kinds = _table("redundancy", "bytes", "why", right=("bytes",))
    for name, size_bytes, why in (
        ("declared replicas", report.replica_bytes, "another device holds the same: never written"),
        ("computed by the update", report.computed_bytes, "replayed, so no delta has it"),
        ("record", report.record_bytes, "what the update consumes: in every delta"),
        ("other leaves", report.other_bytes, "no update computes them: in every delta"),
    ):
        if size_bytes is not None:
            _add_row(kinds, name, decimal(size_bytes), why)
    for table in (saves, kinds):
        console.print(table)
        console.print()
    console.print(_in_words(report), highlight=False)
    bounds = (
        "At most: what compresses, is zero, is equal or did not change is known at a save only."
    )
    console.print(bounds, style="dim", highlight=False)


def _ratio(ratio: float | None) -> str:
    """A ratio with as many digits as a person wants to read."""
    return "?" if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


def _share(balance: Balance | None) -> str | None:
    if balance is None:
        return None
    least, most = decimal(balance.min_bytes), decimal(balance.max_bytes)
    return least if least == most else f"{least} to {most}"


def _in_words(report: RedundancyReport) -> str:
    held, stock = decimal(report.held_bytes), decimal(report.state_bytes)
    if report.delta_bytes is None or report.amortised_bytes is None:
        return (
            f"One step costs {stock} instead of {held}, and every step is a base: there is no "
            "Recorder in this state. Wrap the optimizer in one to see what deltas cost."
        )
    return (
        f"One step costs {decimal(report.delta_bytes)} instead of the {held} that all devices "
        f"hold ({_ratio(report.held_to_delta)} times less) or the {stock} that stock Orbax "
        f"writes ({_ratio(report.stock_to_delta)} times less); "
        f"{decimal(round(report.amortised_bytes))} a step with a base after every "
        f"{report.max_deltas} deltas."
    )


WORTH_SHOWING = 0.001
"""Changes of the waste below this share of the time are left out of the table."""


def show_goodput(report: GoodputReport) -> None:
    """Print what becomes of the time with each system, and what is uncertain about it."""
    console = _console()
    failures = report.outcomes[0].failures if report.outcomes else 0
    console.print(
        f"{report.hosts:,} hosts, {report.devices:,} devices, a failure every "
        f"{report.mtbf_s / 3600:.3g} h: {failures:.0f} in {report.duration_s / 86_400:.3g} days "
        f"(mean of {_count(report.runs, 'run', 'runs')}, seed {report.seed})",
        highlight=False,
    )
    console.print()
    numbers = ("goodput", "saving", "repeated", "down", "lost steps", "a failure")
    table = _table("system", *numbers, "saves", right=numbers)
    for each in report.outcomes:
        shares = (each.goodput, each.saving, each.repeated, each.down)
        lost = (f"{each.lost_steps:,.0f}", f"{each.lost_a_failure:.1f}")
        _add_row(table, each.system, *(f"{x:.2%}" for x in shares), *lost, each.schedule)
    console.print(table)
    console.print()
    if report.sensitivities:
        _show_sensitivities(report, console)
    kinds = [each.kind for each in report.figures]
    counts = (f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    note = f"Figures: {', '.join(counts)}; --json lists them. Measured is: on two CPU cores."
    console.print(note, style="dim", highlight=False)


def _show_sensitivities(report: GoodputReport, console: Console) -> None:
    numbers = ("value", "halved", "waste", "doubled")
    table, left_out = _table("system", "figure", *numbers, right=numbers), 0
    for each in report.sensitivities:
        change = max(abs(each.halved - each.waste), abs(each.doubled - each.waste))
        if change < WORTH_SHOWING:
            left_out += 1
            continue
        shares = (f"{x:.2%}" for x in (each.halved, each.waste, each.doubled))
        _add_row(table, each.system, each.figure, f"{each.value:.3g}", *shares)
    console.print(table)
    changes = f"{_count(left_out, 'figure changes', 'figures change')} the waste"
    console.print(f"{changes} by less than {WORTH_SHOWING:.1%} of the time.", highlight=False)
    console.print()
