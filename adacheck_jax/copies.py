"""Which leaves a delta stores, and host copies of the last state to compare the next one with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from adacheck_jax import staging
from adacheck_jax.lineage import Lineage
from adacheck_jax.policy import Decision
from adacheck_jax.programs import Program
from adacheck_jax.snapshot import Structure
from adacheck_jax.staging import Blocks, Joined

NOTHING: Mapping[int, Blocks] = {}
"""Of a state of which nothing is held."""


def of_restored(
    restored: Lineage, leaves: Sequence[Any], kept: Collection[int] | None
) -> Mapping[int, Blocks]:
    """Copies of a restored state that the first save after it may be stored as differences from.

    Args:
        restored: the step's lineage.
        leaves: its leaves; None for one that was left out.
        kept: indices of the leaves to copy; None for all.
    """
    specs, process = restored.base.leaves, jax.process_index()
    held = {i: staging.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    boxes = {i: specs[i].boxes_of(process) for i in held if kept is None or i in kept}
    picks = {i: staging.picks_of(held[i], wanted) for i, wanted in boxes.items()}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return staging.stage({i: held[i] for i in picks}, picks)


def candidates(
    structure: Structure, decision: Decision, program: Program, wrong: Collection[int] = ()
) -> tuple[int, ...]:
    """The leaves that a save stores: a delta only what is not what it would be without it.

    Args:
        structure: of the state.
        decision: base or delta.
        program: the update.
        wrong: leaves that replay does not reproduce.
    """
    every = range(len(structure.leaves))
    if decision.kind in ("base", "bits"):
        return tuple(every)
    replayed = structure.computed - program.stored - frozenset(wrong)
    # Without an update the record is the parent's, and so it is none of the next one's business.
    idle = structure.consumed - structure.consumed_by(decision.updates)
    return tuple(i for i in every if i in wrong or not (i in replayed or i in idle))


def unchanged(
    structure: Structure, stored: Collection[int], updates: Sequence[int]
) -> tuple[int, ...]:
    """The leaves that a delta neither stores nor computes: they must have the parent's bits."""
    touched = structure.computed_by(updates).union(stored)
    return tuple(i for i in range(len(structure.leaves)) if i not in touched)


def comparable(
    blocks: Mapping[int, Blocks], structure: Structure, decision: Decision
) -> Mapping[int, Blocks]:
    """The parent's leaves from which differences may be stored.

    A record is read by itself. Of a leaf that is replayed elsewhere one process may store its boxes
    and another not: then all of them have to do without what was there before.
    """
    if decision.kind == "bits" or not blocks:
        return blocks
    without = structure.consumed
    if jax.process_count() > 1:
        without |= structure.computed
    return Joined({i: blocks for i in blocks if i not in without})  # they may not be here yet
