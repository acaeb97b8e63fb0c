"""Checkpointing systems as the simulation knows them: what each does with its figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.waste import Costs, Schedule
from benchmarks.goodput.figures import Cluster
from benchmarks.goodput.tiers import Behaviour, Tier

Values = Mapping[str, float]
"""Values of the figures of a system."""
ALWAYS = (1.0, 1.0, 1.0)
"""A storage that survives every kind of failure."""
LOCAL = (1.0, 0.0, 0.0)
"""The memory of the host itself."""


def _young_steps(blocking_s: float, write_s: float, cluster: Cluster) -> int:
    """Steps between saves at Young's interval, or as soon as the save before is written."""
    interval_s = math.sqrt(2 * blocking_s * cluster.mtbf_s)
    return max(round(interval_s / cluster.step_s), math.ceil(write_s / cluster.step_s), 1)


def _storage(values: Values, every: int, *, blocks: bool = True) -> Tier:
    """Full saves to a storage that survives everything."""
    return Tier(
        name="storage",
        base_every=every,
        survives=ALWAYS,
        restore_s=values["restore_s"],
        base_blocking_s=values["blocking_s"] if blocks else 0.0,
        base_write_s=values["write_s"],
    )


def _at_youngs_interval(values: Values, cluster: Cluster) -> Behaviour:
    every = _young_steps(values["blocking_s"], values["write_s"], cluster)
    return Behaviour((_storage(values, every),), values["slowdown"])


def _checkfreq(values: Values, _: Cluster) -> Behaviour:
    every = max(round(values["every_steps"]), 1)
    tier = _storage({**values, "blocking_s": 0.0}, every)
    return Behaviour((tier,), values["slowdown"])


def _from_memory_s(values: Values) -> float:
    return values["restore_s"] / max(values["memory_speedup"], 1.0)


def _gemini(values: Values, cluster: Cluster) -> Behaviour:
    memory = Tier(
        name="memory of peers",
        base_every=max(math.ceil(values["memory_write_s"] / cluster.step_s), 1),
        survives=(1.0, 1.0, min(values["rack_survival"], 1.0)),
        restore_s=_from_memory_s(values),
        base_write_s=values["memory_write_s"],
    )
    every = max(round(values["storage_interval_s"] / cluster.step_s), 1)
    return Behaviour((memory, _storage(values, every)), values["slowdown"])


def _lowdiff(values: Values, cluster: Cluster) -> Behaviour:
    """Its own optimum: b = (2 S R M / W)^1/3 seconds a batch, R / b^2 full saves a second."""
    merge_s, step_s = max(values["merge_s"], 1e-9), cluster.step_s
    batch_s = (2 * values["write_s"] * merge_s * cluster.mtbf_s) ** (1 / 3)
    batch = max(round(batch_s / step_s), 1)
    full = max(
        round((batch * step_s) ** 2 / merge_s / step_s), math.ceil(values["write_s"] / step_s)
    )
    tier = Tier(
        name="storage",
        base_every=full + 1,
        survives=ALWAYS,
        restore_s=values["restore_s"],
        replay_s=merge_s / batch,
        delta_every=min(batch, full),
        base_write_s=values["write_s"],
    )
    return Behaviour((tier,), values["slowdown"])


def _lowdiff_plus(values: Values, cluster: Cluster) -> Behaviour:
    memory = Tier("memory of the host", 1, LOCAL, _from_memory_s(values))
    every = max(math.ceil(values["write_s"] / cluster.step_s), 1)
    storage = _storage(values, every, blocks=False)
    return Behaviour((memory, storage), values["slowdown"])


def _tiercheck(values: Values, cluster: Cluster) -> Behaviour:
    peers = (1.0, 1.0, min(values["rack_survival"], 1.0))
    every = max(round(values["storage_interval_s"] / cluster.step_s), 1)
    return Behaviour(
        (
            Tier("memory of the host", 1, LOCAL, values["memory_restore_s"]),
            Tier("memory of peers", 1, peers, values["peer_restore_s"]),
            _storage(values, every, blocks=False),
        ),
        values["slowdown"],
    )


def _checkmate(values: Values, _: Cluster) -> Behaviour:
    tier = Tier("shadow cluster", 1, ALWAYS, values["restore_s"])
    return Behaviour((tier,), values["slowdown"])


def _multi_tier(values: Values, cluster: Cluster) -> Behaviour:
    local = Tier(
        name="memory of hosts",
        base_every=_young_steps(values["blocking_s"], values["write_s"], cluster),
        survives=(1.0, 1.0, min(values["rack_survival"], 1.0)),
        restore_s=values["memory_restore_s"],
        base_blocking_s=values["blocking_s"],
        base_write_s=values["write_s"],
    )
    every = max(round(values["storage_interval_s"] / cluster.step_s), 1)
    return Behaviour((local, _storage(values, every)), values["slowdown"])


def own_costs(values: Values, cluster: Cluster) -> Costs:
    """Costs of this library on a cluster."""
    seconds = {name: value for name, value in values.items() if name.endswith("_s")}
    return Costs(
        step_s=cluster.step_s,
        restart_s=sum(x * s for x, s in zip(cluster.shares, cluster.restarts_s, strict=True)),
        further_write_s=seconds["delta_write_s"],
        **seconds,
    )


def _own(values: Values, cluster: Cluster) -> Behaviour:
    costs = own_costs(values, cluster)
    schedule = best_schedule(costs, cluster.mtbf_s)
    return as_behaviour(costs, schedule, values["slowdown"])


def _own_by_default(values: Values, cluster: Cluster) -> Behaviour:
    schedule = Schedule(base_every=20, save_every=1)
    return as_behaviour(own_costs(values, cluster), schedule, values["slowdown"])


def as_behaviour(costs: Costs, schedule: Schedule, slowdown: float = 0.0) -> Behaviour:
    """This library under a schedule: one storage of bases and deltas."""
    tier = Tier(
        name="storage",
        base_every=schedule.base_every + 1,
        survives=ALWAYS,
        restore_s=costs.open_s + costs.base_restore_s,
        replay_s=costs.replay_s,
        delta_every=schedule.save_every,
        base_blocking_s=costs.base_blocking_s,
        base_write_s=costs.base_write_s,
        delta_blocking_s=costs.delta_blocking_s,
        delta_write_s=costs.delta_write_s,
        further_write_s=costs.further_write_s,
        defer_blocking_s=costs.defer_blocking_s,
    )
    return Behaviour((tier,), slowdown)


SYSTEMS: Mapping[str, Callable[[Values, Cluster], Behaviour]] = {
    "stock Orbax": _at_youngs_interval,
    "ByteCheckpoint": _at_youngs_interval,
    "CheckFreq": _checkfreq,
    "Gemini": _gemini,
    "LowDiff": _lowdiff,
    "LowDiff+": _lowdiff_plus,
    "TierCheck": _tiercheck,
    "Checkmate": _checkmate,
    "Orbax multi-tier": _multi_tier,
    "adacheck_jax": _own,
    "adacheck_jax, as it is by default": _own_by_default,
}
"""The behaviour of each system, in the order in which they are shown."""
