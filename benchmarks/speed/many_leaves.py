"""Saves and restores of a state of many small leaves, by this library or by stock Orbax."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.speed import states

_SHAPES = [(64, 64), (64,), (16, 64), (64, 16)]
SAVES = 3


def run(root: str, leaves: int, way: str, act: str) -> Any:
    """Seconds of saves or restores, the first of a process before the others.

    Args:
        root: directory of the steps, or of those that an earlier call saved.
        leaves: number of arrays of params and moments; the records are a third more.
        way: ``own`` or ``stock``.
        act: ``saves``; ``restores 0`` or ``restores 2`` for those of one step; ``goes on`` for
            saves behind a restore of the newest one.

    Returns:
        For each save its blocking, durable and CPU seconds; for each restore wall and CPU seconds.
    """
    recorder = states.recorder()
    state = _state(leaves // 3, recorder)
    handler = adacheck.AdaCheckHandler(recorder) if way == "own" else None
    with ocp.CheckpointManager(Path(root) / way, item_handlers=handler) as manager:
        first = 0
        if act != "saves":
            abstract = states.abstract(state if handler else states.without_record(state))
            asked = adacheck.RestoreArgs if handler else ocp.args.StandardRestore
            if act != "goes on":
                del state
                step = int(act.split()[1])
                return [
                    _timed(lambda: manager.restore(step, args=asked(abstract))) for _ in range(3)
                ]
            first = SAVES
            restored = manager.restore(SAVES - 1, args=asked(abstract))
            state = restored if handler else state
        figures = []
        for step in range(first, first + SAVES):
            state = jax.block_until_ready(_trained(recorder, state))
            args = adacheck.SaveArgs(state) if handler else _stock_args(state)
            figures.append(
                _timed(lambda n=step, a=args: manager.save(n, args=a), manager.wait_until_finished)
            )
        return figures


def _state(params_count: int, recorder: adacheck.Recorder) -> Any:
    noise = np.random.default_rng(0).standard_normal(64 * 64, np.float32)
    params = {
        f"layer_{i:05}": jnp.asarray(noise[: np.prod(shape)].reshape(shape) * (1 + i))
        for i in range(params_count)
        for shape in (_SHAPES[i % len(_SHAPES)],)
    }
    return {"params": params, "opt_state": recorder.init(params), "step": jnp.zeros((), jnp.int32)}


def _trained(recorder: adacheck.Recorder, state: Any) -> Any:
    """The state after one update, leaf by leaf: XLA takes minutes to compile 10,000 leaves."""
    params = state["params"]
    gradients = jax.tree.map(lambda p: jnp.sin(p * 1e3) * 1e-2, params)
    updates, opt_state = recorder.update(gradients, state["opt_state"], params)
    params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}


def _stock_args(state: Any) -> Any:
    return ocp.args.StandardSave(states.without_record(state))


def _timed(act: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> list[float]:
    """Seconds until it returns, seconds until what it began is done, and CPU seconds of both."""
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    jax.block_until_ready(act())
    returned_s = time.perf_counter()
    wait()
    return [returned_s - start_s, time.perf_counter() - start_s, _cpu_s() - start_cpu_s]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
