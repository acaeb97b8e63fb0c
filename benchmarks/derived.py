"""Bytes of a delta of a run that keeps an average of its params and a target network.

    python -m benchmarks.derived

A language model learns the text of the standard library by adamw, on one device, and every step is
saved: without the two trees; with them, declared as ``Recorder(derived=...)``; and with them,
undeclared, so that they are stored as differences. The last step is restored and compared, bit by
bit. The bytes are those that a step's directory has and no earlier one; medians of the deltas.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from benchmarks.common import LanguageModel, environment, new_bytes, tokens_of, width_for

STEPS, PERIOD, RATE = 8, 3, 1e-3


def average(params: Any, ema: Any, count: jax.Array) -> Any:
    return optax.incremental_update(params, ema, 0.001)


def copied(params: Any, target: Any, count: jax.Array) -> Any:
    return optax.periodic_update(params, target, count, PERIOD)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"ema_params": average, "target_params": copied}


class Row(NamedTuple):
    """One case: its mixed-precision setting, and what a base and a delta take."""

    params: str
    trees: str
    state_bytes: int
    base_bytes: int
    delta_bytes: int


def measure(params_count: int, dtype: Any, names: tuple[str, ...], *, declared: bool) -> Row:
    """Trains and saves one case; fails where a restored bit differs."""
    own = {name: FUNCTIONS[name] for name in names}
    recorder = adacheck.Recorder(optax.adamw(RATE), derived=own if declared else None)
    model = LanguageModel(width_for(params_count), jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(dtype), model.initial())
    state = {"params": params, "opt_state": recorder.init(params)}
    for name in own:  # a target network has the data type of the params, an average may have more
        kept = None if name == "target_params" else jnp.float32
        state[name] = jax.tree.map(lambda x, kept=kept: jnp.array(x, kept), params)

    @jax.jit
    def train_step(state: Any, tokens: jax.Array) -> Any:
        gradients = jax.grad(model.loss)(state["params"], tokens)
        updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        after = {"params": params, "opt_state": opt_state}
        for name, function in own.items():
            old = state[name]
            if declared:
                after[name] = recorder.derive(name, opt_state, params, old)
            else:
                new = function(params, old, opt_state.adacheck_count)
                after[name] = jax.tree.map(lambda x, o: x.astype(o.dtype), new, old)
        return after

    handler = adacheck.AdaCheckHandler(
        recorder, params_path="params", max_deltas=STEPS, compression="none"
    )
    with tempfile.TemporaryDirectory() as root:
        with ocp.CheckpointManager(root, item_handlers=handler) as manager:
            for step in range(STEPS):
                state = jax.block_until_ready(train_step(state, tokens_of(step)))
                manager.save(step, args=adacheck.SaveArgs(state))
            manager.wait_until_finished()
            restored = manager.restore(STEPS - 1, args=adacheck.RestoreArgs(state))
        for path, leaf in trees.flatten(restored)[0].items():
            if np.asarray(leaf).tobytes() != np.asarray(trees.flatten(state)[0][path]).tobytes():
                raise SystemExit(f"{path} was restored with other bits")
        base, *deltas = (new_bytes(Path(root) / str(step)) for step in range(STEPS))
    shown = "none" if not own else f"{len(own)}, {'declared' if declared else 'undeclared'}"
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    return Row(jnp.dtype(dtype).name, shown, state_bytes, base, int(statistics.median(deltas)))


def run(params_count: int) -> list[Row]:
    cases: list[tuple[tuple[str, ...], bool]] = [((), True), (tuple(FUNCTIONS), True)]
    cases.append((tuple(FUNCTIONS), False))
    return [
        measure(params_count, dtype, names, declared=declared)
        for dtype in (jnp.float32, jnp.bfloat16)
        for names, declared in cases
    ]


def table(rows: list[Row]) -> str:
    lines = [
        "| params | trees | state | base | delta | of that without |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        bare = next(each for each in rows if each.params == row.params)
        share = row.delta_bytes / bare.delta_bytes
        sizes = (f"{each:,}" for each in row[2:])
        lines.append(f"| {row.params} | {row.trees} | {' | '.join(sizes)} | {share:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=1_600_000, help="about how many")
    arguments = parser.parse_args()
    print(json.dumps(environment()), table(run(arguments.params)), sep="\n\n")


if __name__ == "__main__":
    main()
