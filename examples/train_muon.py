"""Trains with muon, whose update multiplies matrices, and still replays every step bit for bit.

The bits of a product of matrices depend on how the compiler arranged the program around it. So the
update becomes a program of its own, marked (1) and (2); all else is as in ``train_lm.py``::

    python examples/train_muon.py --root /tmp/muon --steps 40 --devices 8 --mesh 4x2

In the end the last step is restored onto one device and compared with the live state.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import train_lm
from flax.training.train_state import TrainState

import adacheck_jax as adacheck

recorder = adacheck.Recorder(optax.contrib.muon(2e-3))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
update = adacheck.separate_update(optimizer)  # (1) instead of state.apply_gradients


def init_state() -> TrainState:
    """The example model's params, and a fresh muon."""
    state = train_lm.init_state()
    params = state.params
    return TrainState.create(apply_fn=state.apply_fn, params=params, tx=optimizer)


def abstract_state(mesh: jax.sharding.Mesh) -> TrainState:
    """Shapes, data types and shardings of the state on a mesh."""
    return train_lm.abstract_state(mesh, init_state)


@jax.jit
def gradients(state: TrainState, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Loss and gradients: the train step without its update."""

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jax.value_and_grad(loss_of)(state.params)


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step, in two compiled programs; params and optimizer state are donated."""
    loss, grads = gradients(state, tokens)
    params, opt_state = update(grads, state.opt_state, state.params)  # (2)
    return state.replace(step=state.step + 1, params=params, opt_state=opt_state), loss


def main() -> None:
    """Reads the command line, trains, restores and compares."""
    parser = argparse.ArgumentParser(description="Train with muon, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="new checkpoint directory")
    parser.add_argument("--steps", type=int, default=40, help="steps in all (default 40)")
    parser.add_argument("--mesh", default="1x1", help="data x model, such as 4x2 (default 1x1)")
    parser.add_argument("--devices", type=int, help="virtual devices to make of a CPU")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = train_lm.parse_mesh(args.mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh))
    state = jax.jit(init_state, out_shardings=shardings)()
    with adacheck.checkpoint_manager(args.root, recorder) as manager:
        for step in range(1, args.steps + 1):
            state, loss = train_step(state, train_lm.batch(step, mesh))
            manager.save(step, args=adacheck.SaveArgs(state))
            if step % 10 == 0:
                print(f"step {step}, loss {float(loss):.4f}", flush=True)
        manager.wait_until_finished()
        target = adacheck.RestoreArgs(
            abstract_state(train_lm.parse_mesh("1x1")), require_exact=True
        )
        restored = manager.restore(args.steps, args=target)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(restored), strict=True)
    different = sum(int((np.asarray(a) != np.asarray(b)).sum()) for a, b in pairs)
    print(f"step {args.steps} restored on one device: {different} elements differ")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
