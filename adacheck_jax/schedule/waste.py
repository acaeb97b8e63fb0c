"""Costs, schedules of saves, and the share of the time that training loses to saves and failures.

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

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

LARGEST = 700.0
"""Exponents up to this have a finite result."""
_TERMS, _HALVINGS = 9, 14
LAG = 2
"""Steps that a failure costs of which memory holds no whole copy yet; one of them was not over."""

Floats = float | np.ndarray
Ints = int | np.ndarray
"""Numbers, or arrays of them, of which each element is computed alike."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that saving, failing and restoring take.

    Attributes:
        step_s: one training step, with all that runs beside it but no save.
        delta_blocking_s: training waits as long for a save of deltas, however many it holds.
        base_blocking_s: training waits as long for a save of a base.
        delta_write_s: from where a save of one delta stops blocking until it is durable.
        base_write_s: from where a save of a base stops blocking until it is durable.
        restart_s: from a failure until the restore begins: noticing it, finding a machine, starting
            the processes.
        open_s: what every restore takes beside reading: finding the lineage, compiling the update.
        base_restore_s: reading a base onto the devices.
        replay_s: reading one delta and replaying its update.
        defer_blocking_s: training waits as long for a step that a later save holds.
        further_write_s: each delta of a save after the first makes its write longer by this.
        recover_s: having the state from the memory of hosts, after the restart.

    Raises:
        ValueError: a cost is negative or not finite, or ``step_s`` is 0.
    """

    step_s: float
    delta_blocking_s: float
    base_blocking_s: float
    delta_write_s: float = 0.0
    base_write_s: float = 0.0
    restart_s: float = 0.0
    open_s: float = 0.0
    base_restore_s: float = 0.0
    replay_s: float = 0.0
    defer_blocking_s: float = 0.0
    further_write_s: float = 0.0
    recover_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"expected {field.name} to be seconds >= 0, found {seconds!r}")
        if not self.step_s:
            raise ValueError("expected step_s to be more than 0, found 0")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The number of steps a save, and of deltas a base.

    A lineage is a base and ``base_every`` deltas, one a step. A save holds ``save_every`` of them;
    the last save of a lineage holds what is left.

    Attributes:
        base_every: deltas after each base, as ``max_deltas``.
        save_every: steps from one save to the next; all but the last of them are deferred.

    Raises:
        ValueError: one of them is less than 1, or ``save_every`` is more than ``base_every``.
    """

    base_every: int
    save_every: int

    def __post_init__(self) -> None:
        if not 1 <= self.save_every <= self.base_every:
            raise ValueError(
                "expected base_every >= save_every >= 1, found "
                f"base_every={self.base_every} and save_every={self.save_every}"
            )


def waste(
    costs: Costs, schedule: Schedule, mtbf_s: float, storage_mtbf_s: float | None = None
) -> float:
    """Share of the time, from 0 to 1, that does not go into steps which are kept.

    That is the time that saves block, and after each failure the restart, the restore and the
    steps that are trained again. After a failure that the memory of hosts survives these are the
    restart, the recovery, and the steps that memory does not have, :data:`LAG` at most: what
    storage has, memory has too. Where it has more than storage, the next save is a base.

    Args:
        costs: costs of saves, restores and recoveries.
        schedule: the schedule.
        mtbf_s: mean seconds between failures of the job as a whole.
        storage_mtbf_s: mean seconds between those of them that memory does not survive; None for
            all.

    Raises:
        ValueError: ``mtbf_s`` is not positive, or more than ``storage_mtbf_s``.
    """
    rarer_s = mtbf_s if storage_mtbf_s is None else storage_mtbf_s
    if not 0 < mtbf_s <= rarer_s:
        raise ValueError(f"expected mtbf_s from 0 to {rarer_s!r}, found {mtbf_s!r}")
    lost = float(wastes(costs, schedule.base_every, schedule.save_every, rarer_s))
    if mtbf_s == rarer_s:
        return lost
    write_s = _deltas(costs, schedule.save_every).write_s
    again_s = LAG * costs.step_s
    behind_s = float(schedule.save_every * costs.step_s / 2 + write_s)  # storage, in the mean
    if behind_s < again_s:
        again_s, base_s = behind_s, 0.0
    else:
        gap_s = schedule.save_every * costs.step_s  # after which a save waits for the base
        base_s = costs.base_blocking_s + max(costs.base_write_s - gap_s, 0.0)
    pause_s = costs.restart_s + costs.recover_s + again_s + base_s
    if pause_s / mtbf_s > LARGEST:
        return 1.0
    # A pause that is tried until no failure comes, for each of the failures while all runs.
    pauses = (1 - mtbf_s / rarer_s) * float(expm1(pause_s / mtbf_s))
    return 1 - (1 - lost) / (1 + pauses)


def wastes(costs: Costs, base_every: Ints, save_every: Ints, mtbf_s: float) -> Floats:
    """:func:`waste` of one schedule, or of each of many, by their two numbers."""
    if not mtbf_s > 0:
        raise ValueError(f"expected mtbf_s to be more than 0, found {mtbf_s!r}")
    return 1 - (base_every + 1) * costs.step_s / lineage_s(costs, base_every, save_every, mtbf_s)


def restore_s(costs: Costs, schedule: Schedule) -> float:
    """Seconds of the longest restore: of the last step of a lineage, without the restart."""
    return costs.open_s + costs.base_restore_s + schedule.base_every * costs.replay_s


def lineage_s(costs: Costs, base_every: Ints, save_every: Ints, mtbf_s: float) -> Floats:
    """Expected seconds from one durable base to the next, failures and all; may be infinite."""
    saves = -(-base_every // save_every)
    last = base_every - (saves - 1) * save_every
    base = _Save(1, costs.base_blocking_s, costs.base_write_s)
    full, short = _deltas(costs, save_every), _deltas(costs, last)
    lineage = _Lineage(costs, mtbf_s)
    with np.errstate(over="ignore", invalid="ignore"):  # of what is infinite, or is not taken
        alone_s = lineage.span(base, short, 0)
        several_s = (
            lineage.span(base, full, 0)
            + lineage.equal_spans(full, saves - 2)
            + lineage.span(full, short, base_every - last)
        )
        return np.where(saves == 1, alone_s, several_s) + lineage.span(short, base, base_every)


class _Save(NamedTuple):
    """A save that holds some steps, the seconds that it blocks, and those that it is written."""

    steps: Ints
    blocking_s: float
    write_s: Floats


def _deltas(costs: Costs, count: Ints) -> _Save:
    write_s = costs.delta_write_s + (count - 1) * costs.further_write_s
    return _Save(count, costs.delta_blocking_s, write_s)


class _Lineage(NamedTuple):
    costs: Costs
    mtbf_s: float

    def span(self, done: _Save, following: _Save, depth: Ints) -> Floats:
        """Expected seconds from where one save is durable to where the following one is.

        A save waits for the write of the one before it; after a restore nothing is being written.
        """
        costs = self.costs
        gap_s = following.steps * costs.step_s + (following.steps - 1) * costs.defer_blocking_s
        end_s = following.blocking_s + following.write_s
        ahead_s = np.maximum(gap_s - done.write_s, 0.0) + end_s
        recovery_s = costs.restart_s + costs.open_s + costs.base_restore_s + depth * costs.replay_s
        retry_s = recovery_s + gap_s + end_s
        fails = -expm1(-ahead_s / self.mtbf_s)
        finite_s = self.mtbf_s * fails * (1 + expm1(retry_s / self.mtbf_s))
        return np.where((ahead_s + retry_s) / self.mtbf_s > LARGEST, np.inf, finite_s)

    def equal_spans(self, save: _Save, count: Ints) -> Floats:
        """The sum of ``count`` spans between equal saves, the first from the first such save."""
        growth = save.steps * self.costs.replay_s / self.mtbf_s
        first = self.span(save, save, save.steps)
        total_s = first * power_sum(growth, count) / (1 + expm1(growth))
        finite_s = np.where(growth * count > LARGEST, np.inf, total_s)
        return np.where(np.asarray(count) < 1, 0.0, finite_s)


def expm1(exponent: Floats) -> Floats:
    """``e**exponent - 1`` for ``|exponent| <= LARGEST``, to a relative error below 1e-12."""
    part, result = exponent / 2.0**_HALVINGS, 0.0
    for term in range(_TERMS, 0, -1):  # x (1 + x/2 (1 + x/3 (...)))
        result = part / term * (1 + result)
    for _ in range(_HALVINGS):
        result = result * (2 + result)  # e**2x - 1 = (e**x - 1)(e**x + 1)
    return result


_FLAT = 1e-290
"""A growth below which all powers are 1; numbers near the smallest have few digits."""


def power_sum(exponent: Floats, count: Ints) -> Floats:
    """Sum of ``e**(exponent * k)`` over k from 1 to ``count``."""
    ratio = expm1(exponent)
    is_flat = np.abs(ratio) < _FLAT
    total = (1 + ratio) * expm1(exponent * count) / np.where(is_flat, 1.0, ratio)
    return np.where(is_flat, count, total)
