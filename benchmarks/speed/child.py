"""Runs one measurement in processes of its own, with as many devices as it wants.

python -m benchmarks.speed.child saves '{"params": 1000000, ...}'
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.common import free_port

_TIMEOUT_S = 3600


def measure(module: str, **arguments: Any) -> Any:
    """What :func:`measure_each` gives for the first process."""
    return measure_each(module, **arguments)[0]


def measure_each(module: str, *, devices: int = 1, processes: int = 1, **arguments: Any) -> Any:
    """What ``run(**arguments)`` of a module returns in each process.

    Args:
        module: name in this package; ``".NAME"`` for one of ``benchmarks``.
        devices: of each process.
        processes: that run it together.
        arguments: JSON; a folder for what is saved is added to them.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="adacheck-benchmark-") as root:
        return _run(module, devices, processes, {"root": root, **arguments})


def _run(module: str, devices: int, processes: int, arguments: Mapping[str, Any]) -> list[Any]:
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={devices}"
    running = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, module, json.dumps(arguments)],
            env={
                **os.environ,
                "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
                _PLACE: f"{process} {processes} {port}",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        told = [each.communicate(timeout=_TIMEOUT_S) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (_, errors) in zip(running, told, strict=True):
        if each.returncode:
            raise RuntimeError(f"{module} {arguments}: exit {each.returncode}\n{errors[-2000:]}")
    return [json.loads(output.splitlines()[-1]) for output, _ in told]


_PLACE = "ADACHECK_BENCHMARK_PROCESS"


def main() -> None:
    import jax

    process, processes, port = map(int, os.environ.get(_PLACE, "0 1 0").split())
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    module = importlib.import_module(f".{sys.argv[1]}", "benchmarks.speed")
    print(json.dumps(module.run(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
