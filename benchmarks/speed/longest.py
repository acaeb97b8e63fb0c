"""Longest step of a training run that saves every step, beside its mean, each way in a process."""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import LanguageModel, tokens_of, width_for
from benchmarks.speed import states

NOTHING, STOCK = "nothing saved", "stock Orbax, every step"
BACKGROUND = "adacheck_jax, every step"
IN_THE_LOOP = "adacheck_jax, bases in the loop"
WAYS = (NOTHING, BACKGROUND, IN_THE_LOOP, STOCK)


def run(root: str, way: str, params: int, batch: int, warm: int, steps: int, deltas: int) -> Any:
    """Trains, and takes the time of each step.

    Args:
        root: where it saves.
        way: one of :data:`WAYS`.
        params: about so many.
        batch: sequences of 64 bytes a step.
        warm: steps before those that are measured: programs are compiled, and the first bases made.
        steps: that are measured.
        deltas: longest lineage.
    """
    model = LanguageModel(width_for(params))
    recorder = states.recorder()
    weights = model.initial()
    state = {"params": weights, "opt_state": recorder.init(weights), "step": jnp.int32(0)}
    state_bytes = states.size_bytes(states.without_record(state))
    arrays = len(jax.tree.leaves(state))

    @jax.jit
    def gradients_of(state: Any, tokens: jax.Array) -> Any:
        return jax.grad(model.loss)(state["params"], tokens)

    def updated(state: Any, gradients: Any) -> Any:
        updates, inner = recorder.update(gradients, state["opt_state"], state["params"])
        weights = optax.apply_updates(state["params"], updates)
        return {"params": weights, "opt_state": inner, "step": state["step"] + 1}

    update = jax.jit(updated, donate_argnums=(0, 1))
    if way in (BACKGROUND, IN_THE_LOOP):
        # A fixed number of deltas is kept to, so that the loop writes all bases.
        policy = adacheck.AdaptivePolicy(most_deltas=deltas) if way == BACKGROUND else deltas
        made = adacheck.checkpoint_manager(root, recorder, max_to_keep=2, max_deltas=policy)
    else:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        made = ocp.CheckpointManager(root, options=options)

    def args_of(state: Any) -> Any:
        if way == STOCK:
            return ocp.args.StandardSave(states.without_record(state))
        return adacheck.SaveArgs(state)

    times_s = []
    with made as manager:
        for number in range(warm + steps):
            tokens = jnp.asarray(tokens_of(number, batch))
            begin_s = time.perf_counter()
            state = jax.block_until_ready(update(state, gradients_of(state, tokens)))
            if way != NOTHING:
                manager.save(number, args=args_of(state))
            times_s.append(time.perf_counter() - begin_s)
    measured_s = times_s[warm:]
    return {
        "state_bytes": state_bytes,
        "arrays": arrays,
        "mean_s": statistics.fmean(measured_s),
        "longest_s": max(measured_s),
    }
