"""How much slower a small language model trains when every step is saved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.common import LanguageModel, tokens_of, width_for
from benchmarks.speed import states

NOTHING, OURS, STOCK = "nothing saved", "adacheck_jax, every step", "stock Orbax, every step"
RECORDED = "adacheck_jax, recorded"


def run(root: str, params: int, batch: int, steps: int, rounds: int, max_deltas: int) -> Any:
    """Trains with and without saving, in turns.

    Args:
        root: where they save.
        params: about so many.
        batch: sequences of 64 bytes a step.
        steps: in each turn.
        rounds: how often it is each way's turn; the first warms up.
        max_deltas: longest lineage.
    """
    model = LanguageModel(width_for(params))
    recorder = states.recorder()
    weights = model.initial()
    state = {"params": weights, "opt_state": recorder.init(weights), "step": jnp.int32(0)}

    @jax.jit
    def gradients_of(state: Any, tokens: jax.Array) -> Any:
        return jax.grad(model.loss)(state["params"], tokens)

    def updated(state: Any, gradients: Any) -> Any:
        updates, inner = recorder.update(gradients, state["opt_state"], state["params"])
        weights = optax.apply_updates(state["params"], updates)
        return {"params": weights, "opt_state": inner, "step": state["step"] + 1}

    update = jax.jit(updated, donate_argnums=(0, 1))
    batches = [jnp.asarray(tokens_of(number, batch)) for number in range(steps)]

    def turn(state: Any, save: Callable[[Any, bool], Any]) -> Any:
        """One turn: the state, seconds a step, and the longest step."""
        start_s = last_s = time.perf_counter()
        longest_s = 0.0
        for number, tokens in enumerate(batches):
            gradients = gradients_of(state, tokens)
            state = jax.block_until_ready(update(state, gradients))
            save(state, number == steps - 1)
            now_s = time.perf_counter()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
        return state, (last_s - start_s) / steps, longest_s

    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    managers: dict[str, Any] = {
        name: adacheck.checkpoint_manager(
            Path(root) / name, recorder, max_to_keep=2, max_deltas=max_deltas
        )
        for name in (OURS, RECORDED)
    }
    managers[STOCK] = ocp.CheckpointManager(Path(root) / "stock", options=options)

    def args_of(name: str, state: Any) -> Any:
        if name == STOCK:
            return ocp.args.StandardSave(states.without_record(state))
        return adacheck.SaveArgs(state)

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (NOTHING, *managers)}
    for position in range(rounds + 1):
        for name, found in times.items():
            if name == NOTHING:
                state, *measured = turn(state, lambda s, is_last: None)
            else:
                manager = managers[name]

                def save(
                    state: Any,
                    is_last: bool,
                    name: str = name,
                    manager: Any = manager,
                ) -> None:
                    step = int(state["step"])
                    if name != RECORDED or is_last or not manager.handler.record_step(state, step):
                        manager.save(step, args=args_of(name, state))

                state, *measured = turn(state, save)
                manager.wait_until_finished()
            if position:
                found.append((measured[0], measured[1]))
    for manager in managers.values():
        manager.close()
    return {
        "state_bytes": states.size_bytes(states.without_record(state)),
        "rows": {
            name: {
                "step_s": statistics.median(each for each, _ in found),
                "longest_s": max(each for _, each in found),
            }
            for name, found in times.items()
        },
    }
