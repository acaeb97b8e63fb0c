"""Commands that hand steps over: to other formats and other directories, and from stock Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adacheck_jax.cli.command import (
    STEPS,
    Item,
    Json,
    Root,
    Target,
    bytes_of,
    errors,
    print_json,
    root_of,
    step_of,
)
from adacheck_jax.cli.tables import handover as tables
from adacheck_jax.tools.steps import InputError, newest

app = typer.Typer()
_FORMATS = ("orbax", "safetensors", "npz")


@app.command(context_settings=STEPS)
def export(
    root: Root,
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="Step (saved or deferred) or version; latest, -1."),
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="New directory; a new file for npz.")],
    kind: Annotated[
        str, typer.Option("--format", help="orbax, safetensors or npz.")
    ] = "safetensors",
    changes: Annotated[
        bool,
        typer.Option("--changes", help="Of a version, what changed since the one before, alone."),
    ] = False,
    params_only: Annotated[
        bool, typer.Option("--params-only/--all", help="The params alone, or every leaf.")
    ] = True,
    max_shard_size: Annotated[
        str, typer.Option(help="Largest safetensors file: 5GB is 5,000,000,000 bytes.")
    ] = "5GB",
    item: Item = None,
    as_json: Json = False,
) -> None:
    """Write one recorded step, or published version, to DEST for those who lack this library.

    \b
    Examples:
      adacheck export checkpoints 1200 model --format safetensors
      adacheck export published 1200 model --changes

    orbax: a checkpoint that ocp.StandardCheckpointer().restore(path) reads, and v1's load(path).
    safetensors: model.safetensors, or shards and their index; npz: one file for numpy.load. There
    a leaf's name is its path with dots. The export is read back and compared with the step before
    it gets its name. Exit code 1 if the step is damaged, not exact on this machine, or has leaves
    of a type that the format does not hold; 2 if there is no such step, or something is at DEST.
    With --changes each leaf that changed has two arrays: NAME.indices, flat and ascending, and
    NAME.bits, the new elements' bits.

    With --json: the fields of adacheck_jax.tools.handover.export.ExportReport.
    """
    from adacheck_jax.tools.handover import export as exports
    from adacheck_jax.tools.handover import published
    from adacheck_jax.tools.handover.formats import Format

    with errors():
        if kind not in _FORMATS:
            raise InputError(f"--format: expected one of {', '.join(_FORMATS)}, found {kind!r}.")
        top, wanted, number = root_of(root), Format(kind), step_of(step)
        shard_bytes = bytes_of("--max-shard-size", max_shard_size)
        if published.is_published(top):
            report = published.export_version(
                top, number, dest, wanted, changes=changes, shard_bytes=shard_bytes
            )
        elif changes:
            raise InputError(f"--changes: expected a root of published weights, found {root}.")
        else:
            report = exports.export(
                top,
                newest(top, number, item),
                dest,
                wanted,
                params_only=params_only,
                shard_bytes=shard_bytes,
                item=item,
            )
    if as_json:
        print_json(report)
    else:
        tables.show_export(report)


@app.command()
def transform(
    root: Root,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Directory of a new root.")],
    rules: Annotated[Path, typer.Option(help="TOML file of rules (docs/guide/layouts.md).")],
    step: Annotated[str, typer.Option(help="Step: number (saved or deferred), latest, -1.")],
    item: Item = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan alone.")] = False,
    as_json: Json = False,
) -> None:
    """Write one recorded step to a new root in another layout: scanned, fused, renamed, padded.

    \b
    Example: adacheck transform checkpoints scanned --rules rules.toml --step 1200

    A rule is applied to the params and to all that the optimizer keeps for them. The inverse of
    each is computed and compared, so that no bit is lost unasked. The step is a base there, which
    a run in the new layout restores and goes on from. docs/guide/layouts.md has the rules.
    Exit code 1 if a rule does not fit or would lose bits, or the step is damaged; 2 if there is no
    such step, or something is at DEST.

    With --json: the fields of adacheck_jax.tools.handover.transform.TransformReport.
    """
    from adacheck_jax.layout import read_rules
    from adacheck_jax.tools.handover import transform as transforms

    with errors():
        read = read_rules(rules.read_bytes(), str(rules))
        number = newest(root_of(root), step_of(step, "--step"), item)
        report = transforms.transform(root_of(root), dest, read, number, item, dry_run=dry_run)
    if as_json:
        print_json(report)
    else:
        tables.show_transform(report)


@app.command()
def cp(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="SRC[/STEP]... DEST", help="A root, or steps of one; a new root."),
    ],
    as_json: Json = False,
) -> None:
    """Copy a checkpoint root, or some of its steps with all that they build on, to DEST.

    \b
    Example: adacheck cp checkpoints/1100 checkpoints/1200 /mnt/backup/checkpoints

    Hard links stay hard links, so that the copy is as large as the original; cp -r would write
    each link as a file of its own. Every file is read back. A step is copied under a temporary name
    and renamed last; one that cannot be copied is told in its row. Steps that DEST has stay, and
    are linked to. A step that is deleted meanwhile has a row that says so. Exit code 1 if a step
    was refused or all were deleted, 2 if there is no such root or step.

    With --json: the fields of adacheck_jax.tools.handover.copying.CopyReport.
    """
    from adacheck_jax.tools.handover import copying

    with errors():
        if len(paths) < 2:
            raise InputError("expected SRC[/STEP]... and DEST, found one path.")
        *sources, dest = paths
        report = copying.copy(sources, dest)
    if as_json:
        print_json(report)
    else:
        tables.show_copy(report)
    results = {step.result for step in report.steps}
    if copying.REFUSED in results or results == {copying.DELETED}:
        raise typer.Exit(1)


@app.command(name="import")
def import_(
    target: Target,
    src: Annotated[
        str, typer.Argument(metavar="SRC", help="Checkpoint of stock Orbax, or safetensors files.")
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="New checkpoint root.")],
    step: Annotated[int, typer.Option(min=0, help="Step number of the base.")],
    as_json: Json = False,
) -> None:
    """Put a checkpoint of stock Orbax, or safetensors, as a base under a new root.

    \b
    Example: adacheck import train.py:state old/1200/default new_run --step 1200

    TARGET takes no argument and returns the abstract state, built with the Recorder, or a tuple of
    it and the Recorder. The state of the optimizer goes where the Recorder keeps it. In a program
    adacheck.tools.import_checkpoint does the same, onto your mesh. Exit code 1 if leaves do not
    fit.

    With --json: the fields of adacheck_jax.tools.handover.importing.ImportReport.
    """
    from adacheck_jax.cli import callables
    from adacheck_jax.tools.handover import importing

    with errors():
        state, recorder = callables.state_of(target)
        report = importing.import_base(src, dest, step, state, recorder)
    if as_json:
        print_json(report)
    else:
        tables.show_import(report)
