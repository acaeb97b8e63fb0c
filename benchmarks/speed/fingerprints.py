"""Cost of a delta where XLA programs do not call compiled loops, or replicas are not compared."""

from __future__ import annotations

import functools
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from adacheck_jax.device.loops import xla_call
from benchmarks.speed import measure, states
from benchmarks.speed.ways import Managed

USUAL, NO_CALL, NO_COMPARISON = "as it is", "without the XLA call", 'check_replicas="off"'
_EVERY = 5
"""Recorded steps that are saved at once."""


def run(root: str, params: int, leaves: int, rounds: int) -> Any:
    """Saves deltas, then records steps, in several ways and in turns.

    Args:
        root: folder for the saves.
        params: number of params; the arrays of every second layer lie whole on each device.
        leaves: arrays of params; AdamW makes four of each.
        rounds: measured saves, and measured recorded steps, of each way.
    """
    recorder = adacheck.Recorder(optax.adamw(1e-3))
    state = _placed(states.train_state(params, leaves, recorder))
    step, state_bytes = states.train_step_of(recorder), states.size_bytes(state)
    assert xla_call.wait()
    ways = {
        USUAL: _Recording(root, "usual", recorder),
        NO_CALL: _WithoutCall(root, "no call", recorder),
    }
    if jax.device_count() > 1:
        ways[NO_COMPARISON] = _Recording(root, "off", recorder, check_replicas="off")
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in ways}

    def note(name: str, **figures: float) -> None:
        for key, value in figures.items():
            rows[name].setdefault(key, []).append(value)

    turns = [*ways]
    for number in range(2 * rounds + 4):
        state = jax.block_until_ready(step(state))
        turns.reverse()
        for name in turns:
            if number < rounds + 4:
                cost = measure.one_save(ways[name], number, state)
                if number >= 4:  # a base, and the first deltas
                    note(name, **{key: asdict(cost)[key] for key in ("durable_s", "cpu_s")})
            elif number % _EVERY == 0:
                measure.one_save(ways[name], number, state)
            else:
                note(name, record_s=ways[name].record_s(number, state))
    for way in ways.values():
        way.close()
    return {
        "devices": jax.device_count(),
        "leaves": len(jax.tree.leaves(state)),
        "state_bytes": state_bytes,
        "rows": {name: _medians(own, rows[USUAL]) for name, own in rows.items()},
    }


def _medians(own: dict[str, list[float]], usual: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and medians of the ratios to what was measured in the same turn."""
    found = {}
    for key, values in own.items():
        ratios = [value / other for value, other in zip(values, usual[key], strict=True)]
        found[key] = {"median": statistics.median(values), "ratio": statistics.median(ratios)}
    return found


def _placed(state: Any) -> Any:
    """A state of which every second layer is whole on each device."""

    def placed(path: Any, leaf: jax.Array) -> jax.Array:
        layer = jax.tree_util.keystr(path).rpartition("layer_")[2][:5]
        sharding = leaf.sharding
        if layer.isdecimal() and int(layer) % 2 and isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.device_put(leaf, sharding)

    return jax.tree_util.tree_map_with_path(placed, state)


class _Recording(Managed):
    """Saves through a manager, and records steps."""

    def __init__(self, root: str, name: str, recorder: adacheck.Recorder, **options: Any) -> None:
        self._handler = adacheck.AdaCheckHandler(recorder, max_deltas=10_000, **options)
        super().__init__(Path(root) / name.replace(" ", "_"), self._handler, adacheck.SaveArgs)

    def record_s(self, number: int, state: Any) -> float:
        """Time until a step was recorded."""
        start_s = time.perf_counter()
        assert self._handler.record_step(state, number)
        return time.perf_counter() - start_s


class _WithoutCall(_Recording):
    """Saves as if XLA programs could not call the loops."""

    _patch = staticmethod(functools.partial(mock.patch.object, xla_call, "is_ready"))

    def save(self, step: int, state: Any) -> None:
        with self._patch(return_value=False):
            super().save(step, state)

    def record_s(self, number: int, state: Any) -> float:
        with self._patch(return_value=False):
            return super().record_s(number, state)
