"""Cost of pinned updates: time to compile one, and time of a train step that contains one."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import adacheck_jax as adacheck
from benchmarks.common import LanguageModel, tokens_of, width_for

PINNED, FREE, NONE = "pinned", "not pinned", "no Recorder"
BEFORE, INSIDE = "pinned, clipped by norm before the Recorder", "pinned, clipped inside it"
WAYS = (PINNED, FREE, NONE, BEFORE, INSIDE)
STAGES = ("trace_s", "lower_s", "compile_s")


def run(root: str, leaves: int, params: int, batch: int, steps: int, rounds: int) -> Any:
    """Compiles updates and runs train steps with and without pinning and sums, in turns.

    Args:
        root: folder, not used: nothing is saved.
        leaves: arrays of params, each of 8 by 8 elements, of the update that is compiled.
        params: about so many, of the language model that is trained.
        batch: sequences of 64 bytes a step.
        steps: of training in each turn.
        rounds: turns of each way; one more at first warms up.
    """
    del root
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    compiled = {name: _Rows() for name in WAYS}
    trained = {name: _Rows() for name in WAYS}
    loops = {name: _loop(mesh, name, params, batch) for name in trained}
    for position in range(rounds + 1):
        for name in WAYS:
            stages = _stages(mesh, name, leaves)
            step_s = loops[name](steps)
            if position:
                compiled[name].add(stages)
                trained[name].add({"step_s": step_s})
    return {
        "devices": jax.device_count(),
        "leaves": leaves,
        "rows": {name: compiled[name].medians | trained[name].medians for name in compiled},
    }


class _Rows:
    """Figures of several turns."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, row: dict[str, float]) -> None:
        for key, value in row.items():
            self._values.setdefault(key, []).append(value)

    @property
    def medians(self) -> dict[str, float]:
        return {key: statistics.median(each) for key, each in self._values.items()}


def _split(mesh: Any, tree: Any) -> Any:
    """Places the arrays of a tree: those whose first axis can be cut, cut over all devices."""

    def placed(x: Any) -> Any:
        is_cut = x.ndim and x.shape[0] % mesh.size == 0
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*["x"][: int(is_cut)])))

    return jax.tree.map(placed, tree)


def _optimizer(way: str) -> optax.GradientTransformationExtraArgs:
    clip, adamw = optax.clip_by_global_norm(1.0), optax.adamw(3e-4)
    if way == NONE:
        return adamw
    if way == INSIDE:
        return adacheck.Recorder(optax.chain(clip, adamw))
    recorder = adacheck.Recorder(adamw, pin=way != FREE)
    return optax.chain(clip, recorder) if way == BEFORE else recorder


def _stages(mesh: Any, way: str, leaves: int) -> dict[str, float]:
    """CPU seconds to trace, lower and compile one update of adamw with its ``apply_updates``."""
    recorder = _optimizer(way)
    params = _split(mesh, [jnp.ones((8, 8)) for _ in range(leaves)])
    state = _split(mesh, recorder.init(params))

    def step(params: Any, state: Any, gradients: Any) -> Any:
        updates, state = recorder.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    jax.clear_caches()
    times = [time.process_time()]
    traced = jax.jit(step, donate_argnums=(0, 1)).trace(params, state, params)
    times.append(time.process_time())
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    return dict(zip(STAGES, [b - a for a, b in itertools.pairwise(times)], strict=True))


def _loop(mesh: Any, way: str, params: int, batch: int) -> Callable[[int], float]:
    """A training loop; the function does some steps and returns the seconds of the median one."""
    model = LanguageModel(width_for(params))
    recorder = _optimizer(way)
    weights = _split(mesh, model.initial())
    tokens = jax.device_put(tokens_of(0, batch), NamedSharding(mesh, PartitionSpec("x")))
    state = [weights, _split(mesh, recorder.init(weights))]

    def step(weights: Any, inner: Any, tokens: jax.Array) -> Any:
        gradients = jax.grad(model.loss)(weights, tokens)
        updates, inner = recorder.update(gradients, inner, weights)
        return optax.apply_updates(weights, updates), inner

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, tokens).compile()

    def train(steps: int) -> float:
        times = []
        for _ in range(steps):
            start_s = time.perf_counter()
            state[:] = jax.block_until_ready(compiled(*state, tokens))
            times.append(time.perf_counter() - start_s)
        return statistics.median(times)

    return train
