"""Facts that a plan is made from: about the state, its parent, and bases in the background."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from adacheck_jax.format.manifest import Leaf
from adacheck_jax.plan.when_base import LineageLength
from adacheck_jax.schedule.line import Sizes
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps.lineage import Lineage

Counts = tuple[int, ...]
"""The update counter of each recorder in a state; none without a recorder."""

Kind = Literal["base", "replay", "bits"]
"""A full state; what the updates since the parent consumed; differences from the parent's bits."""


_LEAST_BYTES = 256 * 2**20
"""Host memory that deferred steps may take in any case."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about the step that the next one would follow.

    Attributes:
        depth: number of deltas between its base and it.
        counts: update counters of its state; None while they are still being computed.
        lineage: the saved step on the disk that it is, or is deferred after; None where there is
            none to build on.
        deferred_count: number of deferred steps between that saved step and the next one.
        has_baseline: True if an update of its state can be checked.
        copied: leaves of which host copies are kept.
        leaves: every leaf, in the boxes that this process has of the step: a delta lies in them.
        has_moved: True if its state lay on other devices or had another update.
        structure: structure of that saved step; None for a restored one, as the kind.
        interval: steps between that saved step and the one before it.
        is_lost: True if it is known not to be saved, now or later.
    """

    step: int
    depth: int
    counts: Counts | None
    lineage: Lineage | None
    deferred_count: int
    has_baseline: bool
    copied: Collection[int]
    leaves: tuple[Leaf, ...]
    has_moved: bool = False
    structure: Structure | None = None
    kind: Kind | None = None
    interval: int = 0
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class BackgroundFacts:
    """Bases made in the background: what one process knows, or what all processes agreed on.

    Attributes:
        are_possible: True if the next delta could become one.
        newest_depth: number of the newest of them among the deltas of its line; 0 for none.
        newest_s: seconds that it took.
    """

    are_possible: bool = False
    newest_depth: int = 0
    newest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """A state to save, and all that a plan may know about it.

    Attributes:
        step: step number; None if neither the caller nor the directory gives it.
        counts: update counters; None while they are still being computed.
        replayable: True if no leaf of an update is stored in another data type; for a deferred step
            no leaf of the step saved last.
        quarantined: leaves whose replay was found wrong in a way that a sample may miss.
        parent: the step that a delta would follow; None for none.
        is_only: True if no other step could be followed instead.
        is_first: True if nothing was saved or restored before.
        keeps_ancestors: True if the steps that a delta builds on live as long as it does.
        is_checker_ready: True if updates are replayed, and a check would not wait for a compiler.
        longest_lineage: number of deltas that may follow the base, as the schedule has it now.
        can_become_base: True if a delta can become a base in the background.
        shadow_problem: reason why the shadow cannot follow a delta; empty for none.
    """

    step: int | None
    structure: Structure
    update: ExportedUpdate
    counts: Counts | None
    replayable: bool
    quarantined: frozenset[int]
    parent: Facts | None
    is_only: bool
    is_first: bool
    keeps_ancestors: bool
    process_count: int
    is_checker_ready: bool
    longest_lineage: int
    can_become_base: bool = False
    shadow_problem: str = ""

    @property
    def length(self) -> LineageLength:
        """Length of the lineage that a delta would go on with."""
        parent = self.parent
        deltas, deferred = (parent.depth, parent.deferred_count) if parent else (0, 0)
        can_become_base = self.can_become_base and not deferred and self._is_cut_alike
        return LineageLength(deltas, deferred, self.longest_lineage, can_become_base)

    @property
    def _is_cut_alike(self) -> bool:
        """True if a base in place of a delta has the boxes of the base before it.

        It would be cut, and described to Orbax, as that one.
        """
        parent = self.parent
        if parent is None or (lineage := parent.lineage) is None:
            return True
        is_cut_alike = parent.structure is not None or parent.leaves == lineage.leaves
        return is_cut_alike and not lineage.is_recut


def sizes_of(structure: Structure) -> Sizes:
    """Sizes of a state, the same in all processes."""
    base_bytes = bytes_of(structure, range(len(structure.leaves)))
    delta_bytes = bytes_of(structure, [*structure.consumed])
    return Sizes(base_bytes, delta_bytes or base_bytes, most_bytes(structure))


def most_bytes(structure: Structure) -> int:
    """Host memory for deferred steps in a process, the same in all: as much as a base takes."""
    return max(_LEAST_BYTES, bytes_of(structure, range(len(structure.leaves))))


def bytes_of(structure: Structure, stored: Sequence[int]) -> int:
    """Bytes of some leaves in the process that owns most of them."""
    held: dict[int, int] = {}
    for index in stored:
        for owner, size_bytes in structure.owned_bytes[index].items():
            held[owner] = held.get(owner, 0) + size_bytes
    return max(held.values(), default=0)
