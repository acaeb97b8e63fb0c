"""Runs of chosen tests, each in a process forked from one that has imported what tests need.

``python -m tests.campaigns.forked``, in the directory of a repository of which nothing is imported
but this module and the settings of the tests. It reads one request a line, and answers each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

IMPORTED = (
    "flax.linen",
    "flax.nnx",
    "jax.experimental.multihost_utils",
    "optax",
    "orbax.checkpoint.experimental.v1",
    "rich.console",
    "scipy.linalg",
    "tensorstore",
    "typer",
    "xxhash",
)
MEMORY = 8 << 30
"""Bytes that a process may allocate: a fault may let it allocate without an end."""


@dataclass(frozen=True)
class End:
    """The end of one run.

    Attributes:
        by: the first test that failed, or "import", "timeout" or the status of a process that died;
            empty if all tests passed.
        ran: number of tests that ran to their end.
    """

    by: str
    ran: int


class Server:
    """The process that is forked, for one copy of a repository."""

    def __init__(self, repository: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(repository)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=repository,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], limit_s: float, *, compiles: bool = False) -> End:
        """Runs tests until one fails.

        Args:
            tests: their node IDs, in their order.
            limit_s: CPU time after which the process is killed; or so much time, by the number of
                processes that wait for each processor.
            compiles: True if numba shall compile anew what it has compiled before.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"tests": [*tests], "limit_s": limit_s, "compiles": compiles}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return End(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()


@contextlib.contextmanager
def server(repository: Path) -> Iterator[Server]:
    """A server that ends with its block."""
    made = Server(repository)
    try:
        yield made
    finally:
        made.close()


class _Chosen:
    """A plugin of pytest: runs chosen tests in their order, and writes a line at each one's end."""

    def __init__(self, tests: Sequence[str], ends: Path) -> None:
        self._place = {test: n for n, test in enumerate(tests)}
        self._ends = ends

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        late = "Timeout (>" in report.longreprtext
        if report.failed:
            self._write("timeout" if late else report.nodeid)
        elif report.when == "teardown":
            self._write("")

    def _write(self, by: str) -> None:
        with self._ends.open("a") as file:
            file.write(f"{by}\n")


def _run(tests: Sequence[str], limit_s: float, compiles: bool) -> End:
    """Forks a process that runs tests, and waits for its end."""
    directory = tempfile.mkdtemp(prefix="forked-")
    ends_file = Path(directory) / "ends"
    ends_file.touch()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.setsid()
            status = _in_child(tests, Path(directory), int(limit_s), compiles)
        finally:
            os._exit(status)
    handle = os.pidfd_open(pid)
    crowd = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    late = not select.select([handle], [], [], limit_s * crowd)[0]
    os.close(handle)
    with contextlib.suppress(ProcessLookupError):  # what it has started, too
        os.killpg(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ends = ends_file.read_text().splitlines()
    shutil.rmtree(directory, ignore_errors=True)
    failed = [by for by in ends if by]
    if not failed and (late or status == -signal.SIGXCPU):
        failed = ["timeout"]
    elif not failed and status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        failed = ["import" if status == pytest.ExitCode.INTERRUPTED else f"status {status}"]
    return End(failed[0] if failed else "", len(ends))


def _in_child(tests: Sequence[str], directory: Path, limit_s: int, compiles: bool) -> int:
    log = os.open(directory / "log", os.O_WRONLY | os.O_CREAT)
    for each in (1, 2):
        os.dup2(log, each)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
    if compiles:
        from numba.core import config

        os.environ["NUMBA_CACHE_DIR"] = str(directory / "numba")
        config.reload_config()
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory)
    files = [*filter(os.path.exists, dict.fromkeys(test.partition("::")[0] for test in tests))]
    if not files:  # without any, pytest would take all
        return pytest.ExitCode.NO_TESTS_COLLECTED
    options = ["-x", "-q", "-n0", "-pno:cacheprovider", f"--basetemp={directory / 'tests'}"]
    return pytest.main([*options, *files], [_Chosen(tests, directory / "ends")])


def _serve() -> None:
    from tests.conftest import COMPILED_FAST  # sets what JAX reads as it is imported

    for name in IMPORTED:
        importlib.import_module(name)
    from numba.core.registry import cpu_target

    from benchmarks import xla_flags

    os.environ["XLA_FLAGS"] = " ".join([os.environ["XLA_FLAGS"], *xla_flags.known(COMPILED_FAST)])
    # As numba does before it compiles or loads its first function.
    target: Any = cpu_target
    target.typing_context.refresh()
    target.target_context.refresh()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(asdict(_run(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    _serve()
