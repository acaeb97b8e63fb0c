"""The interface of all comparisons of a replay with its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.sample_sites import WHOLE_ELEMENTS

Findings = dict[int, float]
"""Share of the compared elements that differ, for each leaf that replay gets wrong."""

Comparison = Callable[[Sequence[int]], Findings]
"""Replays the updates of some recorders, and compares; waits for the devices."""

Sums = Callable[[], Mapping[int, int]]
"""Gives this process's contribution to each leaf's fingerprint; waits for the devices."""

DENSE = 1 / 16
"""From this share on a sample does not miss an error: ``(1 - 1/16) ** 1024`` is 2e-29.

With a fourth of the elements it misses one once in 15 million times; the shadow finds that one.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Baseline:
    """Part of a state that a checker keeps to check the next one; ``kept`` is opaque to others."""

    structure: Structure
    program: ExportedUpdate
    kept: Any

    def fits(self, structure: Structure, program: ExportedUpdate) -> bool:
        """True if the checker of a structure and its update can read it."""
        return self.program is program and self.structure.lies_like(structure)


@dataclass(frozen=True, slots=True)
class Check:
    """The check of one delta.

    Attributes:
        baseline: takes the baseline of the state that the delta gives, which may be donated once
            that is dispatched. A sample that is not taken yet holds up no comparison that a save
            waits for.
        findings: the comparison, which has all that it needs of the state.
        renew: takes leaves that replay gets wrong from the state's arrays, for the next check; a
            baseline that is part of the state itself has nothing to take.
    """

    baseline: Callable[[], Baseline]
    findings: Comparison
    renew: Callable[[Sequence[Any], Collection[int]], None] = lambda _arrays, _wrong: None


class Checker(Protocol):
    """Checks the deltas of states of one structure."""

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        ...

    def baseline(self, arrays: Sequence[Any], step: int, *, is_restored: bool = False) -> Baseline:
        """Takes a baseline of a base, or of a restored state; waits for the state."""
        ...

    def begin(self, before: Baseline, arrays: Sequence[Any], step: int, sums: Sums) -> Check:
        """Takes what the comparison of a delta needs of its state."""
        ...


def is_sparse(structure: Structure, index: int, share: float) -> bool:
    """True if a later sample may miss an error that this one found."""
    return share < DENSE and math.prod(structure.leaves[index].shape) > WHOLE_ELEMENTS
