"""The command that tells what saving costs before there is a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from adacheck_jax.cli.command import Json, Target, errors, print_json
from adacheck_jax.cli.tables import models as tables
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.steps import InputError

app = typer.Typer()


@app.command()
def plan(
    target: Target,
    devices_per_process: Annotated[
        int, typer.Option(min=1, help="Devices of an abstract mesh that one process has.")
    ] = 8,
    max_deltas: Annotated[int, typer.Option(min=0, help="Deltas for each base.")] = 20,
    as_json: Json = False,
) -> None:
    """Say what saving every step of a model would cost, before there is a machine to train it on.

    \b
    Example: adacheck plan examples/plan_llama.py:data_parallel

    TARGET takes no argument and returns an abstract state (a pytree of jax.ShapeDtypeStruct with
    shardings, which may be over a jax.sharding.AbstractMesh), or a tuple of it and the Recorder.
    No array is allocated, and no device is needed.

    With --json: the fields of adacheck_jax.tools.plan.RedundancyReport.
    """
    from adacheck_jax.cli import callables
    from adacheck_jax.tools.plan import redundancy_report

    with errors():
        state, recorder = callables.state_of(target)
        try:
            report = redundancy_report(
                state, recorder, devices_per_process=devices_per_process, max_deltas=max_deltas
            )
        except AdaCheckError as error:  # here it is the input that is wrong
            raise InputError(f"{target}: {error}") from error
    if as_json:
        print_json(report)
    else:
        tables.show_plan(report)
