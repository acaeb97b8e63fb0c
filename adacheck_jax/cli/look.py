"""Commands that look at steps: ls, inspect and stats."""

from __future__ import annotations

from typing import Annotated

import typer

from adacheck_jax.cli.command import STEPS, Item, Json, Root, errors, print_json, root_of, step_of
from adacheck_jax.cli.tables import look as tables
from adacheck_jax.tools import inspection, listing

app = typer.Typer()


@app.command()
def ls(
    root: Root,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=1, help="Only the newest N steps.")
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="One row a lineage: a base and its deltas.")
    ] = False,
    as_json: Json = False,
) -> None:
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
    with errors():
        summary = listing.summarize_root(root_of(root), last)
    if as_json:
        print_json(summary)
    else:
        tables.show_root(summary, fold=fold)
    if summary.damaged_count:
        raise typer.Exit(1)


@app.command(context_settings=STEPS)
def inspect(
    root: Root,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step; the newest if left out.")
    ] = None,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Show what one step is made of, and how each of its leaves is restored.

    \b
    Example: adacheck inspect checkpoints 1200

    A leaf is replayed (computed by the update), recorded (the update consumed it), kept as
    differences of its bits, or stored. What the update computes is exact on every mesh if it is
    element-wise, and on the mesh that it was saved on if it is reducing.

    Each delta that it builds on was checked when it was saved: in full, by sample, by identity of
    the arrays that the update returned, or not at all (by an earlier release).

    With --json: the fields of adacheck_jax.tools.inspection.StepDetails.
    """
    with errors():
        details = inspection.describe_step(root_of(root), step_of(step), item)
    if as_json:
        print_json(details)
    else:
        tables.show_step(details)


@app.command()
def stats(
    root: Root,
    last: Annotated[int, typer.Option("--leaves", min=0, help="Leaves to list.")] = 15,
    as_json: Json = False,
) -> None:
    """Show where the bytes under ROOT go: by kind of file, by redundancy, and by leaf.

    \b
    Example: adacheck stats checkpoints

    Of files, names count hard links and files count inodes; named bytes are what a copy takes that
    makes each link a file of its own, such as cp -r. Redundancy says what became of the bytes of
    all recorded states in full; sizes of leaves are those in memory, before compression.

    With --json: the fields of adacheck_jax.tools.statistics.RootStatistics.
    """
    from adacheck_jax.tools import statistics

    with errors():
        report = statistics.statistics_of(root_of(root))
    if as_json:
        print_json(report)
    else:
        tables.show_statistics(report, last)
