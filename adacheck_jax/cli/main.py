"""The ``adacheck`` command: look at checkpoints, and see the library at work.

Tables are for people; ``--json`` prints one JSON object for programs.
"""

from __future__ import annotations  # noqa: I001, since the commands are listed in this order

import atexit
import gc
from typing import Annotated

import typer

import adacheck_jax
from adacheck_jax.cli import look, travel, handover, models
from adacheck_jax.cli.command import app, show_restores

# The commands are listed in the order of the first of these imports. Those that read arrays import
# their modules when they run: with them comes JAX, which takes seconds and which ls, inspect and
# --help do not need.

__all__ = ["app", "handover", "look", "main", "models", "travel"]


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

    ROOT is the directory or URL of a bucket that the checkpoint manager was given. STEP is a
    number, latest, or a place counted from the newest step: -1 is the newest, -2 the one before.

    Exit codes: 0 all is well; 1 a step is damaged, or what was looked for was found to be
    otherwise; 2 the command was given something that is not there, or this machine cannot judge it.
    """
    show_restores()


def main() -> None:
    """Run the command in a process of its own."""
    gc.freeze()  # what is imported stays: no collection looks at it again
    atexit.register(gc.freeze)  # nor at anything at the end, which took longer than many commands
    app()


if __name__ == "__main__":
    main()
