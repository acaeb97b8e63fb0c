"""Measurements of the demonstration, in child processes that end with a line of JSON.

::

    python -m adacheck_jax.cli.demo.measure restore ROOT STEP
    python -m adacheck_jax.cli.demo.measure save ROOT
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.cli.demo import train_lm
from adacheck_jax.device import trees
from adacheck_jax.store.steps.folders import new_bytes

DEVICE_COUNT = 8
MESH = "4x2"
OTHER_MESHES = ("2x4", "8x1", "1x1")
_WARM_UP_SAVES = 2  # the second is the delta manager's first delta
_TIMED_SAVES = 5


def restores(root: Path, step: int) -> list[dict[str, Any]]:
    """Restore one step on every mesh and compare each leaf's bits with those on ``MESH``.

    The handler gets no recorder, so the step's own update program is replayed.

    Args:
        root: checkpoint root.
        step: number of the step to restore.

    Returns:
        For each mesh its name, the seconds of one restore (compiling included), the number of
        leaves, and the leaf paths of those whose bits differ.
    """
    results = []
    expected: dict[str, np.ndarray] = {}
    with ocp.CheckpointManager(root, item_handlers=adacheck.AdaCheckHandler()) as manager:
        for name in (MESH, *OTHER_MESHES):
            abstract = train_lm.abstract_state(train_lm.parse_mesh(name))
            start_s = time.perf_counter()
            state = manager.restore(step, args=adacheck.RestoreArgs(abstract))
            jax.block_until_ready(state)
            restore_s = time.perf_counter() - start_s
            found = {path: np.asarray(leaf) for path, leaf in trees.flatten(state)[0].items()}
            expected = expected or found
            different = [path for path in expected if not _same(expected[path], found[path])]
            results.append(
                {
                    "mesh": name,
                    "restore_s": restore_s,
                    "leaf_count": len(found),
                    "different": different,
                }
            )
    return results


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def saves(root: Path) -> list[dict[str, Any]]:
    """Save the same states as bases, as deltas and with stock Orbax, one after another.

    Args:
        root: directory in which three checkpoint roots are made.

    Returns:
        For each kind its name, the bytes that one step adds, and the median of the milliseconds
        for which ``save`` blocks the training loop.
    """
    mesh = train_lm.parse_mesh(MESH)
    state, train_step = train_lm.new_state(mesh), train_lm.compile_step(mesh)
    handlers = {
        "base": adacheck.AdaCheckHandler(train_lm.recorder, max_deltas=0),
        "delta": adacheck.AdaCheckHandler(train_lm.recorder),
        "stock Orbax": ocp.StandardCheckpointHandler(),
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    managers = {
        kind: ocp.CheckpointManager(root / kind, item_handlers=handler, options=options)
        for kind, handler in handlers.items()
    }
    blocking_ms: dict[str, list[float]] = {kind: [] for kind in managers}
    last = _WARM_UP_SAVES + _TIMED_SAVES
    for step in range(1, last + 1):
        state, _ = train_step(state, train_lm.batch(step, mesh))
        jax.block_until_ready(state)
        for kind, manager in managers.items():
            stock = kind == "stock Orbax"
            args = ocp.args.StandardSave(state) if stock else adacheck.SaveArgs(state)
            start_s = time.perf_counter()
            manager.save(step, args=args)
            blocking_ms[kind].append(1e3 * (time.perf_counter() - start_s))
            manager.wait_until_finished()
    for manager in managers.values():
        manager.close()
    return [
        {
            "kind": kind,
            "new_bytes": new_bytes(root / kind / str(last)),
            "blocking_ms": statistics.median(times_ms[_WARM_UP_SAVES:]),
        }
        for kind, times_ms in blocking_ms.items()
    ]


def main() -> None:
    """Run the measurement that the command line names."""
    jax.config.update("jax_num_cpu_devices", DEVICE_COUNT)
    task, root, *step = sys.argv[1:]
    try:
        result = restores(Path(root), int(step[0])) if task == "restore" else saves(Path(root))
    except Exception as error:  # background threads may add to stderr; this says what mattered
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    print(json.dumps(result))


if __name__ == "__main__":
    main()
