"""Fine-tunes low-rank adapters of a frozen model: deltas have the adapters' gradients alone.

The frozen weights are part of the saved state, and are written once: a later base links to them.
Kill it and run it again: it goes on where it was::

    python examples/lora.py --root /tmp/lora --steps 20

In the end the adapters alone are restored, as for serving, and compared bit by bit.
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

WIDTH, RANK, LAYERS = 256, 4, 2

# (1) wrap the optimizer of the adapters; the frozen weights have none
recorder = adacheck.Recorder(optax.adamw(1e-3))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)

State = dict[str, Any]
Adapters = list[dict[str, jax.Array]]


def init_state() -> State:
    keys = jax.random.split(jax.random.key(0), (LAYERS, 2))
    frozen = [jax.random.normal(key[0], (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    down = [jax.random.normal(key[1], (WIDTH, RANK)) / WIDTH**0.5 for key in keys]
    adapters = [{"down": each, "up": jnp.zeros((RANK, WIDTH))} for each in down]
    return {"frozen": frozen, "adapters": adapters, "opt_state": optimizer.init(adapters)}


def forward(frozen: list[jax.Array], adapters: Adapters, x: jax.Array) -> jax.Array:
    for weight, adapter in zip(frozen, adapters, strict=True):
        x = jnp.tanh(x @ weight + x @ adapter["down"] @ adapter["up"])
    return x


@jax.jit(donate_argnums=0)
def train_step(state: State, inputs: jax.Array) -> tuple[State, jax.Array]:
    """One step towards the inputs in reverse order."""

    def loss_of(adapters: Adapters) -> jax.Array:
        return jnp.mean((forward(state["frozen"], adapters, inputs) - jnp.flip(inputs, 1)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["adapters"])
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["adapters"])
    adapters = optax.apply_updates(state["adapters"], updates)
    return {"frozen": state["frozen"], "adapters": adapters, "opt_state": opt_state}, loss


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune adapters, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    sizes: dict[str, int] = {}

    def on_save(report: adacheck.SaveReport) -> None:
        sizes[report.kind] = report.new_bytes or 0

    # (2) a stock Orbax manager
    with adacheck.checkpoint_manager(args.root, recorder, on_save=on_save) as manager:
        state, first = init_state(), 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            print(f"resuming after step {newest}")
            state, first = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest + 1
        for step in range(first, args.steps + 1):
            inputs = jax.random.uniform(jax.random.key(step), (32, WIDTH))
            state, loss = train_step(state, inputs)
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) save every step
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        wanted = {"adapters": state["adapters"]}
        partial = adacheck.RestoreArgs(wanted, partial_restore=True)
        assert bits(manager.restore(args.steps, args=partial)) == bits(wanted)
    print(f"the adapters of step {args.steps}, restored alone, have the same bits; bytes: {sizes}")


if __name__ == "__main__":
    main()
