"""The copy of the state that the shadow holds: loaded, moved on step by step, and summed up."""

# Threads: made by whoever saves or recovers, compiled by a thread of its own; ``load``, ``follow``,
# ``copied`` and ``close`` run on the shadow's thread, in the order in which they were asked for.
# Others read ``is_lost`` and ``has_room_for_copy``, as values that may be a step old.

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np

from adacheck_jax.device.background import in_background
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.byte_loops import Fingerprints, fingerprint_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.proof.journal import Found, Journal
from adacheck_jax.proof.shadow_file import ShadowFileError
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import HostFold, UnfitError
from adacheck_jax.update.elements.pieces import Pieces
from adacheck_jax.update.elements.sample_sites import WHOLE_ELEMENTS

_log = logging.getLogger(__name__)

Position = object
"""A step of the run, told from all others by identity: a staged one, or a restored one."""


class StepChange(Protocol):
    """A step as it changes the state before it, once its update counters are known."""

    @property
    def updates(self) -> tuple[int, ...]:
        """Positions of the recorders whose update is replayed."""
        ...

    @property
    def stored(self) -> tuple[int, ...]:
        """Leaves that are stored."""
        ...

    @property
    def unreplayed(self) -> frozenset[int]:
        """Leaves that the update computes and that are stored nevertheless."""
        ...

    @property
    def unchanged(self) -> tuple[int, ...]:
        """Leaves that must have the bits of the state before."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ShadowStep:
    """A step that the shadow is to follow, or to begin with.

    Attributes:
        own: the step.
        number: its number.
        blocks: this process's boxes, perhaps on their way: of the leaves that are stored, or of all
            that the shadow begins with.
        sums: gives this process's contribution to the fingerprint of each leaf; may wait.
        before: the step before it; None for a step to begin with.
        again: the same state, if it was followed already.
    """

    own: Position
    number: int
    blocks: Mapping[int, Blocks]
    sums: Callable[[], Mapping[int, int]]
    before: Position | None = None
    again: Position | None = None


class ShadowState:
    """The copy of one structure's states; all work on it is done by one thread, in order.

    Attributes:
        structure: structure of the states.
        update: its exported update.
        has_room_for_copy: True if there is room for all of it once more.
        is_lost: True if a step could not be followed, until the next base.
        journal: the file that it lies in; None if it lies in this process's memory.
        position: the step that it has.
    """

    def __init__(
        self,
        structure: Structure,
        update: ExportedUpdate,
        fold: HostFold,
        journal: Journal | None,
        most_bytes: int,
        *,
        is_there: bool = False,
    ) -> None:
        self.structure, self.update, self._fold = structure, update, fold
        self.journal, self._is_there = journal, is_there
        self.has_room_for_copy = size_of(fold, journal) + fold.size_bytes() <= most_bytes
        self.is_lost = False
        self.position: Position | None = None
        pieces = update.pieces
        assert pieces is not None
        self._taken = [i for i in pieces.leaves if i not in pieces.computed]
        self._compared = sorted(pieces.computed - update.stored)
        self._tellers = _tellers_of(structure, pieces)
        process = jax.process_index()
        self._scalars = [i for i in self._compared if self._tellers.get(i) == process]
        self._arrays = [i for i in self._compared if structure.leaves[i].shape]
        self._fingerprints: dict[bool, tuple[list[int], Fingerprints]] = {}
        self._compiled = in_background(self._compile)

    def _compile(self) -> None:
        if self.journal is not None and not self._is_there:
            try:
                self.journal.create()
            except ShadowFileError as error:
                self.journal = None
                _log.warning(
                    "The shadow lies in memory that ends with this process: %s. If it is killed, "
                    "its state is read from storage.",
                    error,
                )
        self._fold.allocate(self.journal.memory if self.journal else None)
        self._fold.compile()

    def resume(self) -> Found:
        """Takes the state that lies in the file; see :meth:`Journal.resume`."""
        assert self.journal is not None
        self._compiled.result()
        return self.journal.resume()

    def close(self) -> None:
        """Lets go of the file, and follows no more."""
        self._compiled.exception()
        self.is_lost, self.position = True, None
        if self.journal is not None:
            self.journal.file.close()

    def load(self, begun: ShadowStep) -> None:
        """Takes the state of one step."""
        self.position = None
        try:
            self._compiled.result()
            self._replace(begun, (), self._compared, anew=True)
        except Exception as error:
            self._lose(error)
        else:
            # What was given up before may have been followed until now.
            self.position, self.is_lost = begun.own, False

    def follow(self, step: ShadowStep, change: StepChange) -> dict[int, int] | None:
        """Moves on to a step; gives contributions to the fingerprints of what is compared."""
        position, self.position = self.position, None
        try:
            if position is step.before:
                self._move(change, step)
            elif position is None or position is not step.again:
                if not self.is_lost:
                    _log.warning(
                        "Deltas are checked by sample until the next base: the copy of the state "
                        "in host memory had followed another state, such as that of a step that "
                        "is recorded again."
                    )
                self.is_lost = True
                return None
            # What may not have changed is compared with the parent when shares are validated.
            others = change.unreplayed.union(change.unchanged)
            found = {i: each for i, each in self._sums().items() if i not in others}
        except Exception as error:
            self._lose(error)
            return None
        self.position = step.own
        return found

    def copied(
        self, position: Position, others: Mapping[int, Blocks]
    ) -> Mapping[int, Blocks] | None:
        """Copies what this process has of a step; None if the copy is elsewhere, or lacks a leaf.

        Of several processes each has boxes of an array, which together are all of it, and one has
        each number.
        """
        if self.position is not position:
            return None
        blocks, process = dict[int, Blocks](), jax.process_index()
        for i, leaf in enumerate(self.structure.leaves):
            if not leaf.nbytes:
                continue
            if self._fold.holds(i):
                if leaf.shape or self._tellers.get(i, min(leaf.owners)) == process:
                    blocks[i] = {box: np.array(x) for box, x in self._fold.blocks(i).items()}
            elif i in others:
                blocks[i] = others[i]
            elif process in leaf.owners:
                return None
        return blocks

    def _lose(self, error: Exception) -> None:
        """Nothing that goes wrong here costs a step: a sample of each was compared, too."""
        self.is_lost = True
        _log.warning(
            "Deltas are checked by sample until the next base: the copy of the state in host "
            "memory could not be moved on: %s: %s",
            *(type(error).__name__, error),
        )

    def _move(self, change: StepChange, step: ShadowStep) -> None:
        blocks = step.blocks
        updates = change.updates
        after = frozenset(self._compared)
        if updates:  # of several processes one alone may store what it found wrong
            after = change.unreplayed.union(after.intersection(change.stored))
        journal, own = self.journal, after - self.update.stored
        if journal is None or any(i in blocks and blocks[i] for i in own):
            self._replace(step, updates, after)
        else:
            sums = step.sums()
            journal.receive(self._taken, blocks)
            journal.begin(step.number, updates, sums)
            self._take(blocks, updates, after)

    def _replace(
        self,
        step: ShadowStep,
        updates: Sequence[int],
        after: Collection[int],
        *,
        anew: bool = False,
    ) -> None:
        """Goes over the copy as it lies: a file says that it has no step until all of one is there.

        Nothing but an update goes over it so that it may be stopped at any moment.
        """
        blocks, journal, sums = step.blocks, self.journal, dict[int, int]()
        if journal is not None:
            # Until all of it is here the file keeps the step that it has.
            sums, blocks = step.sums(), {i: blocks[i] for i in blocks}
            journal.lift()
        if anew:  # an update that failed may have left it in between
            self._fold.go_to(False, False)
        if journal is not None:
            journal.receive(self._taken, blocks)
        self._take(blocks, updates, after)
        if journal is not None:
            journal.begin(step.number, (), sums)

    def _take(
        self, blocks: Mapping[int, Blocks], updates: Sequence[int], after: Collection[int]
    ) -> None:
        """Goes over the copy: to another step's elements."""
        if self.journal is None:  # else it has put them beside those of the step before
            self._put(self._taken, blocks)
        if updates:
            self._fold.advance(updates, done=self.journal.note if self.journal else None)
        self._put(sorted(self.update.stored.union(after)), blocks)

    def _put(self, leaves: Sequence[int], blocks: Mapping[int, Blocks]) -> None:
        for i in leaves:
            if i in blocks and (own := blocks[i]):
                self._fold.put(i, own)

    def _sums(self) -> dict[int, int]:
        """This process's contribution to the fingerprint of each leaf that is compared."""
        phase, arrays = self._fold.place[0], self._arrays
        if phase not in self._fingerprints:
            blocks = [(i, box, x) for i in arrays for box, x in self._fold.blocks(i).items()]
            table = Fingerprints([(x, box.start) for _, box, x in blocks])
            self._fingerprints[phase] = [i for i, _, _ in blocks], table
        leaves, table = self._fingerprints[phase]
        found: dict[int, list[int]] = {i: [] for i in arrays}
        for i, each in zip(leaves, table.sums(), strict=True):
            found[i].append(each)
        sums = {i: combine(each) for i, each in found.items()}
        for i in self._scalars:
            ((_, value),) = self._fold.blocks(i).items()
            sums[i] = fingerprint_of(value)
        return sums


def size_of(fold: HostFold, journal: Journal | None) -> int:
    """Host memory that a copy takes, in its file or without one."""
    return fold.size_bytes() if journal is None else journal.file.size_bytes


def fold_of(structure: Structure, update: ExportedUpdate, *, is_kept: bool) -> HostFold | str:
    """The fold of an update over this process's boxes; or the reason why there is none.

    There is one though a sample has all elements, if it ``is_kept`` in a file.
    """
    leaves, pieces = structure.leaves, update.pieces
    if pieces is None or not update.pinned:
        return "the update is not one that the host computes alike" if update.program else ""
    touched = [i for each in structure.arguments for i in each]
    if not is_kept and max(math.prod(leaves[i].shape) for i in touched) <= WHOLE_ELEMENTS:
        return ""  # a sample has all elements
    consumed = frozenset(pieces.leaves) - pieces.computed
    behind = consumed.intersection(pieces.scalars_behind()[1])
    if jax.process_count() > 1 and not behind <= structure.everywhere:
        return "arrays are computed from a number that not every process has"
    boxes = {i: [Box.full(leaves[i].shape)] for i in touched}
    count = len(structure.bindings)
    try:
        if jax.process_count() > 1:
            boxes |= _boxes_of_records(structure, pieces, consumed)
        return HostFold(pieces, boxes, count, update.arithmetic)
    except UnfitError as error:
        return str(error)


def _boxes_of_records(
    structure: Structure, pieces: Pieces, consumed: frozenset[int]
) -> dict[int, list[Box]]:
    """The boxes of several processes' shadows: of each leaf those of the record that changes it.

    A process has the boxes on the host that it owns. Of what lies on devices of several processes
    each leaf may have another owner; but the record is all that a step brings.
    """
    process, boxes = jax.process_index(), dict[int, list[Box]]()
    for batch in pieces.batches:
        for leaves in zip(*batch.taken, *batch.outputs, strict=True):
            brought = [structure.leaves[i].boxes_of(process) for i in leaves if i in consumed]
            if any(each != brought[0] for each in brought):
                raise UnfitError("other processes have parts of what the update consumes")
            own = brought[0] if brought else structure.leaves[leaves[0]].boxes_of(process)
            boxes |= dict.fromkeys(leaves, own)
    return boxes


def _tellers_of(structure: Structure, pieces: Pieces) -> dict[int, int]:
    """The process that contributes each computed scalar's fingerprint: one that can compute it.

    Those that no process has all of what they are computed from are left out.
    """
    tellers = {}
    for leaf, behind in pieces.scalars_behind()[0].items():
        brought = behind - pieces.computed
        owners = {owner for i in brought for owner in structure.leaves[i].owners}
        if len(owners) <= 1:
            tellers[leaf] = min(owners, default=0)
    return tellers
