"""The schedule that one line of steps follows, and the costs that it was chosen by.

Every process of a run holds one, gives it the same measurements in the same order, and has it
choose at the same saves: those of bases. So all hold the same schedule, and none is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from adacheck_jax.schedule.adaptive import LEAST_DELTAS, AdaptivePolicy, Position, RunningCosts
from adacheck_jax.schedule.stopwatch import Measurement
from adacheck_jax.schedule.waste import Costs, Schedule, restore_s, waste

MaxDeltas = int | Literal["auto"] | AdaptivePolicy
"""A number of deltas for each base; or a policy that chooses it, ``"auto"`` the default one."""

BEGINNING = Schedule(LEAST_DELTAS, save_every=1)
"""The schedule until a policy knows the costs."""
ENOUGH = 2
"""Measurements of each cost of a save, from which on a policy chooses: the first base of a process
takes longer, because programs are compiled."""
SAVE_COSTS = ("step_s", "delta_blocking_s", "base_blocking_s", "delta_write_s", "base_write_s")

RESTART_S = 60.0
OPEN_S = 2.0
RESTORED_BYTES_PER_S = 300e6
REPLAYED_BYTES_PER_S = 500e6
REPLAY_S = 1e-3
REPLAYED_PART = 0.25
DEFERRED_PART = 0.1
"""Estimates of what was not measured yet; ``docs/reference/schedule.md`` has their reasons."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a state in the process that holds most of it.

    Attributes:
        base_bytes: all of the state.
        delta_bytes: what an update consumes of it.
        deferred_bytes: host memory that deferred steps may take.
    """

    base_bytes: int
    delta_bytes: int
    deferred_bytes: int

    @property
    def most_every(self) -> int:
        """Most steps that a save may hold: those that memory has room for, and its own."""
        return self.deferred_bytes // max(self.delta_bytes, 1) + 1


class LineSchedule:
    """The schedule of one line of steps."""

    def __init__(self, max_deltas: MaxDeltas) -> None:
        self._fixed = max_deltas if isinstance(max_deltas, int) else None
        self._policy = max_deltas if isinstance(max_deltas, AdaptivePolicy) else AdaptivePolicy()
        self._running = RunningCosts()
        self._schedule = BEGINNING

    @property
    def longest_lineage(self) -> int:
        """Deltas that the lineage which is being saved may have."""
        return self._schedule.base_every if self._fixed is None else self._fixed

    def add(self, measured: Iterable[Measurement]) -> None:
        """Adds measurements, the same in every process.

        Raises:
            ValueError: there is no such cost, or it cannot have this value.
        """
        for name, seconds, deltas in measured:
            if deltas == 1:
                self._running.add(name, seconds)
            elif self._running.count(name):
                further_s = seconds - self._running.median(name, 0.0)
                self._running.add("further_write_s", max(further_s, 0.0) / (deltas - 1))

    def begin_lineage(self, sizes: Sizes) -> str:
        """Chooses the schedule of a lineage whose base is being saved.

        Returns:
            What was chosen, and the reason; empty if it is what was chosen before.
        """
        if self._fixed is not None or any(self._running.count(x) < ENOUGH for x in SAVE_COSTS):
            return ""
        costs, before = self._costs(sizes), self._schedule
        most_every = sizes.most_every if self._policy.is_asked else 1
        self._schedule = self._policy.next(costs, before, most_every)
        return "" if self._schedule == before else self._told(costs, before)

    def note(self, saved: int | None, depth: int = 0) -> None:
        """Tells the policy how far the line is, for a manager that asks when to save.

        Args:
            saved: the manager's number of the step saved or restored last; None if there is none
                that the next one could follow.
            depth: deltas between its base and the last step, deferred ones included.
        """
        at = None if saved is None else Position(saved, depth, self._schedule)
        self._policy.note(at)

    def _costs(self, sizes: Sizes) -> Costs:
        """Costs as measured; estimated where no step was restored or deferred."""
        delta_blocking_s = self._running.median("delta_blocking_s", 0.0)
        delta_write_s = self._running.median("delta_write_s", 0.0)
        replay_s = REPLAY_S + sizes.delta_bytes / REPLAYED_BYTES_PER_S
        estimate = Costs(
            step_s=1.0,
            delta_blocking_s=0.0,
            base_blocking_s=0.0,
            restart_s=RESTART_S,
            open_s=OPEN_S,
            base_restore_s=sizes.base_bytes / RESTORED_BYTES_PER_S,
            replay_s=max(replay_s, REPLAYED_PART * delta_write_s),
            defer_blocking_s=DEFERRED_PART * delta_blocking_s,
            further_write_s=DEFERRED_PART * delta_write_s,
            recover_s=OPEN_S + sizes.base_bytes / RESTORED_BYTES_PER_S,
        )
        return self._running.costs(estimate)

    def _told(self, costs: Costs, before: Schedule) -> str:
        chosen, policy = self._schedule, self._policy
        rates = f"a failure each {policy.mtbf_s:.6g} s"
        if policy.storage_mtbf_s is not None:
            rates += (
                f", of which memory survives all but one each {policy.storage_mtbf_s:.6g} s at "
                f"{costs.recover_s:.3g} s for a recovery,"
            )

        def lost(schedule: Schedule) -> str:
            return f"{waste(costs, schedule, policy.mtbf_s, policy.storage_mtbf_s):.3%}"

        saves = f", a save each {chosen.save_every} steps" if chosen.save_every > 1 else ""
        return (
            f"schedule: a base each {chosen.base_every} deltas{saves}, because a step takes "
            f"{costs.step_s:.3g} s, a save of deltas blocks {costs.delta_blocking_s:.3g} s, one of "
            f"a base {costs.base_blocking_s:.3g} s, and a restore takes up to "
            f"{restore_s(costs, chosen):.3g} s, {costs.replay_s:.3g} s of it for each delta; with "
            f"{rates} {lost(chosen)} of the time is lost, {lost(before)} with a base each "
            f"{before.base_every}"
        )
