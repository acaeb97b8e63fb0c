"""Copies taken before the caller may donate the state, and those kept to compare the next with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.transfer import Joined, Staged
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.save.exported_update import Program
from adacheck_jax.save.policy import Decision
from adacheck_jax.save.snapshot import Snapshot, Structure

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
    held = {i: transfer.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    boxes = {i: specs[i].boxes_of(process) for i in held if kept is None or i in kept}
    picks = {i: transfer.picks_of(held[i], wanted) for i, wanted in boxes.items()}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return transfer.stage({i: held[i] for i in picks}, picks)


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


@dataclass(frozen=True, slots=True)
class Held:
    """What a save has got hold of.

    Attributes:
        staged: this process's boxes of what it needs on the host.
        kept: those of them that the next save will compare with.
        parts: the fingerprints.
        values: the small leaves that tell whether the state is what was expected.
        waiting: what has to be on the host before the state may be donated.
    """

    staged: Joined
    kept: Mapping[int, Blocks]
    parts: fingerprint.Contributions
    values: Mapping[int, Any]
    waiting: list[Staged | fingerprint.Contributions]

    def wait(self) -> None:
        """Waits until the state may be donated."""
        while self.waiting:
            self.waiting[-1].wait()
            self.waiting.pop()


def hold(
    snapshot: Snapshot,
    wanted: Collection[int],
    kept: Collection[int],
    small: Collection[int],
    *,
    waits: bool,
    defers: bool,
    every_replica: bool,
) -> Held:
    """Gets hold of all that a save will need of a state, which may be donated then.

    Args:
        snapshot: the state.
        wanted: the leaves that this save needs on the host.
        kept: those that the next one will compare with.
        small: those by whose values the state is judged later.
        waits: whether this may wait for the running step. If not, what is still being computed
            or lies on an accelerator is copied there first.
        defers: whether the state stays as it is until it was waited for.
        every_replica: whether replicas are fingerprinted too.
    """
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    # One program makes the copies of all processes; on CPU devices each would make its own.
    owned = not waits and (
        jax.process_count() == 1 or any(map(transfer.on_accelerator, snapshot.arrays))
    )
    if owned:
        copied = {*wanted, *kept, *small}
        copied |= {i for i in arrays if i not in summing.placed}
        arrays |= transfer.copies({i: arrays[i] for i in copied})
    groups = [tuple(kept), tuple(i for i in wanted if i not in kept)]
    staged = [Staged({i: arrays[i] for i in each}, structure.picks) for each in groups]
    if not owned:  # all transfers are started before the first is awaited
        for each in staged:
            each.begin()
    joined = Joined({i: group for group in staged for i in group})
    parts = fingerprint.Contributions(
        arrays,
        structure.picks,
        structure.whole_picks,
        every_replica=every_replica,
        staged=joined,
        owned=owned or defers,
        summing=summing,
    )
    values = {i: arrays[i] if owned else np.array(arrays[i]) for i in small}
    return Held(joined, staged[0], parts, values, [] if owned else [*staged, parts])
