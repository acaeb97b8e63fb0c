"""Tables of the command that tells what saving costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.filesize import decimal

from adacheck_jax.cli.printing import add_row, new_table, screen

if TYPE_CHECKING:  # the modules of some import JAX, which ``adacheck ls`` does not need
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
