"""Commands that tell what saving costs before there is a checkpoint: plan and goodput."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from adacheck_jax.cli.command import Json, errors, print_json, seconds_of
from adacheck_jax.cli.tables import models as tables
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.steps import InputError

app = typer.Typer()


@app.command()
def plan(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="Function to call: path/to/file.py:function or package.module:function.",
        ),
    ],
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
    from adacheck_jax.update.recorder import Recorder

    with errors():
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
        print_json(report)
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

    \b
    Example: adacheck goodput --hosts 512 --mtbf 12h --plot goodput.svg

    Simulates failures of software, hosts and racks, by default at the rate of Llama 3 (one in 3
    hours on 16,384 GPUs), and what each system then still has. Published figures are taken as
    published; what nobody published is assumed, and --json and --sensitivity say which.
    The file of --costs is an object of objects: {"cluster": {"step_s": 2}, "adacheck_jax":
    {"delta_blocking_s": 0.02}}, with the names that --json lists under figures.

    With --json: the fields of adacheck_jax.tools.goodput.simulation.GoodputReport.
    """
    from adacheck_jax.tools.goodput.cluster import DAY_S, Cluster
    from adacheck_jax.tools.goodput.simulation import goodput_report

    with errors():
        try:
            cluster = Cluster(hosts, devices_per_host, days * DAY_S)
            if mtbf is not None:
                cluster = cluster.with_mtbf(seconds_of("--mtbf", mtbf))
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
        print_json(report)
    else:
        tables.show_goodput(report)


def _wishes(path: Path) -> dict[str, dict[str, float]]:
    """Figures of a JSON file, by system."""
    try:
        wishes = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected JSON, found {error}.") from error
    if not isinstance(wishes, dict) or not all(isinstance(x, dict) for x in wishes.values()):
        raise InputError(f'{path}: expected an object of objects such as {{"cluster": {{}}}}.')
    return wishes
