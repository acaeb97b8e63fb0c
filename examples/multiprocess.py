"""Trains a small network in several processes on this machine, which save every step together.

Kill it, or one of its processes, at any moment and run it again, with as many processes or with
others: it goes on from the newest step::

    python examples/multiprocess.py --root /tmp/multiprocess --processes 4 --steps 20
    python examples/multiprocess.py --root /tmp/multiprocess --processes 2 --steps 40

Params and moments are cut over the devices of all processes (FSDP), and so is the batch. The data
are made up. On a cluster each host runs ``train`` after ``jax.distributed.initialize()``; (1) to
(4) mark all that saving every step needs, as in one process.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding

import adacheck_jax as adacheck

WIDTH, BATCH = 256, 64

recorder = adacheck.Recorder(optax.adamw(1e-3))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
model = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(1)])


def init_state() -> TrainState:
    """Random params and a fresh optimizer."""
    params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def abstract_state(mesh: Mesh) -> TrainState:
    """Shapes, data types and shardings of the state: matrices are cut, the rest is replicated."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, jax.P("data") if leaf.ndim == 2 else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init_state))


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The inputs of one step, of which each process makes the rows that its devices need."""

    def rows(index: tuple[slice, ...]) -> np.ndarray:
        numbers = range(*index[0].indices(BATCH))
        made = [np.random.default_rng((step, n)).standard_normal(WIDTH) for n in numbers]
        return np.array(made, np.float32)

    return jax.make_array_from_callback((BATCH, WIDTH), NamedSharding(mesh, jax.P("data")), rows)


def train_step(state: TrainState, inputs: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step towards the mean of the inputs' sines."""

    def loss_of(params: Any) -> jax.Array:
        outputs = state.apply_fn({"params": params}, inputs)
        return jnp.mean((outputs - jnp.sin(inputs).mean(axis=1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(root: Path, steps: int) -> None:
    """Trains up to a number of steps; every process of the job calls it with the same arguments."""

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    wanted = abstract_state(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    say(f"{jax.process_count()} processes, {jax.device_count()} devices")
    options = ocp.CheckpointManagerOptions(
        max_to_keep=5,
        # So that waiting for a process that died ends after seconds, and not after minutes.
        async_options=ocp.AsyncOptions(barrier_sync_fn=adacheck.wait_for_processes),
    )
    # (2) a stock Orbax manager, one in each process
    with adacheck.checkpoint_manager(root, recorder, options=options) as manager:
        first = 1
        if (newest := manager.latest_step()) is not None:  # (3) resume, on any number of processes
            state = manager.restore(newest, args=adacheck.RestoreArgs(wanted))
            first = newest + 1
            say(f"resuming after step {newest}")
        else:
            state = jax.jit(init_state, out_shardings=shardings)()
        for step in range(first, steps + 1):
            state, loss = step_fn(state, batch(step, mesh))
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) returns; writing goes on
            say(f"step {step}, loss {loss:.4f}")
    say(f"saved in {root}; look at it with: adacheck ls {root}")


def join(process: int, processes: int, port: int, devices: int) -> None:
    """Makes this process one of the job's, which ends where the launcher does."""

    def end_with_launcher() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_launcher, daemon=True).start()
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)


def launch(arguments: list[str], processes: int) -> int:
    """Starts the processes of the job; where one fails or is killed, ends the others.

    Returns:
        Exit code: 0 if all of them ended well.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, *arguments, "--port", str(port), "--process"]
    started = [
        subprocess.Popen([*command, str(process)], stdin=subprocess.PIPE)
        for process in range(processes)
    ]
    try:
        while any(each.poll() is None for each in started):
            if any(each.returncode for each in started):
                break
            time.sleep(0.1)
    finally:
        ended = [each.poll() for each in started]
        for each in started:
            each.kill()
            each.wait()
    for process, code in enumerate(ended):
        if code:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            print(f"process {process} {how}", flush=True)
    if any(ended):
        print("the others are ended too; run it again to go on", flush=True)
    return int(any(ended))


def main() -> None:
    """Reads the command line; launches the processes, or is one of them."""
    parser = argparse.ArgumentParser(description="Train in several processes, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    parser.add_argument("--processes", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--devices", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # given by the launcher
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.process is None:
        sys.exit(launch(sys.argv[1:], args.processes))
    join(args.process, args.processes, args.port, args.devices)
    train(args.root.absolute(), args.steps)


if __name__ == "__main__":
    main()
