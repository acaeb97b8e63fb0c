"""The ``adacheck`` command: look at checkpoints, and see the library at work.

Tables are for people; ``--json`` prints one JSON object for programs.
"""

from __future__ import annotations

import atexit
import gc
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import adacheck_jax
from adacheck_jax.cli import handover, keep, look, models, report, travel
from adacheck_jax.cli.command import Json, WholeSentences, errors, print_json, show_restores

# Commands that read arrays import their modules when they run: with them comes JAX, which takes
# seconds to import and which ls, inspect and --help do not need.

app = typer.Typer(
    cls=WholeSentences,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # paragraphs are wrapped to the terminal's width, and pipes stay plain
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"adacheck {adacheck_jax.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Look at checkpoints in which every training step is a base or a delta.

    ROOT is the directory or URL (gs://, s3://) that the checkpoint manager was given. STEP is a
    number, latest, or a place counted from the newest step: -1 is the newest, -2 the one before.

    Exit codes: 0 all is well; 1 a step is damaged, or what was looked for was found to be
    otherwise; 2 the command was given something that is not there, or this machine cannot judge it.
    """
    show_restores()


for commands in (look, travel, report, keep, handover, models):
    app.registered_commands += commands.app.registered_commands


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=12, help="Training steps of each run.")] = 40,
    keep: Annotated[
        Path | None, typer.Option(help="New directory to work in; else a temporary one. Both stay.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Chooses the moment of the kill; random if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train, kill -9, resume, restore on four meshes, and compare every bit. Takes a minute or two.

    Needs no accelerator: child processes train a small language model on 8 virtual CPU devices.
    Exit code 1 if any bit differs.
    With --json: the fields of adacheck_jax.cli.demo.report.DemoReport.
    """
    from adacheck_jax.cli.demo import report as reports
    from adacheck_jax.cli.demo import run

    console = Console(quiet=as_json)
    with errors():
        report = run.run_demo(steps=steps, seed=seed, keep=keep, console=console)
    if as_json:
        print_json(report)
    else:
        reports.show(report, console)
    if report.failures:
        raise typer.Exit(1)


def main() -> None:
    """Run the command in a process of its own."""
    gc.freeze()  # what is imported stays: no collection looks at it again
    atexit.register(gc.freeze)  # nor at anything at the end, which took longer than many commands
    app()


if __name__ == "__main__":
    main()
