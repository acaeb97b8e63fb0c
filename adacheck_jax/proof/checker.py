"""The interface of all comparisons of a replay with its state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adacheck_jax.state.exported_update import Engine, ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.sample_sites import WHOLE_ELEMENTS

Findings = dict[int, float]
"""Share of the compared elements that differ, for each leaf that replay gets wrong."""

DENSE = 1 / 16
"""From this share on a sample cannot miss an error: ``(1 - 1/16) ** 1024`` is 2e-29."""


@dataclass(frozen=True, slots=True, eq=False)
class Witness:
    """Part of a state that a checker keeps to check the next one.

    Attributes:
        structure: structure of the state.
        program: its exported update.
        kept: that part; opaque to everybody but the engine that keeps it.
    """

    structure: Structure
    program: ExportedUpdate
    kept: Any

    def fits(self, structure: Structure, program: ExportedUpdate) -> bool:
        """True if the checker of a structure and its update can read it."""
        return self.program is program and self.structure.lies_like(structure)


@dataclass(frozen=True, slots=True)
class CheckedState:
    """A state that is being saved, while its arrays are alive.

    Attributes:
        arrays: plain arrays, one a leaf.
        step: step number.
        sums: function that gives this process's contribution to each leaf's fingerprint; may be
            called later, and waits for the devices.
    """

    arrays: Sequence[Any]
    step: int
    sums: Callable[[], Mapping[int, int]]


class Check(Protocol):
    """The check of one delta, with all that it needs of the state."""

    @property
    def witness(self) -> Witness:
        """Witness of the state that the delta gives."""
        ...

    def findings(self, updates: Sequence[int]) -> Findings:
        """Replays, and compares; waits for the devices.

        Args:
            updates: positions of the recorders that made an update.
        """
        ...

    def renew(self, state: CheckedState, wrong: Collection[int]) -> None:
        """Takes leaves that replay gets wrong from the state itself, for the next check.

        Args:
            state: its arrays are still alive.
            wrong: indices of the leaves.
        """
        ...


class Checker(Protocol):
    """Checks the deltas of states of one structure."""

    engine: Engine

    @property
    def is_ready(self) -> bool:
        """True if checks need not wait for a compiler."""
        ...

    def witness(self, state: CheckedState) -> Witness:
        """Takes a witness of a base, or of a restored state; waits for the state."""
        ...

    def begin(self, before: Witness, state: CheckedState) -> Check:
        """Takes what the check of a delta needs; the state may be donated afterwards.

        Args:
            before: witness of the parent; it fits the structure and the update of this checker.
            state: the state that the delta is to give.
        """
        ...


def is_sparse(structure: Structure, index: int, share: float) -> bool:
    """True if a later sample may miss an error that this one found."""
    return share < DENSE and math.prod(structure.leaves[index].shape) > WHOLE_ELEMENTS
