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
from pathlib import Path
from typing import Any

import typer

from adacheck_jax.cli.printing import print_rows
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.steps import InputError

_KILL_AT = (6, 30)
"""First and last step after which the process may be killed, of the 40 that the child trains."""


def run(keep: Path | None) -> bool:
    """Train, kill, resume and restore on other meshes; print what is seen.

    Returns:
        True if every bit was equal.

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
    typer.echo("1/2 train a small language model on 8 virtual devices, save every step, kill -9")
    losses = dict(_lines("train", root, random.randint(*_KILL_AT)))
    killed, was_saving = max(losses), any("tmp" in path.name for path in root.iterdir())
    typer.echo("2/2 resume in a new process; then train without interruption, restore\n")
    *resumed, result = _lines("resume", root)
    losses_of_all = [*losses.items(), *resumed]
    wrong = [n for n, loss in losses_of_all if loss != result["expected"][n - 1]]
    is_exact = not wrong and all(x[2] == result["leaf_count"] for x in result["restores"])
    count = result["leaf_count"]
    rows = [(mesh, f"{s:.2f} s", f"{n} of {count}") for mesh, s, n in result["restores"]]
    print_rows(("restore on", "time", "leaves with equal bits"), rows, right=("time",))
    typer.echo("")
    moment = "in the middle of a save" if was_saving else "between two saves"
    equal = f"do NOT all equal (first: step {wrong[0]})" if wrong else "equal bit for bit"
    typer.echo(
        f"{'' if is_exact else 'FAILED: not every bit is equal. '}A process was killed {moment} "
        f"after step {killed}. A new one went on from step {resumed[0][0] - 1}. All "
        f"{len(losses_of_all)} losses, before the kill and after it, {equal} those of a run "
        f"without interruption. The last step was restored on {len(result['restores'])} meshes and "
        f"compared with the state of that run. ({time.monotonic() - start_s:.0f} s)\n\n"
        f"Look at what it left:\n  adacheck ls {root}\n  adacheck log {root}\n"
        f"  adacheck verify {root} --read-data --replay"
    )
    return is_exact


def _lines(task: str, root: Path, fatal_step: int | None = None) -> Iterator[Any]:
    """Values that a child process prints; it is killed soon after one step, if one is given."""
    command = [sys.executable, "-m", "adacheck_jax.cli.demo_child", task, str(root)]
    log = root.with_name(f"{task}.log")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    killed = False
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as child,
    ):
        try:
            for line in child.stdout or ():
                value = json.loads(line)
                yield value
                if fatal_step is not None and value[0] >= fatal_step:
                    time.sleep(random.random() / 10)  # anywhere: computing, writing, committing
                    child.kill()
                    killed = True
                    break
        except BaseException:
            child.kill()  # else leaving this block waits for its end
            raise
    if not killed and (child.returncode or fatal_step is not None):
        said = log.read_text().strip().rpartition("\n")[2]
        raise AdaCheckError(f"the child process ended with {child.returncode}: {said} (see {log})")
