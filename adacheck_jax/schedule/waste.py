"""The share of the time that training loses to saves and failures, as a function of the schedule.

Failures come at a constant rate (exponential times between them), also during restarts and
restores. Under that, and for costs that do not vary, the result is exact: the derivation is in
``docs/reference/schedule.md``. The terms are those of LowDiff (SC '25, arXiv 2509.04084), which
gives their first order for batches that are merged; here every delta is replayed by itself, and a
save that is still being written when a failure comes is lost.

Exponentials have the same bits on every machine: they are made of additions, multiplications and
divisions, each of which IEEE 754 fixes to the last bit. Those of libm and numpy choose their
instructions by processor, so that two hosts of one job could disagree about the better schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from adacheck_jax.schedule.costs import Costs, Schedule

LARGEST = 700.0
"""Exponents up to this have a finite result."""
_TERMS = 9
_SMALL = 1 / 16


def waste(costs: Costs, schedule: Schedule, mtbf_s: float) -> float:
    """Share of the time, from 0 to 1, that does not go into steps which are kept.

    That is the time that saves block, and after each failure the restart, the restore and the
    steps that are trained again.

    Raises:
        ValueError: ``mtbf_s`` is not positive.
    """
    if not mtbf_s > 0:
        raise ValueError(f"expected mtbf_s to be more than 0, found {mtbf_s!r}")
    kept_s = (schedule.base_every + 1) * costs.step_s
    return 1 - kept_s / lineage_s(costs, schedule, mtbf_s)


def restore_s(costs: Costs, schedule: Schedule) -> float:
    """Seconds of the longest restore: of the last step of a lineage, without the restart."""
    return costs.open_s + costs.base_restore_s + schedule.base_every * costs.replay_s


def lineage_s(costs: Costs, schedule: Schedule, mtbf_s: float) -> float:
    """Expected seconds from one durable base to the next, failures and all; may be infinite."""
    every, total = schedule.save_every, schedule.base_every
    delta_saves = -(-total // every)
    last = total - (delta_saves - 1) * every
    base = _Save(1, costs.base_blocking_s, costs.base_write_s)
    full, short = _deltas(costs, every), _deltas(costs, last)
    lineage = _Lineage(costs, mtbf_s)
    if delta_saves == 1:
        return lineage.span(base, short, 0) + lineage.span(short, base, total)
    return (
        lineage.span(base, full, 0)
        + lineage.equal_spans(full, delta_saves - 2)
        + lineage.span(full, short, total - last)
        + lineage.span(short, base, total)
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """A save that holds some steps, the seconds that it blocks, and those that it is written."""

    steps: int
    blocking_s: float
    write_s: float


def _deltas(costs: Costs, count: int) -> _Save:
    write_s = costs.delta_write_s + (count - 1) * costs.further_write_s
    return _Save(count, costs.delta_blocking_s, write_s)


@dataclass(frozen=True, slots=True)
class _Lineage:
    costs: Costs
    mtbf_s: float

    def span(self, done: _Save, following: _Save, depth: int) -> float:
        """Expected seconds from where one save is durable to where the following one is."""
        ahead_s, again_s = self._without_failure(done, following)
        costs = self.costs
        recovery_s = costs.restart_s + costs.open_s + costs.base_restore_s + depth * costs.replay_s
        return self._expected_s(ahead_s, recovery_s + again_s)

    def equal_spans(self, save: _Save, count: int) -> float:
        """The sum of ``count`` spans between equal saves, the first from the first such save."""
        growth = save.steps * self.costs.replay_s / self.mtbf_s
        if count < 1:
            return 0.0
        first = self.span(save, save, save.steps)
        if growth * count > LARGEST:
            return float("inf")
        return first * power_sum(growth, count) / (1 + expm1(growth))

    def _without_failure(self, done: _Save, following: _Save) -> tuple[float, float]:
        """Seconds to the next durable save: from the durable one before, and after a restore.

        A save waits for the write of the one before it; after a restore nothing is being written.
        """
        costs = self.costs
        gap_s = following.steps * costs.step_s + (following.steps - 1) * costs.defer_blocking_s
        end_s = following.blocking_s + following.write_s
        return max(gap_s - done.write_s, 0.0) + end_s, gap_s + end_s

    def _expected_s(self, ahead_s: float, retry_s: float) -> float:
        """Expected seconds where a first try takes ``ahead_s``, and each later one ``retry_s``."""
        if (ahead_s + retry_s) / self.mtbf_s > LARGEST:
            return float("inf")
        fails = -expm1(-ahead_s / self.mtbf_s)
        return self.mtbf_s * fails * (1 + expm1(retry_s / self.mtbf_s))


def expm1(exponent: float) -> float:
    """``e**exponent - 1`` for ``|exponent| <= LARGEST``, to a relative error below 1e-12."""
    halvings = 0
    while abs(exponent) > _SMALL:
        exponent /= 2
        halvings += 1
    result = 0.0
    for term in range(_TERMS, 0, -1):  # x (1 + x/2 (1 + x/3 (...)))
        result = exponent / term * (1 + result)
    for _ in range(halvings):
        result *= 2 + result  # e**2x - 1 = (e**x - 1)(e**x + 1)
    return result


def power_sum(exponent: float, count: int) -> float:
    """Sum of ``e**(exponent * k)`` over k from 1 to ``count``."""
    ratio = expm1(exponent)
    if not ratio:
        return float(count)
    return (1 + ratio) * expm1(exponent * count) / ratio
