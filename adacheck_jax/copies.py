"""Which leaves a delta stores, and host copies of the last state to compare the next one with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax import proof, staging
from adacheck_jax.boxes import Box
from adacheck_jax.lineage import Lineage
from adacheck_jax.policy import Decision
from adacheck_jax.programs import Program
from adacheck_jax.snapshot import Snapshot, Structure
from adacheck_jax.staging import Blocks, Joined, Staged


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Host copies of a saved or restored state, to compare the next one with.

    Attributes:
        blocks: this process's boxes of the leaves that the next delta may store as differences.
        is_proof_due: whether the next update is to be proved, as all processes know alike.
        sites: the proof sites of what the update computes, if this process can prove it.
    """

    blocks: Mapping[int, Blocks]
    is_proof_due: bool
    sites: Mapping[int, Blocks]


NOTHING = HostCopies({}, False, {})
"""Of a state that is not known here."""


def of_restored(
    restored: Lineage, leaves: Sequence[Any], *, replays: bool, proves: bool
) -> HostCopies:
    """Copies what the first save after a restore needs.

    Args:
        restored: the step's lineage.
        leaves: its leaves; None for one that was left out.
        replays: whether updates may be replayed onto the step.
        proves: whether the next update is to be proved, if it is replayed.
    """
    specs, update, process = restored.base.leaves, restored.base.update, jax.process_index()
    held = {i: staging.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    wanted: Iterable[int] = range(len(specs))
    sites: dict[int, list[Box]] = {}
    replays = replays and update is not None
    if update is not None and replays:
        wanted = _not_computed(wanted, update.explained, update.passed)
        arguments = (update.params, update.inner, update.record, update.extra)
        every = proof.sites(specs, arguments, process)
        sites = {i: every[i] for i in update.explained if proves}
    blocks = _held(held, {i: specs[i].boxes_of(process) for i in wanted})
    found = _held(held, sites)
    return HostCopies(blocks, replays and proves, found if len(found) == len(sites) else {})


def sites_of(
    snapshot: Snapshot, staged: Mapping[int, Blocks]
) -> tuple[Mapping[int, Blocks], Staged]:
    """The proof sites of what the update computes; none if they are not held here.

    Args:
        snapshot: the state.
        staged: what is staged of it already; used where it is the same boxes.

    Returns:
        The sites, and those of them that were not staged already.
    """
    structure = snapshot.structure
    picks = structure.proof_picks
    computed = structure.arguments[0] + structure.arguments[1] if picks else ()
    again = [i for i in computed if i not in staged or structure.picks[i] != picks[i]]
    rest = Staged({i: snapshot.arrays[i] for i in again}, picks).begin()
    return Joined({i: rest if i in rest else staged for i in computed}), rest


def candidates(structure: Structure, decision: Decision, program: Program) -> tuple[int, ...]:
    """What a save stores: a delta only what is not what it would be without it."""
    every = range(len(structure.leaves))
    if decision.kind in ("base", "bits"):
        return tuple(every)
    params, inner, record, extra = structure.arguments
    consumed = frozenset(record + extra)
    rest = _not_computed(every, params + inner, program.passed)
    # Without an update the record is the parent's, and so it is none of the next one's business.
    return tuple(i for i in rest if decision.update_count or i not in consumed)


def comparable(
    blocks: Mapping[int, Blocks], structure: Structure, decision: Decision
) -> Mapping[int, Blocks]:
    """The parent's leaves from which differences may be stored: a record is read by itself."""
    if decision.kind == "bits":
        return blocks
    consumed = frozenset(structure.arguments[2] + structure.arguments[3] if blocks else ())
    return Joined({i: blocks for i in blocks if i not in consumed})  # they may not be here yet


def _not_computed(
    every: Iterable[int], computed: Collection[int], passed: Collection[int]
) -> list[int]:
    """The leaves that an update does not compute: it may pass them through."""
    skipped = frozenset(computed) - frozenset(passed)
    return [i for i in every if i not in skipped]


def _held(arrays: Mapping[int, Any], boxes: Mapping[int, Sequence[Box]]) -> Mapping[int, Blocks]:
    """Host copies of boxes of some leaves; leaves that are not held here in full are left out."""
    picks = {i: staging.picks_of(arrays[i], wanted) for i, wanted in boxes.items() if i in arrays}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return staging.stage({i: arrays[i] for i in picks}, picks)
