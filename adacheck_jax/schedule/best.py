"""The schedule that loses least time."""

from __future__ import annotations

import bisect

import numpy as np

from adacheck_jax.schedule.waste import Costs, Schedule, restore_s, wastes

LONGEST_LINEAGE = 100_000
"""No lineage is planned to have more deltas."""
_EACH_UP_TO = 128


def best_schedule(
    costs: Costs,
    mtbf_s: float,
    restore_budget_s: float | None = None,
    *,
    least_deltas: int = 1,
    most_deltas: int = LONGEST_LINEAGE,
    most_every: int = LONGEST_LINEAGE,
) -> Schedule:
    """The schedule with the least :func:`~adacheck_jax.schedule.waste.waste`.

    Equal arguments give an equal result, on every machine: see
    :func:`~adacheck_jax.schedule.waste.expm1`. So processes that agree on the arguments need not
    exchange the result. Takes some 10 ms.

    Example::

        costs = Costs(step_s=0.3, delta_blocking_s=0.04, base_blocking_s=0.08, replay_s=0.05)
        best_schedule(costs, mtbf_s=3 * 3600, restore_budget_s=60)

    Args:
        costs: measured costs.
        mtbf_s: mean seconds between failures of the job as a whole.
        restore_budget_s: the longest restore that is allowed, in seconds from its beginning, of
            the last step of a lineage; None for any.
        least_deltas: shortest lineage that is wanted, where longer ones are allowed.
        most_deltas: longest lineage that is allowed.
        most_every: most steps that a save may hold.

    Raises:
        ValueError: ``mtbf_s`` is not positive, or a base with one delta takes longer to restore
            than ``restore_budget_s``.
    """
    longest = min(_longest_lineage(costs, restore_budget_s), most_deltas)
    least, most_every = min(least_deltas, longest), min(longest, most_every)
    total, every = _candidates(costs, longest, most_every)
    is_allowed = (least <= total) & (total <= longest) & (every <= total)
    total, every = total[is_allowed], every[is_allowed]
    # Less waste is preferred, then more frequent saves, then shorter lineages.
    lost = np.asarray(wastes(costs, total, every, mtbf_s))
    first = np.lexsort([total, every, lost])[0]
    return Schedule(int(total[first]), int(every[first]))


def _candidates(costs: Costs, longest: int, most_every: int) -> tuple[np.ndarray, np.ndarray]:
    """Deltas a base, and steps a save, of the schedules that are tried.

    All if they are few; else lengths a twentieth apart, and as many full saves as that, after
    which the last one is full too, or so short that the base, a step later, need not wait for its
    write.
    """
    lengths, every = np.meshgrid(_apart(longest), _apart(most_every))
    spare_s = max(costs.step_s - costs.delta_write_s, 0.0)
    unhindering = every
    if costs.further_write_s:
        unhindering = np.minimum(every, 1 + spare_s // costs.further_write_s).astype(int)
    full = lengths * every
    totals = np.stack([lengths, full, full - every + unhindering])
    return totals.reshape(-1), np.broadcast_to(every, totals.shape).reshape(-1)


def _apart(longest: int) -> list[int]:
    """Numbers up to a largest one: the small ones, and others a twentieth apart."""
    found = [*range(1, min(_EACH_UP_TO, longest) + 1)]
    while found[-1] < longest:
        found.append(min(found[-1] * 21 // 20, longest))
    return found


def _longest_lineage(costs: Costs, restore_budget_s: float | None) -> int:
    if restore_budget_s is None:
        return LONGEST_LINEAGE
    if restore_s(costs, Schedule(1, 1)) > restore_budget_s:
        raise ValueError(
            f"expected restore_budget_s of at least {restore_s(costs, Schedule(1, 1)):.3g} (a base "
            f"and one delta), found {restore_budget_s!r}"
        )
    lengths = range(1, LONGEST_LINEAGE + 1)
    return bisect.bisect_right(
        lengths, restore_budget_s, key=lambda n: restore_s(costs, Schedule(n, 1))
    )
