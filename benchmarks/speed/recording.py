"""What keeping every step costs a loop of short steps: recorded, or saved through the manager."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck
from benchmarks.speed import states

NOTHING, RECORDED = "nothing saved", "adacheck_jax, recorded"


@dataclass
class _Keeper:
    """A way to keep every step.

    Attributes:
        manager: that saves; None for none.
        save: called with a step's number and state.
    """

    manager: ocp.CheckpointManager | None
    save: Callable[[int, Any], Any]


def run(root: str, params: int, leaves: int, steps: int, rounds: int, every: int) -> Any:
    """Keeps every step of a loop, in several ways and in turns.

    Args:
        root: where it is saved.
        params: how many.
        leaves: arrays of params.
        steps: in each turn.
        rounds: how often it is each way's turn; the first warms up.
        every: so many recorded steps are saved at once.
    """
    recorder = states.recorder()
    state = states.train_state(params, leaves, recorder)
    train_step = states.train_step_of(recorder)
    keepers = _keepers(Path(root), recorder, every)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in keepers}
    number = 0
    for position in range(rounds + 1):
        for name, keeper in keepers.items():
            blocking_s = []
            start_s, cpu_s = time.perf_counter(), time.process_time()
            for _ in range(steps):
                state = jax.block_until_ready(train_step(state))
                called_s = time.perf_counter()
                keeper.save(number, state)
                blocking_s.append(time.perf_counter() - called_s)
                number += 1
            if keeper.manager is not None:
                keeper.manager.wait_until_finished()
            total_s, cpu_s = time.perf_counter() - start_s, time.process_time() - cpu_s
            if position:
                rows[name].append(
                    {
                        "step_s": total_s / steps,
                        "blocking_s": statistics.fmean(blocking_s),
                        "median_blocking_s": statistics.median(blocking_s),
                        "cpu_s": cpu_s / steps,
                    }
                )
    for keeper in keepers.values():
        if keeper.manager is not None:
            keeper.manager.close()
    return {
        "state_bytes": states.size_bytes(states.without_record(state)),
        "leaves": len(jax.tree.leaves(state)),
        "every": every,
        "rows": {
            name: {key: statistics.median(row[key] for row in own) for key in own[0]}
            for name, own in rows.items()
        },
    }


def _keepers(root: Path, recorder: adacheck.Recorder, every: int) -> dict[str, _Keeper]:
    def manager(name: str, handler: Any) -> ocp.CheckpointManager:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        return ocp.CheckpointManager(root / name, item_handlers=handler, options=options)

    keepers = {NOTHING: _Keeper(None, lambda number, state: None)}
    recorded = adacheck.checkpoint_manager(
        root / "recorded", recorder, max_to_keep=2, max_deltas=5 * every
    )

    def record(number: int, state: Any) -> None:
        if not recorded.handler.record_step(state, number) or number % every == 0:
            recorded.save(number, args=adacheck.SaveArgs(state))

    keepers[RECORDED] = _Keeper(recorded, record)
    every_step = adacheck.checkpoint_manager(root / "saved", recorder, max_to_keep=2)
    keepers["adacheck_jax, saved"] = _Keeper(
        every_step, lambda n, s: every_step.save(n, args=adacheck.SaveArgs(s))
    )
    stock = manager("stock", ocp.StandardCheckpointHandler())
    keepers["stock Orbax"] = _Keeper(
        stock, lambda n, s: stock.save(n, args=ocp.args.StandardSave(states.without_record(s)))
    )
    floor = manager("floor", ocp.JsonCheckpointHandler())
    keepers["manager's floor (JSON)"] = _Keeper(
        floor, lambda n, s: floor.save(n, args=ocp.args.JsonSave({}))
    )
    return keepers
