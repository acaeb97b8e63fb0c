"""Seconds that the saves and steps of one process take, by a monotonic clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Measurement = tuple[str, float, int]
"""A field of :class:`~adacheck_jax.schedule.costs.Costs`, its seconds, and the number of deltas
that took them together: 1 but for the write of a save that holds several."""

Clock = Callable[[], float]
"""Seconds since some moment; never goes back."""


class Stopwatch:
    """Measures the calls by which a training loop saves or defers its steps, one after another.

    What lies between two calls is a step; the time of a call that neither saves nor defers one is
    part of it. What cannot be known is left out: the write of a save that did not end before the
    next one, the step before the first call.

    Args:
        clock: the clock.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._entered_s = 0.0
        self._left_s: float | None = None
        self._written: tuple[str, int, float] | None = None
        self._measured: dict[tuple[str, int], list[float]] = {}

    def enter(self, durable_s: float | None) -> None:
        """Notes that a call begins.

        Args:
            durable_s: reading of the clock when the last save was durable; None if it is not, or
                nothing was saved.
        """
        self._entered_s = self._clock()
        if self._written is not None and durable_s is not None:
            name, deltas, left_s = self._written
            self.note(name, max(durable_s - left_s, 0.0), deltas)
            self._written = None

    def leave_saved(self, *, is_base: bool, deltas: int) -> None:
        """Notes that a call that saved returns.

        Args:
            is_base: True if it saved a base.
            deltas: number of deltas that it saved; 1 for a base.
        """
        kind = "base" if is_base else "delta"
        self._written = (f"{kind}_write_s", deltas, self._leave(f"{kind}_blocking_s"))

    def leave_deferred(self) -> None:
        """Notes that a call that deferred a step returns."""
        self._leave("defer_blocking_s")

    def _leave(self, name: str) -> float:
        now_s, before_s = self._clock(), self._left_s
        if before_s is not None and self._entered_s > before_s:
            self.note("step_s", self._entered_s - before_s)
        self.note(name, now_s - self._entered_s)
        self._left_s = now_s
        return now_s

    def note(self, name: str, seconds: float, deltas: int = 1) -> None:
        """Notes a cost that was measured."""
        self._measured.setdefault((name, deltas), []).append(seconds)

    def take(self) -> tuple[Measurement, ...]:
        """The median of each cost that was measured since it was asked last."""
        measured, self._measured = self._measured, {}
        return tuple(
            (name, statistics.median_low(seconds), deltas)
            for (name, deltas), seconds in measured.items()
        )
