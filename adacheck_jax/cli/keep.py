"""Commands that keep a root sound and small: verify, repair and compact."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from adacheck_jax.cli.command import (
    STEPS,
    Item,
    Json,
    Root,
    Step,
    errors,
    print_json,
    progress_bar,
    root_of,
    step_of,
)
from adacheck_jax.cli.tables import keep as tables
from adacheck_jax.tools.steps import InputError, newest

app = typer.Typer()


@app.command(context_settings=STEPS)
def verify(
    root: Root,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="Step; all if left out.")
    ] = None,
    item: Item = None,
    read_data: Annotated[bool, typer.Option("--read-data", help="Read every stored byte.")] = False,
    read_data_subset: Annotated[
        str | None, typer.Option(help="Read the data of a part of the steps, such as 10%.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the steps of --read-data-subset.")] = 0,
    replay: Annotated[
        bool, typer.Option("--replay", help="Recompute every step, and compare every leaf.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Look for damage in the steps under ROOT.

    \b
    Examples:
      adacheck verify checkpoints --read-data
      adacheck verify checkpoints latest --replay

    Without options the structure: manifests and what they say of each other, update programs, and
    that every file and every chunk of an array is there. --read-data checks the checksum of every
    chunk, and of what is stored whole the fingerprint. --replay restores each step on one device.

    Exit code 1 if there is damage, 2 if a step cannot be recomputed on this machine.

    With --json: the fields of adacheck_jax.tools.audit.RootReport.
    """
    from adacheck_jax.tools import audit

    with errors():
        number = None if step is None else newest(root_of(root), step_of(step), item)
        wanted = audit.Thoroughness(read_data, _part(read_data_subset), seed, replay)
        with progress_bar() as progress:
            report = audit.verify_root(root_of(root), number, item, wanted, progress)
    if as_json:
        print_json(report)
    else:
        tables.show_verification(report)
    if report.damaged_count:
        raise typer.Exit(1)
    if any(each.not_checked for each in report.steps):
        raise typer.Exit(2)


@app.command()
def repair(
    root: Root,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    read_data: Annotated[
        bool, typer.Option("--read-data", help="Look for damage in every stored byte.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also where a temporary directory is new.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove from ROOT what cannot be restored and what no step needs.

    \b
    Example: adacheck repair checkpoints --dry-run

    That is: what interrupted saves left, and steps that fail verification, if restoring them was
    tried and failed too. A step that another one builds on stays, and what this machine cannot
    judge. Stop the training run first: exit code 2 if a save may be under way.

    With --json: the fields of adacheck_jax.tools.upkeep.repair.RepairReport.
    """
    from adacheck_jax.tools.upkeep import repair as repairs

    with errors(), progress_bar() as progress:
        report = repairs.repair(
            root_of(root), read_data=read_data, dry_run=dry_run, force=force, progress=progress
        )
    if as_json:
        print_json(report)
    else:
        tables.show_repair(report)


@app.command(context_settings=STEPS)
def compact(
    root: Root,
    step: Step = "latest",
    item: Item = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look only; change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Turn one saved delta under ROOT into a base, in its place.

    \b
    Example: adacheck compact checkpoints 1200

    Restores the step on this machine, bit-exact and verified, and writes its state into its
    directory; at one moment it is a base, and what it built on is let go. A training may go on
    meanwhile: steps that follow begin at the new base.

    Exit code 1 if the step is damaged or cannot
    be restored exactly here: it stays as it was; 2 if it is no saved delta.

    With --json: the fields of adacheck_jax.tools.compaction.CompactionReport.
    """
    from adacheck_jax.tools import compaction

    with errors():
        report = compaction.compact(root_of(root), step_of(step), item, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        tables.show_compaction(report)


def _part(text: str | None) -> float:
    """Fraction of 1 from a percentage such as ``10%``."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    part = float(found[1]) / 100 if found else 0.0
    if not 0 < part <= 1:
        raise InputError(f"--read-data-subset: expected a percentage such as 10%, found {text!r}.")
    return part
