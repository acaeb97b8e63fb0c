"""Slowdown of training where every step is saved.

    python -m benchmarks.slowdown --mb 100

Two kinds of steps, of about 200 ms. One leaves the host idle, as an accelerator does: its update
waits for a callback that sleeps. The other one takes all cores for products of matrices. The loop
waits for each step's loss, as loops do that print it. Each way has processes of its own, which take
turns; the first ten steps of each, with the first base and all compilations, are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import environment

NOTHING, OURS, STOCK = "nothing saved", "adacheck_jax, every step", "stock Orbax, every step"
WAYS = (NOTHING, OURS, STOCK)
HOSTS = ("idle", "busy")
STEP_S = 0.2
WARM_STEPS = 10
SIDE = 1024


def _work(host: str) -> Callable[[jax.Array], jax.Array]:
    """A function of a number that takes :data:`STEP_S`, and gives a number that is zero."""
    if host == "idle":

        def sleep(x: Any) -> Any:
            time.sleep(STEP_S)
            return np.zeros_like(x)

        return lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x)

    def products(x: jax.Array, count: Any) -> jax.Array:
        matrix = jnp.full((SIDE, SIDE), x)
        return jax.lax.fori_loop(0, count, lambda _, y: y @ matrix * 1e-3, matrix).sum() * 0.0

    timed = jax.jit(products)
    jax.block_until_ready(timed(jnp.float32(1), 2))
    begin_s = time.perf_counter()
    jax.block_until_ready(timed(jnp.float32(1), 20))
    count = max(1, round(STEP_S / (time.perf_counter() - begin_s) * 20))
    return lambda x: products(x, count)


def _run(way: str, host: str, root: Path, mb: int, steps: int) -> list[float]:
    """Seconds of each step of a run."""
    count = max(1, mb * 1_000_000 // (4 * SIDE * SIDE * 4))  # params, two moments, a gradient
    tx: Any = optax.adamw(1e-3)
    tx = adacheck.Recorder(tx) if way == OURS else tx
    keys = jax.random.split(jax.random.key(0), count)
    params = {f"{i:05}": jax.random.normal(key, (SIDE, SIDE)) for i, key in enumerate(keys)}
    state: Any = {"params": params, "opt": tx.init(params)}
    work = _work(host)

    def train(state: Any, step: jax.Array) -> Any:
        loss = work(state["params"]["00000"][0, 0] + step)
        gradients = jax.tree.map(lambda x: 0.01 * x + loss, state["params"])
        updates, opt = tx.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    train_step, manager, taken_s = jax.jit(train, donate_argnums=0), None, list[float]()
    if way == OURS:
        manager = adacheck.checkpoint_manager(root, tx, max_to_keep=2)
    elif way == STOCK:
        manager = ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(max_to_keep=2))
    begin_s = time.perf_counter()
    for step in range(WARM_STEPS + steps):
        state, loss = train_step(state, jnp.float32(step))
        float(loss)
        if manager is not None:
            args = adacheck.SaveArgs(state) if way == OURS else ocp.args.StandardSave(state)
            manager.save(step, args=args)
            del args
        now_s = time.perf_counter()
        taken_s.append(now_s - begin_s)
        begin_s = now_s
    if manager is not None:
        manager.close()
    return taken_s[WARM_STEPS:]


def _measured(way: str, host: str, given: argparse.Namespace) -> list[float]:
    command = [sys.executable, "-m", __spec__.name, "--mb", str(given.mb)]
    command += ["--steps", str(given.steps), "--child", way, host]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=100, help="megabytes of state with its record")
    parser.add_argument("--steps", type=int, default=60, help="steps a run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs each way (default %(default)s)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(_run(*given.child, Path(directory) / "root", given.mb, given.steps)))
        return
    print(environment())
    print("| host | | mean step: ms | longest: ms | mean, beside nothing saved | longest |")
    print("|---|---|---|---|---|---|")
    for host in HOSTS:
        means: dict[str, list[float]] = {way: [] for way in WAYS}
        longest: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                taken_s = _measured(way, host, given)
                means[way].append(statistics.mean(taken_s))
                longest[way].append(max(taken_s))
        for way in WAYS:
            mean, top = statistics.median(means[way]), statistics.median(longest[way])
            ratios = [a / b for a, b in zip(means[way], means[NOTHING], strict=True)]
            tops = [a / b for a, b in zip(longest[way], longest[NOTHING], strict=True)]
            cells = [f"{1000 * mean:.1f}", f"{1000 * top:.1f}"]
            cells += [f"{statistics.median(x):.3f}" for x in (ratios, tops)]
            print(f"| {host} | {way} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
