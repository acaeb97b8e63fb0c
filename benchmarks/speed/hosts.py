"""What the memory of several hosts costs a save, and what each tier takes to give a state back."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import adacheck_jax as adacheck
from benchmarks.speed import states

MEMORY, STORAGE, STOCK = "memory", "storage", "stock Orbax"
SAVES = (("in this process alone", False, 0), ("in files", True, 0), ("in files, copied", True, 1))
"""Where the state is kept: a name, whether in files, and the number of copies."""
TIERS = (("memory", None), ("memory, a host's wiped", 1), ("storage", None), ("stock Orbax", None))
"""What a state is taken from in turn, and the host whose memory is wiped before."""


def run(
    root: str, memory: str, do: str, parts: int, params: int, leaves: int, copies: int, steps: int
) -> Any:
    """Trains with every step saved, or takes the last one; each process is a host.

    Args:
        root: storage.
        memory: folder with a directory for each host; empty to save without.
        do: ``"save"``, or the tier to take the state from.
        parts: in which the state is cut; each lies on all hosts divided by their number.
        params: about so many.
        leaves: arrays of params.
        copies: of each box in the memory of other hosts.
        steps: that are saved.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder, parts)
    host = f"host {jax.process_index()}"
    shadow = adacheck.Shadow(
        directory=f"{memory}/{host}" if memory else None, domain=host, copies=copies
    )
    with (
        adacheck.checkpoint_manager(f"{root}/own", recorder, shadow=shadow) as manager,
        ocp.CheckpointManager(f"{root}/stock") as stock,
    ):
        if do == "save":
            return _saved(manager, stock, recorder, state, steps)
        wanted = states.abstract(state)
        del state
        acts: dict[str, Callable[[], Any]] = {
            MEMORY: lambda: manager.handler.recover(manager.directory, wanted),
            STORAGE: lambda: manager.restore(steps, args=adacheck.RestoreArgs(wanted)),
            STOCK: lambda: stock.restore(
                steps, args=ocp.args.StandardRestore(states.without_record(wanted))
            ),
        }
        multihost_utils.sync_global_devices("taken")
        start_s = time.perf_counter()
        found = jax.block_until_ready(acts[do]())
        seconds = _of_all([time.perf_counter() - start_s])
        if found is None:
            raise RuntimeError("memory gave no state back")
        return {"seconds": float(seconds.max())}


def _saved(
    manager: adacheck.AdaCheckManager,
    stock: ocp.CheckpointManager,
    recorder: adacheck.Recorder,
    state: Any,
    steps: int,
) -> Any:
    """Blocking of the slowest process, and CPU seconds of all, of the second half of the saves."""
    step, taken = states.train_step_of(recorder), list[tuple[float, float]]()
    for number in range(1, steps + 1):
        state = jax.block_until_ready(step(state))
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        manager.save(number, args=adacheck.SaveArgs(state))
        blocking_s = time.perf_counter() - start_s
        manager.wait_until_finished()
        taken.append((blocking_s, time.process_time() - start_cpu_s))
    stock.save(steps, args=ocp.args.StandardSave(states.without_record(state)))
    stock.wait_until_finished()
    blocking_s, cpu_s = zip(*taken[steps // 2 :], strict=True)
    found = _of_all([statistics.median(blocking_s), statistics.median(cpu_s)])
    state_bytes = states.size_bytes(states.without_record(state))
    return {
        "state_bytes": state_bytes,
        "blocking_s": float(found[:, 0].max()),
        "cpu_s": float(found[:, 1].sum()),
    }


def _of_all(values: list[float]) -> np.ndarray:
    """The values of all processes, of shape (processes, values)."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(values)))


@contextlib.contextmanager
def memory() -> Iterator[str]:
    """A folder that lies in memory where the system has one."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as found:
        yield found


def wipe(memory: str, host: int) -> None:
    """Deletes what lies in a host's memory."""
    for path in Path(memory, f"host {host}").iterdir():
        path.unlink()
