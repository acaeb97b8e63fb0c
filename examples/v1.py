"""Trains a small network and saves every step through Orbax v1.

Kill it at any moment and run it again: it goes on from the newest step, bit for bit as if nothing
had happened::

    python examples/v1.py --root /tmp/v1 --steps 20

The data are made up. (1) to (4) mark all that a training loop needs to save every step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as ocp

import adacheck_jax as adacheck

WIDTH, BATCH = 64, 32

recorder = adacheck.Recorder(optax.adamw(1e-3))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
model = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(1)])


def init_state() -> TrainState:
    """Random params and a fresh optimizer."""
    params = model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


@jax.jit(donate_argnums=0)  # the state may be donated
def train_step(state: TrainState, inputs: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step towards the sum of the inputs' sines."""

    def loss_of(params: Any) -> jax.Array:
        outputs = state.apply_fn({"params": params}, inputs)
        return jnp.mean((outputs - jnp.sin(inputs).sum(axis=1, keepdims=True)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(checkpointer: ocp.training.Checkpointer, steps: int) -> None:
    """Trains up to a number of steps, from the newest saved one."""
    state, first = init_state(), 1
    if checkpointer.latest is not None:  # (3) resume
        first = checkpointer.latest.step + 1
        print(f"resuming after step {first - 1}")
        state = checkpointer.load(None, state)
    for step in range(first, steps + 1):
        # A batch is a function of the step: resuming needs no iterator state.
        state, loss = train_step(state, jax.random.normal(jax.random.key(step), (BATCH, WIDTH)))
        checkpointer.save_async(step, state)  # (4) returns; writing goes on
        print(f"step {step}, loss {loss:.4f}")


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train a small network, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    # (2) a stock Checkpointer of Orbax
    with adacheck.v1.checkpointer(args.root, recorder, max_to_keep=5) as checkpointer:
        train(checkpointer, args.steps)


if __name__ == "__main__":
    main()
