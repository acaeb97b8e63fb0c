"""Commands that look back through a run: log, diff, bisect and report."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adacheck_jax.cli.command import (
    Item,
    Json,
    Last,
    Root,
    app,
    command,
    errors,
    print_json,
    progress_bar,
    root_of,
    step_of,
)
from adacheck_jax.cli.printing import (
    counted,
    print_rows,
    shown_bytes,
    tell_deleted,
    tell_more,
)
from adacheck_jax.errors import listed
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.steps import InputError, refuse_inside

if TYPE_CHECKING:
    from adacheck_jax.tools.history.bisect import Bisection
    from adacheck_jax.tools.history.compare import StepComparison
    from adacheck_jax.tools.history.log import RunLog
    from adacheck_jax.tools.history.walk import State, Walk
    from adacheck_jax.tools.report.gather import Report

_GROUP = "Look back through a run"
_SHOWN = 30
"""Leaves that are shown; --json has all of them."""


@contextlib.contextmanager
def _walk(root: str, item: str | None) -> Iterator[Walk]:
    from adacheck_jax.tools.history.walk import Walk

    with contextlib.closing(Walk(root_of(root), item)) as walk:
        yield walk


def _tell_rounded(paths: Sequence[str]) -> None:
    if paths:
        count = counted(len(paths), "leaf", "leaves")
        typer.echo(f"{count} replayed to rounding only: the update adds up elements.")


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _show_log(report: RunLog) -> None:
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
        typer.echo(f"the newest {shown:,} of {counted(total, 'recorded step')}")
    if any(step.rounded for step in report.steps):
        typer.echo("Replayed to rounding only: the update adds up elements on other devices.")


@command(_GROUP, _show_log)
def log(root: Root, last: Last = None, item: Item = None) -> RunLog:
    """Show what each step did: norms of gradients and updates, learning rate, metrics.

    \b
    Example: adacheck log checkpoints --last 20

    Nothing is computed forward: the gradients are those that the Recorder recorded, and the states
    are restored and replayed on one device of this machine. Of each step the change of the params
    since the recorded step before it is shown. The learning rate is a leaf of that name, as
    optax.inject_hyperparams makes one; metrics are those that were given to the manager's save.

    Exit code 1 if a step is damaged, 2 if this machine cannot replay it.

    With --json: the fields of adacheck_jax.tools.history.log.RunLog.
    """
    with _walk(root, item) as walk, progress_bar() as progress:
        from adacheck_jax.tools.history import log as logs

        return logs.log(walk, last, progress)


def _show_diff(report: StepComparison) -> None:
    """Print a row for each leaf that differs, and of two runs the first step that does."""
    if report.compared_count is not None:
        until, steps = report.equal_until, counted(report.compared_count, "common step")
        before = "none before it is" if until is None else f"all until {until} are"
        differs = f"Step {report.before[1]} is the first of {steps} that differs; {before} equal."
        equal = f"All {steps} are equal: every leaf has the same fingerprint."
        typer.echo(equal if report.is_equal else differs)
    rows = []
    for each in report.differences[:_SHOWN]:
        many, first = each.changed_share >= 0.01, each.first
        changed = f"{each.changed_share:.0%}" if many else f"{each.changed_count:,}"
        numbers = map(_number, (each.norm, each.relative, each.largest, each.cosine))
        element = f"{[*first.index]}: {first.before} -> {first.after}, {counted(first.bits, 'bit')}"
        if first.process is not None:
            element += f", process {first.process}"
        rows.append((each.path, each.role, changed, *numbers, element))
    numbers = ("changed", "norm", "relative", "largest", "cosine")
    print_rows(
        ("leaf", "role", *numbers, "first element"),
        rows,
        numbers,
        ("cosine", "largest", "norm", "role", "first element"),
    )
    tell_more(len(report.differences) - _SHOWN, "leaves")
    for paths, (root, step) in (
        (report.only_before, report.before),
        (report.only_after, report.after),
    ):
        if paths:
            typer.echo(f"Only at step {step} of {root}: {listed(paths, 10)}")
    if report.alike:
        typer.echo(f"Saved with other bits, and replayed alike here: {listed(report.alike, 10)}")
    count = len(report.differences) + len(report.alike)
    differ = counted(count, "leaf differs", "leaves differ")
    typer.echo(f"{differ}, {report.leaf_count - count:,} equal by fingerprint or every bit.")
    _tell_rounded(report.rounded)


@command(
    _GROUP,
    _show_diff,
    lambda report: not report.is_equal,
    has_steps=True,
)
def diff(
    root: Root,
    before: Annotated[
        str, typer.Argument(metavar="STEP", help="Step: number, latest, -1; or another run's root.")
    ],
    after: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step to compare with the first one.")
    ] = None,
    other: Annotated[
        str | None, typer.Option("--other", help="Root of the second step, if it is another.")
    ] = None,
    item: Item = None,
) -> StepComparison:
    """Compare two recorded steps, leaf by leaf; of two runs the first step at which they differ.

    \b
    Examples:
      adacheck diff checkpoints 1100 1200
      adacheck diff checkpoints latest latest --other /mnt/backup/checkpoints
      adacheck diff run_a run_b

    Leaves that have the same fingerprint are equal. Of the others the params come first, then the
    optimizer's state, the record last, and of each those that changed most: the share of their
    elements that changed, or their number, the norm of the change and the same relative to the
    leaf, the largest change of an element, the cosine of the angle between before and after, and
    the first element that changed, with its values, the bits that differ, and the process that
    wrote it.

    Of two runs fingerprints are compared step by step, which reads no array. There records come
    first: gradients that differ did so before all else.

    Exit code 0 if all leaves are equal, 1 if some differ, as diff's.

    With --json: the fields of adacheck_jax.tools.history.compare.StepComparison.
    """
    runs = after is None
    if runs and (other or re.fullmatch(r"latest|-?\d+", before)):
        raise InputError("expected two steps, or the root of another run, found one step.")
    other = before if runs else other
    with _walk(root, item) as first, progress_bar() as progress:
        from adacheck_jax.tools.history import compare as compares

        with _walk(other, item) if other else contextlib.nullcontext(first) as second:
            if runs:
                return compares.compare_runs(first, second, progress)
            old = first.find(step_of(before, "STEP")).number
            new = second.find(step_of(after, "STEP")).number
            return compares.compare_steps(first, old, second, new)


def _show_bisection(report: Bisection) -> None:
    """Print the steps that were looked at, and the first one."""
    rows = [(step, "no" if says is None else "yes", says) for step, says in report.tried.items()]
    print_rows(("step", "holds", ""), rows, right=("step",))
    steps = counted(report.searched_count, "recorded step")
    restored = f"{counted(report.restored_count, 'state')} of {steps} restored"
    if report.step is None:
        typer.echo(f"It does not hold at step {rows[0][0]}, the last one: {restored}.")
    else:
        before = "" if report.before is None else f", and does not at step {report.before}"
        typer.echo(f"Step {report.step} is the first at which it holds{before}: {restored}.")
        typer.echo(f"  {report.says}")
    _tell_rounded(report.rounded)


@command(_GROUP, _show_bisection, lambda report: report.step is None, has_steps=True)
def bisect(
    root: Root,
    predicate: Annotated[
        str | None,
        typer.Option(help="Function to call: path/to/file.py:function or package.module:function."),
    ] = None,
    non_finite: Annotated[
        bool, typer.Option("--non-finite", help="Look for the first NaN or infinity.")
    ] = False,
    first: Annotated[str | None, typer.Option(help="Oldest step to look at.")] = None,
    last: Annotated[str | None, typer.Option(help="Newest step to look at.")] = None,
    item: Item = None,
) -> Bisection:
    """Find the first recorded step at which something holds, by halving.

    \b
    Examples:
      adacheck bisect checkpoints --non-finite
      adacheck bisect checkpoints --predicate checks.py:is_dead

    The function gets the state, nested dicts of numpy arrays by the names in the leaf paths
    that adacheck inspect shows, and the step number. It returns something true where it holds;
    a text is shown. Of n steps about 2 + log2(n) are restored: it has to hold at all steps after
    the first at which it holds.

    Exit code 0 if there is such a step, 1 if it does not hold at the last one.

    With --json: the fields of adacheck_jax.tools.history.bisect.Bisection.
    """
    with _walk(root, item) as walk, progress_bar() as progress:
        from adacheck_jax.tools.history import bisect as bisects

        if (predicate is None) != non_finite:
            raise InputError("expected --predicate FILE.py:FUNCTION or --non-finite, one of them.")
        asked = bisects.not_finite if predicate is None else _asked(predicate)
        ends = [None if each is None else walk.find(step_of(each)).number for each in (first, last)]
        return bisects.bisect(walk, asked, *ends, progress=progress)


def _asked(target: str) -> Callable[[State], str | None]:
    """A function of the user's as a predicate."""
    from adacheck_jax.cli.callables import function_of

    asked = function_of(target, "with the state, nested dicts of arrays, and the step number")

    def holds(state: State) -> str | None:
        found = asked(state.tree(), state.step, where=f"at step {state.step} ")
        return None if not found else found if isinstance(found, str) else "it holds"

    return holds


@app.command(rich_help_panel=_GROUP)
def report(
    root: Root,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")
    ] = Path("report.html"),
    norms: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Restore at most N steps for norms, evenly spread."),
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Draw a page about a run: bytes, costs, norms, changes of leaves, and what was verified.

    \b
    Examples:
      adacheck report checkpoints -o report.html
      adacheck report checkpoints --norms 50

    The page is one file that loads nothing and runs no script; drawing it takes
    pip install 'adacheck-jax[report]'. The root is only read. Norms are those of restored steps,
    one after another on one device: of all steps where the run is small, else of none unless
    --norms says of how many. Beside a training that holds the accelerators set JAX_PLATFORMS=cpu.

    Exit code 1 if a step is damaged; the page is written all the same. An existing FILE is
    replaced.

    With --json: the fields of adacheck_jax.tools.report.gather.Report, and no page.
    """
    from adacheck_jax.tools.report.gather import gather

    with errors():
        place = root_of(root)
        if not as_json:
            _check(output, place)
        with progress_bar() as progress:
            found = gather(place, item, norms, progress)
        print_json(found) if as_json else _write(found, output)
    if found.damage:
        raise typer.Exit(1)


def _check(output: Path, root: AnyPath) -> None:
    """Refuse to draw without the packages for it, or where no page can be written."""
    try:
        from adacheck_jax.tools.report import page  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"report draws with packages that are not all there ({error}): pip install "
            "'adacheck-jax[report]', or print the facts with --json."
        ) from error
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise InputError(f"{output}: expected a file in a directory. Give another path with -o.")
    refuse_inside(output.absolute(), root)


def _write(found: Report, output: Path) -> None:
    """Write the page; a reader finds all of it, or the one before."""
    from adacheck_jax.tools.report.page import page_of

    at(output).write(page_of(found).encode())
    steps = counted(len(found.kept), "step")
    wrong = f", {len(found.damage):,} damaged" if found.damage else ""
    typer.echo(f"{output}: {steps}, {shown_bytes(found.summary.disk_bytes)} on disk{wrong}")
