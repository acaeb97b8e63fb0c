"""A small run to look at: ``python -m tests.cli.report_run ROOT`` trains and saves it."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState

import adacheck_jax as adacheck
from examples import train_lm

STEPS = 60
DEFERRED = {n for n in range(STEPS) if n > 30 and n % 3 < 2}
"""Steps that a later save writes."""


def train(root: Path, steps: int = STEPS) -> None:
    """Trains the model of ``examples/train_lm.py``, with a learning rate and a loss to be seen."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 4e-3, 12, steps)
    adamw = optax.inject_hyperparams(optax.adamw)(learning_rate=rate)
    recorder = adacheck.Recorder(adamw, dtype=jnp.bfloat16)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)
    mesh = train_lm.parse_mesh("1x1")
    tokens = jnp.zeros((1, train_lm.CONTEXT), jnp.int32)
    params = train_lm.model.init(jax.random.key(0), tokens)["params"]
    state = TrainState.create(apply_fn=train_lm.model.apply, params=params, tx=optimizer)

    @jax.jit
    def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(params: dict[str, jax.Array]) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    handler = adacheck.AdaCheckHandler(recorder, max_deltas=12)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root.absolute(), item_handlers=handler, options=options) as manager:
        for step in range(steps):
            state, loss = train_step(state, train_lm.batch(step, mesh))
            if step not in DEFERRED or not handler.record_step(state, step):
                metrics = {"loss": float(loss)}
                manager.save(step, args=adacheck.SaveArgs(state), metrics=metrics, force=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
