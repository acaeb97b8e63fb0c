"""What a delta costs, the more deltas are before it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import adacheck_jax as adacheck
from benchmarks.speed import measure, states, ways


def run(root: str, params: int, leaves: int, depth: int, pieces: int) -> Any:
    """Saves one long lineage.

    Args:
        root: where it is saved.
        params: how many.
        leaves: arrays of params.
        depth: deltas after the base.
        pieces: the lineage is cut into so many, and medians are given of each.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    step = states.train_step_of(recorder)
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=depth)
    costs = []
    way = ways.Managed(Path(root), handler, adacheck.SaveArgs)
    for number in range(depth + 1):
        state = jax.block_until_ready(step(state))
        costs.append(measure.one_save(way, number, state))
    way.close()
    deltas = costs[2:]  # the base, and the delta after which programs are compiled
    length = len(deltas) // pieces
    rows = []
    for piece in range(pieces):
        own = deltas[piece * length : (piece + 1) * length]
        rows.append({"depth": (piece + 1) * length, **asdict(measure.median(own))})
    return {"rows": rows}
