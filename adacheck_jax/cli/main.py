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
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from adacheck_jax.cli import callables
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.lineage import shown_steps
from adacheck_jax.tools import audit, inspection
from adacheck_jax.tools import repair as repairs
from adacheck_jax.tools.inspection import RootSummary, StepDetails
from adacheck_jax.tools.plan import Balance, RedundancyReport, redundancy_report
from adacheck_jax.tools.steps import InputError
from adacheck_jax.update.recorder import Recorder

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
    depth, recorded, checked, new_bytes and error (null if all is well).
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
    Each delta that it builds on was checked when it was saved: in full, by sample, by identity of
    the arrays that the update returned, or not at all (by an earlier release).
    With --json: step, directory, kind, reason, update_count, parent, base, depth, replayed_count,
    checks (step, checked), problem, new_bytes, versions, groups (name, leaf_count, leaf_bytes) and
    leaves (path, description, group, exactness, source, box_count, leaf_bytes, fingerprint).
    """
    with _errors():
        details = inspection.describe_step(root, step, item)
    if as_json:
        _print_json(details)
    else:
        _show_step(details)


@app.command()
def verify(
    root: Root,
    step: Annotated[int | None, typer.Argument(help="Step number; all if left out.")] = None,
    item: Annotated[str | None, typer.Option(help="Item name; all if left out.")] = None,
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

    Without options the structure: manifests and what they say of each other, update programs, and
    that every file and every chunk of an array is there. --read-data checks the checksum of every
    chunk, and of what is stored whole the fingerprint. --replay restores each step on one device.
    Exit code 1 if there is damage, 2 if a step cannot be recomputed on this machine.
    With --json: the fields of adacheck_jax.tools.audit.RootReport.
    """
    with _errors():
        wanted = audit.Thoroughness(read_data, _part(read_data_subset), seed, replay)
        with _progress() as progress:
            report = audit.verify_root(root, step, item, wanted, progress)
    if as_json:
        _print_json(report)
    else:
        _show_verification(report)
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

    That is: what interrupted saves left, and steps that fail verification, if restoring them was
    tried and failed too. A step that another one builds on stays, and what this machine cannot
    judge. Stop the training run first: exit code 2 if a save may be under way.
    With --json: the fields of adacheck_jax.tools.repair.RepairReport.
    """
    with _errors(), _progress() as progress:
        report = repairs.repair(
            root, read_data=read_data, dry_run=dry_run, force=force, progress=progress
        )
    if as_json:
        _print_json(report)
    else:
        _show_repair(report)


def _part(text: str | None) -> float:
    """A percentage as a part of 1."""
    if text is None:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    part = float(found[1]) / 100 if found else 0.0
    if not 0 < part <= 1:
        raise InputError(f"--read-data-subset: expected a percentage such as 10%, found {text!r}.")
    return part


@contextlib.contextmanager
def _progress() -> Iterator[audit.Progress | None]:
    """A progress bar on stderr, if somebody sees it."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("")

        def tell(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield tell


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
    With --json: the fields of adacheck_jax.tools.plan.RedundancyReport.
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
    Exit code 1 if any bit differs. With --json: the fields of adacheck_jax.cli.demo.run.DemoReport.
    """
    from adacheck_jax.cli.demo import run  # the other commands need none of it

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
    is_recorded = any(step.recorded for step in summary.steps)
    names = ("step", *(("item",) if several else ()), "kind", "updates", "parent", "depth")
    names = (*names, *(("recorded",) if is_recorded else ()), "checked")
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
            *((shown_steps(step.recorded) if step.recorded else None,) if is_recorded else ()),
            step.checked,
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
        if details.recorded:
            _add_row(facts, "recorded with it", f"steps {shown_steps(details.recorded)}")
        counts = (("delta", details.depth), ("update", details.replayed_count))
        deltas, updates = (f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts)
        _add_row(facts, "restore reads", f"base {details.base} and {deltas}; replays {updates}")
        _add_row(facts, "checked when saved", _shown_checks(details))
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


_CHECKS = {
    "full": "in full",
    "sample": "by sample",
    "identity": "by identity",
    "stored": "all stored",
    "": "not checked",
}


def _shown_checks(details: StepDetails) -> str:
    """How each delta was checked, those that were checked alike together."""
    kinds: dict[str, list[int]] = {}
    for each in details.checks:
        kinds.setdefault(each.checked, []).append(each.step)
    return ", ".join(
        f"step{'' if len(steps) == 1 else 's'} {shown_steps(steps)} {_CHECKS.get(kind, kind)}"
        for kind, steps in kinds.items()
    )


def _show_verification(report: audit.RootReport) -> None:
    table = _table("step", "item", "kind", "checked", "result", right=("step",))
    for step in report.steps:
        result = "ok"
        if step.damage:
            result = f"damaged ({len(step.damage)})"
        elif step.not_checked:
            result = "ok, but not recomputed"
        elif step.rounded:
            result = f"ok, {_count(len(step.rounded), 'leaf', 'leaves')} to rounding"
        number = "?" if step.step is None else step.step
        _add_row(table, number, step.item, step.kind or "?", ", ".join(step.checked), result)
    console = _console()
    console.print(table)
    console.print()
    details = _table("step", "file", "leaf", "damage", right=("step",))
    for step in report.steps:
        for each in step.damage:
            file = each.file.removeprefix(f"{report.root}/")
            _add_row(details, step.step, file, each.leaf, each.message)
    if report.damaged_count:
        console.print(details)
        console.print()
    for reason in dict.fromkeys(step.not_checked for step in report.steps if step.not_checked):
        console.print(Text(f"Not recomputed: {reason}"))
    for each in report.leftovers:
        console.print(Text(f"Note: {each.path}: {each.why}"))
    console.print(_verdict(report), highlight=False)
    if report.not_looked_at:
        console.print(Text(f"Not looked at: {', '.join(report.not_looked_at)}."))


def _verdict(report: audit.RootReport) -> str:
    total = len(report.steps)
    steps = _count(total, "step", "steps")
    found = f"{steps} verified" if not report.damaged_count else ""
    if report.damaged_count:
        found = f"{report.damaged_count} of {steps} damaged"
    replayed = sum("replay" in step.checked for step in report.steps)
    read = "every stored byte was read" if report.data_count == total else "no array was read"
    if report.data_count < total and (report.data_count or report.subset):
        read = f"of {total - report.data_count} no array was read"
        if report.subset:
            read += f" ({report.subset:.3g} of the steps chosen with seed {report.seed})"
    again = "" if not replayed else f", and {_count(replayed, 'was', 'were')} recomputed"
    return f"{found}: {read}{again}."


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _show_repair(report: repairs.RepairReport) -> None:
    console = _console()
    table = _table("remove" if report.is_dry_run else "removed", "frees", "why", right=("frees",))
    for each in report.removals:
        _add_row(table, each.path, decimal(each.freed_bytes), each.why)
    if report.removals:
        console.print(table)
        console.print()
    for each in report.kept:
        console.print(Text(f"Kept {each.path}: {each.why}"))
    count = _count(len(report.removals), "directory", "directories")
    done = "would be removed" if report.is_dry_run else "removed"
    left = _count(report.step_count, "step", "steps")
    console.print(
        f"{count} {done}, {decimal(report.freed_bytes)} freed; {left} left.", highlight=False
    )


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
