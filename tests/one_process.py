"""One process of a run of several: its arguments, and JAX set up for them.

A worker imports this before anything else that imports JAX:
``python -m WORKER MODE PROCESS PROCESSES PORT ROOT OUT DEVICES``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Arguments:
    """Arguments of a worker.

    Attributes:
        mode: what to do.
        process: index of this process.
        processes: number of processes.
        port: port of the coordination service.
        root: checkpoint root.
        out: beginning of the paths of what this process writes for the test.
        devices: number of devices of each process.
        heartbeat_s: seconds without a heartbeat after which JAX takes a process for dead.
    """

    mode: str
    process: int
    processes: int
    port: int
    root: str
    out: str
    devices: int
    heartbeat_s: int = 100


def parsed(argv: list[str]) -> Arguments:
    """The arguments of a command line."""
    mode, process, processes, port, root, out, devices, *more = argv
    heartbeat_s = int(more[0]) if more else Arguments.heartbeat_s
    numbers = int(process), int(processes), int(port)
    return Arguments(mode, *numbers, root, out, int(devices), heartbeat_s)


own = parsed(sys.argv[1:])
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={own.devices}"
)

import jax  # noqa: E402

jax.config.update("jax_cpu_collectives_implementation", "gloo")
if os.environ.get("JAX_ENABLE_RECOVERABILITY") == "1":  # JAX was imported before it was set
    jax.config.update("jax_enable_recoverability", True)
if own.processes > 1:
    jax.distributed.initialize(
        f"127.0.0.1:{own.port}",
        own.processes,
        own.process,
        heartbeat_timeout_seconds=own.heartbeat_s,
    )

import numpy as np  # noqa: E402
from jax._src import compilation_cache, compiler  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402


def _keep(key: str, seconds: float, name: str, backend: Any, program: Any, *calls: Any) -> None:
    """Keeps a compiled program for the next run: JAX has the first process alone do that."""
    if not any(calls):
        compilation_cache.put_executable_and_time(key, name, program, backend, int(seconds))


compiler._cache_write = _keep


def write(state: object, name: str) -> None:
    """Writes the whole state to OUT-NAME.npz; all processes call it."""
    leaves = jax.tree.leaves(state)
    cut = [n for n, x in enumerate(leaves) if not getattr(x, "is_fully_addressable", True)]
    whole = [leaves[n].sharding.update(spec=PartitionSpec()) for n in cut]
    # One program for all of them: to compile one a leaf takes longer than what most runs do.
    gathered = jax.jit(_same, out_shardings=whole)([leaves[n] for n in cut]) if cut else []
    found = dict(zip(cut, (np.asarray(x) for x in gathered), strict=True))
    for n in {*range(len(leaves))} - {*cut}:
        found[n] = np.asarray(multihost_utils.process_allgather(leaves[n], tiled=True))
    if jax.process_index() == 0:
        np.savez(f"{own.out}-{name}.npz", *(found[n] for n in range(len(leaves))))


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays
