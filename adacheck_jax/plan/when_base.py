"""When a base is written: a pure function of the lineage's length.

The schedule (:mod:`adacheck_jax.schedule`) gives the number of deltas that may follow a base. Where
a committed delta can become a base in the background, the loop does not write one until the lineage
has twice that length. All other reasons for a base, such as another tree or a counter that skipped,
are in :mod:`~adacheck_jax.plan.decision`: no delta is possible there, whatever this module says.

Asked by ``by_counters`` in ``plan/decision.py``, which makes ``NOW`` a base, and by
``plan/save_plan.py``. A rule by something else than length needs a field here and one in ``Facts``;
what has to outlive a save stands in ``Line`` (``save/line/parents.py``): its ``follow`` alone hears
of restores and recoveries, and ``advance``, of the next save, forgets them.

The numbers come from ``Situation.length`` (``plan/situation.py``), which has them from
``Planner._facts`` and ``_situation`` (``save/line/planner.py``; ``base_depth`` there is not 0 if
the base was made in the background). All processes must have the same ones: they count from the
base that all were told of, and not from the newest that one finds on the disk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BaseDue(enum.Enum):
    """The next base, as far as the length of the lineage tells."""

    NOT_YET = enum.auto()
    """The next save is a delta, and stays one."""
    IN_BACKGROUND = enum.auto()
    """The next save is a delta that becomes a base once it is committed."""
    NOW = enum.auto()
    """The next save is a base, written by the loop."""


@dataclass(frozen=True, slots=True)
class LineageLength:
    """The length of a lineage, and the most that it may have.

    Attributes:
        deltas: number of deltas after the base, with the deferred ones.
        deferred: number of those that are deferred.
        longest: number of deltas that may follow a base, by the schedule.
        can_become_base: True if a delta can become a base in the background.
    """

    deltas: int
    deferred: int
    longest: int
    can_become_base: bool

    @property
    def most(self) -> int:
        """Number of deltas from which on the loop writes a base."""
        return self.longest * (2 if self.can_become_base else 1)

    @property
    def due(self) -> BaseDue:
        """When the next base is written.

        A base cannot hold deferred steps, of which there are more while storage is away: the save
        that writes them is a delta, and the next one a base.
        """
        if self.deferred:
            return BaseDue.NOT_YET
        if self.deltas >= self.most:
            return BaseDue.NOW
        if self.can_become_base and self.deltas + 1 >= self.longest:
            return BaseDue.IN_BACKGROUND
        return BaseDue.NOT_YET

    @property
    def reason(self) -> str:
        """The reason for a base that is due now, for the log and the manifest."""
        return f"the lineage is full ({self.deltas} of {self.most} deltas)"

    @property
    def has_room_for_deferred(self) -> bool:
        """True if one more step may be deferred: it, and the save that writes it, are deltas."""
        return self.deltas + 2 <= self.longest
