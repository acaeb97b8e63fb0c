"""Time, CPU and host memory that saves and restores of gigabytes take, beside stock Orbax's.

    python -m benchmarks.gigabytes --mb 1600

Float32 params under AdamW in arrays of 4, 9 and 16 MB, on one CPU device, whose memory is the
host's. Each way saves in a process of its own, and each restore has one. Every save is waited for,
and nothing trains meanwhile, so that its CPU can be told. Peaks are of resident memory: of saves
above that of the training without them, of a restore above the process before it. The size is that
of the state with the record; stock Orbax saves params and the optimizer's state without one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
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
SIDES = (1024, 1536, 2048)
GB = 1e9


def _setting(way: str, mb: int) -> tuple[Any, Any, Any]:
    """Optimizer, a function to the first state, and a train step that donates the state."""
    tx: Any = optax.adamw(1e-3)
    if WAYS[way]:
        tx = adacheck.Recorder(tx)
    sizes, left = list[int](), mb * 1_000_000 // 16  # params, two moments, a gradient, of 4 bytes
    while left > 0:
        sizes.append(SIDES[len(sizes) % len(SIDES)])
        left -= sizes[-1] ** 2

    def begin() -> dict[str, Any]:
        keys = jax.random.split(jax.random.key(0), len(sizes))
        pairs = enumerate(zip(sizes, keys, strict=True))
        params = {f"{i:05}": jax.random.normal(key, (n, n)) for i, (n, key) in pairs}
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


def _save(way: str, root: Path, mb: int, steps: int) -> dict[str, Any]:
    """Saves every step of a run: seconds, CPU seconds and blocked seconds of each, and peaks."""
    tx, begin, train = _setting(way, mb)
    state = jax.block_until_ready(train(begin(), jnp.int32(0)))
    forget_peak()
    for step in (1, 2):
        state = jax.block_until_ready(train(state, jnp.int32(step)))
    before, first = memory_bytes("VmHWM"), 0
    size = sum(each.nbytes for each in jax.tree.leaves(state))
    costs = list[tuple[float, float, float]]()
    with _manager(way, root, tx) as manager:
        for step in range(steps):
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            save = adacheck.SaveArgs(state) if WAYS[way] else ocp.args.StandardSave(state)
            manager.save(step, args=save)
            blocked_s = time.monotonic() - begin_s
            del save
            manager.wait_until_finished()
            wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
            costs.append((wall_s, cpu_s, blocked_s))
            first = first or memory_bytes("VmHWM") - before
            state = jax.block_until_ready(train(state, jnp.int32(step + 3)))
        peak = memory_bytes("VmHWM") - before
    return {"size": size, "first": first, "peak": peak, "costs": costs}


def _restore(way: str, root: Path, mb: int, step: int) -> dict[str, float]:
    """Restores one step: its peak in bytes, its seconds, and those of CPU."""
    tx, begin, _ = _setting(way, mb)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(begin)
    )
    restore = adacheck.RestoreArgs(wanted) if WAYS[way] else ocp.args.StandardRestore(wanted)
    with _manager(way, root, tx) as manager:
        forget_peak()
        before, begin_s, cpu_s = memory_bytes("VmRSS"), time.monotonic(), time.process_time()
        jax.block_until_ready(manager.restore(step, args=restore))
        wall_s, cpu_s = time.monotonic() - begin_s, time.process_time() - cpu_s
        return {"peak": memory_bytes("VmHWM") - before, "wall_s": wall_s, "cpu_s": cpu_s}


@contextlib.contextmanager
def _memory_at_hand() -> Iterator[None]:
    """Free memory is given to a file of zeros, from which whoever takes memory gets it at once.

    A virtual machine may give free memory back to its host, and gets it slowly, 2 to 4 s a GB.
    Pages of a file are not free, and the system takes them without a write.
    """
    with tempfile.TemporaryFile() as file:
        file.truncate(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        while file.read(1 << 24):
            pass
        yield


def _measured(*arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", __spec__.name, "--child", *map(str, arguments)]
    with _memory_at_hand():
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
    titles = "state GB", "first save: s, CPU s", "a later save: s, CPU s, blocked ms"
    titles += "peak of the first save", "of all", "restore of the first: s, CPU s, peak"
    print("| |", " | ".join([*titles, "of the last"]), "|")
    print("|---" * 8 + "|")
    for way in WAYS:
        with tempfile.TemporaryDirectory() as directory:
            args = way, Path(directory) / "root", given.mb
            saved = _measured(*args, given.steps)
            restored = [_measured(*args, f"={step}") for step in (0, given.steps - 1)]
        size, (first, *later) = saved["size"], saved["costs"]
        wall_s, cpu_s, blocked_s = map(statistics.median, zip(*later, strict=True))
        peaks = [f"{saved[x] / GB:.2f} ({saved[x] / size:.2f} x)" for x in ("first", "peak")]
        cells = [f"{size / GB:.2f}", f"{first[0]:.2f}, {first[1]:.2f}"]
        cells += [f"{wall_s:.2f}, {cpu_s:.2f}, {1000 * blocked_s:.0f}", *peaks]
        for each in restored:
            peak = f"{each['peak'] / GB:.2f} ({each['peak'] / size:.2f} x)"
            cells.append(f"{each['wall_s']:.2f}, {each['cpu_s']:.2f}, {peak}")
        print(f"| {way} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
