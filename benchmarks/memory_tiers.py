"""The schedule of a large cluster whose hosts' memory survives most failures.

    python -m benchmarks.memory_tiers            # a minute on one core
    python -m benchmarks.memory_tiers --hosts 2048

For each set of failures that memory survives: what ``AdaptivePolicy`` chooses, the bytes that go to
storage, and the share of the time that is lost, by the closed form and in simulated runs. The
simulation walks from failure to failure through a timetable of saves, and has no formula in common
with ``adacheck_jax.schedule``. A second table has what is lost if the rate is believed wrongly.
Costs and failures are those of ``benchmarks/goodput/figures.toml``. Prints Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adacheck_jax.schedule.adaptive import AdaptivePolicy
from adacheck_jax.schedule.waste import Costs, Schedule, waste
from benchmarks.goodput.figures import Cluster, cluster_of, figures_of, read
from benchmarks.goodput.systems import own_costs
from benchmarks.schedule import Timetable

MOST_EVERY = 9
"""Steps that a save may hold: deferred ones may take as much memory as a base, eight deltas."""
WRITE_S, RESTORE_S = 50.41, 129.0
"""ByteCheckpoint (NSDI '25): 405B params on 8,960 GPUs, to and from a shared storage."""
WRONG = (0.25, 0.5, 2.0, 4.0)
SEED = 0


@dataclass(slots=True)
class _Runs:
    """Runs between two failures; arrays are of shape (trials,).

    Attributes:
        start: step that each resumed from.
        base: step of the base of the lineage that it is in, or of that which comes next.
        since_s: when training resumed, counted from the return of that base's save.
        stored: newest step in storage.
        save: which save of its lineage that step is.
        recovery_s: restart, and restore or recovery.
    """

    start: np.ndarray
    base: np.ndarray
    since_s: np.ndarray
    stored: np.ndarray
    save: np.ndarray
    recovery_s: np.ndarray


def simulated_waste(
    costs: Costs,
    schedule: Schedule,
    mtbf_s: float,
    storage_mtbf_s: float,
    failures: int = 1000,
    trials: int = 200,
) -> float:
    """Share of the time lost in simulated runs: a quarter of the failures passes unobserved.

    A failure that memory survives costs the step under way and one or two before it, but none that
    storage has, which memory has too. Where it has more, the next step is a base of a new lineage.

    Args:
        costs: costs of saves, restores and recoveries.
        schedule: when to save what.
        mtbf_s: mean seconds between failures.
        storage_mtbf_s: mean seconds between those that memory does not survive.
        failures: failures of each run.
        trials: number of runs. Runs of equal numbers have equal failures.
    """
    table, random = Timetable.of(costs, schedule), np.random.default_rng(SEED)
    restore_s = costs.restart_s + costs.open_s + costs.base_restore_s
    zeros = np.zeros(trials, np.int64)
    runs = _Runs(zeros, zeros, np.full(trials, table.wait_s[0]), zeros, zeros, np.zeros(trials))
    begun, passed_s = zeros, 0.0
    for number in range(failures):
        uptime_s = mtbf_s * random.exponential(size=trials)
        is_lost = random.uniform(size=trials) < mtbf_s / storage_mtbf_s
        late = random.integers(1, 3, size=trials)
        if number == failures // 4:
            begun, passed_s = runs.start, 0.0
        passed_s += float(uptime_s.sum())
        trains = uptime_s > runs.recovery_s
        now_s = runs.since_s + np.where(trains, uptime_s - runs.recovery_s, 0.0)
        done = np.where(trains, _done(runs, now_s, table, costs, schedule), runs.start)
        stored, save = _stored(runs, now_s, table, schedule)
        runs.save = np.where(trains & (stored > runs.stored), save, runs.save)
        runs.stored = np.where(trains, np.maximum(stored, runs.stored), runs.stored)
        # What failed before it trained finds in memory what it found before.
        newest = np.where(trains, np.maximum(done - late, runs.start), runs.start)
        is_newer = trains & ~is_lost & (newest > runs.stored)
        goes_back = is_lost | (trains & ~is_newer)  # to the step that storage has
        runs.start = np.where(goes_back, runs.stored, newest)
        depth = table.depth[runs.save]
        runs.base = np.where(goes_back, runs.stored - depth, runs.base)
        runs.base = np.where(is_newer, runs.start + 1, runs.base)
        again_s = table.return_s[runs.save] + table.wait_s[runs.save]
        runs.since_s = np.where(goes_back, again_s, runs.since_s)
        runs.since_s = np.where(is_newer, -costs.step_s - costs.base_blocking_s, runs.since_s)
        memory_s = costs.restart_s + costs.recover_s
        stored_s = restore_s + depth * costs.replay_s
        # A restore that did not end is begun anew: memory is empty until then.
        runs.recovery_s = np.where(trains, memory_s, runs.recovery_s)
        runs.recovery_s = np.where(is_lost, stored_s, runs.recovery_s)
    return float(1 - (runs.start - begun).sum() * costs.step_s / passed_s)


def _done(
    runs: _Runs, now_s: np.ndarray, table: Timetable, costs: Costs, schedule: Schedule
) -> np.ndarray:
    """The steps that are done."""
    further, rest_s = np.divmod(np.maximum(now_s, 0.0), table.lineage_s)
    last = np.searchsorted(table.return_s, rest_s, side="right") - 1
    held = np.append(np.diff(table.depth), 1)[last]
    # After a restore no save is being written that the next one would wait for.
    begun_s = np.maximum(table.return_s[last], np.where(further == 0, runs.since_s, 0.0))
    steps = np.minimum((rest_s - begun_s) // (costs.step_s + costs.defer_blocking_s), held)
    done = runs.base + further * (schedule.base_every + 1) + table.depth[last] + steps
    first = runs.start + np.minimum((now_s - runs.since_s) // costs.step_s, 1)
    return np.where(now_s < 0, first, done).astype(np.int64)


def _stored(
    runs: _Runs, now_s: np.ndarray, table: Timetable, schedule: Schedule
) -> tuple[np.ndarray, np.ndarray]:
    """The newest durable save of the lineages since the last recovery: its step, and number."""
    further, rest_s = np.divmod(np.maximum(now_s, 0.0), table.lineage_s)
    save = np.searchsorted(table.durable_s, rest_s, side="right") - 1
    is_before = save < 0  # the base is on its way
    lineage = further.astype(np.int64) - is_before
    save = np.where(is_before, len(table.depth) - 1, save)
    step = runs.base + lineage * (schedule.base_every + 1) + table.depth[save]
    return np.where((now_s < 0) | (lineage < 0), -1, step), save


def survived(cluster: Cluster) -> Mapping[str, float]:
    """Share of the failures after which storage is needed, by what memory survives."""
    software, _, rack = cluster.shares
    return {
        "nothing": 1.0,
        "processes (`copies=0`)": 1 - software,
        "hosts (`copies=1`)": rack,
        "racks too (`domain=`), nine in ten": rack / 10,
    }


def costs_of(cluster: Cluster) -> Mapping[str, Costs]:
    """Costs of a host's part of the state, and with a slower storage."""
    figures = figures_of(read(), "adacheck_jax", cluster)
    found = own_costs({name: each.value for name, each in figures.items()}, cluster)
    part = cluster.value("record_bytes_a_param") / cluster.value("state_bytes_a_param")
    shared = dataclasses.replace(
        found,
        delta_write_s=part * WRITE_S,
        further_write_s=part * WRITE_S,
        base_write_s=WRITE_S,
        base_restore_s=RESTORE_S,
        replay_s=part * RESTORE_S,
    )
    return {"a disk a host": found, "shared": shared}


def chosen(costs: Costs, mtbf_s: float, storage_mtbf_s: float) -> Schedule:
    """The schedule of a policy that knows both rates, for restores of any length."""
    policy = AdaptivePolicy(mtbf_s, None, storage_mtbf_s=storage_mtbf_s)
    return policy.next(costs, None, MOST_EVERY)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=16384, help="hosts of 8 devices")
    parser.add_argument("--failures", type=int, default=1000, help="failures of each run")
    given = parser.parse_args(arguments)
    cluster = cluster_of(read(), given.hosts)
    mtbf_s, per_step = cluster.mtbf_s, cluster.gb("record") + cluster.gb("state")
    restarts = 1 - 1 / (1 + np.expm1(next(iter(costs_of(cluster).values())).restart_s / mtbf_s))
    print(
        f"{given.hosts:,} hosts, a failure every {mtbf_s / 60:.3g} min, of which restarts alone "
        f"lose {restarts:.2%} of the time; seed {SEED}\n"
    )
    _row("storage", "memory survives", "storage needed every", "a base each, a save each")
    _row("MB a host and step", "lost, computed", "simulated", end="\n")
    _row(*["---"] * 7, end="\n")
    for name, costs in costs_of(cluster).items():
        for what, share in survived(cluster).items():
            rarer_s = mtbf_s / share
            found = chosen(costs, mtbf_s, rarer_s)
            deltas = found.base_every * cluster.gb("record")
            stored = 1000 * (per_step + deltas) / (found.base_every + 1)
            lost = waste(costs, found, mtbf_s, rarer_s)
            real = simulated_waste(costs, found, mtbf_s, rarer_s, given.failures)
            _row(name, what, f"{rarer_s / 3600:.3g} h", f"{found.base_every}, {found.save_every}")
            _row(f"{stored:.0f}", f"{lost:.2%}", f"{real:.2%}", end="\n")
    print()
    _row("storage", "memory survives", *(f"believed × {wrong:g}" for wrong in WRONG), end="\n")
    _row(*["---"] * (2 + len(WRONG)), end="\n")
    for name, costs in costs_of(cluster).items():
        for what, share in [*survived(cluster).items()][1:]:
            rarer_s = mtbf_s / share
            right = waste(costs, chosen(costs, mtbf_s, rarer_s), mtbf_s, rarer_s)
            cells = list[str]()
            for wrong in WRONG:
                found = chosen(costs, mtbf_s, max(rarer_s * wrong, mtbf_s))
                more = waste(costs, found, mtbf_s, rarer_s) - right
                cells.append(f"{more:+.3%} ({found.base_every}, {found.save_every})")
            _row(name, what, *cells, end="\n")


def _row(*cells: str, end: str = "") -> None:
    """Print cells of a Markdown row; the row is complete with an ``end``."""
    print("".join(f"| {cell} " for cell in cells) + ("|" + end if end else ""), end="", flush=True)


if __name__ == "__main__":
    main()
