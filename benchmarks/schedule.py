"""The chosen schedule of saves beside all others, with simulated failures.

    python -m benchmarks.schedule            # two minutes on one core
    python -m benchmarks.schedule --size small

For each set of costs and each mean time between failures the waste of many schedules is simulated,
with the same failures for all of them, and the one that ``best_schedule`` chooses is compared with
the best of them. The simulation walks through a timetable of saves, from failure to failure; it has
no formula in common with ``adacheck_jax.schedule``. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adacheck_jax.schedule.adaptive import AdaptivePolicy
from adacheck_jax.schedule.best import LONGEST_LINEAGE, best_schedule
from adacheck_jax.schedule.waste import Costs, Schedule, restore_s, waste

COSTS: Mapping[str, Costs] = {
    # docs/guide/cost.md: 99.5 MB in 301 arrays; the steps' length and the restart are assumed.
    "100 MB, measured": Costs(
        step_s=0.1,
        delta_blocking_s=0.0425,
        base_blocking_s=0.0813,
        delta_write_s=0.049,
        base_write_s=0.39,
        restart_s=10,
        open_s=0.38,
        base_restore_s=0.239,
        replay_s=0.024,
        defer_blocking_s=0.0013,
    ),
    # 2 GB a host as measured in docs/guide/cost.md, long steps; the rest is assumed.
    "2 GB a host, long steps": Costs(
        step_s=6,
        delta_blocking_s=0.045,
        base_blocking_s=0.092,
        delta_write_s=0.55,
        base_write_s=4.7,
        restart_s=300,
        open_s=10,
        base_restore_s=7,
        replay_s=0.4,
        defer_blocking_s=0.0025,
    ),
    # Invented: a storage that takes longer for a delta than a step takes.
    "slow storage": Costs(
        step_s=1,
        delta_blocking_s=0.2,
        base_blocking_s=2,
        delta_write_s=2,
        base_write_s=60,
        restart_s=60,
        open_s=5,
        base_restore_s=30,
        replay_s=0.4,
        defer_blocking_s=0.002,
        further_write_s=0.3,
    ),
}
MINUTE_S, DAY_S = 60.0, 86_400.0
MTBFS_S = np.geomspace(10 * MINUTE_S, 30 * DAY_S, 10)
THREE_HOURS_S = 3 * 3600.0
BUDGET_S = 15.0
BASES_ALONE = dataclasses.replace(
    COSTS["100 MB, measured"], delta_blocking_s=0.0, defer_blocking_s=0.0, restart_s=0.0
)
WRONG = (0.25, 0.5, 2.0, 4.0)
SEED = 0


@dataclass(frozen=True, slots=True)
class Timetable:
    """One lineage without failures, from the return of its base's save on.

    Attributes:
        return_s: when the base's save and each save of deltas returns: (saves,).
        durable_s: when each of them is durable: (saves,).
        wait_s: how long the save after each waits for its write: (saves,).
        depth: deltas between the base and each save: (saves,).
        lineage_s: when the next base's save returns.
    """

    return_s: np.ndarray
    durable_s: np.ndarray
    wait_s: np.ndarray
    depth: np.ndarray
    lineage_s: float

    @classmethod
    def of(cls, costs: Costs, schedule: Schedule) -> Timetable:
        """The timetable of a schedule."""
        total, every = schedule.base_every, schedule.save_every
        depth = np.append(np.arange(0, total, every), total)
        held = np.diff(depth)
        gap_s = np.append(held * costs.step_s + (held - 1) * costs.defer_blocking_s, costs.step_s)
        blocking_s = np.append(np.full(len(held), costs.delta_blocking_s), costs.base_blocking_s)
        delta_write_s = costs.delta_write_s + (held - 1) * costs.further_write_s
        write_s = np.concatenate([[costs.base_write_s], delta_write_s])
        wait_s = np.maximum(write_s - gap_s, 0)
        ends_s = np.cumsum(gap_s + wait_s + blocking_s)
        return_s = np.concatenate([[0.0], ends_s[:-1]])
        return cls(return_s, return_s + write_s, wait_s, depth, ends_s[-1])


def simulated_waste(
    costs: Costs, schedule: Schedule, mtbf_s: float, failures: int = 80, trials: int = 400
) -> float:
    """Share of the time lost in simulated runs: a quarter of the failures passes unobserved.

    Args:
        costs: costs of saves and restores.
        schedule: when to save what.
        mtbf_s: mean seconds between failures.
        failures: failures of each run.
        trials: number of runs. Runs of equal numbers have equal failures.
    """
    table, random = Timetable.of(costs, schedule), np.random.default_rng(SEED)
    saves, steps = len(table.depth), schedule.base_every + 1
    restore_s = costs.restart_s + costs.open_s + costs.base_restore_s
    between_s = mtbf_s * random.exponential(size=(failures, trials))
    newest = (random.uniform(size=trials) * saves).astype(np.int64)  # over all lineages
    kept, passed_s, recovery_s = np.zeros(trials), 0.0, np.zeros(trials)
    for number, uptime_s in enumerate(between_s):
        lineage, save = np.divmod(newest, saves)
        since_s = table.return_s[save] + table.wait_s[save] + uptime_s - recovery_s
        further, rest_s = np.divmod(since_s, table.lineage_s)
        durable = np.searchsorted(table.durable_s, rest_s, side="right") - 1
        durable = (lineage + further.astype(np.int64)) * saves + durable
        durable = np.where(uptime_s > recovery_s, np.maximum(durable, newest), newest)
        if number >= failures // 4:
            kept += _steps(durable, table, steps) - _steps(newest, table, steps)
            passed_s += uptime_s.sum()
        newest = durable
        recovery_s = restore_s + table.depth[newest % saves] * costs.replay_s
    return float(1 - kept.sum() * costs.step_s / passed_s)


def _steps(saves: np.ndarray, table: Timetable, lineage_steps: int) -> np.ndarray:
    lineage, save = np.divmod(saves, len(table.depth))
    return lineage * lineage_steps + table.depth[save]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The chosen schedule beside the best simulated one.

    Attributes:
        chosen: what ``best_schedule`` returns.
        computed: its waste by the closed form.
        simulated: its simulated waste.
        best: the best schedule of the grid.
        least: its simulated waste.
    """

    chosen: Schedule
    computed: float
    simulated: float
    best: Schedule
    least: float


def compare(
    costs: Costs, mtbf_s: float, ratio: float, failures: int = 80, trials: int = 400
) -> Comparison:
    """Simulate the chosen schedule, and a grid of schedules whose numbers are a ratio apart."""
    chosen = best_schedule(costs, mtbf_s)
    simulated = simulated_waste(costs, chosen, mtbf_s, failures, trials)
    lost = {each: simulated_waste(costs, each, mtbf_s, failures, trials) for each in grid(ratio)}
    best = min(lost, key=lost.__getitem__)
    return Comparison(chosen, waste(costs, chosen, mtbf_s), simulated, best, lost[best])


def grid(ratio: float) -> list[Schedule]:
    """Schedules whose numbers are a ratio apart, from 1 to the longest lineage."""
    count = round(np.log(LONGEST_LINEAGE) / np.log(ratio)) + 1
    numbers = sorted({round(x) for x in np.geomspace(1, LONGEST_LINEAGE, count)})
    return [Schedule(n, b) for n in numbers for b in numbers if b <= n]


def _shown_time(seconds: float) -> str:
    for unit_s, unit in ((DAY_S, "d"), (3600.0, "h")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.3g} {unit}"
    return f"{seconds / MINUTE_S:.3g} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=("small", "full"), default="full")
    is_full = parser.parse_args().size == "full"
    _row("costs", "mean time between failures", "chosen: base every, save every")
    _row("waste, computed", "simulated", "best of the grid", "its waste", "chosen ÷ best", end="\n")
    _row(*["---"] * 8, end="\n")
    for name, costs in COSTS.items():
        for mtbf_s in map(float, MTBFS_S if is_full else MTBFS_S[::3]):
            found = compare(costs, mtbf_s, 1.5 if is_full else 3.0)
            ratio = f"{found.simulated / found.least:.3f}"
            _row(name, _shown_time(mtbf_s), _shown(found.chosen), f"{found.computed:.3%}")
            _row(
                f"{found.simulated:.3%}", _shown(found.best), f"{found.least:.3%}", ratio, end="\n"
            )
    print()
    _row(
        "costs",
        "waste at 3 h",
        "of 20, 1",
        *(f"chosen for 3 h × {wrong:g}" for wrong in WRONG),
        end="\n",
    )
    _row(*["---"] * (3 + len(WRONG)), end="\n")
    for name, costs in COSTS.items():
        least = waste(costs, best_schedule(costs, THREE_HOURS_S), THREE_HOURS_S)
        chosen = [best_schedule(costs, THREE_HOURS_S * wrong) for wrong in WRONG]
        ratios = [waste(costs, each, THREE_HOURS_S) / least for each in chosen]
        default = f"{waste(costs, Schedule(20, 1), THREE_HOURS_S):.3%}"
        _row(name, f"{least:.3%}", default, *(f"{ratio:.3f} of it" for ratio in ratios), end="\n")
    print()
    _row("bases and replays alone", "base every, save every", "longest restore", end="")
    _row("waste, computed", "simulated", end="\n")
    _row(*["---"] * 5, end="\n")
    for name, schedule in bases_alone().items():
        shown = _shown(schedule), f"{restore_s(BASES_ALONE, schedule):.1f} s"
        _row(name, *shown, f"{waste(BASES_ALONE, schedule, THREE_HOURS_S):.4%}")
        _row(f"{simulated_waste(BASES_ALONE, schedule, THREE_HOURS_S):.4%}", end="\n")


def bases_alone() -> dict[str, Schedule]:
    """Schedules for a state of 100 MB and a failure in three hours, where saving deltas is free."""
    chosen = best_schedule(BASES_ALONE, THREE_HOURS_S)
    policy = AdaptivePolicy(THREE_HOURS_S, BUDGET_S, most_deltas=1000)
    return {
        "20 deltas": Schedule(20, chosen.save_every),
        "chosen, any restore": chosen,
        f"chosen, restores of {BUDGET_S:g} s": best_schedule(BASES_ALONE, THREE_HOURS_S, BUDGET_S),
        "chosen by the policy, which leaves a tenth of them": policy.next(BASES_ALONE, None),
    }


def _row(*cells: str, end: str = "") -> None:
    """Print cells of a Markdown row; the row is complete with an ``end``."""
    print("".join(f"| {cell} " for cell in cells) + ("|" + end if end else ""), end="", flush=True)


def _shown(schedule: Schedule) -> str:
    return f"{schedule.base_every:,}, {schedule.save_every:,}"


if __name__ == "__main__":
    main()
