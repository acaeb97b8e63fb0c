"""A restore of some deltas, beside the least that it has to do."""

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
from adacheck_jax.store.steps import lineage
from benchmarks.speed import measure, states


def run(root: str, params: int, leaves: int, deltas: list[int], repeats: int) -> Any:
    """Restores steps that some deltas lead to.

    Args:
        root: where they are saved.
        params: how many.
        leaves: arrays of params.
        deltas: how many are replayed, ascending.
        repeats: of each restore, after one to warm up; medians count.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    step, rows = states.train_step_of(recorder), []
    own_root, stock_root = Path(root) / "ours", Path(root) / "stock"
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=deltas[-1])
    with ocp.CheckpointManager(own_root, item_handlers=handler) as manager:
        for number in range(deltas[-1] + 1):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
    abstract, state_bytes = states.abstract(state), states.size_bytes(state)
    stock = states.without_record(state)
    with ocp.CheckpointManager(stock_root) as manager:
        manager.save(0, args=ocp.args.StandardSave(stock))
        manager.wait_until_finished()
        stock_args = ocp.args.StandardRestore(states.abstract(stock))
        del stock
        stock_s = _median(lambda: manager.restore(0, args=stock_args), repeats)
    updates_of = _updates(recorder, state)
    del state
    with ocp.CheckpointManager(own_root, item_handlers=adacheck.AdaCheckHandler()) as manager:
        for count in deltas:
            args = adacheck.RestoreArgs(abstract)
            rows.append(
                {
                    "deltas": count,
                    "restore_s": _median(
                        lambda n=count, a=args: manager.restore(n, args=a), repeats
                    ),
                    "peak_bytes": _peak_bytes(lambda n=count, a=args: manager.restore(n, args=a)),
                    "stock_s": stock_s,
                    "read_s": _median(lambda n=count: _read(own_root, n), repeats),
                    "updates_s": _median(lambda n=count: updates_of(n), repeats),
                }
            )
    return {"state_bytes": state_bytes, "rows": rows}


def _median(act: Callable[[], Any], repeats: int) -> float:
    times_s = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        jax.block_until_ready(act())
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])


def _peak_bytes(act: Callable[[], Any]) -> int:
    measure.forget_peak()
    before_bytes = measure.memory_bytes("VmRSS")
    jax.block_until_ready(act())
    return measure.memory_bytes("VmHWM") - before_bytes


def _read(root: Path, count: int) -> None:
    """Reads the files of some deltas, one after the other."""
    for number in range(1, count + 1):
        start = lineage.pack_in(root / str(number) / "default", 0)
        for path in start.parent.glob(f"{start.name}.*"):
            path.read_bytes()


def _updates(recorder: adacheck.Recorder, state: Any) -> Callable[[int], Any]:
    """Runs nothing but the update, so many times."""

    def update(params: Any, inner: Any, record: Any) -> Any:
        updates, inner = recorder.tx.update(record, inner, params)
        return optax.apply_updates(params, updates), inner

    compiled = jax.jit(update, donate_argnums=(0, 1))
    record = jax.tree.map(jnp.copy, state["opt_state"].adacheck_record)
    held = [jax.tree.map(jnp.copy, (state["params"], state["opt_state"].adacheck_inner))]

    def updates(count: int) -> Any:
        for _ in range(count):
            held[0] = compiled(*held[0], record)
        return held[0]

    return updates
