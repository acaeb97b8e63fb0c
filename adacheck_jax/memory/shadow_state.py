"""The copy of the state that the shadow holds: loaded, moved on step by step, and summed up."""

# Threads: made by whoever saves or recovers, compiled by a thread of its own; ``load``, ``follow``,
# ``copied`` and ``close`` run on the shadow's thread, in the order in which they were asked for.
# Others read ``is_lost`` and ``has_room_for_copy``, as values that may be a step old.

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import jax
import numpy as np

from adacheck_jax.device.background import in_background
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.byte_loops import Fingerprints, fingerprint_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.memory import holdings
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import Found, StepChange, StepFile, remove_others
from adacheck_jax.memory.holdings import Held, LeafBox, OfBoxes
from adacheck_jax.memory.peers import Peers, judged
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import HostFold, UnfitError
from adacheck_jax.update.elements.sample_sites import WHOLE_ELEMENTS

_log = logging.getLogger(__name__)

Position = object
"""A step of the run, told from all others by identity: a staged one, or a restored one."""
NOT_SENT = "they were not sent"
"""Why a process drops copies of another one's boxes."""


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
        lost: gives the processes whose boxes in ``blocks`` did not all come; may wait.
    """

    own: Position
    number: int
    blocks: Mapping[int, Blocks]
    sums: Callable[[], Mapping[int, int]]
    before: Position | None = None
    again: Position | None = None
    lost: Callable[[], AbstractSet[int]] = frozenset


class Followed:
    """A state that goes from step to step with training; all work on it is one thread's, in order.

    Attributes:
        structure: structure of the states.
        update: its exported update.
        has_room_for_copy: True if there is room for all of it once more.
        is_lost: True if a step could not be followed, until the next base.
        held: the boxes that it has.
        journal: the file that it lies in; None if it lies in this process's memory.
        position: the step that it has.
        told_until: beginning of a warning that a step could not be followed.
    """

    has_room_for_copy = False
    told_until = "Deltas are checked by sample until the next base"

    def __init__(
        self,
        structure: Structure,
        update: ExportedUpdate,
        held: Held,
        journal: StepFile | None,
        *,
        is_there: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self.structure, self.update, self.held = structure, update, held
        self.journal, self._is_there = journal, is_there
        # While it passes gates, and the owners whose copies were found bad; digests are of the step
        # that was stored or folded last.
        self._peers, self._is_gated, self._bad = peers, False, frozenset[int]()
        self._folded: tuple[int, OfBoxes] | None = None
        self.is_lost = False
        self.position: Position | None = None
        self._prepared = in_background(self._prepare)

    def base_reason(self, ahead: int) -> str:
        """Reason why the next save should be a base, before which some steps may still come."""
        return ""

    def _prepare(self) -> None:
        """Makes the file, if it is not there; in the background."""
        raise NotImplementedError

    def _load(self, begun: ShadowStep) -> None:
        """Takes a whole state, in place of what is there."""
        raise NotImplementedError

    def _move(self, change: StepChange, step: ShadowStep) -> Sequence[int] | None:
        """Goes to the next step; its fingerprints, if it has passed a gate."""
        raise NotImplementedError

    def _proof(self, step: ShadowStep, change: StepChange) -> dict[int, int] | None:
        """This process's contribution to the fingerprints of what it computed; None for nothing."""
        raise NotImplementedError

    def _arrive(self, step: ShadowStep, passed: Sequence[int] | None) -> None:
        """Notes a step that passed the gate, with its fingerprints."""

    def copied(
        self, position: Position, others: Mapping[int, Blocks]
    ) -> Mapping[int, Blocks] | None:
        """Copies what this process has of a step; None where that cannot be had."""

    def _make_file(self) -> None:
        """Makes the file where it is not there; where it cannot be had, that is told."""
        if (journal := self.journal) is None or self._is_there:
            return
        try:
            try:
                journal.create()
            except ShadowFileError:
                if not remove_others(journal.place):
                    raise
                journal.create()  # there was no room for two
        except ShadowFileError as error:
            self.journal = None
            _log.warning(
                "The shadow lies in memory that ends with this process: %s. If it is killed, "
                "its state is read from storage.",
                error,
            )

    def resume(self) -> Found:
        """Takes the state that lies in the file; see :meth:`Journal.resume`."""
        assert self.journal is not None
        self._prepared.result()
        return self.journal.resume()

    def close(self) -> None:
        """Lets go of the file, and follows no more."""
        self._prepared.exception()
        self.is_lost, self.position = True, None
        if self.journal is not None:
            self.journal.file.close()

    def load(self, begun: ShadowStep) -> None:
        """Takes the state of one step."""
        self.position, peers = None, self._peers
        self._is_gated, self._bad, self._folded = peers is not None, frozenset(), None
        if peers is not None:
            peers.gate.begin(begun.number)
        try:
            self._prepared.result()
            self._load(begun)
            if self._is_gated:
                self._arrive(begun, self._pass(begun, ()))
            if self.journal is not None and (peers is None or self._is_gated):
                remove_others(self.journal.place)
        except Exception as error:
            self._lose(error, begun.number)
        else:
            # What was given up before may have been followed until now.
            self.position, self.is_lost = begun.own, False

    def follow(self, step: ShadowStep, change: StepChange) -> dict[int, int] | None:
        """Moves on to a step; gives contributions to the fingerprints of what is compared."""
        position, self.position = self.position, None
        try:
            passed = None
            if position is step.before:
                passed = self._move(change, step)
            elif position is None or position is not step.again:
                if not self.is_lost:
                    _log.warning(
                        "%s: the copy of the state in host memory had followed another state, "
                        "such as that of a step that is recorded again.",
                        self.told_until,
                    )
                self.is_lost = True
                self.refuse(step.number, "its copy of the state had followed another state")
                return None
            found = self._proof(step, change)
            self._arrive(step, passed)
        except Exception as error:
            self._lose(error, step.number)
            return None
        self.position = step.own
        return found

    def refuse(self, step: int, reason: str) -> None:
        """Tells the other processes that this one does not follow a step."""
        if self._peers is not None:
            self._peers.gate.refuse(step, reason)

    def _pass(self, step: ShadowStep, updates: Sequence[int]) -> Sequence[int] | None:
        """Waits until all processes have stored a step; its fingerprints, None where one has not.

        Where a process does not follow, the file says that it has no step, and each goes on alone.

        Raises:
            AdaCheckError: a process is gone. What lies in the file stays as it is.
        """
        peers, journal, held, sums = self._peers, self.journal, self.held, step.sums()
        if peers is None:
            return None
        if journal is None:
            peers.gate.refuse(step.number, "its copy of the state lies in no file")
            answer = ""
        else:
            last, found = self._folded or (None, {})
            copies = {i: each for i, each in held.copies.items() if i not in self._bad}
            report = {
                "sums": [value for _, value in sorted(sums.items())],
                "own": holdings.digests_of(held.elsewhere, found),
                "copies": holdings.digests_of(copies, found),
                "folded": last,
            }
            answer = peers.gate.agree(step.number, report, judged)
        if isinstance(answer, str):
            self._is_gated = False
            if journal is not None:
                self._go_alone(journal, answer)
            return None
        process = jax.process_index()
        bad = {owner for owner, holder in answer["bad"] if holder == process}
        self._drop(bad, "they differ from what that process has in memory")
        assert journal is not None
        journal.begin(step.number, updates, sums, answer["sums"], bad=self._bad)
        return answer["sums"]

    def _go_alone(self, journal: StepFile, reason: str) -> None:
        """Notes that a process does not follow, and that the file may not stand where others do."""
        _log.warning("Nothing can be recovered from memory until the next base: %s.", reason)
        journal.lift()

    def _lose(self, error: Exception, step: int) -> None:
        """Nothing that goes wrong here costs a step: a sample of each was compared, too.

        That of the step on which it is lost may be a thin one; what it misses a restore refuses.
        """
        self.is_lost = True
        self.refuse(step, f"its copy of the state was lost ({type(error).__name__}: {error})")
        _log.warning(
            "%s: the copy of the state in host memory could not be moved on: %s: %s",
            *(self.told_until, type(error).__name__, error),
        )

    def _drop(self, owners: AbstractSet[int], why: str) -> None:
        """Offers no copies of some processes' boxes any more, and says so."""
        if found := self.held.copies.keys() & owners - self._bad:
            self._bad |= found
            _log.warning(
                "Until the next base this process keeps no copies of the state of process %s: %s. "
                "Its steps are saved as before.",
                *(", ".join(map(str, sorted(found))), why),
            )


class ShadowState(Followed):
    """The copy of one structure's states that the host's arithmetic moves on."""

    journal: Journal | None

    def __init__(
        self,
        structure: Structure,
        update: ExportedUpdate,
        fold: HostFold,
        held: Held,
        journal: Journal | None,
        most_bytes: int,
        *,
        is_there: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self._fold = fold
        self._received: OfBoxes = {}
        self.has_room_for_copy = size_of(fold, journal) + fold.copy_bytes <= most_bytes
        pieces = update.pieces
        assert pieces is not None
        self._taken = [i for i in pieces.leaves if i not in pieces.computed]
        self._compared = sorted(pieces.computed - update.stored)
        self._tellers = holdings.tellers_of(structure, pieces)
        process = jax.process_index()
        self._scalars = [i for i in self._compared if self._tellers.get(i) == process]
        self._arrays = [i for i in self._compared if structure.leaves[i].shape]
        self._fingerprints: dict[bool, tuple[list[LeafBox], Fingerprints]] = {}
        super().__init__(structure, update, held, journal, is_there=is_there, peers=peers)

    def _prepare(self) -> None:
        self._make_file()
        self._fold.allocate(self.journal.memory if self.journal else None)
        self._fold.compile()

    def _load(self, begun: ShadowStep) -> None:
        self._received = {}
        self._replace(begun, (), self._compared, anew=True)
        if self._is_gated:
            self._sums(begun.number)

    def _proof(self, step: ShadowStep, change: StepChange) -> dict[int, int] | None:
        # What may not have changed is compared with the parent when shares are validated.
        others = change.unreplayed.union(change.unchanged)
        return {i: x for i, x in self._sums(step.number).items() if i not in others}

    def _arrive(self, step: ShadowStep, passed: Sequence[int] | None) -> None:
        """Notes in the file that a step which passed the gate is folded."""
        if passed is None or self._folded is None or self.journal is None:
            return
        journal, found, blocks = self.journal, self._folded[1], step.blocks
        for i in journal.received:
            brings = i in blocks and blocks[i]
            for box, x in journal.own(i).items():
                if brings or (i, box) not in self._received:
                    self._received[i, box] = fingerprint_of(x, box.start)
        found = found | self._received
        self._folded, leaves = (step.number, found), sorted({i for i, _ in found})
        folded = {str(i): [found[i, box] for box in self.held.boxes(i)] for i in leaves}
        journal.begin(step.number, (), step.sums(), passed, folded, self._bad)

    def copied(
        self, position: Position, others: Mapping[int, Blocks]
    ) -> Mapping[int, Blocks] | None:
        """Copies what this process has of a step; None if the copy is elsewhere, or lacks a leaf.

        Each of several processes has boxes of an array, which together are all of it; one process
        has each number.
        """
        if self.position is not position:
            return None
        blocks, process = dict[int, Blocks](), jax.process_index()
        for i, leaf in enumerate(self.structure.leaves):
            if not leaf.nbytes:
                continue
            if self._fold.holds(i):
                if leaf.shape or self._tellers.get(i, min(leaf.owners)) == process:
                    mine, own = self._fold.blocks(i), self.held.own.get(i, ())
                    blocks[i] = {box: np.array(mine[box]) for box in own}
            elif i in others:
                blocks[i] = {box: np.array(x) for box, x in others[i].items()}
            elif process in leaf.owners:
                return None
        return blocks

    def _move(self, change: StepChange, step: ShadowStep) -> Sequence[int] | None:
        """Goes over the copy, to the next step; its fingerprints, if it has passed a gate."""
        blocks = step.blocks
        updates = change.updates
        after = frozenset(self._compared)
        if updates:  # one process alone may store what it found wrong
            after = change.unreplayed.union(after.intersection(change.stored))
        journal, own, passed = self.journal, after - self.update.stored, None
        records = self.structure.arguments[2]
        if len(updates) == len(self.structure.bindings) and not all(
            i in blocks and blocks[i] for i in records if self.held.boxes(i)
        ):
            raise UnfitError("a step did not bring all of the record")
        is_alone = self._peers is not None and not self._is_gated
        if journal is None or is_alone or any(i in blocks and blocks[i] for i in own):
            self._replace(step, updates, after)
            return self._pass(step, ()) if self._is_gated else None
        self._drop(step.lost(), NOT_SENT)
        journal.receive(self._taken, blocks)
        journal.begin(step.number, updates, step.sums(), bad=self._bad)
        if self._is_gated:
            passed = self._pass(step, updates)
        self._take(blocks, updates, after)
        return passed

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
            if self._is_gated:
                self._drop(step.lost(), NOT_SENT)
            journal.lift()
        if anew:  # an update that failed may have left it in between
            self._fold.go_to(False, False)
            stored = () if journal is None else journal.received
            if any(self.held.boxes(i) and not blocks.get(i) for i in stored):
                raise UnfitError("a base did not bring all that is kept of it")
        if journal is not None:
            journal.receive(self._taken, blocks)
        self._take(blocks, updates, after)
        if journal is not None:
            journal.begin(step.number, (), sums, bad=self._bad)

    def _take(
        self, blocks: Mapping[int, Blocks], updates: Sequence[int], after: Collection[int]
    ) -> None:
        """Goes over the copy: to another step's elements."""
        if self.journal is None:  # else it has put them beside those of the step before
            self._put(self._taken if updates else filter(self._fold.holds, self._taken), blocks)
        if updates:
            self._fold.advance(updates, done=self.journal.note if self.journal else None)
        self._put(sorted(self.update.stored.union(after)), blocks)

    def _put(self, leaves: Iterable[int], blocks: Mapping[int, Blocks]) -> None:
        for i in leaves:
            if i in blocks and (own := blocks[i]):
                self._fold.put(i, own)

    def _sums(self, step: int) -> dict[int, int]:
        """This process's contribution to the fingerprint of each leaf that is compared."""
        phase, arrays = self._fold.place[0], self._arrays
        if phase not in self._fingerprints:
            blocks = [(i, box, x) for i in arrays for box, x in self._fold.blocks(i).items()]
            table = Fingerprints([(x, box.start) for _, box, x in blocks])
            self._fingerprints[phase] = [(i, box) for i, box, _ in blocks], table
        boxes, table = self._fingerprints[phase]
        found = dict(zip(boxes, table.sums(), strict=True))
        self._folded, own = (step, found), self.held.own
        sums = {i: combine([found[i, box] for box in own.get(i, ())]) for i in arrays}
        for i in self._scalars:
            ((_, value),) = self._fold.blocks(i).items()
            sums[i] = fingerprint_of(value)
        return sums


def size_of(fold: HostFold, journal: Journal | None) -> int:
    """Host memory that a copy takes, in its file or without one."""
    return fold.size_bytes() if journal is None else journal.file.size_bytes


def fold_of(
    structure: Structure,
    update: ExportedUpdate,
    held: Held | None = None,
    peers: Peers | None = None,
    *,
    is_kept: bool,
) -> tuple[HostFold, Held] | str:
    """The fold of an update over boxes, and these; or the reason why there is none.

    There is one though a sample has all elements, if it ``is_kept`` in a file. Without boxes that
    are to be ``held`` those of this process's shadow.
    """
    count, leaves, pieces = jax.process_count(), structure.leaves, update.pieces
    if pieces is None or not update.pinned:
        return "the update is not one that the host computes alike" if update.program else ""
    touched = [i for each in structure.arguments for i in each]
    if not is_kept and max(math.prod(leaves[i].shape) for i in touched) <= WHOLE_ELEMENTS:
        return ""  # a sample has all elements
    consumed = frozenset(pieces.leaves) - pieces.computed
    behind = consumed.intersection(pieces.scalars_behind()[1])
    if count > 1 and not behind <= structure.everywhere:
        return "arrays are computed from a number that not every process has"
    try:
        if held is None:
            held = holdings.whole(structure)
            if count > 1:
                domains, copies = (peers.domains, peers.copies) if peers is not None else ((), 0)
                held = holdings.held_of(structure, pieces, domains, copies)
        boxes = {i: held.boxes(i) for i in range(len(leaves))}
        passing = () if is_kept else structure.arguments[2]
        args = pieces, boxes, len(structure.bindings), update.arithmetic, passing
        return HostFold(*args), held
    except UnfitError as error:
        return str(error)
