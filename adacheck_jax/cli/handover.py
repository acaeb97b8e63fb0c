"""Commands that hand steps over, to other formats and other directories."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from adacheck_jax.cli.command import DryRun, Item, Root, command, progress_bar, root_of, step_of
from adacheck_jax.cli.printing import print_rows, tell_more
from adacheck_jax.errors import listed
from adacheck_jax.tools.handover.formats import Format

if TYPE_CHECKING:  # which import JAX, or are not needed by other commands
    from adacheck_jax.tools.handover.copying import CopyReport
    from adacheck_jax.tools.handover.export import ExportReport
    from adacheck_jax.tools.handover.transform import TransformReport

_GROUP = "Hand steps over"


def _show_export(report: ExportReport) -> None:
    """Print the files of an export, and what was compared."""
    files = [(name, decimal(size_bytes)) for name, size_bytes in report.files.items()]
    print_rows(("file", "bytes"), files[:20], right=("bytes",))
    tell_more(len(files) - 20, "files")
    what = "params" if report.params_only else "all leaves"
    named = "Version" if report.kind == "version" else "Step"
    replayed = f", {report.replayed_count} updates replayed" if report.replayed_count else ""
    typer.echo(
        f"{named} {report.step} ({report.kind}{replayed}) is at {report.destination}: {what}, "
        f"{report.leaf_count:,} leaves, {decimal(report.leaf_bytes)}. Read back, every leaf has "
        "the bits that were saved."
    )
    if report.empty:
        typer.echo(f"Without elements, which Orbax does not store: {listed(report.empty, 10)}.")


@command(_GROUP, _show_export, has_steps=True)
def export(
    root: Root,
    step: Annotated[
        str,
        typer.Argument(metavar="STEP", help="Step (saved or deferred) or version; latest, -1."),
    ],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="New directory.")],
    kind: Annotated[Format, typer.Option("--format")] = Format.SAFETENSORS,
    params_only: Annotated[
        bool, typer.Option("--params-only/--all", help="The params alone, or every leaf.")
    ] = True,
    item: Item = None,
) -> ExportReport:
    """Write one recorded step, or published version, to DEST for those who lack this library.

    \b
    Example: adacheck export checkpoints 1200 model --format safetensors

    orbax: a checkpoint that ocp.StandardCheckpointer().restore(path) reads, and v1's load(path).
    safetensors: model.safetensors, or shards of 5 GB and their index; a leaf's name is its path
    with dots. The export is read back and compared with the step before it gets its name. Exit
    code 1 if the step is damaged, not exact on this machine, or has leaves of a type that the
    format does not hold; 2 if there is no such step, or something is at DEST.

    With --json: the fields of adacheck_jax.tools.handover.export.ExportReport.
    """
    from adacheck_jax.tools.handover import export as exports

    place, number = root_of(root), step_of(step)
    return exports.export(place, number, dest, kind, params_only=params_only, item=item)


def _show_transform(report: TransformReport) -> None:
    """Print the leaves that rules concern in the first tree, and what was left as it was."""
    trees = report.trees or ("",)
    start = f"{trees[0]}/" if trees[0] else ""
    inside = []
    for leaves in (report.changed, report.made):
        found = {k.removeprefix(start): v for k, v in leaves.items() if k.startswith(start)}
        inside.append([f"{path} {kind}" for path, kind in (found or leaves).items()])
    print_rows(("before", "after"), itertools.zip_longest(*inside))
    others = f", and alike of {', '.join(trees[1:])}" if trees[1:] else ""
    proof = (
        " Their inverses give back every bit." if report.proved else " Some rules may lose bits."
    )
    typer.echo(
        f"Leaves of {trees[0] or 'the state'}{others}. Step {report.step} "
        f"{'would be' if report.is_dry_run else 'is'} at {report.destination}."
        f"{'' if report.is_dry_run else proof}"
    )
    shown = listed(report.untouched, 10) or "none"
    typer.echo(f"As they were, {len(report.untouched)} leaves: {shown}.")
    if report.rounds_otherwise:
        typer.echo("The optimizer adds up elements: a run that goes on rounds otherwise there.")


@command(_GROUP, _show_transform)
def transform(
    root: Root,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Directory of a new root.")],
    rules: Annotated[Path, typer.Option(help="TOML file of rules (docs/guide/layouts.md).")],
    step: Annotated[str, typer.Option(help="Step: number (saved or deferred), latest, -1.")],
    item: Item = None,
    dry_run: DryRun = False,
) -> TransformReport:
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

    read = read_rules(rules.read_bytes(), str(rules))
    number = step_of(step, "--step")
    return transforms.transform(root_of(root), dest, read, number, item, dry_run=dry_run)


def _show_copy(report: CopyReport) -> None:
    """Print a row for each step, and what was written."""
    rows = []
    for each in report.steps:
        result = each.result if each.why is None else f"{each.result}: {each.why}"
        written = decimal(each.written_bytes) if each.written_bytes else None
        rows.append((each.name, result, written))
    print_rows(("step", "result", "written"), rows, right=("written",))
    if report.not_copied:
        typer.echo(f"Not copied, as they are no steps: {', '.join(report.not_copied)}.")
    typer.echo(
        f"Every file was read back. {decimal(report.written_bytes)} to {report.destination}."
    )


def _copied(report: CopyReport) -> bool:
    results = {step.result for step in report.steps}
    return "refused" in results or results == {"deleted meanwhile"}


@command(_GROUP, _show_copy, _copied)
def cp(
    root: Root,
    dest: Annotated[str, typer.Argument(metavar="DEST", help="Another root: a directory or URL.")],
) -> CopyReport:
    """Copy the steps of a checkpoint root to another one, on a disk or in a bucket.

    \b
    Examples:
      adacheck cp checkpoints /mnt/backup/checkpoints
      adacheck cp checkpoints s3://bucket/run

    On a disk hard links stay hard links, and the copy is as large as the original; cp -r would
    write each link as a file of its own. In a bucket a delta refers to the steps that it builds on;
    back on a disk it has links to them. Every file is read back. A step counts as one when it is
    whole; one that cannot be copied is told in its row. Steps that DEST has stay: after a kill call
    it again. A step that is deleted meanwhile has a row that says so. Exit code 1 if a step was
    refused or all were deleted, 2 if there is no such root, or a bucket does not answer.

    With --json: the fields of adacheck_jax.tools.handover.copying.CopyReport.
    """
    from adacheck_jax.tools.handover import copying

    with progress_bar() as progress:
        return copying.copy(root_of(root), root_of(dest), progress)
