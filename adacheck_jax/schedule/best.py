"""The schedule that loses least time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from adacheck_jax.schedule.costs import Costs, Schedule
from adacheck_jax.schedule.waste import restore_s, waste

LONGEST_LINEAGE = 100_000
"""No lineage is planned to have more deltas."""
_EACH_UP_TO = 16
_RATIO = 1.2
_POLISHED = 8
_EVERY_UP_TO = 64


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
    exchange the result. Takes some 30 ms.

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

    def rank(schedule: Schedule) -> tuple[float, int, int]:
        """Less waste is preferred, then more frequent saves, then shorter lineages."""
        return waste(costs, schedule, mtbf_s), schedule.save_every, schedule.base_every

    if longest <= _EVERY_UP_TO:
        lengths = range(least, longest + 1)
        pairs = ((n, every) for n in lengths for every in range(1, min(n, most_every) + 1))
        return min(itertools.starmap(Schedule, pairs), key=rank)
    tried = {
        schedule
        for every in _intervals(most_every)
        for schedule in _lineages(costs, mtbf_s, every, max(least, every), longest)
    }
    best = sorted(tried, key=rank)[:_POLISHED]
    return min((_polished(each, rank, least, longest, most_every) for each in best), key=rank)


def _polished(
    schedule: Schedule,
    rank: Callable[[Schedule], Any],
    least: int,
    longest: int,
    most_every: int,
) -> Schedule:
    """The best schedule to which ever smaller moves of both numbers lead."""
    step = max(schedule.base_every // 4, 1)
    while step:
        total, every = schedule.base_every, schedule.save_every
        saves, less, more = -(-total // every), every - step, every + step
        moves = [(total + step, every), (total - step, every), (total, less), (total, more)]
        moves += [(saves * less, less), (saves * more, more)]  # as many saves of another size
        moves += [(total, -(-total // n)) for n in (saves - step, saves + step) if n > 0]
        near = [
            Schedule(n, b)
            for n, b in moves
            if 1 <= b <= min(n, most_every) and least <= n <= longest
        ]
        found = min([schedule, *near], key=rank)
        step = step // 2 if found == schedule else step
        schedule = found
    return schedule


def _longest_lineage(costs: Costs, restore_budget_s: float | None) -> int:
    if restore_budget_s is None:
        return LONGEST_LINEAGE
    if restore_s(costs, Schedule(1, 1)) > restore_budget_s:
        raise ValueError(
            f"expected restore_budget_s of at least {restore_s(costs, Schedule(1, 1)):.3g} (a base "
            f"and one delta), found {restore_budget_s!r}"
        )
    left_s = restore_budget_s - costs.open_s - costs.base_restore_s
    if left_s >= LONGEST_LINEAGE * costs.replay_s:
        return LONGEST_LINEAGE
    longest = max(int(left_s / costs.replay_s), 1)
    while restore_s(costs, Schedule(longest, 1)) > restore_budget_s:  # the quotient was rounded
        longest -= 1
    return longest


def _intervals(longest: int) -> list[int]:
    """Steps between saves that are tried: a few each, then a fixed ratio apart."""
    tried = list(range(1, min(_EACH_UP_TO, longest) + 1))
    while (following := round(tried[-1] * _RATIO)) < longest and tried[-1] >= _EACH_UP_TO:
        tried.append(following)
    return tried if tried[-1] == longest else [*tried, longest]


def _lineages(
    costs: Costs, mtbf_s: float, every: int, least: int, longest: int
) -> Iterator[Schedule]:
    """The best lineages with saves of ``every`` steps.

    The last save of a lineage is full, or so short that the base, a step later, need not wait for
    its write. Each further save of a lineage costs more than the one before it (a longer replay),
    and so the time a step first falls with their number and then rises: bisection finds the least.
    """
    spare_s = max(costs.step_s - costs.delta_write_s, 0.0)
    unhindering = every
    if spare_s < (every - 1) * costs.further_write_s:
        unhindering = 1 + int(spare_s / costs.further_write_s)
    yield Schedule(least, every)
    yield Schedule(longest, every)
    for last in {every, unhindering}:
        # Numbers of full saves before the last one.
        low, high = max(-(-(least - last) // every), int(last < every)), (longest - last) // every
        while low < high:
            middle = (low + high) // 2
            here, further = (Schedule(x * every + last, every) for x in (middle, middle + 1))
            is_less = waste(costs, further, mtbf_s) < waste(costs, here, mtbf_s)
            low, high = (middle + 1, high) if is_less else (low, middle)
        if low == high:
            yield Schedule(low * every + last, every)
