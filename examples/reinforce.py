"""Learns to balance a pole by REINFORCE with a value baseline, and saves every step.

The environment is written in JAX, so that a step plays a batch of games and updates the policy in
one program. The target network, a slow average of the value network, is part of the state, and so
is the random key. Kill it and run it again: it goes on where it was, in the same games::

    python examples/reinforce.py --root /tmp/reinforce --steps 200

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

GAMES, MOVES, HIDDEN, DISCOUNT = 16, 100, 32, 0.98

recorder = adacheck.Recorder(optax.adam(1e-2))  # (1) wrap the optimizer, last in the chain
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)

State = dict[str, Any]


def init_network(key: jax.Array, outputs: int) -> dict[str, jax.Array]:
    return {"in": jax.random.normal(key, (4, HIDDEN)), "out": jnp.zeros((HIDDEN, outputs))}


def apply(network: dict[str, jax.Array], observed: jax.Array) -> jax.Array:
    return jnp.tanh(observed @ network["in"]) @ network["out"]


def init_state() -> State:
    policy, value, key = jax.random.split(jax.random.key(0), 3)
    params = {"policy": init_network(policy, 2), "value": init_network(value, 1)}
    target = jax.tree.map(jnp.copy, params["value"])
    return {"params": params, "opt_state": optimizer.init(params), "target": target, "key": key}


def move(pole: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Position, speed, angle and spin of cart and pole 20 ms later; True if the pole is up."""
    _, v, angle, spin = pole
    force = jnp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * jnp.sin(angle)
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * force / 1.1
    turn /= 0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1)
    push = (force - 0.05 * turn * jnp.cos(angle)) / 1.1
    pole = pole + 0.02 * jnp.array([v, push, spin, turn])
    return pole, (jnp.abs(pole[0]) < 2.4) & (jnp.abs(pole[2]) < 0.21)


def play(policy: dict[str, jax.Array], key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One game: what was observed, what was done, and 1 for each move that the pole was up."""

    def one(game: Any, key: jax.Array) -> Any:
        pole, up = game
        action = jax.random.categorical(key, apply(policy, pole))
        after, still_up = move(pole, action)
        return (after, up & still_up), (pole, action, up.astype(jnp.float32))

    begin, key = jax.random.split(key)
    pole = jax.random.uniform(begin, (4,), minval=-0.05, maxval=0.05)
    return jax.lax.scan(one, (pole, jnp.array(True)), jax.random.split(key, MOVES))[1]


@jax.jit(donate_argnums=0)
def train_step(state: State) -> tuple[State, jax.Array]:
    """Plays, and updates both networks; returns the mean length of a game."""
    key, games_key = jax.random.split(state["key"])
    keys = jax.random.split(games_key, GAMES)
    observed, actions, up = jax.vmap(play, (None, 0))(state["params"]["policy"], keys)
    after = jnp.concatenate([observed[:, 1:], observed[:, -1:]], axis=1)
    expected = up + DISCOUNT * up * apply(state["target"], after)[..., 0]
    returns = jax.lax.associative_scan(lambda a, b: b + DISCOUNT * a, up, reverse=True, axis=1)

    def loss_of(params: dict[str, Any]) -> jax.Array:
        value = apply(params["value"], observed)[..., 0]
        chances = jax.nn.log_softmax(apply(params["policy"], observed))
        chosen = jnp.take_along_axis(chances, actions[..., None], axis=-1)[..., 0]
        advantage = jax.lax.stop_gradient(returns - value)
        return jnp.sum(up * ((value - expected) ** 2 - 0.1 * chosen * advantage)) / up.sum()

    gradients = jax.grad(loss_of)(state["params"])
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    target = optax.incremental_update(params["value"], state["target"], 0.05)
    after_state = {"params": params, "opt_state": opt_state, "target": target, "key": key}
    return after_state, up.sum(axis=1).mean()


def bits(state: State) -> list[bytes]:
    """All bits of a state; of a typed random key those of its data."""
    plain = state | {"key": jax.random.key_data(state["key"])}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(plain)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Balance a pole, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=200, help="steps in all (default 200)")
    args = parser.parse_args()
    # (2) the target network has the shapes of params, so tell where the trained ones are
    with adacheck.checkpoint_manager(args.root, recorder, params_path="params") as manager:
        state, first = init_state(), 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            print(f"resuming after step {newest}")
            state, first = manager.restore(newest, args=adacheck.RestoreArgs(state)), newest + 1
        for step in range(first, args.steps + 1):
            state, length = train_step(state)
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) save every step
            if step % 10 == 0 or step == args.steps:
                print(f"step {step}, the pole is up for {length:.1f} moves")
        manager.wait_until_finished()
        last = bits(state)
        before = manager.restore(args.steps - 1, args=adacheck.RestoreArgs(state))
        assert bits(train_step(before)[0]) == last
    print(f"step {args.steps - 1}, restored and trained once more, is step {args.steps} bit by bit")


if __name__ == "__main__":
    main()
