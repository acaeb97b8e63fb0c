"""Cost of checking deltas, in turns: by sample, in full by shadow or second copy, not at all."""

from __future__ import annotations

import functools
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import jax

import adacheck_jax as adacheck
from adacheck_jax.proof.checker import Check
from adacheck_jax.save.line import planner
from benchmarks.speed import measure, states
from benchmarks.speed.ways import Managed

SAMPLE, UNCHECKED = "check by sample", "no check"
SHADOW, FULL = "check in full, by the shadow", "check in full, by a second copy"


def run(root: str, params: int, leaves: int, rounds: int, saves: int) -> Any:
    """Measures saves of deltas, of steps that are computed and of steps that are computing.

    Args:
        root: folder for the saves.
        params: how many.
        leaves: arrays of params; AdamW and the record make four of each.
        rounds: how often it is each way's turn.
        saves: in each turn.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    size_bytes = states.size_bytes(states.without_record(state))
    step = states.train_step_of(recorder)

    def managed(kind: type[Managed], name: str, **options: Any) -> Managed:
        handler = adacheck.AdaCheckHandler(recorder, max_deltas=10_000, **options)
        return kind(Path(root) / name.replace(" ", "_"), handler, adacheck.SaveArgs)

    found = {}
    for kind in ("computed", "computing"):
        ways = {
            UNCHECKED: functools.partial(managed, _Unchecked, f"none {kind}", shadow=None),
            SAMPLE: functools.partial(managed, Managed, f"sample {kind}", shadow=None),
            SHADOW: functools.partial(managed, Managed, f"shadow {kind}"),
            FULL: functools.partial(
                managed, Managed, f"full {kind}", shadow=adacheck.Shadow(on_devices=True)
            ),
        }
        costs = measure.side_by_side(
            ways,
            state,
            step,
            rounds=rounds,
            saves=saves,
            paired={},
            is_computed=kind == "computed",
        )
        found[kind] = {name: asdict(cost) for name, cost in costs.items()}
        state = states.train_state(params, leaves, recorder)  # the other one was donated
    return {
        "devices": jax.device_count(),
        "leaves": len(jax.tree.leaves(state)),
        "state_bytes": size_bytes,
        "costs": found,
    }


class _Unchecked(Managed):
    """Saves deltas without a check, which a handler never does, to compare checks with."""

    def save(self, step: int, state: Any) -> None:
        with mock.patch.object(planner.Planner, "checker_of", return_value=_Nothing()):
            super().save(step, state)


class _Nothing:
    """A checker, and its checks, that look at nothing."""

    is_ready = True

    def baseline(self, *_: Any) -> Any:
        return mock.MagicMock()

    def begin(self, *_: Any) -> Check:
        return Check(self.baseline(), lambda _: {})
