"""Which step the next delta follows: a pure function of the update counters.

``Planner.plan_save`` asks where it has a choice: a speculative plan takes the only candidate, and
deferred steps keep the step that they follow. Candidates are the step restored last and the step
saved last, those of them that are on the disk (:class:`adacheck_jax.save.line.parents.Line` knows
and looks at them). A run that has looked at an older step goes on from the one saved last; a run
that has gone back goes on from the restored one: the counters tell them apart.

What a manifest says of its parent is written by ``_delta_manifest`` in ``save/commit.py``; which
restores a line hears of is decided by ``TrainingRun._follow`` in ``adapter/training_run.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from adacheck_jax.plan.decision import advanced
from adacheck_jax.plan.situation import Counts


def which_parent(candidates: Sequence[Counts], counts: Counts) -> int | None:
    """Position of the step that a state follows.

    Args:
        candidates: update counters of each step that may be followed, the restored one first.
        counts: update counters of the state; empty without a recorder.

    Returns:
        The first step from which each recorder made at most one update. Without such a step the
        first one: then the plan finds out why no delta is possible, and tells it. None without
        candidates.
    """
    for position, before in enumerate(candidates):
        if counts and len(before) == len(counts) and advanced(before, counts) is not None:
            return position
    return 0 if candidates else None
