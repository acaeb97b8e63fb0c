"""A restore of some deltas, beside the least that it has to do."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from adacheck_jax.store.steps import folders
from benchmarks.speed import measure, states

Act = Callable[[], Any]


def run(
    root: str,
    params: int,
    leaves: int,
    deltas: list[int],
    repeats: int,
    first: str = "",
    onto: int = 0,
) -> Any:
    """Restores steps that some deltas lead to.

    Args:
        root: where they are saved, or were saved by an earlier call.
        params: how many.
        leaves: arrays of params.
        deltas: how many are replayed, ascending.
        repeats: of each restore, in turns and after one to warm up; medians count.
        first: the one restore that is measured, of a run that goes on, without one to warm up:
            ``"stock"`` or a number of deltas. Empty for all of them.
        onto: devices that steps are restored onto, of those that they were saved from; 0 for all.
    """
    own_root, stock_root = Path(root) / "ours", Path(root) / "stock"
    is_new = not stock_root.exists()
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    abstract, state_bytes = states.abstract(state, onto), states.size_bytes(state)
    stock_abstract = states.abstract(states.without_record(state), onto)
    if is_new:
        state = _save(own_root, stock_root, recorder, state, deltas[-1])
    updates_of = None if first else _updates(recorder, state)
    del state
    # A run that is resumed goes on; one that restores again and again only evaluates.
    handler = adacheck.AdaCheckHandler(recorder if first else None)
    own = ocp.CheckpointManager(own_root, item_handlers=handler)
    with own, ocp.CheckpointManager(stock_root) as stock:

        def of_stock() -> Any:
            return stock.restore(0, args=ocp.args.StandardRestore(stock_abstract))

        def of_step(step: int) -> Any:
            return own.restore(step, args=adacheck.RestoreArgs(abstract))

        if updates_of is None:
            return _timed(of_stock if first == "stock" else lambda: of_step(int(first)))
        acts: dict[str, Act] = {"stock": of_stock}
        for count in deltas:
            acts[f"restore {count}"] = lambda n=count: of_step(n)
            acts[f"read {count}"] = lambda n=count: _read(own_root, n)
            acts[f"updates {count}"] = lambda n=count: updates_of(n)
        taken = _in_turns(acts, repeats)
        rows = [
            {
                "deltas": count,
                **_named("restore", taken[f"restore {count}"]),
                "peak_bytes": _peak_bytes(lambda n=count: of_step(n)),
                **_named("stock", taken["stock"]),
                **_named("read", taken[f"read {count}"]),
                **_named("updates", taken[f"updates {count}"]),
            }
            for count in deltas
        ]
    return {"state_bytes": state_bytes, "rows": rows}


def _save(
    own_root: Path, stock_root: Path, recorder: adacheck.Recorder, state: Any, depth: int
) -> Any:
    """Save a base, some deltas, and by stock Orbax the last state; returns that state."""
    step = states.train_step_of(recorder)
    handler = adacheck.AdaCheckHandler(recorder, max_deltas=depth)
    with ocp.CheckpointManager(own_root, item_handlers=handler) as manager:
        for number in range(depth + 1):
            state = step(state)
            manager.save(number, args=adacheck.SaveArgs(state))
    with ocp.CheckpointManager(stock_root) as manager:
        manager.save(0, args=ocp.args.StandardSave(states.without_record(state)))
    return state


def _in_turns(acts: dict[str, Act], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each: turn by turn, so that other jobs slow all of them down."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for number in range(repeats + 1):
        for name, act in acts.items():
            found = _timed(act)
            if number:
                taken[name].append(found)
    return taken


def _timed(act: Act) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of the process and of those that it started."""
    start_s, start_cpu_s = time.perf_counter(), _cpu_s()
    jax.block_until_ready(act())
    return time.perf_counter() - start_s, _cpu_s() - start_cpu_s


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _named(name: str, taken: Sequence[tuple[float, float]]) -> dict[str, float]:
    wall_s, cpu_s = zip(*taken, strict=True)
    return {f"{name}_s": statistics.median(wall_s), f"{name}_cpu_s": statistics.median(cpu_s)}


def _peak_bytes(act: Act) -> int:
    measure.forget_peak()
    before_bytes = measure.memory_bytes("VmRSS")
    jax.block_until_ready(act())
    return measure.memory_bytes("VmHWM") - before_bytes


def _read(root: Path, count: int) -> None:
    """Reads the files of some deltas, one after the other."""
    for number in range(1, count + 1):
        start = folders.pack_in(root / str(number) / "default", 0)
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
