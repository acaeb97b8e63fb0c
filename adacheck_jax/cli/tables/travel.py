"""Tables of the commands that look back through a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from adacheck_jax.cli.printing import counted, print_rows, print_text, tell_deleted

if TYPE_CHECKING:
    from adacheck_jax.tools.history.bisect import Bisection
    from adacheck_jax.tools.history.compare import RunComparison, StepComparison
    from adacheck_jax.tools.history.differences import LeafDifference
    from adacheck_jax.tools.history.log import RunLog

_SHOWN = 30
"""Leaves that are shown; --json has all of them."""


def show_log(report: RunLog) -> None:
    """Print a row for each step."""
    names = [*dict.fromkeys(name for step in report.steps for name in step.metrics)]
    titles = ("step", "kind", "gradient", "update", "update/params", "learning rate", *names)
    rows = []
    for step in report.steps:
        share = None
        if step.update_norm is not None and step.params_norm:
            share = step.update_norm / step.params_norm
        numbers = (step.gradient_norm, step.update_norm, share, step.learning_rate)
        metrics = (step.metrics.get(name) for name in names)
        rows.append((step.step, step.kind, *map(_number, (*numbers, *metrics))))
    print_rows(titles, rows, right=("step", *titles[2:]))
    tell_deleted(report.deleted)
    shown, total = len(report.steps) + len(report.deleted), report.recorded_count
    if shown < total:
        print_text(f"the newest {shown:,} of {counted(total, 'recorded step', 'recorded steps')}")
    if any(step.rounded for step in report.steps):
        print_text("Replayed to rounding only: the update adds up elements on other devices.")


def show_diff(report: StepComparison) -> None:
    """Print a row for each leaf that differs."""
    rows = [
        (
            each.path,
            each.role,
            _share(each.changed_share),
            *map(_number, (each.norm, each.relative, each.largest, each.cosine)),
        )
        for each in report.differences[:_SHOWN]
    ]
    numbers = ("changed", "norm", "relative", "largest", "cosine")
    if rows:
        optional = ("role", "cosine", "largest", "norm")
        print_rows(("leaf", "role", *numbers), rows, numbers, optional)
    _tell_more(report.differences)
    for paths, (root, step) in (
        (report.only_before, report.before),
        (report.only_after, report.after),
    ):
        if paths:
            shown = ", ".join(paths[:10]) + (", ..." if len(paths) > 10 else "")
            print_text(f"Only at step {step} of {root}: {shown}")
    equal = report.leaf_count - len(report.differences)
    differ = counted(len(report.differences), "leaf differs", "leaves differ")
    print_text(f"{differ}, {equal:,} equal by fingerprint or every bit.")
    _tell_rounded(report.rounded)


def show_bisection(report: Bisection) -> None:
    """Print the steps that were looked at, and the first one."""
    rows = [(each.step, "yes" if each.holds else "no", each.says) for each in report.tried]
    print_rows(("step", "holds", ""), rows, right=("step",))
    steps = counted(report.searched_count, "recorded step", "recorded steps")
    restored = f"{counted(report.restored_count, 'state', 'states')} of {steps} restored"
    if report.step is None:
        print_text(f"It does not hold at step {report.tried[0].step}, the last one: {restored}.")
    else:
        before = "" if report.before is None else f", and does not at step {report.before}"
        print_text(f"Step {report.step} is the first at which it holds{before}: {restored}.")
        print_text(f"  {report.says}")
    _tell_rounded(report.rounded)


def show_comparison(report: RunComparison) -> None:
    """Print where two runs begin to differ."""
    steps = counted(report.compared_count, "common step", "common steps")
    for only, root in ((report.only_first, report.first), (report.only_second, report.second)):
        if only:
            print_text(f"{counted(len(only), 'step', 'steps')} only in {root}, not compared")
    if report.step is None:
        print_text(f"All {steps} are equal: every leaf has the same fingerprint.")
        return
    until = "None before it" if report.equal_until is None else f"All until {report.equal_until}"
    print_text(f"Step {report.step} is the first of {steps} that differs. {until} equal.")
    print_text(f"{report.cause[:1].upper()}{report.cause[1:]}.")
    rows = []
    for each in report.differences[:_SHOWN]:
        first = each.first
        values = f"{first.before} -> {first.after}"
        bits = counted(first.bits, "bit", "bits")
        cells = (each.path, each.role, each.changed_count, list(first.index), values, bits)
        rows.append((*cells, first.process))
    titles = ("leaf", "role", "elements", "first", "values", "differ by", "process")
    print_rows(titles, rows, ("elements", "process"), ("role", "differ by", "process"))
    _tell_more(report.differences)


def _tell_more(found: Sequence[LeafDifference]) -> None:
    if len(found) > _SHOWN:
        print_text(f"and {len(found) - _SHOWN:,} more leaves, which --json lists")


def _tell_rounded(paths: Sequence[str]) -> None:
    if paths:
        count = counted(len(paths), "leaf", "leaves")
        print_text(f"{count} replayed to rounding only: the update adds up elements.")


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "<1%"
