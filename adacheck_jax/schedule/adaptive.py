"""A schedule that follows measured costs, and does not change back and forth.

:class:`AdaptivePolicy` chooses; it is given to the handler, and where steps are deferred to the
manager too. :class:`RunningCosts` is what it chooses by. Both are deterministic, so processes that
give them the same seconds hold the same schedule. Nothing here reads a clock.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adacheck_jax.schedule.best import LONGEST_LINEAGE, best_schedule
from adacheck_jax.schedule.waste import Costs, Schedule, restore_s, waste

WINDOW = 31
"""Measurements of each cost that a running median is taken over."""
WORTH_CHANGING = 0.02
"""A schedule is kept while a better one would save less than this share of the waste."""
LEAST_DELTAS = 20
"""Deltas of the shortest lineage that is chosen where restores may take as long: a base takes seven
times the bytes of a delta in mixed precision, which seconds need not show."""
HEADROOM = 0.9
"""Part of the restore budget that a new schedule may take, so that noise does not exceed it."""


class RunningCosts:
    """Running medians of measured costs."""

    def __init__(self) -> None:
        names = (field.name for field in dataclasses.fields(Costs))
        self._measured = {name: deque[float](maxlen=WINDOW) for name in names}

    def add(self, name: str, seconds: float) -> None:
        """Add one measurement.

        Raises:
            ValueError: there is no such cost, or it cannot have this value.
        """
        if name not in self._measured:
            raise ValueError(f"expected one of {[*self._measured]}, found {name!r}")
        dataclasses.replace(_VALID, **{name: seconds})  # validates
        self._measured[name].append(seconds)

    def count(self, name: str) -> int:
        """Number of measurements of a cost, of those that its median is taken over."""
        return len(self._measured[name])

    def median(self, name: str, otherwise: float) -> float:
        """Median of the last measurements of a cost, or another value if there are none."""
        measured = self._measured[name]
        return statistics.median_low(measured) if measured else otherwise

    def costs(self, estimate: Costs) -> Costs:
        """Median of the last measurements of each cost, or its estimate."""
        estimated = dataclasses.asdict(estimate)
        return Costs(**{name: self.median(name, value) for name, value in estimated.items()})


_VALID = Costs(step_s=1.0, delta_blocking_s=0.0, base_blocking_s=0.0)


class _Checkpoint(Protocol):
    @property
    def step(self) -> int: ...


class _Context(Protocol):
    @property
    def reached_preemption(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Position:
    """A point of a line of steps: see :meth:`~adacheck_jax.schedule.line.LineSchedule.note`."""

    saved: int
    depth: int
    schedule: Schedule


@dataclass(eq=False)
class AdaptivePolicy:
    """Chooses how many deltas follow a base, and how many steps a save holds, from measured costs.

    Given to the handler it decides when a base is written::

        handler = AdaCheckHandler(recorder, max_deltas=AdaptivePolicy(mtbf_s=8 * 3600))

    Where steps are deferred (``record_step``), the same object given to the manager decides when
    a save is due::

        policy = AdaptivePolicy(mtbf_s=8 * 3600)
        handler = AdaCheckHandler(recorder, max_deltas=policy)
        options = CheckpointManagerOptions(save_decision_policy=policy)

    Nothing is chosen before two bases were saved by this process: until then it is a base each 20
    deltas, and a save each step. A policy belongs to one line of steps.

    Args:
        mtbf_s: mean seconds between failures of the job as a whole. The default, three hours, is
            that of a large cluster; a value that is four times too large or too small costs a few
            hundredths of the waste.
        restore_budget_s: the longest restore that is allowed, in seconds from its beginning; None
            for any.
        storage_mtbf_s: mean seconds between those of the failures that the memory of hosts does not
            survive (``Shadow(directory=...)``), such as the loss of a machine whose boxes no other
            one has; None for all. The less often storage is needed, the longer are lineages and the
            rarer saves, and the more is lost when it is.
        most_deltas: longest lineage that may be chosen. However few steps are kept, all deltas of
            their lineages stay on the disk, and each has links to those before it.

    Attributes:
        is_asked: True once a manager asked when to save, so that steps may be deferred.

    Raises:
        ValueError: one of them is not positive, or ``storage_mtbf_s`` is less than ``mtbf_s``.
    """

    mtbf_s: float = 3 * 3600.0
    restore_budget_s: float | None = 60.0
    most_deltas: int = 100
    storage_mtbf_s: float | None = None
    is_asked: bool = dataclasses.field(default=False, init=False, repr=False)
    _position: Position | None = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("mtbf_s", "restore_budget_s", "storage_mtbf_s"):
            seconds = getattr(self, name)
            if name != "mtbf_s" and seconds is None:
                continue
            if not isinstance(seconds, int | float) or not seconds > 0:
                raise ValueError(f"expected {name} to be more than 0, found {seconds!r}")
        rarer_s = self.mtbf_s if self.storage_mtbf_s is None else self.storage_mtbf_s
        if rarer_s < self.mtbf_s or math.isinf(rarer_s):
            raise ValueError(
                f"expected storage_mtbf_s to be at least mtbf_s={self.mtbf_s!r}, and finite, since "
                f"it is of some of these failures; found {rarer_s!r}"
            )
        if not isinstance(self.most_deltas, int) or self.most_deltas < 1:
            raise ValueError(
                f"expected most_deltas to be an int of at least 1, found {self.most_deltas!r}"
            )

    def note(self, position: Position | None) -> None:
        """Notes how far the line of steps is; called by the handler."""
        self._position = position

    def should_save(
        self, step: _Checkpoint, previous_steps: Sequence[Any], *, context: _Context
    ) -> bool:
        """True if a step is to be saved; asked by the manager, as an Orbax ``SaveDecisionPolicy``.

        A save is due after as many steps as the schedule has in one, at the last delta of a
        lineage, where there is no step to build on, and before a preemption. The answer depends on
        step numbers and on what all processes know alike, on no clock.
        """
        self.is_asked = True
        at = self._position
        if at is None or context.reached_preemption:
            return True
        is_end = at.depth + 1 >= at.schedule.base_every  # a base has no room for deferred steps
        return is_end or step.step - at.saved >= at.schedule.save_every

    def next(
        self, costs: Costs, current: Schedule | None, most_every: int = LONGEST_LINEAGE
    ) -> Schedule:
        """The schedule to go on with.

        Where not even one delta can be restored within the budget, that is a base and one delta in
        turns: no schedule restores sooner, and training goes on.

        Args:
            costs: costs as measured so far, the same in every process.
            current: the schedule in use; None for none.
            most_every: most steps that a save may hold.
        """
        # What other failures cost hardly depends on the schedule.
        budget_s, mtbf_s = self.restore_budget_s, self.storage_mtbf_s or self.mtbf_s
        if budget_s is not None:
            budget_s = max(HEADROOM * budget_s, restore_s(costs, Schedule(1, 1)))
        best = best_schedule(
            costs,
            mtbf_s,
            budget_s,
            least_deltas=LEAST_DELTAS,
            most_deltas=self.most_deltas,
            most_every=most_every,
        )
        if (
            current is None
            or current.base_every < min(LEAST_DELTAS, best.base_every)
            or current.base_every > self.most_deltas
            or current.save_every > most_every
            or restore_s(costs, current) > (self.restore_budget_s or math.inf)
        ):
            return best
        lost, least = (waste(costs, each, mtbf_s) for each in (current, best))
        return current if lost - least < WORTH_CHANGING * lost else best
