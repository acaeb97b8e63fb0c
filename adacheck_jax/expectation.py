"""What a step is expected to be before its values are known, and whether it is.

A save does not wait for a step that is still being computed. That one update lies between it and
the step before is assumed then, and found out when the values are there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax import copies, staging
from adacheck_jax.commit import StepShare
from adacheck_jax.decisions import Decisions
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.policy import Tip
from adacheck_jax.programs import Program
from adacheck_jax.snapshot import Structure


@dataclass(frozen=True, slots=True)
class Expectation:
    """That one update lies between a step and the one before, or none.

    Attributes:
        share: of the step; its decision and counter are set, and what depends on them.
        structure: of the state.
        values: of its small leaves, as ``Decisions.small`` chose them.
        tip: tells the step before; its counter may come to be known meanwhile.
        program: the update.
        where: under which the small values are remembered.
        again: of the same step, if it was recorded before it was saved.
    """

    share: StepShare
    structure: Structure
    values: Mapping[int, Any]
    tip: Callable[[], Tip]
    program: Program
    where: Hashable
    again: Expectation | None = None

    @property
    def count(self) -> int:
        """The update counter; waits for it."""
        binding = self.structure.binding
        assert binding is not None
        return int(self.values[self.structure.index[binding.count]])

    def settle(self, decisions: Decisions) -> None:
        """Finds out whether it is so, and sets what depends on it.

        Raises:
            AdaCheckError: it is not.
        """
        if self.share.count is not None:
            return
        if self.again is not None and self.again.count != self.count:
            raise AdaCheckError(
                f"expected step {self.share.step} as it was recorded, with {self.again.count} "
                f"updates; found {self.count}. The step is not saved. Give record_step the numbers "
                "of the steps, as the manager counts them."
            )
        read = {i: np.asarray(value) for i, value in self.values.items()}
        share, where = self.share, self.where
        share.decision, count = decisions.settle(
            self.structure, read, self.tip(), self.program, where
        )
        if not share.decision.update_count:
            assert share.delta is not None
            share.delta.candidates = copies.candidates(self.structure, share.decision, self.program)
            share.unchanged = others(self.structure, share.delta.candidates)
        share.count = count


def others(structure: Structure, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The leaves that a delta does not store."""
    return tuple(sorted(frozenset(range(len(structure.leaves))).difference(stored)))


def are_ready(values: Mapping[int, Any]) -> bool:
    """Whether all values have been computed: then no device is busy with their step any more."""
    return all(map(staging.is_ready, values.values()))
