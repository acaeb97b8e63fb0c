"""Seconds that the saves and steps of one process take, by a monotonic clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Measurement = tuple[str, float, int]
"""A field of :class:`~adacheck_jax.schedule.waste.Costs`, its seconds, and the number of deltas
that took them together: 1 but for the write of a save that holds several."""

Clock = Callable[[], float]
"""Seconds since some moment; never goes back."""


@dataclass(slots=True)
class _Call:
    kind: str
    deltas: int
    entered_s: float
    left_s: float


class Stopwatch:
    """Measures the calls by which a training loop saves or defers its steps, one after another.

    What lies between two calls is a step; the time of a call that neither saves nor defers one is
    part of it. What cannot be known is left out: the write of a save that did not end before the
    next one, the step before the first call.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._entered_s = 0.0
        self._left: _Call | None = None
        self._written: _Call | None = None
        self._measured: dict[tuple[str, int], list[float]] = {}

    def enter(self, durable_s: float | None) -> None:
        """Notes that a call begins."""
        self._entered_s = self._clock()
        if (written := self._written) is not None and durable_s is not None:
            self.note(
                f"{written.kind}_write_s", max(durable_s - written.left_s, 0.0), written.deltas
            )
            self._written = None

    def leave_saved(self, *, is_base: bool, deltas: int) -> None:
        """Notes that a call that saved returns."""
        self._leave(_Call("base" if is_base else "delta", deltas, self._entered_s, self._clock()))
        self._written = self._left

    def leave_deferred(self) -> None:
        """Notes that a call that deferred a step returns."""
        self._leave(_Call("defer", 1, self._entered_s, self._clock()))

    def stay(self) -> None:
        """Notes that the last call, of which it was thought that it returned, returns only now."""
        if self._left is not None:
            self._left.left_s = self._clock()

    def _leave(self, call: _Call) -> None:
        if (before := self._left) is not None:
            self.note(f"{before.kind}_blocking_s", before.left_s - before.entered_s)
            if call.entered_s > before.left_s:
                self.note("step_s", call.entered_s - before.left_s)
        self._left = call

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
