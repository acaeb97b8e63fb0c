"""The command that draws a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import adacheck_jax
from adacheck_jax.cli.command import Item, Json, Root, errors, print_json, progress_bar, root_of
from adacheck_jax.cli.printing import counted, shown_bytes
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:
    from adacheck_jax.tools.report.facts import Report

app = typer.Typer()

EVERY_S = 5
"""Seconds between two looks at a watched root, and between two loads of its page."""


@app.command()
def report(
    root: Root,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")
    ] = Path("report.html"),
    norms: Annotated[
        int | None,
        typer.Option(
            "--norms",
            min=0,
            metavar="N",
            help="Restore at most N steps for norms, evenly spread; by default all of a small run.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page anew whenever steps appear.")
    ] = False,
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Draw a page about a run: bytes, costs, norms, changes of leaves, and what was verified.

    \b
    Examples:
      adacheck report checkpoints -o report.html
      adacheck report checkpoints --norms 50
      adacheck report checkpoints --watch

    The page is one file that needs no network, and the root is only read. Norms of gradients,
    updates and changes are those of restored steps, one after another on one device: of all steps
    where the run is small, else of none unless --norms says of how many. --watch looks every few
    seconds beside a running training, on the CPU unless JAX_PLATFORMS says otherwise, and its page
    loads itself again; Ctrl-C ends it.

    Exit code 1 if a step is damaged; the page is written all the same. An existing FILE is
    replaced.

    With --json: the fields of adacheck_jax.tools.report.facts.Report, and no page.
    """
    from adacheck_jax.tools.report import gather

    with errors():
        place = root_of(root)
        if watch:
            _watch(place, output, item, norms, as_json=as_json)
            return
        if not as_json:
            _checked(output, place)
        with progress_bar() as progress:
            found = gather.gather(
                place, adacheck_jax.__version__, item, norm_count=norms, tell=progress
            )
        if as_json:
            print_json(found)
        else:
            _write(found, output)
            typer.echo(_told(found, output))
    if found.verification.damaged_count:
        raise typer.Exit(1)


def _watch(
    root: AnyPath, output: Path, item: str | None, norms: int | None, *, as_json: bool
) -> None:
    """Keep a page up to date until the user ends it."""
    if as_json:
        raise InputError("expected --watch or --json, found both: --watch keeps a page up to date.")
    _checked(output, root)
    import jax

    from adacheck_jax.tools.report import watching

    if jax.config.values["jax_platforms"] is None:  # the training holds the accelerators
        jax.config.update("jax_platforms", "cpu")
    newest: Report | None = None
    typer.echo(f"watching {root}, writing {output}; Ctrl-C ends it")
    try:
        for newest in watching.reports(
            root, adacheck_jax.__version__, item, norms, EVERY_S, typer.echo
        ):
            _write(newest, output, EVERY_S)
            typer.echo(_told(newest, output))
    except KeyboardInterrupt:
        if newest is None:
            typer.echo("stopped; no page was written")
        else:
            _write(newest, output)  # which does not load itself again
            typer.echo(f"stopped; {output} has the steps up to {newest.newest}")


def _checked(output: Path, root: AnyPath) -> None:
    """Refuse a place where no page can be written.

    Raises:
        InputError: it is a directory, has no parent, or lies under the root.
    """
    if output.is_dir():
        raise InputError(f"{output}: expected a file to write, found a directory. Name a file.")
    if not output.absolute().parent.is_dir():
        raise InputError(f"{output.absolute().parent}: expected a directory, found none.")
    if not isinstance(root, Location):
        place, top = output.absolute().parent.resolve(), root.resolve()
        if place == top or top in place.parents:
            raise InputError(
                f"{output}: expected a place outside of the checkpoint root {root}, where a "
                "manager keeps its steps. Give another path with -o."
            )


def _write(found: Report, output: Path, watch_s: int | None = None) -> None:
    """Write the page; a reader finds all of it, or the one before."""
    from adacheck_jax.tools.report import drawing

    at(output).write(drawing.page_of(found, watch_s).encode())


def _told(found: Report, output: Path) -> str:
    steps = counted(found.recorded_count, "recorded step", "recorded steps")
    damaged = found.verification.damaged_count
    wrong = f", {counted(damaged, 'damaged step', 'damaged steps')}" if damaged else ""
    return f"{output}: {steps}, {shown_bytes(found.disk_bytes)} on disk{wrong}"
