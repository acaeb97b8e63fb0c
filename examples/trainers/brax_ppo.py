"""Trains a policy by brax's PPO, and saves what brax hands out after each epoch: params alone.

Kill it at any moment and run it again: it goes on from the params that were saved last, with an
optimizer that begins anew, which brax keeps to itself::

    python examples/trainers/brax_ppo.py --root /tmp/brax --steps 12

(1) to (4) mark what differs from the same script without adacheck_jax. Run with brax 0.14.2 and
jax 0.10.2.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from brax import envs
from brax.training.agents.ppo import train as ppo

import adacheck_jax as adacheck

ENVIRONMENTS, UNROLL = 32, 5


def device_put_replicated(tree: Any, devices: list[jax.Device]) -> Any:
    """A copy of each leaf for each device, along a new first axis."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * len(devices)), tree)


if not hasattr(jax, "device_put_replicated"):  # brax 0.14.2 calls it; jax 0.10 has it no more
    jax.device_put_replicated = device_put_replicated  # type: ignore[attr-defined]


def digest_of(params: Any) -> str:
    leaves = jax.tree.leaves(params)
    digest = hashlib.sha256(b"".join(np.asarray(jnp.asarray(leaf)).tobytes() for leaf in leaves))
    return f"{len(leaves)} leaves, {digest.hexdigest()[:16]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=12, help="epochs, of four updates each")
    args = parser.parse_args()
    train = functools.partial(
        ppo.train,
        environment=envs.get_environment("inverted_pendulum", backend="generalized"),
        episode_length=64,
        num_envs=ENVIRONMENTS,
        batch_size=ENVIRONMENTS // 2,
        num_minibatches=2,
        num_updates_per_batch=2,
        unroll_length=UNROLL,
        run_evals=False,
        max_devices_per_host=1,
    )
    _, start, _ = train(num_timesteps=0)
    manager = adacheck.checkpoint_manager(args.root, delta="bits")  # (1)
    first, start = manager.restore_newest(start) or (0, start)  # (2)
    print(f"begins behind step {first}: {digest_of(start)}", flush=True)

    def save(step: int, make_policy: Any, params: Any) -> None:
        if step:
            epoch = first + step // (ENVIRONMENTS * UNROLL)
            manager.save(epoch, args=adacheck.SaveArgs(params))  # (3)
            print(f"step {epoch}: {digest_of(params)}", flush=True)

    epochs = args.steps - first
    train(
        num_timesteps=epochs * ENVIRONMENTS * UNROLL,
        num_evals=epochs + 1,
        restore_params=start,
        policy_params_fn=save,
        seed=first,
    )
    manager.close()  # (4)


if __name__ == "__main__":
    main()
