"""The schedule that loses least time."""

from __future__ import annotations

from adacheck_jax.schedule.costs import Costs, Schedule
from adacheck_jax.schedule.waste import restore_s, waste

LONGEST_LINEAGE = 100_000
"""No lineage is planned to have more deltas."""
_EACH_UP_TO = 16
_RATIO = 1.2
_POLISHED = 8
_MOVES = 30
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
    :mod:`~adacheck_jax.schedule.exponential`. So processes that agree on the arguments need not
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
    least = min(least_deltas, longest)
    search = _Search(costs, mtbf_s, longest, min(longest, most_every))
    if longest <= _EVERY_UP_TO:
        return min(search.every(least, longest), key=_order)[1]
    found = [found for every in _intervals(search.most_every) for found in search.of(every)]
    best = sorted(found, key=_order)[:_POLISHED]
    chosen = min((search.polished(each) for each in best), key=_order)[1]
    too_short = chosen.base_every < least
    return min(search.every(least, least), key=_order)[1] if too_short else chosen


Found = tuple[float, Schedule]
"""A schedule behind its waste."""


def _order(found: Found) -> tuple[float, int, int]:
    """Order of preference: less waste, then more frequent saves, then shorter lineages."""
    return found[0], found[1].save_every, found[1].base_every


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


class _Search:
    def __init__(self, costs: Costs, mtbf_s: float, longest: int, most_every: int) -> None:
        self._costs, self._mtbf_s = costs, mtbf_s
        self._longest, self.most_every = longest, most_every
        spare_s = costs.step_s - costs.delta_write_s
        further = spare_s / costs.further_write_s if costs.further_write_s else float(longest)
        self._unhindering = 1 + int(min(max(further, 0.0), longest))

    def _found(self, base_every: int, save_every: int) -> Found:
        schedule = Schedule(base_every, save_every)
        return waste(self._costs, schedule, self._mtbf_s), schedule

    def every(self, least: int, longest: int) -> list[Found]:
        """All schedules whose lineages have so many deltas."""
        return [
            self._found(n, every)
            for n in range(least, longest + 1)
            for every in range(1, min(n, self.most_every) + 1)
        ]

    def of(self, every: int) -> list[Found]:
        """The best lineages with saves of ``every`` steps.

        The last save of a lineage is full, or short enough that the base, a step later, need not
        wait for its write. Each further save of a lineage costs more than the one before it (a
        longer replay), and so the time a step first falls with their number and then rises:
        bisection finds the least.
        """
        found = [self._found(self._longest, every)]
        for last in {every, min(self._unhindering, every)}:
            low, high = int(last < every), (self._longest - last) // every
            if high < low:
                continue
            while low < high:
                middle = (low + high) // 2
                here, further = (self._found(x * every + last, every) for x in (middle, middle + 1))
                low, high = (middle + 1, high) if further[0] < here[0] else (low, middle)
            found.append(self._found(low * every + last, every))
        return found

    def polished(self, found: Found) -> Found:
        """The best schedule to which ever smaller moves of both numbers lead."""
        step = max(found[1].base_every // 4, 1)
        for _ in range(_MOVES):
            better = min(self._around(found[1], step), key=_order, default=found)
            if _order(better) < _order(found):
                found = better
            elif step == 1:
                break
            else:
                step //= 2
        return found

    def _around(self, schedule: Schedule, step: int) -> list[Found]:
        total, every = schedule.base_every, schedule.save_every
        saves = -(-total // every)
        moves = {(total + step, every), (total - step, every)}
        moves |= {(total, every + step), (total, every - step)}
        for near in (every - step, every + step):  # as many saves, each larger or smaller
            moves.add((saves * near, near))
        for near in (saves - step, saves + step):  # as long a lineage, in more or fewer saves
            moves.add((total, -(-total // near) if near > 0 else 0))
        return [
            self._found(n, b)
            for n, b in sorted(moves)
            if 1 <= b <= self.most_every and b <= n <= self._longest
        ]
