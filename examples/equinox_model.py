"""Trains an equinox model and saves every step: of the model its arrays are saved.

Functions and numbers in the model are no arrays; they come from the code, as equinox does it. Kill
it and run it again: it goes on where it was::

    python examples/equinox_model.py --root /tmp/equinox --steps 20

In the end the last step is restored into a fresh model and compared bit by bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck

WIDTH = 64

recorder = adacheck.Recorder(optax.lion(1e-3))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)


def create() -> tuple[eqx.nn.MLP, Any]:
    model = eqx.nn.MLP(WIDTH, 1, WIDTH, depth=2, key=jax.random.key(0))
    return model, optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def train_step(model: eqx.nn.MLP, opt_state: Any, inputs: jax.Array) -> tuple[Any, Any, jax.Array]:
    def loss_of(model: eqx.nn.MLP) -> jax.Array:
        outputs = jax.vmap(model)(inputs)
        return jnp.mean((outputs - jnp.sin(inputs).sum(axis=1, keepdims=True)) ** 2)

    loss, gradients = eqx.filter_value_and_grad(loss_of)(model)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


def state_of(model: eqx.nn.MLP, opt_state: Any) -> dict[str, Any]:
    """The arrays, which are saved."""
    return {"model": eqx.filter(model, eqx.is_array), "opt_state": opt_state}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an equinox model, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    model, opt_state = create()
    with adacheck.checkpoint_manager(args.root, recorder) as manager:  # (2) a stock Orbax manager
        first = 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            print(f"resuming after step {newest}")
            wanted = adacheck.RestoreArgs(state_of(model, opt_state))
            found = manager.restore(newest, args=wanted)
            model, opt_state = eqx.combine(found["model"], model), found["opt_state"]
            first = newest + 1
        for step in range(first, args.steps + 1):
            inputs = jax.random.normal(jax.random.key(step), (32, WIDTH))
            model, opt_state, loss = train_step(model, opt_state, inputs)
            manager.save(step, args=adacheck.SaveArgs(state_of(model, opt_state)))  # (4)
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        wanted = adacheck.RestoreArgs(state_of(*create()))
        restored = manager.restore(args.steps, args=wanted)
        assert bits(restored) == bits(state_of(model, opt_state))
    print(f"step {args.steps} restored into a fresh model: every bit is the same")


if __name__ == "__main__":
    main()
