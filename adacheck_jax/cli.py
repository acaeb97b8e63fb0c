"""The ``adacheck`` command: look at checkpoints, and see the library at work.

Tables are for people; ``--json`` prints one JSON object for programs. Exit codes: 0 all is well, 1
a step is damaged or a demonstration failed, 2 the command was given something that is not there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from adacheck_jax import callables, inspection
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.inspection import InputError, RootSummary, StepDetails
from adacheck_jax.recorder import Recorder
from adacheck_jax.report import Balance, RedundancyReport, redundancy_report

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at checkpoints in which every training step is a base or a delta.",
)

Root = Annotated[Path, typer.Argument(help="Directory given to the checkpoint manager.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command()
def ls(root: Root, as_json: Json = False) -> None:
    """List the steps under ROOT: base or delta, what each builds on, what it added.

    Exit code 1 if a step cannot be restored. Array data is verified by a restore, not here.
    With --json: root, disk_bytes, and steps, each with step, item, kind, update_count, parent,
    depth, new_bytes and error (null if all is well).
    """
    with _errors():
        summary = inspection.summarize_root(root)
    if as_json:
        _print_json(summary)
    else:
        _show_root(summary)
    if any(step.error for step in summary.steps):
        raise typer.Exit(1)


@app.command()
def inspect(
    root: Root,
    step: Annotated[int | None, typer.Argument(help="Step number; the newest if left out.")] = None,
    item: Annotated[
        str | None, typer.Option(help="Item name, where a step holds several such items.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what one step is made of, and how each of its leaves is restored.

    A leaf is replayed (computed by the update), recorded (the update consumed it), kept as
    differences of its bits, or stored. What the update computes is exact on every mesh if it is
    element-wise, and on the mesh that it was saved on if it is reducing.
    With --json: step, directory, kind, reason, update_count, parent, base, depth, replayed_count,
    problem, new_bytes, versions, groups (name, leaf_count, leaf_bytes) and leaves (path,
    description, group, exactness, source, box_count, leaf_bytes, fingerprint).
    """
    with _errors():
        details = inspection.describe_step(root, step, item)
    if as_json:
        _print_json(details)
    else:
        _show_step(details)


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            help="Function to call: path/to/file.py:function or package.module:function."
        ),
    ],
    devices_per_process: Annotated[
        int, typer.Option(min=1, help="Devices of an abstract mesh that one process has.")
    ] = 8,
    max_deltas: Annotated[int, typer.Option(min=0, help="Deltas for each base.")] = 20,
    as_json: Json = False,
) -> None:
    """Say what saving every step of a model would cost, before there is a machine to train it on.

    TARGET takes no argument and returns an abstract state (a pytree of jax.ShapeDtypeStruct with
    shardings, which may be over a jax.sharding.AbstractMesh), or a tuple of it and the Recorder.
    No array is allocated, and no device is needed.
    With --json: the fields of adacheck_jax.report.RedundancyReport.
    """
    with _errors():
        made = callables.call(target)
        has_recorder = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Recorder)
        state, recorder = made if has_recorder else (made, None)
        try:
            report = redundancy_report(
                state, recorder, devices_per_process=devices_per_process, max_deltas=max_deltas
            )
        except AdaCheckError as error:  # here it is the input that is wrong
            raise InputError(f"{target}: {error}") from error
    if as_json:
        _print_json(report)
    else:
        _show_plan(report)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=12, help="Training steps of each run.")] = 40,
    keep: Annotated[
        Path | None, typer.Option(help="New directory to work in and to keep; else temporary.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Chooses the moment of the kill; random if left out.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train, kill -9, resume, restore on four meshes, and compare every bit. Takes a minute or two.

    Needs no accelerator: child processes train a small language model on 8 virtual CPU devices.
    Exit code 1 if any bit differs. With --json: the fields of adacheck_jax.demo.run.DemoReport.
    """
    from adacheck_jax.demo import run  # the other commands need none of it

    console = Console(quiet=as_json)
    with _errors():
        report = run.run_demo(steps=steps, seed=seed, keep=keep, console=console)
    if as_json:
        _print_json(report)
    else:
        run.show(report, console)
    if report.failures:
        raise typer.Exit(1)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turns what can go wrong into one line on stderr and an exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (InputError, OSError) as error:
        _fail(error, 2)
    except AdaCheckError as error:
        _fail(error, 1)


def _fail(error: Exception, code: int) -> None:
    typer.echo(f"adacheck: {' '.join(str(error).split())}", err=True)
    raise typer.Exit(code) from error


def _print_json(record: Any) -> None:
    typer.echo(json.dumps(dataclasses.asdict(record), indent=2))


def _console() -> Console:
    """The terminal; or, for a file or a pipe, lines long enough to keep a row on one line."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 200))


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _add_row(table: Table, *cells: object) -> None:
    """Adds cells as they are: a shape such as ``[4]`` is not rich's markup."""
    table.add_row(*(Text("" if cell is None else str(cell)) for cell in cells))


def _show_root(summary: RootSummary) -> None:
    numbers = ("step", "updates", "depth", "new bytes")
    several = len({Path(step.item).name for step in summary.steps}) > 1
    names = ("step", *(("item",) if several else ()), "kind", "updates", "parent", "depth")
    table = _table(*names, "new bytes", "status", right=numbers)
    for step in summary.steps:
        number = "?" if step.step is None else step.step
        parent = None if step.parent is None else f"on {step.parent}"
        _add_row(
            table,
            *((number, step.item) if several else (number,)),
            step.kind or "?",
            step.update_count,
            parent,
            step.depth,
            decimal(step.new_bytes),
            "ok" if step.error is None else _first_sentence(step.error),
        )
    console = _console()
    console.print(table)
    total = f"{decimal(summary.disk_bytes)} on disk, each hard-linked file counted once"
    console.print(total, style="dim", highlight=False)


def _first_sentence(message: str) -> str:
    return re.split(r"(?<=\.)\s", message, maxsplit=1)[0]


def _show_step(details: StepDetails) -> None:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    _add_row(facts, "step", f"{details.step} ({details.kind}: {details.reason})")
    _add_row(facts, "directory", details.directory)
    if details.parent is not None:
        _add_row(facts, "builds on", f"step {details.parent}, delta {details.depth} of its lineage")
        counts = (("delta", details.depth), ("update", details.replayed_count))
        deltas, updates = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts)
        _add_row(facts, "restore reads", f"base {details.base} and {deltas}; replays {updates}")
    _add_row(
        facts,
        "updates so far",
        "no recorder" if details.update_count is None else details.update_count,
    )
    replayable = "yes" if details.problem is None else f"no: {details.problem}"
    _add_row(facts, "updates replayed", replayable)
    _add_row(facts, "new bytes", decimal(details.new_bytes))
    _add_row(facts, "written by", ", ".join(f"{k} {v}" for k, v in details.versions.items()))
    groups = _table("group", "leaves", "bytes", right=("leaves", "bytes"))
    for group in details.groups:
        _add_row(groups, group.name, group.leaf_count, decimal(group.leaf_bytes))
    names = ("leaf path", "type", "update", "restored", "boxes", "fingerprint")
    leaves = _table(*names, right=("boxes",))
    for leaf in details.leaves:
        cells = (leaf.path, leaf.description, leaf.exactness, leaf.source, leaf.box_count)
        _add_row(leaves, *cells, leaf.fingerprint)
    console = _console()
    for table in (facts, groups, leaves):
        console.print(table)
        console.print()


def _show_plan(report: RedundancyReport) -> None:
    console = _console()
    counts = (
        (report.leaf_count, "leaves"),
        (report.device_count, "devices"),
        (report.process_count, "processes"),
    )
    console.print(", ".join(f"{count:,} {what}" for count, what in counts), highlight=False)
    console.print()
    saves = _table("a save", "bytes", "times less", "each process", right=("bytes", "times less"))
    for name, size_bytes, balance in (
        ("all that each device holds", report.held_bytes, None),
        ("stock Orbax", report.state_bytes, None),
        ("base", report.base_bytes, report.base),
        ("delta", report.delta_bytes, report.delta),
        (f"mean of 1 base, {report.max_deltas} deltas", report.amortised_bytes, None),
    ):
        if size_bytes is not None:
            less = _ratio(report.held_bytes / size_bytes) if size_bytes else None
            _add_row(saves, name, decimal(round(size_bytes)), less, _share(balance))
    kinds = _table("redundancy", "bytes", "why", right=("bytes",))
    for name, size_bytes, why in (
        ("declared replicas", report.replica_bytes, "another device holds the same: never written"),
        ("computed by the update", report.computed_bytes, "replayed, so no delta has it"),
        ("record", report.record_bytes, "what the update consumes: in every delta"),
        ("other leaves", report.other_bytes, "no update computes them: in every delta"),
    ):
        if size_bytes is not None:
            _add_row(kinds, name, decimal(size_bytes), why)
    for table in (saves, kinds):
        console.print(table)
        console.print()
    console.print(_in_words(report), highlight=False)
    bounds = (
        "At most: what compresses, is zero, is equal or did not change is known at a save only."
    )
    console.print(bounds, style="dim", highlight=False)


def _ratio(ratio: float | None) -> str:
    """As many digits as a person wants to read."""
    return "?" if ratio is None else f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


def _share(balance: Balance | None) -> str | None:
    if balance is None:
        return None
    least, most = decimal(balance.min_bytes), decimal(balance.max_bytes)
    return least if least == most else f"{least} to {most}"


def _in_words(report: RedundancyReport) -> str:
    held, stock = decimal(report.held_bytes), decimal(report.state_bytes)
    if report.delta_bytes is None or report.amortised_bytes is None:
        return (
            f"One step costs {stock} instead of {held}, and every step is a base: there is no "
            "Recorder in this state. Wrap the optimizer in one to see what deltas cost."
        )
    return (
        f"One step costs {decimal(report.delta_bytes)} instead of the {held} that all devices "
        f"hold ({_ratio(report.held_to_delta)} times less) or the {stock} that stock Orbax "
        f"writes ({_ratio(report.stock_to_delta)} times less); "
        f"{decimal(round(report.amortised_bytes))} a step with a base after every "
        f"{report.max_deltas} deltas."
    )


if __name__ == "__main__":
    app()
