"""Measured costs of saves and restores, and schedules of saves."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


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
