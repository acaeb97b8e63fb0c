"""Runs of several processes, each forked from one that has imported what all of them import.

To import JAX and Orbax takes a process longer than what most tests have it do.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from benchmarks.common import free_port

ROOT = Path(__file__).parents[1]
WORKER = "tests.end_to_end.multiprocess_worker"

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["orbax.checkpoint.v1", "tests.support"])


@dataclass(frozen=True)
class Child:
    """One process of a run.

    Attributes:
        process: itself.
        output: file of what it prints.
    """

    process: BaseProcess
    output: Path

    @property
    def returncode(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self.process.exitcode

    def ended(self, timeout_s: float = 500) -> str:
        """What it printed when it had ended."""
        self.process.join(timeout_s)
        said = self.output.read_text()
        if self.returncode is None:
            raise TimeoutError(f"a process goes on after {timeout_s} s; it printed:\n{said}")
        return said


def _run(module: str, arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """Runs a module in this process, as ``python -m`` would."""
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)  # the parent's as it is now, not when this was forked
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # JAX takes leave of the other processes; a fork does not run them


def start(
    mode: str, processes: int, root: Path | str, out: Path, devices: int, worker: str = WORKER
) -> list[Child]:
    """Starts all processes of a run; ``tests/one_process.py`` says what they are given."""
    port = free_port()
    children = []
    for index in range(processes):
        arguments = [str(value) for value in (mode, index, processes, port, root, out, devices)]
        output = Path(tempfile.mkstemp(prefix=f"{mode}-{index}.", suffix=".txt")[1])
        given = (worker, arguments, dict(os.environ), output)
        process = _FORKS.Process(target=_run, args=given)
        process.start()
        children.append(Child(process, output))
    return children


def outputs(children: list[Child]) -> list[str]:
    """What processes printed; all of them have to end well."""
    try:
        said = [child.ended() for child in children]
    finally:
        for child in children:
            child.process.kill()
            child.process.join()
            child.output.unlink()
    for child, output in zip(children, said, strict=True):
        assert child.returncode == 0, output
    return said


def launch(
    mode: str, processes: int, root: Path | str, out: Path, devices: int, worker: str = WORKER
) -> None:
    """Runs all processes to their end."""
    outputs(start(mode, processes, root, out, devices, worker))


def leaves(path: Path) -> list[bytes]:
    """The bytes of all leaves that a process wrote."""
    with np.load(path) as arrays:
        return [arrays[name].tobytes() for name in arrays.files]
