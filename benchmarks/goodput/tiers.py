"""Storage levels that a system saves to: when, at what cost, and which failures they survive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Tier:
    """A storage level: when it is saved to, what that costs, and which failures it survives.

    Attributes:
        name: name of the level.
        base_every: steps from one full save to the next.
        survives: probability that its contents survive a failure of each of ``KINDS``.
        restore_s: seconds of restoring a full save.
        replay_s: seconds for each step that is restored from deltas.
        delta_every: steps from one save of deltas to the next; 0 for none.
        base_blocking_s: training waits as long for a full save.
        base_write_s: from there until it is safe.
        delta_blocking_s: training waits as long for a save of deltas.
        delta_write_s: from there until a save of one delta is safe.
        further_write_s: each further delta of a save makes that longer by this.
        defer_blocking_s: training waits as long for a step that a later save holds.
    """

    name: str
    base_every: int
    survives: tuple[float, float, float]
    restore_s: float
    replay_s: float = 0.0
    delta_every: int = 0
    base_blocking_s: float = 0.0
    base_write_s: float = 0.0
    delta_blocking_s: float = 0.0
    delta_write_s: float = 0.0
    further_write_s: float = 0.0
    defer_blocking_s: float = 0.0

    def blocking_s(self, step_s: float) -> float:
        """Seconds that saves add to each step, in the mean, with waits for the save before."""
        if not self.delta_every:
            wait_s = max(self.base_write_s - self.base_every * step_s, 0.0)
            return (self.base_blocking_s + wait_s) / self.base_every
        deltas = self.base_every - 1
        held = np.diff(np.append(np.arange(0, deltas, self.delta_every), deltas))
        gap_s = np.append(held, 1) * step_s
        write_s = np.append(
            self.base_write_s, self.delta_write_s + (held - 1) * self.further_write_s
        )
        waits_s = np.maximum(write_s - gap_s, 0.0).sum()
        deferred_s = (held - 1).sum() * self.defer_blocking_s
        saves_s = self.base_blocking_s + len(held) * self.delta_blocking_s
        return float(saves_s + deferred_s + waits_s) / self.base_every

    def newest(self, progress: np.ndarray, whole_step_s: float) -> np.ndarray:
        """The newest step that is safe, of runs that come to some progress without a failure.

        Args:
            progress: steps that are done, with parts of the one under way: (runs,).
            whole_step_s: seconds of a step with what saves add to it.
        """
        every, base_lag = self.base_every, self.base_write_s / whole_step_s
        if not self.delta_every:
            return np.floor((progress - base_lag) / every) * every
        write_s = self.delta_write_s + (self.delta_every - 1) * self.further_write_s
        safe = progress - write_s / whole_step_s
        base = np.floor(safe / every) * every
        deltas = np.floor((safe - base) / self.delta_every) * self.delta_every
        deltas = np.where(np.floor(safe - base) == every - 1, every - 1, deltas)
        return np.where(progress - base < base_lag, base - 1, base + deltas)

    def restoring_s(self, step: np.ndarray) -> np.ndarray:
        """Seconds of restoring a saved step: (runs,)."""
        if not self.delta_every:
            return np.full(step.shape, self.restore_s)
        return self.restore_s + step % self.base_every * self.replay_s

    def described(self) -> str:
        """The tier and its intervals in words."""
        if not self.delta_every:
            return f"{self.name} every {_steps(self.base_every)}"
        deltas = f"deltas every {_steps(self.delta_every)}"
        return f"{self.name}: {deltas}, a base every {_steps(self.base_every)}"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count:,} steps"


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The saves and restores of a system.

    Attributes:
        tiers: levels that it saves to; the last one survives everything.
        slowdown: share by which it makes each step longer, besides what its saves block.
    """

    tiers: tuple[Tier, ...]
    slowdown: float = 0.0
