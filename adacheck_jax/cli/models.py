"""The command that tells what saving costs before there is a checkpoint, and the demonstration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.filesize import decimal

from adacheck_jax.cli.command import Target, app, command, errors
from adacheck_jax.cli.printing import print_rows
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.steps import InputError

if TYPE_CHECKING:  # which imports JAX
    from adacheck_jax.tools.plan import RedundancyReport

_GROUP = "Without a checkpoint"


_NEEDS = (
    ("host memory, each process", "two bases, three deltas; one, two if saves are waited for"),
    ("the same, shadow=None", "two bases, two deltas; none, two if saves are waited for"),
    ("programs, each process", "what saves compile"),
    ("disk", "two bases, and the deltas between"),
)
"""Needs of a run, and what makes each."""


def _show_plan(report: RedundancyReport) -> None:
    """Print bytes of each kind of save, and of each kind of redundancy."""
    typer.echo(
        f"{report.leaf_count:,} leaves, {report.device_count:,} devices, "
        f"{report.process_count:,} processes\n"
    )
    saves = (
        ("all that each device holds", report.held_bytes),
        ("stock Orbax", report.state_bytes),
        ("base", report.base_bytes),
        ("delta", report.delta_bytes),
        (f"mean of 1 base, {report.max_deltas} deltas", report.amortised_bytes),
    )
    print_rows(
        ("a save", "bytes", "times less", "each process"),
        [
            (
                name,
                decimal(round(size)),
                size and _ratio(report.held_bytes / size),
                decimal(round(size / report.process_count)) if number > 1 else None,
            )
            for number, (name, size) in enumerate(saves)
            if size is not None
        ],
        right=("bytes", "times less"),
    )
    typer.echo("")
    sizes = report.memory_bytes, report.sampled_memory_bytes, report.program_bytes
    needs = zip(_NEEDS, (*sizes, report.disk_bytes), strict=True)
    rows = [(name, decimal(size), why) for (name, why), size in needs if size is not None]
    if rows:
        print_rows(("a run needs at most", "bytes", "for"), rows, right=("bytes",))
        typer.echo("")
    kinds = (
        (
            "declared replicas",
            report.held_bytes - report.state_bytes,
            "another device holds the same: never written",
        ),
        ("computed by the update", report.computed_bytes, "replayed, so no delta has it"),
        ("record", report.record_bytes, "what the update consumes: in every delta"),
        ("other leaves", report.other_bytes, "no update computes them: in every delta"),
    )
    rows = [(name, decimal(size), why) for name, size, why in kinds if size is not None]
    print_rows(("redundancy", "bytes", "why"), rows, right=("bytes",))
    if report.delta_bytes is None:
        typer.echo("\nThere is no Recorder in this state, so every step is a base.")
    typer.echo(
        "\nAt most: what compresses, is zero, is equal or did not change is known at a save only."
    )


def _ratio(ratio: float) -> str:
    """A ratio with as many digits as a person wants to read."""
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"


@command(_GROUP, _show_plan)
def plan(
    target: Target,
    devices_per_process: Annotated[
        int, typer.Option(min=1, help="Devices of an abstract mesh that one process has.")
    ] = 8,
    max_deltas: Annotated[int, typer.Option(min=0, help="Deltas for each base.")] = 20,
) -> RedundancyReport:
    """Say what saving every step of a model would cost.

    \b
    Example:
      adacheck plan examples/plan_llama.py:data_parallel

    TARGET takes no argument and returns an abstract state (a pytree of jax.ShapeDtypeStruct with
    shardings, which may be over a jax.sharding.AbstractMesh), or a tuple of it and the Recorder.
    No array is allocated, and no device is needed.

    With --json: the fields of adacheck_jax.tools.plan.RedundancyReport.
    """
    from adacheck_jax.cli.callables import function_of
    from adacheck_jax.tools.plan import redundancy_report
    from adacheck_jax.update.recorder import Recorder

    takes = "without arguments and must return an abstract state, or a tuple of it and a Recorder"
    state, recorder = function_of(target, takes)(), None
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Recorder):
        state, recorder = state
    try:
        return redundancy_report(
            state,
            recorder,
            devices_per_process=devices_per_process,
            max_deltas=max_deltas,
        )
    except (AdaCheckError, ValueError) as error:  # here it is the input that is wrong
        raise InputError(f"{target}: {error}") from error


@app.command(rich_help_panel=_GROUP)
def demo(
    keep: Annotated[
        Path | None, typer.Option(help="New directory to work in; else a temporary one. Both stay.")
    ] = None,
) -> None:
    """Train, kill -9, resume, restore on four meshes, and compare every bit, in a minute or two.

    Needs no accelerator: child processes train a small language model on 8 virtual CPU devices.
    Exit code 1 if any bit differs.
    """
    from adacheck_jax.cli import demo as demos

    with errors():
        is_exact = demos.run(keep)
    if not is_exact:
        raise typer.Exit(1)
