"""A trainer and two rollout processes that have its new weights after every step.

A policy learns by REINFORCE to answer a context with the right one of eight actions. The trainer
keeps float32 weights and publishes them in bfloat16; each rollout process follows them in float32,
plays a batch with them, and sends it back. Both sides fingerprint the weights of each step::

    python examples/rl_weight_sync.py --steps 10
    python examples/rl_weight_sync.py --root gs://BUCKET/weights --steps 100

(1) to (4) mark what publishing takes.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import tempfile
import time
from multiprocessing.queues import Queue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adacheck_jax as adacheck

CONTEXTS, ACTIONS, WIDTH, BATCH = 32, 8, 256, 512
ANSWERS = np.arange(CONTEXTS) * 5 % ACTIONS


def initial() -> dict[str, jax.Array]:
    """Random weights of a network with one hidden layer."""
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (CONTEXTS, WIDTH)),
        "out": jax.random.normal(keys[1], (WIDTH, ACTIONS)) / WIDTH**0.5,
    }


def logits_of(params: Any, contexts: jax.Array) -> jax.Array:
    return jnp.tanh(params["in"][contexts]) @ params["out"]


def halved(params: Any) -> Any:
    """The weights that rollouts use."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def fingerprint(params: Any) -> str:
    """Digest of the weights' bits in bfloat16."""
    leaves = jax.tree.leaves(halved(params))
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()[:16]


def roll_out(root: str, worker: int, steps: int, played: Queue[Any]) -> None:
    """Follows the weights, and plays a batch with those of every step."""
    # (3) The shapes, data types and shardings that this process wants: float32 on its device.
    follower = adacheck.publish.Follower(root, jax.eval_shape(initial), poll_s=0.01)
    for step in range(steps):
        params = follower.wait_for(step, timeout_s=120)  # (4) verified on the device, then cast
        rng = np.random.default_rng((step, worker))
        contexts = rng.integers(0, CONTEXTS, BATCH)
        key = jax.random.key(2 * step + worker)
        actions = np.asarray(jax.random.categorical(key, logits_of(params, contexts)))
        rewards = (actions == ANSWERS[contexts]).astype(np.float32)
        played.put((worker, follower.version, fingerprint(params), contexts, actions, rewards))


@jax.jit
def loss_of(params: Any, contexts: Any, actions: Any, rewards: Any) -> jax.Array:
    chosen = jax.nn.log_softmax(logits_of(params, contexts))[jnp.arange(len(actions)), actions]
    return -jnp.mean(chosen * (rewards - rewards.mean()))


def train(root: str, steps: int, played: Queue[Any], workers: int) -> None:
    """Publishes the weights, gathers what was played with them, and takes a step."""
    params, optimizer = initial(), optax.adam(1e-2)
    state = optimizer.init(params)
    with adacheck.publish.Publisher(root) as publisher:  # (1)
        for step in range(steps):
            start_s = time.perf_counter()
            publisher.publish(halved(params), version=step)  # (2) returns at once
            batches = [played.get(timeout=120) for _ in range(workers)]
            for worker, version, digest, *_ in batches:
                assert version == step, f"worker {worker} used version {version} in step {step}"
                assert digest == fingerprint(params), f"worker {worker} used other weights"
            size, took_s = publisher.wait(), time.perf_counter() - start_s
            assert size is not None
            contexts, actions, rewards = (
                np.concatenate([b[n] for b in batches]) for n in (3, 4, 5)
            )
            print(
                f"step {step}: weights {fingerprint(params)} in {workers} rollouts, "
                f"{size.changed} of {size.words} changed, {size.delta_bytes or size.base_bytes} "
                f"bytes, reward {rewards.mean():.2f}, {took_s * 1e3:.0f} ms"
            )
            gradients = jax.grad(loss_of)(params, contexts, actions, rewards)
            updates, state = optimizer.update(gradients, state, params)
            params = jax.tree.map(lambda p, u: p + u, params, updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", help="directory or URL; a temporary directory by default")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    played: Any = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        root = options.root or directory
        rollouts = [
            context.Process(target=roll_out, args=(root, n, options.steps, played), daemon=True)
            for n in range(options.workers)
        ]
        for each in rollouts:
            each.start()
        train(root, options.steps, played, options.workers)
        for each in rollouts:
            each.join(60)
            assert each.exitcode == 0, f"a rollout process ended with {each.exitcode}"
    print("Every rollout used the weights of its step, bit by bit.")


if __name__ == "__main__":
    main()
