"""One save of a train state, beside every other way of saving it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from benchmarks.speed import measure, states, ways


def run(
    root: str, params: int, leaves: int, rounds: int, saves: int, only: list[str] | None = None
) -> Any:
    """Measures the ways in turns.

    Args:
        root: where they save.
        params: how many.
        leaves: arrays of params; AdamW and the record make four of each.
        rounds: how often it is each way's turn.
        saves: in each turn.
        only: names of ways; all of them without it.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    found = {
        "leaves": len(jax.tree.leaves(state)),
        "state_bytes": states.size_bytes(states.without_record(state)),
        "record_bytes": states.size_bytes(state["opt_state"].adacheck_record),
    }
    known = ways.all_ways(Path(root), recorder, 10_000)
    chosen = {name: each for name, each in known.items() if only is None or name in only}
    step = states.train_step_of(recorder)
    costs = measure.side_by_side(
        chosen, state, step, rounds=rounds, saves=saves, paired=ways.PAIRED
    )
    return {**found, "costs": {name: asdict(cost) for name, cost in costs.items()}}
