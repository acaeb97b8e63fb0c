"""The demonstration: a run is killed and goes on, and every bit of it is compared."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.filesize import decimal

from adacheck_jax.cli.printing import print_rows, print_text
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.steps import InputError

_KILL_AT = (6, 30)
"""First and last step after which the process may be killed, of the 40 that the child trains."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Result of the demonstration.

    Attributes:
        root: checkpoint root that the demonstration left.
        killed_step: last step whose loss the killed process printed.
        was_saving: True if the kill interrupted a save.
        resumed_step: newest committed step, from which the new process went on.
        loss_count: number of losses, before the kill and after it.
        other_losses: steps whose loss is not that of a run without interruption.
        leaf_count: number of leaves of the state.
        restores: mesh, seconds, and number of leaves with the bits of the run without
            interruption, of restores of the last step.
        saves: kind, bytes, and median of the milliseconds for which it blocks the loop, of saves
            of the same states.
        total_s: seconds of the whole demonstration.
    """

    root: str
    killed_step: int
    was_saving: bool
    resumed_step: int
    loss_count: int
    other_losses: tuple[int, ...]
    leaf_count: int
    restores: tuple[tuple[str, float, int], ...]
    saves: tuple[tuple[str, int, float], ...]
    total_s: float

    @property
    def is_exact(self) -> bool:
        """True if every bit was equal."""
        return not self.other_losses and all(x[2] == self.leaf_count for x in self.restores)


def run(keep: Path | None) -> DemoReport:
    """Train, kill, resume, restore on other meshes, and measure.

    Args:
        keep: new or empty directory to work in; None makes one among the temporary files.

    Raises:
        InputError: ``keep`` exists and is not an empty directory.
        AdaCheckError: a child process failed.
    """
    start_s = time.monotonic()
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise InputError(f"{keep}: expected a new or empty directory. Give another one.")
    work = Path(tempfile.mkdtemp(prefix="adacheck-demo-")) if keep is None else keep.absolute()
    work.mkdir(parents=True, exist_ok=True)
    root = work / "checkpoints"
    _say(
        f"1/2 train a small language model on 8 virtual devices, save every step, kill -9 ({work})"
    )
    losses = dict(_lines("train", root, random.randint(*_KILL_AT)))
    killed, was_saving = max(losses), any("tmp" in path.name for path in root.iterdir())
    _say("2/2 resume in a new process; then train without interruption, restore, and measure")
    *resumed, result = _lines("resume", root)
    wrong = [
        step for step, loss in [*losses.items(), *resumed] if loss != result["expected"][step - 1]
    ]
    return DemoReport(
        root=str(root),
        killed_step=killed,
        was_saving=was_saving,
        resumed_step=resumed[0][0] - 1,
        loss_count=len(losses) + len(resumed),
        other_losses=tuple(wrong),
        leaf_count=result["leaf_count"],
        restores=tuple(map(tuple, result["restores"])),
        saves=tuple(map(tuple, result["saves"])),
        total_s=time.monotonic() - start_s,
    )


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _lines(task: str, root: Path, fatal_step: int | None = None) -> Iterator[Any]:
    """Values that a child process prints; it is killed soon after one step, if one is given."""
    command = [sys.executable, "-m", "adacheck_jax.cli.demo_child", task, str(root)]
    log = root.with_name(f"{task}.log")
    with log.open("w") as errors:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        try:
            for line in child.stdout or ():
                value = json.loads(line)
                yield value
                if fatal_step is not None and value[0] >= fatal_step:
                    time.sleep(random.random() / 10)  # anywhere: computing, writing, committing
                    child.kill()
                    fatal_step = None
        finally:
            child.kill()
            code = child.wait()
    if task == "resume" and code:
        last = log.read_text().strip().rpartition("\n")[2]
        raise AdaCheckError(f"the child process {task} ended with {code}: {last} ({log})")


def show(report: DemoReport) -> None:
    """Print tables, then the conclusion."""
    stock = next(save for save in report.saves if save[0].startswith("stock"))
    print_rows(
        ("one save", "bytes", "of stock", "blocks the loop", "of stock"),
        [
            (kind, decimal(size), f"{size / stock[1]:.2f}", f"{ms:.1f} ms", f"{ms / stock[2]:.2f}")
            for kind, size, ms in report.saves
        ],
        right=("bytes", "of stock", "blocks the loop"),
    )
    print_text("")
    rows = [(mesh, f"{s:.2f} s", f"{n} of {report.leaf_count}") for mesh, s, n in report.restores]
    print_rows(("restore on", "time", "leaves with equal bits"), rows, right=("time",))
    print_text("")
    moment = "in the middle of a save" if report.was_saving else "between two saves"
    losses = "equal those of a run without interruption, bit for bit"
    if report.other_losses:
        losses = f"do NOT equal those of a run without interruption: {report.other_losses}"
    print_text(
        f"{'' if report.is_exact else 'FAILED: not every bit is equal. '}"
        f"A process was killed {moment} after step {report.killed_step}. A new one went on from "
        f"step {report.resumed_step}. All {report.loss_count} losses, before the kill and after "
        f"it, {losses}. The last step was restored on {len(report.restores)} meshes and compared "
        f"with the state of that run. ({report.total_s:.0f} s)"
    )
    print_text(
        f"\nLook at what it left:\n  adacheck ls {report.root}\n  adacheck log {report.root}"
    )
    print_text(f"  adacheck verify {report.root} --read-data --replay")
