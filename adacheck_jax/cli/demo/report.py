"""Report of the demonstration, and its tables and conclusion for people."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of one kind of save.

    Attributes:
        kind: ``base``, ``delta`` or ``stock Orbax`` (``StandardSave`` of the same state).
        new_bytes: bytes that one step adds on disk.
        blocking_ms: median milliseconds for which ``save`` blocks the training loop.
    """

    kind: str
    new_bytes: int
    blocking_ms: float


@dataclass(frozen=True, slots=True)
class MeshRestore:
    """One restore of one step.

    Attributes:
        mesh: shape of the target mesh, data x model.
        restore_s: seconds of one restore in a fresh process, compiling included.
        leaf_count: number of leaves compared with the restore on the mesh that saved them.
        different: leaf paths of the leaves whose bits differ; empty if all are equal.
    """

    mesh: str
    restore_s: float
    leaf_count: int
    different: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Result of the demonstration.

    Attributes:
        steps: training steps of each run.
        seed: seed that chose the moment of the kill.
        last_loss_step: last step whose loss the killed run reported.
        resumed_step: newest committed step, from which the new process resumed.
        was_saving: True if the kill interrupted a save.
        compared_loss_count: number of losses, before and after the kill, that were compared with
            those of the uninterrupted run.
        restored_step: the step that was copied aside and restored on every mesh.
        restored_kind: ``base`` or ``delta``.
        restored_depth: number of deltas that each restore folded onto the base.
        restores: one restore for each mesh, the mesh that saved first.
        saves: costs of one save of each kind.
        root: checkpoint root that the demonstration left.
        total_s: seconds of the whole demonstration.
        failures: one sentence for each difference; empty if every bit was equal.
    """

    steps: int
    seed: int
    last_loss_step: int
    resumed_step: int
    was_saving: bool
    compared_loss_count: int
    restored_step: int
    restored_kind: str
    restored_depth: int
    restores: tuple[MeshRestore, ...]
    saves: tuple[SaveCost, ...]
    root: str
    total_s: float
    failures: tuple[str, ...]


def show(report: DemoReport, console: Console) -> None:
    """Print a report for people: tables, then the conclusion or the failures."""
    console.print()
    console.print(_save_table(report.saves))
    console.print()
    console.print(_restore_table(report.restores))
    console.print()
    if report.failures:
        console.print("FAILED: not every bit is equal.", style="bold red")
        for failure in report.failures:
            console.print(failure, markup=False, highlight=False)
        console.print(f"Repeat it with --seed {report.seed}.")
    else:
        console.print(_conclusion(report), highlight=False, markup=False)
    console.print()
    console.print("Look at what it left:", style="bold")
    for line in _commands(report):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{report.total_s:.0f} s", style="dim", highlight=False)


def _commands(report: DemoReport) -> list[str]:
    """Commands that show what the demonstration left, with a word on each."""
    root = shlex.quote(report.root)
    lines = [
        (f"adacheck ls {root}", "its newest steps"),
        (f"adacheck log {root}", "norms and learning rate of each step"),
        (f"adacheck diff {root} -2 -1", "what one step changed"),
        (f"adacheck verify {root} --read-data --replay", "every stored bit, replayed"),
        (f"rm -r {shlex.quote(str(Path(report.root).parent))}", "remove it"),
    ]
    width = max(len(command) for command, _ in lines)
    return [f"{command.ljust(width)}  # {said}" for command, said in lines]


def _save_table(saves: tuple[SaveCost, ...]) -> Table:
    stock = next(save for save in saves if save.kind == "stock Orbax")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("one save")
    for name in ("bytes", "of stock", "blocking", "of stock"):
        table.add_column(name, justify="right")
    for save in saves:
        table.add_row(
            save.kind,
            decimal(save.new_bytes),
            f"{save.new_bytes / stock.new_bytes:.2f}",
            f"{save.blocking_ms:.1f} ms",
            f"{save.blocking_ms / stock.blocking_ms:.2f}",
        )
    return table


def _restore_table(restores: tuple[MeshRestore, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("restore on")
    table.add_column("time", justify="right")
    table.add_column("leaves verified", justify="right")
    for each in restores:
        verified = each.leaf_count - len(each.different)
        table.add_row(each.mesh, f"{each.restore_s:.2f} s", f"{verified} of {each.leaf_count}")
    return table


def _conclusion(report: DemoReport) -> str:
    moment = "in the middle of a save" if report.was_saving else "between two saves"
    replayed = f", a base and {report.restored_depth} deltas," if report.restored_depth else ""
    meshes = [each.mesh for each in report.restores]
    return (
        f"A run was killed {moment} after step {report.last_loss_step}. A new process resumed "
        f"from step {report.resumed_step} and went on to step {report.steps}: all "
        f"{report.compared_loss_count} losses before and after the kill equal those of a run that "
        f"was never interrupted, bit for bit. Step {report.restored_step}{replayed} copied out of "
        f"its root, was restored on {len(meshes)} meshes ({', '.join(meshes)}): each of its "
        f"{report.restores[0].leaf_count} leaves has the same bits on all of them."
    )
