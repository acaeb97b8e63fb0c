"""Commands that look back through a run: log, diff, bisect and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from adacheck_jax.cli.command import (
    STEPS,
    Item,
    Json,
    Root,
    errors,
    print_json,
    progress_bar,
    root_of,
    step_of,
)
from adacheck_jax.cli.tables import travel as tables
from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:
    from adacheck_jax.tools.history.walk import State, Walk

app = typer.Typer()


@contextlib.contextmanager
def _walk(root: str, item: str | None) -> Iterator[Walk]:
    from adacheck_jax.tools.history.walk import Walk

    walk = Walk(root_of(root), item)
    with contextlib.closing(walk):
        yield walk


@app.command()
def log(
    root: Root,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, help="Only the newest N steps.")
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
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
    with errors(), _walk(root, item) as walk, progress_bar() as progress:
        from adacheck_jax.tools.history import log as logs

        report = logs.log(walk, last, progress)
    if as_json:
        print_json(report)
    else:
        tables.show_log(report)


@app.command(context_settings=STEPS)
def diff(
    root: Root,
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="Step: number, latest, -1.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Step: number, latest, -1.")],
    other: Annotated[
        str | None, typer.Option("--other", help="Root of the second step, if it is another.")
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Compare two recorded steps, leaf by leaf.

    \b
    Examples:
      adacheck diff checkpoints 1100 1200
      adacheck diff checkpoints latest latest --other /mnt/backup/checkpoints

    Leaves that have the same fingerprint are equal. Of the others, those that changed most first:
    the share of their elements that changed, the norm of the change and the same relative to the
    leaf, the largest change of an element, and the cosine of the angle between before and after.

    Exit code 0 if all leaves are equal, 1 if some differ, as diff's.

    With --json: the fields of adacheck_jax.tools.history.compare.StepComparison.
    """
    with errors(), _walk(root, item) as first:
        from adacheck_jax.tools.history import compare as compares

        with _walk(other, item) if other else contextlib.nullcontext(first) as second:
            old = first.number(step_of(before, "BEFORE"))
            new = second.number(step_of(after, "AFTER"))
            report = compares.compare_steps(first, old, second, new)
    if as_json:
        print_json(report)
    else:
        tables.show_diff(report)
    if report.differences or report.only_before or report.only_after:
        raise typer.Exit(1)


@app.command(context_settings=STEPS)
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
    as_json: Json = False,
) -> None:
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
    with errors(), _walk(root, item) as walk, progress_bar() as progress:
        from adacheck_jax.tools.history import bisect as bisects

        if (predicate is None) != non_finite:
            raise InputError("expected --predicate FILE.py:FUNCTION or --non-finite, one of them.")
        wanted = bisects.not_finite if predicate is None else _asked(predicate)
        ends = [None if each is None else walk.number(step_of(each)) for each in (first, last)]
        report = bisects.bisect(walk, wanted, *ends, tell=progress)
    if as_json:
        print_json(report)
    else:
        tables.show_bisection(report)
    if report.step is None:
        raise typer.Exit(1)


def _asked(target: str) -> Callable[[State], str | None]:
    """A function of the user's as a predicate."""
    from adacheck_jax.cli import callables

    function = callables.function(target)

    def holds(state: State) -> str | None:
        found = callables.called(target, function, state.tree(), state.step)
        return None if not found else found if isinstance(found, str) else "it holds"

    return holds


@app.command(context_settings=STEPS)
def compare(
    run1: Annotated[str, typer.Argument(metavar="RUN1", help="Root of one run.")],
    run2: Annotated[
        str, typer.Argument(metavar="RUN2", help="Root of the run to compare it with.")
    ],
    first: Annotated[str | None, typer.Option(help="First step to compare.")] = None,
    last: Annotated[str | None, typer.Option(help="Last step to compare.")] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Find the first step, leaf and element at which two runs that should be equal are not.

    \b
    Example: adacheck compare run_a run_b

    The fingerprints of all leaves are compared step by step, which reads no array. The first step
    that differs is restored from both, and its leaves are compared: gradients first, since a
    difference in them came before all others. An element is shown with its values, the number of
    bits that differ, and the process that wrote it.

    Exit code 0 if all common steps are equal, 1 if one differs, 2 if the runs have other leaves.

    With --json: the fields of adacheck_jax.tools.history.compare.RunComparison.
    """
    with errors(), _walk(run1, item) as one, _walk(run2, item) as two, progress_bar() as progress:
        from adacheck_jax.tools.history import compare as compares

        ends = [None if each is None else one.number(step_of(each)) for each in (first, last)]
        report = compares.compare_runs(one, two, *ends, tell=progress)
    if as_json:
        print_json(report)
    else:
        tables.show_comparison(report)
    if report.step is not None:
        raise typer.Exit(1)
