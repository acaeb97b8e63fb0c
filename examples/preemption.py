"""Trains until it is told to end, saves the step that it is at, and goes on when it is run again.

A cluster that needs its machine sends SIGTERM. JAX's preemption service hears it, and Orbax's
``reached_preemption`` answers True at the same step in all processes. A single process may hear the
signal itself (``--plain``). Between saves, steps are kept in memory; the one at which it ends is
saved with all of them::

    python examples/preemption.py --root /tmp/preempted --steps 100000   # kill it, and run it again
    python examples/preemption.py --root /tmp/preempted --steps 100000 --preempt-after 15

The second line sends the signal to itself. In the end the last step is restored and compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck

WIDTH = 64

recorder = adacheck.Recorder(optax.adamw(1e-2))  # (1) wrap the optimizer, last in the chain

State = dict[str, Any]


def init_state() -> State:
    params = {"w": jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / 8}
    return {"params": params, "opt_state": recorder.init(params)}


@jax.jit(donate_argnums=0)
def train_step(state: State, inputs: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(inputs @ params["w"]) - inputs) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def begin_job() -> None:
    """Starts JAX's services for this one process; a cluster gives the address and the numbers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jax.config.update("jax_enable_preemption_service", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=1, process_id=0)


def hear() -> threading.Event:
    """An event that SIGTERM sets, in a process that JAX's service does not listen in."""
    heard = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: heard.set())
    return heard


def train(
    manager: adacheck.AdaCheckManager,
    steps: int,
    preempt_after: int | None,
    heard: threading.Event | None,
) -> None:
    """Trains up to a number of steps, or to a preemption."""
    state, step = init_state(), 0
    if (newest := manager.latest_step()) is not None:  # (3) resume
        print(f"resuming after step {newest}")
        state, step = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest
    begun, preempted = step, False
    while step < steps and not preempted:
        step += 1
        if step - begun == preempt_after:
            os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does it
        state, loss = train_step(state, jax.random.normal(jax.random.key(step), (32, WIDTH)))
        preempted = heard.is_set() if heard else manager.reached_preemption(step)
        due = manager.should_save(step) or preempted or step == steps
        # (4) save, or keep for the next save
        if due or not manager.handler.record_step(state, step):
            manager.save(step, args=adacheck.SaveArgs(state), force=True)
            print(f"step {step}, loss {loss:.4f}")
    if preempted:
        print(f"preempted after step {step}")
    manager.wait_until_finished()
    if (report := manager.handler.last_save) is not None:
        print(f"with it the steps that were kept in memory: {report.deferred}")
    restored = manager.restore(step, args=adacheck.RestoreArgs(state))
    for live, found in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert np.asarray(live).tobytes() == np.asarray(found).tobytes()
    print(f"step {step} is saved: every bit of it, restored, is the same")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save the step at which a run is preempted.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default 40)")
    parser.add_argument("--preempt-after", type=int, help="steps until it sends itself SIGTERM")
    parser.add_argument("--plain", action="store_true", help="without JAX's preemption service")
    args = parser.parse_args()
    heard = hear() if args.plain else None
    if heard is None:
        begin_job()
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=3)
    # (2) a stock Orbax manager
    with adacheck.checkpoint_manager(args.root, recorder, options=options) as manager:
        train(manager, args.steps, args.preempt_after, heard)


if __name__ == "__main__":
    main()
