"""The shadow: this process's own copy of the state in host memory, which follows training.

It takes the state from a base, or from a restored step, and folds into it the record of each step
after that, box by box, in a thread of its own. After each step its fingerprints must be those that
the devices computed of the trained state: so every delta is proved in full, and nothing more than
the record leaves the devices. What it holds is this process's part of a base.

Other systems keep such a replica for recovery alone (LowDiff+, AdaCheck); none proves it.
"""

# Threads: start, follow, is_beyond and recover are called by whoever saves or restores; a Proof by
# the thread that moves the run's steps on. All work on the copy itself (``shadow_state``) is done
# by the one thread made here, in the order in which it was asked for. No lock: the callers change
# the references here alone, and the thread never reads them.

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from adacheck_jax.format.boxes import Blocks
from adacheck_jax.proof.free_memory import free_bytes
from adacheck_jax.proof.journal import FilePlace, Found, Journal
from adacheck_jax.proof.shadow_file import ShadowFileError
from adacheck_jax.proof.shadow_state import (
    Position,
    ShadowState,
    ShadowStep,
    StepChange,
    fold_of,
    size_of,
)
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program

_log = logging.getLogger(__name__)

_Sums = Future[dict[int, int] | None]
Copies = Mapping[int, Blocks] | None
"""The blocks of every leaf that has elements; None if they cannot be had."""


class ShadowThread:
    """Follows a training run.

    The shadow may take ``most_bytes`` of host memory, by default half of what is free, shared by
    the processes of a machine. With 0 there is none. Without a place it lies in no file.
    """

    def __init__(self, most_bytes: int | None, place: FilePlace | None = None) -> None:
        self._most_bytes, self._place = most_bytes, place
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_shadow")
        self._state: ShadowState | None = None
        self._refused: tuple[Structure, ExportedUpdate] | None = None
        self._told: Position | None = None
        self._follows_saves = False

    def start(
        self,
        structure: Structure,
        update: ExportedUpdate,
        begun: ShadowStep,
        *,
        is_restored: bool = False,
    ) -> None:
        """Takes the state from a base, or from a restored step.

        A run that is being saved stays where it is: most steps that it restores are looked at, and
        not gone on from.
        """
        copy = self._state
        if is_restored and self._follows_saves and copy is not None and not copy.is_lost:
            return
        self._follows_saves = not is_restored
        if copy is None or copy.structure is not structure or copy.update is not update:
            copy = self._state = self._made(structure, update)
        self._told = begun.own
        if copy is not None:
            copy.is_lost = False
            self._thread.submit(copy.load, begun)

    def follow(self, step: ShadowStep) -> Proof | None:
        """Folds a step, in the background; None where there is no shadow."""
        copy = self._state
        if copy is None or copy.is_lost:
            return None
        self._told, self._follows_saves = step.own, True
        return Proof(self, step.own, lambda change: self._thread.submit(copy.follow, step, change))

    def is_beyond(self, position: Position | None) -> bool:
        """True if it was told to follow a step after another one, from which it cannot go back."""
        copy = self._state
        return copy is not None and not copy.is_lost and self._told is not position

    @property
    def has_room_for_copy(self) -> bool:
        """True if there is a shadow, and room for it once more."""
        copy = self._state
        return copy is not None and not copy.is_lost and copy.has_room_for_copy

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
        """Follows no more, and says so."""
        if self._state is not None:
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
        found = fold_of(structure, update, is_kept=True)
        if isinstance(found, str):
            raise ShadowFileError(found or "the update cannot be computed from the shadow")
        assert self._place is not None
        journal = Journal(self._place, structure, update, found)
        journal.open()
        most_bytes = self._most(journal)
        copy = ShadowState(structure, update, found, journal, most_bytes, is_there=True)
        try:
            state = copy.resume()
        except BaseException:
            copy.close()
            raise
        self._refused, self._state = None, copy
        return state

    def stand_at(self, position: Position) -> None:
        """Goes on from the state that was recovered."""
        self._told = position
        if self._state is not None:
            self._state.position = position

    def close(self) -> None:
        """Lets go of the file, which stays; follows no more until the next base."""
        copy = self._state
        if copy is not None and copy.journal is not None:
            self._state = None
            self._thread.submit(copy.close).result()

    def _made(self, structure: Structure, update: ExportedUpdate) -> ShadowState | None:
        if self._most_bytes == 0 or self._refused == (structure, update):
            return None
        self.close()
        self._refused = (structure, update)
        place, found = self._place, fold_of(structure, update, is_kept=self._place is not None)
        # Who wants to recover from it has to know that there is none.
        level, recovers = logging.INFO, ""
        if place is not None:
            level, recovers = logging.WARNING, ", and nothing can be recovered from memory"
        if isinstance(found, str):
            if found:
                _log.log(level, "No host copy of the state follows%s: %s.", recovers, found)
            return None
        journal = None if place is None else Journal(place, structure, update, found)
        size_bytes = size_of(found, journal)
        most_bytes = self._most(journal)
        if size_bytes > most_bytes:
            _log.log(
                level,
                "Deltas are checked by sample%s: a copy of the state in host memory takes %d MiB, "
                "and may take %d: Shadow(bytes=...).",
                *(recovers, size_bytes >> 20, most_bytes >> 20),
            )
            return None
        self._refused = None
        return ShadowState(structure, update, found, journal, most_bytes)

    def _most(self, journal: Journal | None) -> int:
        """Host memory that may be taken; what the file has already is free to it."""
        if self._most_bytes is not None:
            return self._most_bytes
        return (free_bytes() + (journal.file.found_bytes if journal else 0)) // 2


class Proof:
    """The comparison of all of a step with the trained state, by the shadow that follows it.

    One thread begins it, waits for it and ends it: the one that moves the run's steps on.
    """

    def __init__(
        self, shadow: ShadowThread, own: Position, follow: Callable[[StepChange], _Sums]
    ) -> None:
        self._shadow, self._own, self._follow = shadow, own, follow
        self._found: _Sums | None = None
        self._copies: tuple[Mapping[int, Blocks], Future[Copies]] | None = None

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
                self._copies = None

    def sums(self) -> dict[int, int] | None:
        """This process's contribution to the fingerprints of the leaves that are compared; waits.

        None if the shadow is at another step.
        """
        return None if self._found is None else self._found.result()

    def end(self) -> None:
        """Tells who waits for copies that there are none, if the step was not followed."""
        if self._copies is not None:
            self._copies[1].set_result(None)

    def is_trusted(self) -> bool:
        """False if a difference may be the arithmetic of the host: on any platform but the CPU.

        Then the shadow is given up.
        """
        if update_program.platform() == "cpu":
            return True
        self._shadow.give_up("the host computes other bits than the devices")
        return False
