"""The shadow: this process's own copy of the state in host memory, which follows training.

It takes the state from a base, or from a restored step, and folds into it the record of each step
after that, box by box, in a thread of its own. After each step its fingerprints must be those that
the devices computed of the trained state: so every delta is proved in full, and nothing more than
the record leaves the devices. What it holds is this process's part of a base.

Other systems keep such a replica for recovery alone (LowDiff+, AdaCheck); none proves it.
"""

# Threads: start, follow, is_beyond and recover are called by whoever saves or restores; a Proof by
# the thread that moves the run's steps on. The copy itself (``shadow_state``) is loaded, moved and
# copied by the one thread made here, in the order in which that was asked for; a recovery reads its
# file on the caller's. No lock: the callers change
# the references here alone, and the thread never reads them.

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.memory import holdings
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.step_file import (
    FilePlace,
    Found,
    FoundFile,
    StepChange,
    kind_at,
)
from adacheck_jax.memory.holdings import Held, HeldBox
from adacheck_jax.memory.making import HostMemory, opened
from adacheck_jax.memory.peers import Peers
from adacheck_jax.memory.record_state import RecordState
from adacheck_jax.memory.shadow_state import (
    Followed,
    Position,
    ShadowState,
    ShadowStep,
)
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.host_fold import UnfitError

_log = logging.getLogger(__name__)

OTHER_BITS = "the host computes other bits than the devices"
"""Reason why states are not computed in memory."""

_Sums = Future[dict[int, int] | None]
Copies = Mapping[int, Blocks] | None
"""The blocks of every leaf that has elements; None if they cannot be had."""


class ShadowThread:
    """Follows a training run.

    The shadow may take ``most_bytes`` of host memory, by default half of what is free, shared by
    the processes of a machine. With 0 there is none. Without a place it lies in no file. With
    ``keeps_records`` the file has a state and the records since, also where the host could compute
    the states after it; else where it cannot.

    Attributes:
        due: reason why the next save is a base: of several processes what they agreed on; empty for
            none.
    """

    def __init__(
        self,
        most_bytes: int | None,
        place: FilePlace | None = None,
        peers: Peers | None = None,
        *,
        keeps_records: bool = False,
    ) -> None:
        self._host, self._place, self._peers = HostMemory(most_bytes, place, peers), place, peers
        self._keeps_records, self.due, self._loaded = keeps_records, "", None
        self._copied: tuple[Structure, Held | None, Mapping[int, Sequence[Box]]] | None = None
        self._sent: tuple[Structure, ExportedUpdate, Sequence[HeldBox]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_shadow")
        self._state: Followed | None = None
        self._refused: tuple[Structure, ExportedUpdate] | None = None
        self._last_asked: Position | None = None
        self._follows_saves = False

    def start(
        self,
        structure: Structure,
        update: ExportedUpdate,
        begun: ShadowStep,
        *,
        is_restored: bool = False,
    ) -> Sequence[Future[None]]:
        """Takes the state from a base, or from a restored step; what reads it until it is done.

        A run that is being saved stays where it is: most steps that it restores are looked at, and
        not gone on from.
        """
        if is_restored and self.stays:
            return ()
        copy = self._state
        self._follows_saves = not is_restored
        if self._peers is not None:
            self._peers.gate.end()  # nobody need come to the steps before
        if copy is None or copy.structure is not structure or copy.update is not update:
            copy = self._state = self._made(structure, update)
        self._last_asked, self.due = begun.own, ""
        if copy is not None:
            copy.is_lost = False
            self._loaded = self._thread.submit(copy.load, begun)
            return (self._loaded,)
        self._miss(begun.number)
        return ()

    @property
    def stays(self) -> bool:
        """True if it follows a run that is being saved, and takes no restored step."""
        copy = self._state  # several processes have to do alike
        return self._follows_saves and (
            self._peers is not None or (copy is not None and not copy.is_lost)
        )

    @property
    def follows(self) -> bool:
        """True if there is one that has not lost its step."""
        return self._state is not None and not self._state.is_lost

    @property
    def proves(self) -> bool | None:
        """True if, as far as is known, all of the next step is compared with the trained state.

        None while the state that it begins with is being taken.
        """
        # Each of several processes would have to know of all.
        alone = jax.process_count() == 1 and is_host()
        if not (alone and self.follows and isinstance(self._state, ShadowState)):
            return False
        return True if self._is_loaded else None

    @property
    def _is_loaded(self) -> bool:
        return self._loaded is None or self._loaded.done()

    def may_be_sent(self, structure: Structure) -> bool:
        """True if boxes may be sent for copies of them, before the update is known."""
        peers = self._peers
        return peers is not None and holdings.may_be_sent(structure, peers.domains, peers.copies)

    def sent(self, structure: Structure, update: ExportedUpdate) -> Sequence[HeldBox]:
        """The boxes, of all processes, that are sent for copies of them."""
        peers, pieces = self._peers, update.pieces
        if peers is None or not peers.copies or pieces is None:
            return ()
        if self._sent is None or self._sent[0] is not structure or self._sent[1] is not update:
            parts = list[HeldBox]()
            with contextlib.suppress(UnfitError):  # no process has a shadow then
                parts = holdings.parts_of(structure, pieces, peers.domains, peers.copies)
            self._sent = structure, update, [each for each in parts if each.sent]
        return self._sent[2]

    def miss(self, step: int, *, is_restored: bool) -> None:
        """Takes no state from a step that :meth:`start` might have taken, and tells the others."""
        if not (is_restored and self._follows_saves):
            self._miss(step)

    def _miss(self, step: int) -> None:
        if (peers := self._peers) is not None:
            self._thread.submit(peers.gate.begin, step)
            self._refuse(step)

    def follow(self, step: ShadowStep) -> Proof | None:
        """Folds a step, in the background; None where there is no shadow."""
        copy = self._state
        if self._peers is not None:
            self._follows_saves = True
        if copy is None or copy.is_lost:
            self._refuse(step.number)
            return None
        self._last_asked, self._follows_saves = step.own, True

        def follow(change: StepChange | None) -> _Sums:
            if change is None:
                self._refuse(step.number)
                nothing: _Sums = Future()
                nothing.set_result(None)
                return nothing
            return self._thread.submit(copy.follow, step, change)

        return Proof(self, step.own, follow)

    def _refuse(self, step: int) -> None:
        """Tells the other processes that this one does not follow a step."""
        if (peers := self._peers) is not None:
            self._thread.submit(peers.gate.refuse, step, "it has no copy of the state in memory")

    def copied(self, structure: Structure, *, is_base: bool) -> Mapping[int, Sequence[Box]]:
        """The boxes that this process does not own and that the shadow takes of a step.

        Of a base it takes the leaves that no update touches: it is not known yet how the update
        takes the state apart. A step after it may have another structure than the base, which lies
        alike.
        """
        copy, peers = self._state, self._peers
        if peers is None:
            return {}
        held = None if is_base or copy is None else copy.held
        if not (self._copied and self._copied[0] is structure and self._copied[1] is held):
            found = held or holdings.held_of(structure, None, peers.domains, peers.copies)
            boxes = dict[int, Sequence[Box]]()
            for i, leaf in enumerate(structure.leaves):
                own = {*leaf.boxes_of(jax.process_index())}
                if others := [box for box in found.boxes(i) if box not in own]:
                    boxes[i] = others
            self._copied = structure, held, boxes
        return self._copied[2]

    def is_beyond(self, position: Position | None) -> bool:
        """True if it was told to follow a step after another one, from which it cannot go back."""
        copy = self._state
        return copy is not None and not copy.is_lost and self._last_asked is not position

    @property
    def base_reason(self) -> str:
        """Reason why the next save should be a base, from which to begin anew; empty for none."""
        return self.due or self.report(0)[1]

    def report(self, ahead: int) -> tuple[str, str]:
        """Kind of the file that this process keeps, and its reason for a base; for the others.

        So many steps more than those on their way may come until then.
        """
        copy = self._state
        if copy is None or copy.journal is None:
            return "", ""
        return copy.journal.kind, copy.base_reason(ahead) if self._is_loaded else ""

    def learn(self, *, keeps_records: bool, due: str) -> None:
        """Learns what all processes agreed on: the kind of their files, and why a base is due."""
        if keeps_records and not self._keeps_records:
            self.give_up(due)
        elif self._place is not None:
            self.due = due

    def keep_records(self) -> None:
        """Has the file a state and the records since it, as all processes found them."""
        self._keeps_records = True

    @property
    def has_room_for_copy(self) -> bool:
        """True if there is a shadow, and room for it once more."""
        return self._state is not None and self.follows and self._state.has_room_for_copy

    def copy(
        self, position: Position, others: Mapping[int, Blocks], copies: Future[Copies]
    ) -> None:
        """Copies the state of a step, if the shadow is there; see :meth:`Proof.copied`."""
        copy = self._state

        def answer() -> None:
            try:
                copies.set_result(None if copy is None else copy.copied(position, others))
            except Exception as error:
                copies.set_exception(error)

        self._thread.submit(answer)

    def give_up(self, reason: str) -> None:
        """Computes no more, and says so; a file has the records from the next base on."""
        if self._place is not None:  # also where another process alone has one
            self._keeps_records, self.due = True, reason
        if self._state is not None:
            if self._place is None:
                self._refused = (self._state.structure, self._state.update)
            self.close()
            self._state = None
            _log.warning("Deltas are checked by sample from now on: %s", reason)

    def recover(self, structure: Structure, update: ExportedUpdate) -> Found:
        """Takes the state that another process has left in the file; nobody has compared it yet.

        Raises:
            ShadowFileError: there is none, or none that can be taken.
        """
        self.close()
        assert self._place is not None
        found = FoundFile(self._place, None, kind_at(self._place.path))
        file = opened(found, structure, update)
        copy: Followed
        if isinstance(file, RecordLog):
            self.keep_records()
            copy = RecordState(structure, update, file.held, file, is_there=True)
        else:
            most_bytes = self._host.may_take()
            args = structure, update, file.fold, file.held, file, most_bytes
            copy = ShadowState(*args, is_there=True)
        try:
            state = copy.resume()
        except BaseException:
            copy.close()
            raise
        self._refused, self._state = None, copy
        return state

    def stand_at(self, position: Position) -> None:
        """Goes on from the state that was recovered."""
        self._last_asked = position
        if self._state is not None:
            self._state.position = position

    def close(self) -> None:
        """Lets go of the file, which stays; follows no more until the next base."""
        copy = self._state
        if self._peers is not None:
            self._peers.gate.end()
        if copy is not None and copy.journal is not None:
            self._state = None
            self._thread.submit(copy.close).result()

    def _made(self, structure: Structure, update: ExportedUpdate) -> Followed | None:
        if self._host.most_bytes == 0 or self._refused == (structure, update):
            return None
        self.close()
        self._refused = (structure, update)
        if made := self._host.made(structure, update, keeps_records=self._keeps_records):
            self._refused = None
        return made


def is_host() -> bool:
    """True if the devices have the host's arithmetic."""
    return update_program.platform() == "cpu"


class Proof:
    """The comparison of all of a step with the trained state, by the shadow that follows it.

    One thread begins it, waits for it and ends it: the one that moves the run's steps on.
    """

    def __init__(
        self, shadow: ShadowThread, own: Position, follow: Callable[[StepChange | None], _Sums]
    ) -> None:
        self._shadow, self._own, self._follow = shadow, own, follow
        self._found: _Sums | None = None
        self._copies: tuple[Mapping[int, Blocks], Future[Copies]] | None = None
        self._copying: Future[Copies] | None = None

    def copied(self, others: Mapping[int, Blocks]) -> Future[Copies]:
        """Has the state be copied when the shadow is at the step, before it goes on.

        Those of the leaves that the shadow does not hold are ``others``.
        """
        copies: Future[Copies] = Future()
        self._copies = others, copies
        return copies

    def begin(self, change: StepChange) -> None:
        """Begins to fold the step; once."""
        if self._found is None:
            self._found = self._follow(change)
            if self._copies is not None:
                self._shadow.copy(self._own, *self._copies)
                (_, self._copying), self._copies = self._copies, None

    def sums(self) -> dict[int, int] | None:
        """This process's contribution to the fingerprints of the leaves that are compared; waits.

        None if the shadow is at another step.
        """
        if self._copying is not None:
            self._copying.exception()  # till then others' arrays are read
        return None if self._found is None else self._found.result()

    def end(self) -> None:
        """Tells who waits for it, if the step was not followed."""
        if self._copies is not None:
            self._copies[1].set_result(None)
        if self._found is None:
            self._found = self._follow(None)

    def is_trusted(self) -> bool:
        """False if a difference may be the arithmetic of the host: on any platform but the CPU.

        Then the shadow is given up.
        """
        if is_host():
            return True
        self._shadow.give_up(OTHER_BITS)
        return False
