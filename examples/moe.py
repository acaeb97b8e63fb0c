"""Trains a mixture of experts that lie on different devices, and saves every step.

Each token goes to one expert. A replay needs no routing: it folds the recorded gradients. Kill it
and run it again, with another number of devices if you like::

    python examples/moe.py --root /tmp/moe --steps 20 --devices 4
    python examples/moe.py --root /tmp/moe --steps 40 --devices 2

In the end the last step is restored onto one device and compared bit by bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

import adacheck_jax as adacheck

WIDTH, EXPERTS, TOKENS = 32, 8, 128

recorder = adacheck.Recorder(optax.adamw(1e-2))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)

State = dict[str, Any]


def init_state() -> State:
    router, up, down = jax.random.split(jax.random.key(0), 3)
    params = {
        "router": jax.random.normal(router, (WIDTH, EXPERTS)) / 8,
        "up": jax.random.normal(up, (EXPERTS, WIDTH, 2 * WIDTH)) / 8,
        "down": jax.random.normal(down, (EXPERTS, 2 * WIDTH, WIDTH)) / 8,
    }
    return {"params": params, "opt_state": optimizer.init(params)}


def abstract_state(mesh: Mesh) -> State:
    """Shapes and shardings: experts are spread over the devices, all else is everywhere."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = jax.P("expert") if leaf.ndim == 3 else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, jax.eval_shape(init_state))


def loss_of(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
    """Error of the chosen experts' outputs, and a term that spreads tokens over experts."""
    chances = jax.nn.softmax(tokens @ params["router"])
    choice = jax.nn.one_hot(chances.argmax(axis=1), EXPERTS)
    hidden = jax.nn.gelu(jnp.einsum("tw,ewh->teh", tokens, params["up"]))
    outputs = jnp.einsum("teh,ehw,te->tw", hidden, params["down"], choice * chances)
    balance = EXPERTS * jnp.sum(choice.mean(axis=0) * chances.mean(axis=0))
    return jnp.mean((outputs - jnp.sin(tokens)) ** 2) + 0.01 * balance


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], tokens)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def mesh_of(count: int) -> Mesh:
    axes = (AxisType.Auto,)
    return jax.make_mesh((count,), ("expert",), axis_types=axes, devices=jax.devices()[:count])


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    parser.add_argument("--devices", type=int, default=4, help="virtual devices to make of a CPU")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    wanted = abstract_state(mesh_of(args.devices))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    with adacheck.checkpoint_manager(args.root, recorder) as manager:  # (2) a stock Orbax manager
        if (newest := manager.latest_step()) is not None:  # (3) resume, on this mesh
            print(f"resuming after step {newest}")
            state, first = manager.restore(newest, args=adacheck.RestoreArgs(wanted)), newest + 1
        else:
            state, first = jax.jit(init_state, out_shardings=shardings)(), 1
        for step in range(first, args.steps + 1):
            state, loss = step_fn(state, jax.random.normal(jax.random.key(step), (TOKENS, WIDTH)))
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) save every step
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        alone = adacheck.RestoreArgs(abstract_state(mesh_of(1)), require_exact=True)
        assert bits(manager.restore(args.steps, args=alone)) == bits(state)
    print(f"step {args.steps} restored onto one device: every bit is the same")


if __name__ == "__main__":
    main()
