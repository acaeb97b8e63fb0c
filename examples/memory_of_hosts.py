"""Loses a host and all that was in its memory, and goes on from the memory of the other hosts.

Four processes on this machine, each a host: a directory in memory, and a failure domain::

    python examples/memory_of_hosts.py --root /tmp/memory_of_hosts

Params and moments are cut in two (FSDP), and two pairs of hosts hold the same (data parallelism).
So each host keeps what it writes of a base, and a copy of what another one writes; nothing is sent
for it. Storage gets a step now and then. One host is killed and its memory wiped, the whole job is
started again, as a cluster does it, and recovers a step that storage never had. At the end all is
trained once more, uninterrupted, and compared bit by bit.

The data are made up. (1) to (4) mark all that a training loop needs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding

import adacheck_jax as adacheck

HOSTS, VICTIM = 4, 2
WIDTH, BATCH = 128, 32
SAVE_EVERY = 10

recorder = adacheck.Recorder(optax.adamw(1e-3))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
model = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(2)])


def init_state() -> TrainState:
    """Random params and a fresh optimizer."""
    params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def abstract_state(mesh: Mesh) -> TrainState:
    """Shapes, data types and shardings of the state: each half lies on two hosts."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, jax.P("fsdp") if leaf.ndim == 2 else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init_state))


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The inputs of one step, a function of the step alone."""
    rows = np.random.default_rng(step).standard_normal((BATCH, WIDTH), np.float32)
    sharding = NamedSharding(mesh, jax.P(("data", "fsdp")))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def train_step(state: TrainState, inputs: jax.Array) -> TrainState:
    """One step towards the sums of the inputs' sines."""

    def loss_of(params: Any) -> jax.Array:
        outputs = state.apply_fn({"params": params}, inputs)
        return jnp.mean((outputs - jnp.sin(inputs).sum(axis=1, keepdims=True)) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_of)(state.params))


def train(root: Path, memory: Path, host: int, steps: int, kill_at: int | None) -> None:
    """Trains up to a number of steps; every process of the job calls it.

    Args:
        root: storage, the same for all hosts.
        memory: a directory in the memory of this host.
        host: number of this host.
        steps: steps in all.
        kill_at: step after which the victim kills itself; None to compare at the end.
    """
    # What libraries print goes where errors go; the story stays where it is read.
    story = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, file=story, flush=True)

    mesh = jax.make_mesh((2, HOSTS // 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    wanted = abstract_state(mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    begin = jax.jit(init_state, out_shardings=shardings)
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
    shadow = adacheck.Shadow(directory=memory, copies=1, domain=f"host {host}")
    # (2) a stock Orbax manager, one in each process
    with adacheck.checkpoint_manager(root, recorder, shadow=shadow) as manager:
        stored, first = manager.latest_step(), 1
        # (3) resume, from memory wherever that has a step as new as storage
        if (found := manager.restore_newest(wanted)) is not None:
            newest, state = found
            first = newest + 1
            say(f"resuming after step {newest}, from memory; storage has step {stored}")
        else:
            state = begin()
        for step in range(first, steps + 1):
            state = step_fn(state, batch(step, mesh))
            # (4) save now and then, and keep all other steps in memory
            is_due = step % SAVE_EVERY == 0 or step == steps
            if is_due or not manager.handler.record_step(state, step):
                manager.save(step, args=adacheck.SaveArgs(state))
                say(f"step {step} goes to storage")
            if step == kill_at and host == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
    say(f"trained up to step {steps}")
    again = begin()
    for step in range(1, steps + 1):
        again = step_fn(again, batch(step, mesh))
    leaves = [*zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True)]
    for one, other in leaves:
        for a, b in zip(one.addressable_shards, other.addressable_shards, strict=True):
            assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes()
    say(f"an uninterrupted run has the same bits at step {steps}, in all {len(leaves)} arrays")


def join(process: int, port: int) -> None:
    """Makes this process one of the job's, which ends where the launcher does."""

    def end_with_launcher() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_launcher, daemon=True).start()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", HOSTS, process)


def launch(arguments: list[str], root: Path, order: list[int]) -> list[int | None]:
    """Runs the job until all of its processes have ended, or one has: then all are.

    Args:
        arguments: arguments of each.
        root: directory for their errors.
        order: number of the process that runs on each host.

    Returns:
        What each host's process ended by itself with; None for those that were ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = list[subprocess.Popen[bytes]]()
    for host, process in enumerate(order):
        numbers = ["--host", str(host), "--process", str(process), "--port", str(port)]
        with Path(root, f"errors of host {host}").open("ab") as errors:
            command = [sys.executable, __file__, *arguments, *numbers]
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors))
    try:
        while any(each.poll() is None for each in started) and not any(
            each.poll() for each in started
        ):
            time.sleep(0.05)
    finally:
        ended = [each.poll() for each in started]
        for each in started:
            each.kill()
            each.wait()
    return ended


def tell_story(root: Path, steps: int, kill_at: int) -> None:
    """Starts the job, wipes the memory of the host that was lost, and starts it again."""
    root.mkdir(parents=True, exist_ok=True)
    if any(root.iterdir()):
        sys.exit(f"expected an empty directory, found {root} with something in it")
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    memory = Path(tempfile.mkdtemp(prefix="memory_of_hosts-", dir=in_memory))
    shared = ["--root", str(root), "--memory", str(memory), "--steps", str(steps)]
    try:
        print(f"{HOSTS} hosts; the state is cut in two, and each half lies on two hosts")
        ended = launch([*shared, "--kill-at", str(kill_at)], root, [*range(HOSTS)])
        if ended[VICTIM] != -signal.SIGKILL:
            sys.exit(f"expected host {VICTIM} to be killed, found {ended}; see {root}")
        shutil.rmtree(memory / f"host {VICTIM}")
        print(f"host {VICTIM} is killed after step {kill_at}, and its memory is wiped")
        print("the whole job starts again, its processes in another order", flush=True)
        ended = launch(shared, root, [*range(1, HOSTS), 0])
        if any(code != 0 for code in ended):
            sys.exit(f"expected all processes to end well, found {ended}; see {root}")
    finally:
        shutil.rmtree(memory)


def main() -> None:
    """Reads the command line; launches the processes, or is one of them."""
    parser = argparse.ArgumentParser(description="Lose a host, and go on from others' memory.")
    parser.add_argument("--root", type=Path, required=True, help="new directory for checkpoints")
    parser.add_argument("--steps", type=int, default=24, help="steps in all (default 24)")
    parser.add_argument("--kill-at", type=int, help="step at which a host is lost (default 18)")
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)  # these by the launcher
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    root = args.root.absolute()
    if args.host is None:
        tell_story(root, args.steps, 18 if args.kill_at is None else args.kill_at)
        return
    join(args.process, args.port)
    memory = args.memory / f"host {args.host}"
    train(root / "steps", memory, args.host, args.steps, args.kill_at)


if __name__ == "__main__":
    main()
