"""The ``adacheck`` command: look at checkpoints, and see the library at work.

Tables are for people; ``--json`` prints one JSON object for programs. Exit codes: 0 all is well, 1
a step is damaged or a demonstration failed, 2 the command was given something that is not there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.progress
import typer
from rich.console import Console

import adacheck_jax
from adacheck_jax.cli import handover, tables
from adacheck_jax.cli.command import Json, Root
from adacheck_jax.cli.command import errors as _errors
from adacheck_jax.cli.command import print_json as _print_json
from adacheck_jax.cli.command import root_of as _root
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools import inspection
from adacheck_jax.tools.steps import InputError

# Commands that read arrays import their modules when they run: with them comes JAX, which takes
# seconds to import and which ls, inspect and --help do not need.
if TYPE_CHECKING:
    from adacheck_jax.tools.audit import Progress

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
    """Look at checkpoints in which every training step is a base or a delta."""


app.add_typer(handover.app)


@app.command()
def ls(root: Root, as_json: Json = False) -> None:
    """List the steps under ROOT: base or delta, what each builds on, what it added.

    Exit code 1 if a step cannot be restored. Array data is verified by a restore, not here.
    With --json: root, disk_bytes, stock_steps (saved without this library), and steps, each with
    step, item, kind, update_count, parent, depth, recorded, checked, new_bytes and error (null if
    all is well).
    """
    with _errors():
        summary = inspection.summarize_root(_root(root))
    if as_json:
        _print_json(summary)
    else:
        tables.show_root(summary)
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
        details = inspection.describe_step(_root(root), step, item)
    if as_json:
        _print_json(details)
    else:
        tables.show_step(details)


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
    from adacheck_jax.tools import audit

    with _errors():
        wanted = audit.Thoroughness(read_data, _part(read_data_subset), seed, replay)
        with _progress() as progress:
            report = audit.verify_root(_root(root), step, item, wanted, progress)
    if as_json:
        _print_json(report)
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

    That is: what interrupted saves left, and steps that fail verification, if restoring them was
    tried and failed too. A step that another one builds on stays, and what this machine cannot
    judge. Stop the training run first: exit code 2 if a save may be under way.
    With --json: the fields of adacheck_jax.tools.repair.RepairReport.
    """
    from adacheck_jax.tools import repair as repairs

    with _errors(), _progress() as progress:
        report = repairs.repair(
            _root(root), read_data=read_data, dry_run=dry_run, force=force, progress=progress
        )
    if as_json:
        _print_json(report)
    else:
        tables.show_repair(report)


@app.command()
def compact(
    root: Root,
    step: Annotated[str, typer.Argument(help="Step number, or latest.")] = "latest",
    item: Annotated[
        str | None, typer.Option(help="Item name, where a step holds several such items.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look only; change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Turn one saved delta under ROOT into a base, in its place.

    Restores the step on this machine, bit-exact and verified, and writes its state into its
    directory; at one moment it is a base, and what it built on is let go. A training may go on
    meanwhile: steps that follow begin at the new base. Exit code 1 if the step is damaged or cannot
    be restored exactly here: it stays as it was; 2 if it is no saved delta.
    With --json: the fields of adacheck_jax.tools.compaction.CompactionReport.
    """
    from adacheck_jax.tools import compaction

    with _errors():
        if step != "latest" and not step.isdecimal():
            raise InputError(f"STEP: expected a step number or latest, found {step!r}.")
        number = None if step == "latest" else int(step)
        report = compaction.compact(_root(root), number, item, dry_run=dry_run)
    if as_json:
        _print_json(report)
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


@contextlib.contextmanager
def _progress() -> Iterator[Progress | None]:
    """A progress bar on stderr if that is a terminal, else None."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with rich.progress.Progress(console=console, transient=True) as bar:
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
    from adacheck_jax.cli import callables
    from adacheck_jax.tools.plan import redundancy_report
    from adacheck_jax.update.recorder import Recorder

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
        tables.show_plan(report)


@app.command()
def goodput(
    hosts: Annotated[int, typer.Option(min=1, help="Hosts of the cluster.")] = 2048,
    devices_per_host: Annotated[int, typer.Option(min=1, help="Accelerators of each.")] = 8,
    days: Annotated[float, typer.Option(min=0.01, help="Length of the training run.")] = 54,
    mtbf: Annotated[
        str | None,
        typer.Option(help="Mean time between failures of the cluster, such as 3h, 45min or 2d."),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="JSON file of figures in place of the known ones.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Simulated training runs.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of their failures.")] = 0,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Halve and double what is assumed.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it too: FILE.png or FILE.svg.")] = None,
    as_json: Json = False,
) -> None:
    """Say how much of a cluster's time checkpointing systems leave for training, failures and all.

    Simulates failures of software, hosts and racks, by default at the rate of Llama 3 (one in 3
    hours on 16,384 GPUs), and what each system then still has. Published figures are taken as
    published; what nobody published is assumed, and --json and --sensitivity say which.
    The file of --costs is an object of objects: {"cluster": {"step_s": 2}, "adacheck_jax":
    {"delta_blocking_s": 0.02}}, with the names that --json lists under figures.
    With --json: the fields of adacheck_jax.tools.goodput.simulation.GoodputReport.
    """
    from adacheck_jax.tools.goodput.cluster import DAY_S, Cluster
    from adacheck_jax.tools.goodput.simulation import goodput_report

    with _errors():
        try:
            cluster = Cluster(hosts, devices_per_host, days * DAY_S)
            if mtbf is not None:
                cluster = cluster.with_mtbf(_seconds("--mtbf", mtbf))
            wishes = _wishes(costs) if costs else {}
            report = goodput_report(
                cluster, wishes, runs=runs, seed=seed, is_sensitivity=sensitivity
            )
        except ValueError as error:
            raise InputError(str(error)) from error
        if plot:
            from adacheck_jax.cli import plots

            plots.draw_goodput(report, plot)
    if as_json:
        _print_json(report)
    else:
        tables.show_goodput(report)


_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


def _seconds(option: str, text: str) -> float:
    """Seconds of a time such as ``3h``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)", text)
    if not found or not float(found[1]):
        raise InputError(f"{option}: expected a time such as 3h, 45min or 2d, found {text!r}.")
    return float(found[1]) * _UNITS_S[found[2]]


def _wishes(path: Path) -> dict[str, dict[str, float]]:
    """Figures of a JSON file, by system."""
    try:
        wishes = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected JSON, found {error}.") from error
    if not isinstance(wishes, dict) or not all(isinstance(x, dict) for x in wishes.values()):
        raise InputError(f'{path}: expected an object of objects such as {{"cluster": {{}}}}.')
    return wishes


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
    Exit code 1 if any bit differs.
    With --json: the fields of adacheck_jax.cli.demo.report.DemoReport.
    """
    from adacheck_jax.cli.demo import report as reports
    from adacheck_jax.cli.demo import run

    console = Console(quiet=as_json)
    with _errors():
        report = run.run_demo(steps=steps, seed=seed, keep=keep, console=console)
    if as_json:
        _print_json(report)
    else:
        reports.show(report, console)
    if report.failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
