"""Checkpointing systems as the goodput simulation knows them: what each does, and at what cost.

Every figure has its source. Where nobody published a time of a system, it is taken to be as
measured of stock Orbax on this library's test machine, scaled by the bytes of a host, and counts as
assumed. A published time is taken as it is, whatever cluster and model it was measured on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.costs import Costs, Schedule
from adacheck_jax.tools.goodput.cluster import Cluster, Figure, Values, assumed, published
from adacheck_jax.tools.goodput.tiers import Behaviour, Tier

ALWAYS = (1.0, 1.0, 1.0)
"""A storage that survives every kind of failure."""
LOCAL = (1.0, 0.0, 0.0)
"""The memory of the host itself."""
Figures = dict[str, Figure]


@dataclass(frozen=True, slots=True)
class System:
    """A checkpointing system.

    Attributes:
        name: its name.
        figures: its figures on a cluster.
        behaviour: what it does, from the values of its figures.
    """

    name: str
    figures: Callable[[Cluster], dict[str, Figure]]
    behaviour: Callable[[Values, Cluster], Behaviour]


def _young_steps(blocking_s: float, write_s: float, cluster: Cluster) -> int:
    """Steps between saves at Young's interval, or as soon as the save before is written."""
    interval_s = math.sqrt(2 * blocking_s * cluster.mtbf_s)
    return max(round(interval_s / cluster.step_s), math.ceil(write_s / cluster.step_s), 1)


# Seconds, and the gigabytes that they were measured at: docs/guide/cost.md.
_STOCK_BLOCKING = 0.092, 2.0
_STOCK_WRITE = 4.831 - 0.092, 2.0
_STOCK_RESTORE = 0.352, 0.0995
_DELTA_BLOCKING = 0.045, 0.334
_DELTA_WRITE = 0.592 - 0.045, 0.334
_BASE_RESTORE = 0.239, 0.0995
_REPLAY = (1.859 - 0.846) / 40, 0.0995
_OPEN_S = 0.646 - 0.239 - 0.025
_UNHINDERED = assumed(0.0, "writing in the background takes nothing from the steps")


def _measured(at: tuple[float, float], gb: float, what: str) -> Figure:
    seconds, at_gb = at
    shown = f"{what}: {seconds * 1e3:,.0f} ms at {at_gb * 1e3:,.4g} MB, by bytes of a host"
    return Figure(seconds / at_gb * gb, "measured", shown)


def _as_stock(cluster: Cluster, *names: str) -> Figures:
    """Times that nobody published, taken to be those of stock Orbax."""
    known = _stock_figures(cluster)
    return {name: assumed(known[name].value, f"as stock Orbax: {name}") for name in names}


def _stock_figures(cluster: Cluster) -> Figures:
    gb = cluster.state_gb
    return {
        "slowdown": _UNHINDERED,
        "blocking_s": _measured(_STOCK_BLOCKING, gb, "blocks"),
        "write_s": _measured(_STOCK_WRITE, gb, "then written"),
        "restore_s": _measured(_STOCK_RESTORE, gb, "restored"),
    }


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


def _byte_checkpoint_figures(_: Cluster) -> Figures:
    source = "405B params on 8,960 GPUs"
    return {
        "slowdown": _UNHINDERED,
        "blocking_s": published(0.59, source),
        "write_s": published(51 - 0.59, source),
        "restore_s": published(129, source),
    }


def _checkfreq_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": published(0.035, "at most 3.5 %, with all that its saves block"),
        "every_steps": assumed(63, "AdaCheck claims to save 36 to 111 times as often"),
        **_as_stock(cluster, "write_s", "restore_s"),
    }


def _checkfreq(values: Values, _: Cluster) -> Behaviour:
    every = max(round(values["every_steps"]), 1)
    tier = _storage({**values, "blocking_s": 0.0}, every)
    return Behaviour((tier,), values["slowdown"])


def _gemini_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": assumed(0.0, "copies travel while the network is idle"),
        "memory_write_s": assumed(cluster.step_s, "copies take one step"),
        "memory_speedup": published(13, "recovers more than 13 times as fast as from storage"),
        "rack_survival": assumed(0.0, "both copies of a shard are in one rack"),
        "storage_interval_s": assumed(3 * 3600, "a save every 3 hours"),
        **_as_stock(cluster, "blocking_s", "write_s", "restore_s"),
    }


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


def _lowdiff_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": published(0.031, "every step at less than 3.1 %"),
        "merge_s": assumed(
            _measured(_REPLAY, cluster.state_gb, "").value, "a batch as long as a replay here"
        ),
        **_as_stock(cluster, "write_s", "restore_s"),
    }


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


def _lowdiff_plus_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": assumed(0.031, "as LowDiff"),
        "memory_speedup": assumed(13, "as Gemini"),
        **_as_stock(cluster, "write_s", "restore_s"),
    }


def _lowdiff_plus(values: Values, cluster: Cluster) -> Behaviour:
    memory = Tier("memory of the host", 1, LOCAL, _from_memory_s(values))
    every = max(math.ceil(values["write_s"] / cluster.step_s), 1)
    storage = _storage(values, every, blocks=False)
    return Behaviour((memory, storage), values["slowdown"])


def _tiercheck_figures(_: Cluster) -> Figures:
    source = "GPT2-20B"
    return {
        "slowdown": published(0.129, "10.7 to 15.1 % at 40B, every step: the middle"),
        "memory_restore_s": published(8.8, source),
        "peer_restore_s": published(18.4, source),
        "restore_s": published(23.9, source),
        "write_s": published(10, "less than 10 s at 40B"),
        "rack_survival": assumed(0.0, "the ring of copies lies in one rack"),
        "storage_interval_s": assumed(600, "a base every 10 minutes"),
    }


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


def _checkmate_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": assumed(0.0, "switches copy the gradients; its extra hosts are not counted"),
        **_as_stock(cluster, "restore_s"),
    }


def _checkmate(values: Values, _: Cluster) -> Behaviour:
    tier = Tier("shadow cluster", 1, ALWAYS, values["restore_s"])
    return Behaviour((tier,), values["slowdown"])


def _multi_tier_figures(cluster: Cluster) -> Figures:
    return {
        "slowdown": _UNHINDERED,
        "memory_restore_s": published(60, "less than a minute"),
        "rack_survival": assumed(0.5, "another slice has a copy, and may be lost too"),
        "storage_interval_s": assumed(1800, "a save every 30 minutes"),
        **_as_stock(cluster, "blocking_s", "write_s", "restore_s"),
    }


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


def _own_figures(cluster: Cluster) -> Figures:
    gb, stock = cluster.state_gb, _stock_figures(cluster)
    blocking = _measured(_DELTA_BLOCKING, cluster.record_gb, "blocks")
    return {
        "slowdown": _UNHINDERED,
        "delta_blocking_s": blocking,
        "delta_write_s": _measured(_DELTA_WRITE, cluster.record_gb, "then written"),
        "base_blocking_s": assumed(stock["blocking_s"].value, "as stock Orbax"),
        "base_write_s": assumed(
            0.391 / 0.462 * stock["write_s"].value, "0.85 of stock Orbax, as at 99.5 MB"
        ),
        "open_s": Figure(_OPEN_S, "measured", "the update, compiled while the base is read"),
        "base_restore_s": _measured(_BASE_RESTORE, gb, "restored"),
        "replay_s": _measured(_REPLAY, gb, "a delta read and replayed"),
        "defer_blocking_s": assumed(blocking.value, "as saving a delta"),
    }


def own_costs(values: Values, cluster: Cluster) -> Costs:
    """Costs of this library on a cluster."""
    seconds = {name: value for name, value in values.items() if name.endswith("_s")}
    return Costs(
        step_s=cluster.step_s,
        restart_s=cluster.mean_restart_s,
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


SYSTEMS = (
    System("stock Orbax", _stock_figures, _at_youngs_interval),
    System("ByteCheckpoint", _byte_checkpoint_figures, _at_youngs_interval),
    System("CheckFreq", _checkfreq_figures, _checkfreq),
    System("Gemini", _gemini_figures, _gemini),
    System("LowDiff", _lowdiff_figures, _lowdiff),
    System("LowDiff+", _lowdiff_plus_figures, _lowdiff_plus),
    System("TierCheck", _tiercheck_figures, _tiercheck),
    System("Checkmate", _checkmate_figures, _checkmate),
    System("Orbax multi-tier", _multi_tier_figures, _multi_tier),
    System("adacheck_jax", _own_figures, _own),
    System("adacheck_jax, as it is by default", _own_figures, _own_by_default),
)
"""All systems, in the order in which they are shown."""
