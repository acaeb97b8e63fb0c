"""A schedule that follows measured costs, and does not change back and forth.

The seam to a training run: every process feeds the *same* seconds to its
:class:`RunningCosts` (one process measures and tells the others, as it does with its answer to
their reports), and asks :meth:`AdaptivePolicy.next` where it plans a base. Both are deterministic,
so all processes then hold the same schedule, and none has to be exchanged. Nothing here reads a
clock.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from dataclasses import dataclass

from adacheck_jax.schedule.best import best_schedule
from adacheck_jax.schedule.costs import Costs, Schedule
from adacheck_jax.schedule.waste import restore_s, waste

WINDOW = 31
"""Measurements of each cost that a running median is taken over."""
WORTH_CHANGING = 0.02
"""A schedule is kept while a better one would save less than this share of the waste."""
HEADROOM = 0.9
"""Part of the restore budget that a new schedule may take, so that noise does not exceed it."""


class RunningCosts:
    """Running medians of measured costs; an estimate stands in for what was not measured yet.

    Example::

        running = RunningCosts(Costs(step_s=1, delta_blocking_s=0.05, base_blocking_s=0.1))
        running.add("delta_blocking_s", 0.031)
        running.costs()  # delta_blocking_s=0.031, all else as estimated
    """

    def __init__(self, estimate: Costs) -> None:
        """Begin with estimated costs.

        Args:
            estimate: costs until they are measured; of restores, which a run may never make, from
                an earlier run.
        """
        self._estimate = estimate
        names = (field.name for field in dataclasses.fields(Costs))
        self._measured = {name: deque[float](maxlen=WINDOW) for name in names}

    def add(self, name: str, seconds: float) -> None:
        """Add one measurement.

        Args:
            name: a field of :class:`~adacheck_jax.schedule.costs.Costs`.
            seconds: the measured value.

        Raises:
            ValueError: there is no such cost, or it cannot have this value.
        """
        if name not in self._measured:
            raise ValueError(f"expected one of {[*self._measured]}, found {name!r}")
        dataclasses.replace(self._estimate, **{name: seconds})  # validates
        self._measured[name].append(seconds)

    def costs(self) -> Costs:
        """Median of the last measurements of each cost, or its estimate."""
        medians = {
            name: statistics.median_low(measured)
            for name, measured in self._measured.items()
            if measured
        }
        return dataclasses.replace(self._estimate, **medians)


@dataclass(frozen=True, slots=True)
class AdaptivePolicy:
    """Chooses the schedule from measured costs, and keeps it until another is worth the change.

    Attributes:
        mtbf_s: mean seconds between failures of the job as a whole.
        restore_budget_s: the longest restore that is allowed, in seconds; None for any.

    Raises:
        ValueError: one of them is not positive.
    """

    mtbf_s: float
    restore_budget_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "restore_budget_s"):
            if (seconds := getattr(self, name)) is not None and not seconds > 0:
                raise ValueError(f"expected {name} to be more than 0, found {seconds!r}")

    def next(self, costs: Costs, current: Schedule | None) -> Schedule:
        """The schedule to go on with.

        Where not even one delta can be restored within the budget, that is a base and one delta in
        turns: no schedule restores sooner, and training goes on.

        Args:
            costs: costs as measured so far, the same in every process.
            current: the schedule in use; None for none.
        """
        budget_s = self.restore_budget_s
        if budget_s is not None:
            budget_s = max(HEADROOM * budget_s, restore_s(costs, Schedule(1, 1)))
        best = best_schedule(costs, self.mtbf_s, budget_s)
        if current is None or not self._allows(costs, current):
            return best
        lost, least = (waste(costs, each, self.mtbf_s) for each in (current, best))
        return current if lost - least < WORTH_CHANGING * lost else best

    def _allows(self, costs: Costs, schedule: Schedule) -> bool:
        return self.restore_budget_s is None or restore_s(costs, schedule) <= self.restore_budget_s
