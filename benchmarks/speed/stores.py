"""Requests, bytes and times of saves and restores in an object store on this machine."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

import adacheck_jax as adacheck
from benchmarks.speed import states
from benchmarks.speed.ways import DELTA, STOCK
from tests import object_stores

RECORDED, BASE, RESTORE, STOCK_RESTORE = (
    "step recorded, and one of 20 saved",
    "base",
    "restore of a base and {} deltas",
    "stock Orbax's restore",
)
_EVERY = 20


def run(root: str, kind: str, delay_ms: float, params: int, leaves: int, saves: int) -> Any:
    """Saves and restores, a manager for each way.

    Args:
        root: folder, which is not used.
        kind: its scheme.
        delay_ms: what each request takes longer.
        params: number of params.
        leaves: arrays of params; AdamW makes four of each.
        saves: measured saves of each way.
    """
    with object_stores.served(kind) as url:
        return {"kind": kind, "delay_ms": delay_ms} | _rows(url, delay_ms, params, leaves, saves)


def _rows(url: str, delay_ms: float, params: int, leaves: int, saves: int) -> dict[str, Any]:
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    step = states.train_step_of(recorder)
    rows: dict[str, dict[str, float]] = {}

    def measured(name: str, call: Callable[[], Any], then: Callable[[], Any] | None = None) -> None:
        object_stores.taken(url, delay_ms / 1e3)
        start_s = time.perf_counter()
        call()
        blocking_s = time.perf_counter() - start_s
        if then is not None:
            then()
        durable_s = time.perf_counter() - start_s
        seen = object_stores.taken(url, delay_ms / 1e3)
        figures = {"blocking_s": blocking_s, "durable_s": durable_s, "requests": len(seen)}
        figures["own_requests"] = sum("/adacheck/" in each["key"] for each in seen)
        for key in ("sent_bytes", "received_bytes"):
            figures[key] = sum(each[key] for each in seen)
        for key, value in figures.items():
            rows.setdefault(name, {}).setdefault(key, []).append(value)  # type: ignore[arg-type]

    def train(name: str, args: Any, count: int) -> ocp.CheckpointManager:
        nonlocal state
        keep = adacheck.KeepLineage(preservation_policy.LatestN(3))
        handler = None
        if name != STOCK:
            handler = adacheck.AdaCheckHandler(recorder, max_deltas=1000, keep_lineage=keep)
        manager = _manager(f"{url}/{name.replace(' ', '_')}", handler, keep)
        for number in range(count):
            state = jax.block_until_ready(step(state))
            if name == RECORDED:
                measured(name, functools.partial(_recorded, handler, manager, number, state))
            else:
                what = BASE if handler is not None and number == 0 else name
                save = functools.partial(manager.save, number, args=args(state))
                measured(what, save, manager.wait_until_finished)
        manager.wait_until_finished()
        return manager

    saved = adacheck.SaveArgs
    with train(DELTA, saved, saves + 2) as manager:
        abstract = jax.tree.map(_abstract, state)
        restore = adacheck.RestoreArgs(abstract)
        name = RESTORE.format(saves + 1)
        measured(name, lambda: manager.restore(saves + 1, args=restore))
    with train(RECORDED, saved, _EVERY * 2 + 1):
        pass
    with train(STOCK, ocp.args.StandardSave, saves + 1) as manager:
        restore = ocp.args.StandardRestore(abstract)
        measured(STOCK_RESTORE, lambda: manager.restore(saves, args=restore))
    return {
        "state_bytes": states.size_bytes(state),
        "leaves": len(jax.tree.leaves(state)),
        "rows": {name: _medians(own) for name, own in rows.items()},
    }


def _medians(figures: Mapping[str, Any]) -> dict[str, float]:
    """Medians without the first save of each way, and the sum of what blocked."""
    return {
        key: statistics.median(values[1:] if len(values) > 2 else values)
        for key, values in figures.items()
    } | {"mean_blocking_s": statistics.mean(figures["blocking_s"])}


def _manager(root: str, handler: Any, keep: adacheck.KeepLineage) -> ocp.CheckpointManager:
    mode = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
    options = ocp.CheckpointManagerOptions(atomicity_options=mode, preservation_policy=keep)
    return ocp.CheckpointManager(epath.Path(root), item_handlers=handler, options=options)


def _recorded(handler: Any, manager: Any, number: int, state: Any) -> None:
    if number % _EVERY == 0 or not handler.record_step(state, number):
        manager.save(number, args=adacheck.SaveArgs(state))


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
