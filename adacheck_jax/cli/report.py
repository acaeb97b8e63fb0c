"""The command that draws a page about a run."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adacheck_jax.cli.command import (
    Item,
    Json,
    Root,
    app,
    errors,
    print_json,
    progress_bar,
    root_of,
)
from adacheck_jax.cli.printing import counted, shown_bytes
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.steps import InputError, existing

if TYPE_CHECKING:
    from adacheck_jax.tools.report.facts import Report

EVERY_S = 5
"""Seconds between two looks at a watched root, and between two loads of its page."""


@app.command(rich_help_panel="Look back through a run")
def report(
    root: Root,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")
    ] = Path("report.html"),
    norms: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Restore at most N steps for norms, evenly spread."),
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

    The page is one file that loads nothing and runs no script; drawing it takes
    pip install 'adacheck-jax[report]'. The root is only read. Norms are those of restored steps,
    one after another on one device: of all steps where the run is small, else of none unless
    --norms says of how many. --watch looks every few seconds beside a running training, on the CPU
    unless JAX_PLATFORMS says otherwise, and its page loads itself again; Ctrl-C ends it.

    Exit code 1 if a step is damaged; the page is written all the same. An existing FILE is
    replaced.

    With --json: the fields of adacheck_jax.tools.report.facts.Report, and no page.
    """
    from adacheck_jax.tools.report.gather import gather

    with errors():
        place = root_of(root)
        gathered = functools.partial(gather, place, item, norms)
        if as_json and watch:
            raise InputError("expected --watch or --json, found both: --watch writes a page.")
        if not as_json:
            _check(output, place)
        if watch:
            _watch(place, functools.partial(gathered, known={}), output)
            return
        with progress_bar() as progress:
            found = gathered(tell=progress)
        print_json(found) if as_json else _write(found, output)
    if found.damage:
        raise typer.Exit(1)


def _watch(root: AnyPath, gathered: Callable[[], Report], output: Path) -> None:
    """Keep a page up to date until the user ends it."""
    import jax

    if jax.config.values["jax_platforms"] is None:  # the training holds the accelerators
        jax.config.update("jax_platforms", "cpu")
    existing(root)
    newest: Report | None = None
    typer.echo(f"watching {root}, writing {output}; Ctrl-C ends it")
    try:
        for newest in _reports(root, gathered):
            _write(newest, output, EVERY_S)
    except KeyboardInterrupt:
        typer.echo("stopped")
        if newest is not None:
            _write(newest, output)  # which does not load itself again


def _reports(root: AnyPath, gathered: Callable[[], Report]) -> Iterator[Report]:
    """A report whenever steps have come, gone or changed."""
    before, said = None, ""
    while True:
        began_s, why = time.monotonic(), ""
        now: set[object] = {name for name in at(root).folders() if roots.TMP_SUFFIX not in name}
        for each in roots.items_of(root):
            with contextlib.suppress(OSError):  # damaged, or being deleted
                now.add((str(each), manifest_file.stamp(each)))
        if now != before:
            try:
                yield gathered()
                before = now
            except (InputError, AdaCheckError, OSError) as error:
                # A step may have been deleted while it was looked at; the next look tells.
                why = " ".join(str(error).split())
                if why != said:
                    typer.echo(f"waiting: {why}")
            said = why
        took_s = time.monotonic() - began_s
        time.sleep(max(EVERY_S, 4 * took_s))  # busy for a fifth of the time at most


def _check(output: Path, root: AnyPath) -> None:
    """Refuse to draw without the packages for it, or where no page can be written."""
    try:
        from adacheck_jax.tools.report import page  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"report draws with packages that are not all there ({error}): pip install "
            "'adacheck-jax[report]', or print the facts with --json."
        ) from error
    folder = output.absolute().parent.resolve()
    if output.is_dir() or not folder.is_dir():
        raise InputError(f"{output}: expected a file in a directory. Give another path with -o.")
    if not isinstance(root, Location) and folder.is_relative_to(root.resolve()):
        raise InputError(
            f"{output}: expected a place outside of the checkpoint root {root}, where a "
            "manager keeps its steps. Give another path with -o."
        )


def _write(found: Report, output: Path, watch_s: int | None = None) -> None:
    """Write the page; a reader finds all of it, or the one before."""
    from adacheck_jax.tools.report.page import page_of

    at(output).write(page_of(found, watch_s).encode())
    steps = counted(len(found.kept), "step")
    wrong = f", {len(found.damage):,} damaged" if found.damage else ""
    typer.echo(f"{output}: {steps}, {shown_bytes(found.summary.disk_bytes)} on disk{wrong}")
