"""Trains until it is told to end, saves the step that it is at, and goes on when it is run again.

A cluster that needs its machine sends SIGTERM. JAX's preemption service hears it, and Orbax's
``reached_preemption`` answers True at the same step in all processes. Between saves, steps are kept
in memory; the one at which it ends is saved with all of them::

    python examples/preemption.py --root /tmp/preempted --steps 100000   # kill it, and run it again
    python examples/preemption.py --root /tmp/preempted --steps 100000 --preempt-after 15

The second line sends the signal to itself. In the end the last step is restored and compared.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
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


def train(
    manager: ocp.CheckpointManager,
    handler: adacheck.AdaCheckHandler,
    steps: int,
    preempt_after: int | None,
) -> None:
    """Trains up to a number of steps, or to a preemption."""
    state, step = init_state(), 0
    if (newest := manager.latest_step()) is not None:  # (3) resume
        print(f"resuming after step {newest}")
        state, step = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest
    # (5) JAX ends a run at the step after the last one that it was told of: tell it where this run
    # begins, or a signal that comes before the first step is done would be missed.
    begun, preempted = step, manager.reached_preemption(step)
    while step < steps and not preempted:
        step += 1
        if step - begun == preempt_after:
            os.kill(os.getpid(), signal.SIGTERM)  # as a cluster does it
        state, loss = train_step(state, jax.random.normal(jax.random.key(step), (32, WIDTH)))
        preempted = manager.reached_preemption(step)
        due = manager.should_save(step) or preempted or step == steps
        if due or not handler.record_step(state, step):  # (4) save, or keep for the next save
            manager.save(step, args=adacheck.SaveArgs(state), force=True)
            # (6) Orbax's thread tells JAX the step that it has saved. Heard later than a step of
            # this loop, it would have JAX end the run at a step that is past: at none.
            manager.wait_until_finished()
            print(f"step {step}, loss {loss:.4f}")
    if preempted:
        print(f"preempted after step {step}")
    manager.wait_until_finished()
    restored = manager.restore(step, args=adacheck.RestoreArgs(state))
    for live, found in zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True):
        assert np.asarray(live).tobytes() == np.asarray(found).tobytes()
    print(f"step {step} is saved: every bit of it, restored, is the same")


def main() -> None:
    parser = argparse.ArgumentParser(description="Save the step at which a run is preempted.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default 40)")
    parser.add_argument("--preempt-after", type=int, help="steps until it sends itself SIGTERM")
    args = parser.parse_args()
    begin_job()
    handler = adacheck.AdaCheckHandler(recorder)  # (2) an Orbax handler for a stock manager
    options = ocp.CheckpointManagerOptions(save_interval_steps=20, max_to_keep=3)
    root = args.root.absolute()
    with ocp.CheckpointManager(root, item_handlers=handler, options=options) as manager:
        train(manager, handler, args.steps, args.preempt_after)


if __name__ == "__main__":
    main()
