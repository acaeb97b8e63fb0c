"""Seconds that a restarted process takes to its state: from storage, and from memory.

    python -m benchmarks.recoveries --mb 110 --deltas 10

Storage is a base and deltas; memory is the state that the host computed, or the same base and the
records since it, which devices replay. Each is what a new process does first, compiling included.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import adacheck_jax as adacheck
from benchmarks.common import environment

_BYTES_A_PARAM = 16
KINDS = ("storage", "state", "records")


def run(kind: str, directory: Path, mb: float, leaves: int) -> tuple[Any, Any, Any]:
    """A manager of a kind's root and memory, a state, and its update."""
    recorder = adacheck.Recorder(optax.adamw(1e-3))
    side = int((mb * 1e6 / _BYTES_A_PARAM / leaves) ** 0.5)

    @jax.jit
    def begin() -> Any:
        keys = jax.random.split(jax.random.key(0), leaves)
        params = {f"w{n}": jax.random.normal(keys[n], (side, side)) for n in range(leaves)}
        return {"params": params, "opt": recorder.init(params)}

    @jax.jit
    def advance(state: Any) -> Any:
        grads = jax.tree.map(jnp.sin, state["params"])
        updates, opt = recorder.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    memory = None if kind == "storage" else directory / "memory"
    shadow = adacheck.Shadow(directory=memory, records=True if kind == "records" else None)
    root = directory / "root"
    manager = adacheck.checkpoint_manager(root, recorder, max_deltas=1000, shadow=shadow)
    return manager, begin, advance


def save(kind: str, directory: Path, mb: float, leaves: int, deltas: int) -> None:
    """Saves a base and deltas."""
    manager, begin, advance = run(kind, directory, mb, leaves)
    with manager:
        state = begin()
        for step in range(deltas + 1):
            state = advance(state)
            manager.save(step, args=adacheck.SaveArgs(state))


def resume(kind: str, directory: Path, mb: float, leaves: int, results: Any) -> None:
    """Tells the seconds until the newest state is there."""
    manager, begin, _ = run(kind, directory, mb, leaves)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), begin()
    )
    with manager:
        begin_s = time.perf_counter()
        found = manager.restore_newest(wanted)
        jax.block_until_ready(found)
        took_s = time.perf_counter() - begin_s
        assert found is not None
        assert bool(manager.handler.restored.replayed_count) == (kind == "storage")
    results.put(took_s)


def main() -> None:
    """Reads the command line, measures, and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=110, help="size of the state in MB")
    parser.add_argument("--leaves", type=int, default=100, help="arrays of params")
    parser.add_argument("--deltas", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")

    def child(task: Any, *arguments: Any) -> None:
        process = context.Process(target=task, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == 0

    print(json.dumps(environment()))
    with tempfile.TemporaryDirectory(prefix="recoveries.", dir="/dev/shm") as place:
        for kind in KINDS:
            child(save, kind, Path(place, kind), given.mb, given.leaves, given.deltas)
        took: dict[str, list[float]] = {kind: [] for kind in KINDS}
        results = context.Queue()
        for _ in range(given.repeats):
            for kind in KINDS:
                child(resume, kind, Path(place, kind), given.mb, given.leaves, results)
                took[kind].append(results.get())
    for kind, each in took.items():
        print(f"{kind:8} {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
