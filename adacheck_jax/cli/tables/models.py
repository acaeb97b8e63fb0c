"""Tables of the commands that tell what saving costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.filesize import decimal

from adacheck_jax.cli.printing import add_row, counted, new_table, print_rows, screen

if TYPE_CHECKING:  # the modules of some import JAX, which ``adacheck ls`` does not need
    from adacheck_jax.tools.goodput.simulation import GoodputReport
    from adacheck_jax.tools.plan import Balance, RedundancyReport


def show_plan(report: RedundancyReport) -> None:
    """Print bytes of each kind of save, and of each kind of redundancy."""
    console = screen()
    counts = (
        (report.leaf_count, "leaves"),
        (report.device_count, "devices"),
        (report.process_count, "processes"),
    )
    console.print(", ".join(f"{count:,} {what}" for count, what in counts), highlight=False)
    console.print()
    saves = new_table(
        "a save", "bytes", "times less", "each process", right=("bytes", "times less")
    )
    for name, size_bytes, balance in (
        ("all that each device holds", report.held_bytes, None),
        ("stock Orbax", report.state_bytes, None),
        ("base", report.base_bytes, report.base),
        ("delta", report.delta_bytes, report.delta),
        (f"mean of 1 base, {report.max_deltas} deltas", report.amortised_bytes, None),
    ):
        if size_bytes is not None:
            less = _ratio(report.held_bytes / size_bytes) if size_bytes else None
            add_row(saves, name, decimal(round(size_bytes)), less, _share(balance))
    kinds = new_table("redundancy", "bytes", "why", right=("bytes",))
    for name, size_bytes, why in (
        ("declared replicas", report.replica_bytes, "another device holds the same: never written"),
        ("computed by the update", report.computed_bytes, "replayed, so no delta has it"),
        ("record", report.record_bytes, "what the update consumes: in every delta"),
        ("other leaves", report.other_bytes, "no update computes them: in every delta"),
    ):
        if size_bytes is not None:
            add_row(kinds, name, decimal(size_bytes), why)
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
    console = screen()
    failures = report.outcomes[0].failures if report.outcomes else 0
    console.print(
        f"{report.hosts:,} hosts, {report.devices:,} devices, a failure every "
        f"{report.mtbf_s / 3600:.3g} h: {failures:.0f} in {report.duration_s / 86_400:.3g} days "
        f"(mean of {counted(report.runs, 'run', 'runs')}, seed {report.seed})",
        highlight=False,
    )
    console.print()
    numbers = ("goodput", "saving", "repeated", "down", "lost steps", "a failure")
    rows: list[tuple[str, ...]] = []
    for each in report.outcomes:
        shares = (each.goodput, each.saving, each.repeated, each.down)
        lost = (f"{each.lost_steps:,.0f}", f"{each.lost_a_failure:.1f}")
        rows.append((each.system, *(f"{x:.2%}" for x in shares), *lost, each.schedule))
    print_rows(("system", *numbers, "saves"), rows, numbers, optional=("saves", "a failure"))
    console.print()
    if report.sensitivities:
        _show_sensitivities(report, console)
    kinds = [each.kind for each in report.figures]
    counts = (f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    note = f"Figures: {', '.join(counts)}; --json lists them. Measured is: on two CPU cores."
    console.print(note, style="dim", highlight=False)


def _show_sensitivities(report: GoodputReport, console: Console) -> None:
    numbers = ("value", "halved", "waste", "doubled")
    table, left_out = new_table("system", "figure", *numbers, right=numbers), 0
    for each in report.sensitivities:
        change = max(abs(each.halved - each.waste), abs(each.doubled - each.waste))
        if change < WORTH_SHOWING:
            left_out += 1
            continue
        shares = (f"{x:.2%}" for x in (each.halved, each.waste, each.doubled))
        add_row(table, each.system, each.figure, f"{each.value:.3g}", *shares)
    console.print(table)
    changes = f"{counted(left_out, 'figure changes', 'figures change')} the waste"
    console.print(f"{changes} by less than {WORTH_SHOWING:.1%} of the time.", highlight=False)
    console.print()
