"""Host memory that saves and restores take, beside stock Orbax's.

    python -m benchmarks.host_memory --mb 1600

Float32 params under AdamW in arrays of 4 MB, on one CPU device, whose memory is the host's. Each
figure is from a process of its own. Peaks are of resident memory: of saves above that of the
training without them, of a restore above the process before it. The size is that of the state with
the record; stock Orbax saves params and the optimizer's state without one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import environment
from benchmarks.speed.measure import forget_peak, memory_bytes

WAYS = {"full checks": True, "by sample": True, "stock Orbax": False}
"""Each way to save, and if it has a Recorder."""
SIDE = 1024
GB = 1e9


def _setting(way: str, mb: int) -> tuple[Any, Any, Any]:
    """Optimizer, a function to the first state, and a train step that donates the state."""
    tx: Any = optax.adamw(1e-3)
    if WAYS[way]:
        tx = adacheck.Recorder(tx)
    count = max(1, mb * 1_000_000 // (4 * SIDE * SIDE * 4))  # params, two moments, a gradient

    def begin() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), count)
        params = {f"{i:05}": jax.random.normal(key, (SIDE, SIDE)) for i, key in enumerate(keys)}
        return {"params": params, "opt": tx.init(params)}

    def train(state: dict[str, Any], step: int) -> dict[str, Any]:
        params, key = state["params"], jax.random.key(step)
        noise = lambda x: 0.01 * x + 0.1 * jax.random.normal(key, x.shape)  # noqa: E731
        updates, opt = tx.update(jax.tree.map(noise, params), state["opt"], params)
        return {"params": optax.apply_updates(params, updates), "opt": opt}

    return tx, begin, jax.jit(train, donate_argnums=0)


def _manager(way: str, root: Path, tx: Any) -> ocp.CheckpointManager:
    if not WAYS[way]:
        return ocp.CheckpointManager(root)
    shadow = None if way == "by sample" else adacheck.Shadow()
    handler = adacheck.AdaCheckHandler(tx, shadow=shadow)
    return ocp.CheckpointManager(root, item_handlers=handler)


def _save(way: str, root: Path, mb: int, steps: int) -> dict[str, float]:
    """Saves every step of a run; the peak in bytes of the base alone, and of all."""
    tx, begin, train = _setting(way, mb)
    state = jax.block_until_ready(train(begin(), jnp.int32(0)))
    forget_peak()
    for step in (1, 2):
        state = jax.block_until_ready(train(state, jnp.int32(step)))
    before, first = memory_bytes("VmHWM"), 0
    size = sum(each.nbytes for each in jax.tree.leaves(state))
    with _manager(way, root, tx) as manager:
        for step in range(steps):
            save = adacheck.SaveArgs(state) if WAYS[way] else ocp.args.StandardSave(state)
            manager.save(step, args=save)
            del save
            manager.wait_until_finished()
            first = first or memory_bytes("VmHWM") - before
            state = jax.block_until_ready(train(state, jnp.int32(step + 3)))
        return {"size": size, "first": first, "peak": memory_bytes("VmHWM") - before}


def _restore(way: str, root: Path, mb: int, step: int) -> dict[str, float]:
    """Restores one step; its peak in bytes, and its seconds."""
    tx, begin, _ = _setting(way, mb)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(begin)
    )
    restore = adacheck.RestoreArgs(wanted) if WAYS[way] else ocp.args.StandardRestore(wanted)
    with _manager(way, root, tx) as manager:
        forget_peak()
        before, begin_s = memory_bytes("VmRSS"), time.monotonic()
        jax.block_until_ready(manager.restore(step, args=restore))
        seconds = time.monotonic() - begin_s
        return {"peak": memory_bytes("VmHWM") - before, "seconds": seconds}


def _measured(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, "-m", __spec__.name, "--child", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400, help="megabytes of state with its record")
    parser.add_argument("--steps", type=int, default=8, help="saved steps (default %(default)s)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        way, root, mb, steps = given.child
        run = _restore if steps.startswith("=") else _save
        print(json.dumps(run(way, Path(root), int(mb), int(steps.removeprefix("=")))))
        return
    print(environment())
    print("| | state GB | first save | all saves | restore: first step | last step |")
    print("|---|---|---|---|---|---|")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as directory:
            args = way, Path(directory) / "root", given.mb
            saved = _measured(*args, given.steps)
            restored = [_measured(*args, f"={step}") for step in (0, given.steps - 1)]
        size = saved["size"]
        peaks = [saved["first"], saved["peak"], *(each["peak"] for each in restored)]
        cells = [f"{peak / GB:.2f} ({peak / size:.2f} x)" for peak in peaks]
        print(f"| {way} | {size / GB:.2f} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
