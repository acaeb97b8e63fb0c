"""Tables and sentences of the commands that hand steps over, without ``--json``."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.text import Text

from adacheck_jax.cli.printing import add_row, new_table, screen

if TYPE_CHECKING:  # which import JAX, or are not needed by other commands
    from adacheck_jax.tools.handover.copying import CopyReport
    from adacheck_jax.tools.handover.export import ExportReport
    from adacheck_jax.tools.handover.importing import ImportReport
    from adacheck_jax.tools.handover.transform import TransformReport


def show_export(report: ExportReport) -> None:
    """Print the files of an export, and what was compared."""
    files = new_table("file", "bytes", right=("bytes",))
    for each in report.files[:20]:
        add_row(files, each.name, decimal(each.size_bytes))
    console = screen()
    console.print(files)
    if len(report.files) > 20:
        console.print(f"and {len(report.files) - 20} more files", highlight=False)
    what = "params" if report.params_only else "all leaves"
    named = "Version" if report.kind in ("version", "changes") else "Step"
    replayed = f", {report.replayed_count} updates replayed" if report.replayed_count else ""
    sentence = (
        f"{named} {report.step} ({report.kind}{replayed}) is at {report.destination}: {what}, "
        f"{report.leaf_count:,} leaves, {decimal(report.leaf_bytes)}. Read back, every leaf has "
        "the bits that were saved."
    )
    console.print(Text(sentence))
    if report.empty:
        shown = ", ".join(report.empty[:10]) + (", ..." if len(report.empty) > 10 else "")
        console.print(Text(f"Without elements, which Orbax does not store: {shown}."))


def show_transform(report: TransformReport) -> None:
    """Print the leaves that rules concern in the first tree, and what was left as it was."""
    trees = report.trees or ("",)
    rows = new_table("before", "after")
    inside = [_inside(trees[0], leaves) for leaves in (report.changed, report.made)]
    for before, after in itertools.zip_longest(*inside):
        add_row(rows, before, after)
    console = screen()
    console.print(rows)
    others = f", and alike of {', '.join(trees[1:])}" if trees[1:] else ""
    would = "would be" if report.is_dry_run else "is"
    proof = "Their inverses give back every bit." if report.proved else "Some rules may lose bits."
    proof = "" if report.is_dry_run else f" {proof}"
    console.print(
        Text(
            f"Leaves of {trees[0] or 'the state'}{others}. Step {report.step} {would} at "
            f"{report.destination}.{proof}"
        )
    )
    shown = ", ".join(report.untouched[:10]) + (", ..." if len(report.untouched) > 10 else "")
    console.print(Text(f"As they were, {len(report.untouched)} leaves: {shown or 'none'}."))
    if report.rounds_otherwise:
        told = "The optimizer adds up elements: a run that goes on rounds otherwise there."
        console.print(Text(told))


def _inside(tree: str, leaves: Mapping[str, str]) -> list[str]:
    """Leaves of one tree; all leaves if it has none of them."""
    start = f"{tree}/" if tree else ""
    found = [
        f"{path[len(start) :]} {kind}" for path, kind in leaves.items() if path.startswith(start)
    ]
    return found or [f"{path} {kind}" for path, kind in leaves.items()]


def show_copy(report: CopyReport) -> None:
    """Print a row for each step, and what was saved by links."""
    numbers = ("files", "links", "written")
    rows = new_table("step", "result", *numbers, right=numbers)
    for each in report.steps:
        result = each.result if each.why is None else f"{each.result}: {each.why}"
        if each.is_added:
            result += " (another step builds on it)"
        counts = (each.file_count, each.link_count, decimal(each.written_bytes))
        add_row(rows, each.name, result, *(counts if each.file_count else (None, None, None)))
    console = screen()
    console.print(rows)
    console.print(
        Text(
            f"{decimal(report.written_bytes)} written to {report.destination}; as files of their "
            f"own the links would make it {decimal(report.plain_bytes)}. Every file was read back."
        )
    )
    if report.not_copied:
        console.print(Text(f"Not copied, as they are no steps: {', '.join(report.not_copied)}."))


def show_import(report: ImportReport) -> None:
    """Print where a checkpoint is now, and what was not in it."""
    made = f" Made, since no checkpoint has them: {', '.join(report.made[:10])}"
    made += ", ..." if len(report.made) > 10 else "."
    screen().print(
        Text(
            f"{report.source} is step {report.step} under {report.destination}, a base of "
            f"{report.leaf_count:,} leaves.{made if report.made else ''} Nothing could verify what "
            "was read."
        )
    )
