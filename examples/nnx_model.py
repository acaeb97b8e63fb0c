"""Trains a flax nnx model with dropout and batch statistics, and saves every step.

The saved state is ``nnx.state((model, optimizer))``: params, batch statistics, the dropout's random
counter, and the optimizer's state. Kill it and run it again: it goes on where it was::

    python examples/nnx_model.py --root /tmp/nnx --steps 20

In the end the last step is restored into a fresh model and compared bit by bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import adacheck_jax as adacheck

WIDTH = 64

recorder = adacheck.Recorder(optax.adamw(1e-2))  # (1) wrap the optimizer, last in the chain


class Model(nnx.Module):
    """A layer, batch norm, dropout, and a layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, width) to (batch, 1)."""
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def create() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, inputs: jax.Array) -> jax.Array:
    def loss_of(model: Model) -> jax.Array:
        return jnp.mean((model(inputs) - jnp.sin(inputs).sum(axis=1, keepdims=True)) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def bits(state: Any) -> list[bytes]:
    """All bits of a state; of a typed random key those of its data."""
    leaves = jax.tree.leaves(nnx.to_pure_dict(state))
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    plain = [jax.random.key_data(x) if key else x for x, key in zip(leaves, is_key, strict=True)]
    return [np.asarray(leaf).tobytes() for leaf in plain]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an nnx model, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    model, optimizer = create()
    with adacheck.checkpoint_manager(args.root, recorder) as manager:  # (2) a stock Orbax manager
        first = 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            print(f"resuming after step {newest}")
            wanted = adacheck.RestoreArgs(nnx.state((model, optimizer)))
            nnx.update((model, optimizer), manager.restore(newest, args=wanted))
            first = newest + 1
        model.train()
        for step in range(first, args.steps + 1):
            inputs = jax.random.normal(jax.random.key(step), (32, WIDTH))
            loss = train_step(model, optimizer, inputs)
            # (4) save every step
            manager.save(step, args=adacheck.SaveArgs(nnx.state((model, optimizer))))
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        wanted = adacheck.RestoreArgs(nnx.state(create()))
        restored = manager.restore(args.steps, args=wanted)
        assert bits(restored) == bits(nnx.state((model, optimizer)))
    print(f"step {args.steps} restored into a fresh model: every bit is the same")


if __name__ == "__main__":
    main()
