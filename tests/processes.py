"""Processes that are forked from one that has imported what all of them import.

To import JAX and Orbax takes a process longer than what most tests have it do.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import free_port

ROOT = Path(__file__).parents[1]
OURS = "adacheck_jax|tests|examples|benchmarks|__main__"
"""Modules that call nothing deprecated, as pyproject.toml has it for tests."""
WORKER = "tests.end_to_end.multiprocess_worker"

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.preloaded"])


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


def _run(
    program: str, arguments: list[str], environment: dict[str, str], output: Path, directory: Path
) -> None:
    """Runs a module, or a script, in this process as Python would in a new one."""
    assert "tests.preloaded" in sys.modules, "nothing is imported before the fork"
    gc.freeze()  # what was imported stays
    gc.set_threshold(20_000, 10, 50)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)  # the parent's as it is now, not when this was forked
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = [program, *arguments]
    warnings.filterwarnings("error", category=DeprecationWarning, module=OURS)
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        # As Python ends, and a fork does not: threads first, which may still compile for several
        # processes, and then JAX takes leave of the others.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()


def forked(
    program: str | Path,
    *arguments: Any,
    environment: Mapping[str, str] = os.environ,
    directory: Path = ROOT,
) -> Child:
    """Starts a process that runs a module, or a script.

    Args:
        program: name of the module, or path of the script, which ends with ``.py``.
        arguments: of its command line.
        environment: of the process; JAX reads some of it as it is imported, which was before.
        directory: working directory of the process.
    """
    output = Path(tempfile.mkstemp(prefix=f"{Path(program).name}.", suffix=".txt")[1])
    given = (str(program), [*map(str, arguments)], dict(environment), output, directory)
    process = _FORKS.Process(target=_run, args=given)
    process.start()
    return Child(process, output)


def start(
    mode: str, processes: int, root: Path | str, out: Path, devices: int, worker: str = WORKER
) -> list[Child]:
    """Starts all processes of a run; ``tests/one_process.py`` says what they are given."""
    port = free_port()
    return [
        forked(worker, mode, index, processes, port, root, out, devices)
        for index in range(processes)
    ]


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
