"""Trains with optax alone, no model library: the state is a dictionary of arrays.

Kill it at any moment and run it again: it goes on from the newest step, bit for bit as if nothing
had happened::

    python examples/plain_optax.py --root /tmp/plain --steps 20

In the end the step before the last one is restored, trained once more, and compared with the last.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck

WIDTH = 64

schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=5, decay_steps=100)
recorder = adacheck.Recorder(optax.adamw(schedule))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)

State = dict[str, Any]


def init_state() -> State:
    key = jax.random.key(0)
    params = {"hidden": jax.random.normal(key, (WIDTH, WIDTH)) / 8, "out": jnp.zeros(WIDTH)}
    return {"params": params, "opt_state": optimizer.init(params), "key": key}


@jax.jit(donate_argnums=0)
def train_step(state: State) -> tuple[State, jax.Array]:
    """One step; the random key of its batch is part of the state, and so is saved with it."""
    key, batch_key = jax.random.split(state["key"])
    inputs = jax.random.normal(batch_key, (32, WIDTH))

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        outputs = jnp.tanh(inputs @ params["hidden"]) @ params["out"]
        return jnp.mean((outputs - jnp.sin(inputs).sum(axis=1)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, loss


def bits(state: State) -> list[bytes]:
    """All bits of a state; of a typed random key those of its data."""
    plain = state | {"key": jax.random.key_data(state["key"])}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with optax alone, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    with adacheck.checkpoint_manager(args.root, recorder) as manager:  # (2) a stock Orbax manager
        state, first = init_state(), 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            print(f"resuming after step {newest}")
            state, first = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest + 1
        for step in range(first, args.steps + 1):
            state, loss = train_step(state)
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) save every step
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        last = bits(state)
        before = manager.restore(args.steps - 1, args=adacheck.RestoreArgs(state))
        assert bits(train_step(before)[0]) == last
    print(f"step {args.steps - 1}, restored and trained once more, is step {args.steps} bit by bit")


if __name__ == "__main__":
    main()
