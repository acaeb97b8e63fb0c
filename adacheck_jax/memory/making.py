"""Copies of a state in host memory, made as update and memory allow, or opened from a file."""

# Threads: as of ``shadow``, whose callers make them.

from __future__ import annotations

import dataclasses
import logging

import jax

from adacheck_jax.memory import holdings
from adacheck_jax.memory.files.journal import Journal
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.shadow_file import ShadowFileError, peek
from adacheck_jax.memory.files.step_file import (
    FilePlace,
    FoundFile,
    expect_alike,
    remove_others,
    state_header,
)
from adacheck_jax.memory.free_memory import free_bytes
from adacheck_jax.memory.holdings import Held
from adacheck_jax.memory.peers import Peers
from adacheck_jax.memory.record_state import RecordState
from adacheck_jax.memory.shadow_state import Followed, ShadowState, fold_of, size_of
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import UnfitError

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory that copies of a state may take.

    Attributes:
        most_bytes: bytes of it; None for half of what is free, shared by a machine's processes.
        place: place of the file that they lie in; None for memory of this process.
        peers: all processes, if several have such files.
    """

    most_bytes: int | None
    place: FilePlace | None
    peers: Peers | None

    def made(
        self, structure: Structure, update: ExportedUpdate, *, keeps_records: bool
    ) -> Followed | None:
        """A copy of the states of a structure; None where none can be had, which is told."""
        place, peers = self.place, self.peers
        # Who has not set a limit has to know that there is too little memory, and who wants to
        # recover from it that there is none.
        level, recovers = logging.INFO if self.most_bytes is not None else logging.WARNING, ""
        if place is not None:
            level, recovers = logging.WARNING, ", and nothing can be recovered from memory"
        if keeps_records and place is not None:
            return self._made_log(place, structure, update)
        size_bytes = wanted_bytes = most_bytes = 0
        without = None if peers is None else dataclasses.replace(peers, copies=0)
        for each in (peers, without) if peers is not None and peers.copies else (peers,):
            found = fold_of(structure, update, peers=each, is_kept=place is not None)
            if isinstance(found, str):
                if found and place is not None:
                    return self._made_log(place, structure, update)
                if found:
                    _log.info("No host copy of the state follows: %s.", found)
                return None
            fold, held = found
            journal = None if place is None else Journal(place, structure, update, fold, held)
            size_bytes, most_bytes = size_of(fold, journal), self.may_take()
            if size_bytes > most_bytes and place is not None and remove_others(place):
                most_bytes = self.may_take()  # what was recovered from took it
            if size_bytes <= most_bytes:
                _log.info(
                    "Deltas are checked in full: a copy of the state in host memory takes %d MiB, "
                    "and may take %d.",
                    *(-(-size_bytes >> 20), most_bytes >> 20),
                )
                self._tell_copies(structure, update, held, wanted_bytes, most_bytes)
                return ShadowState(structure, update, fold, held, journal, most_bytes, peers=peers)
            wanted_bytes = max(size_bytes, wanted_bytes)
        _log.log(
            level,
            "Deltas are checked by sample%s: a copy of the state in host memory takes %d MiB, "
            "and may take %d: Shadow(bytes=...).",
            *(recovers, -(-size_bytes >> 20), most_bytes >> 20),
        )
        return None

    def _made_log(
        self, place: FilePlace, structure: Structure, update: ExportedUpdate
    ) -> RecordState | None:
        """A state and the records since it, where the host cannot compute what follows."""
        peers, held = self.peers, holdings.whole(structure)
        if not update.program:
            return None
        try:
            if peers is not None:
                args = structure, update.pieces, peers.domains, peers.copies
                held = holdings.held_of(*args, is_whole=True)
        except UnfitError as error:
            _log.warning("Nothing can be recovered from memory: %s.", error)
            return None
        log = RecordLog(place, structure, update, held, self.may_take())
        if log.file.size_bytes < log.least_bytes and remove_others(place):
            log = RecordLog(place, structure, update, held, self.may_take())
        if log.file.size_bytes < log.least_bytes:
            _log.warning(
                "Nothing can be recovered from memory: a state and the records of some steps take "
                "%d MiB of host memory, and may take %d: Shadow(bytes=...).",
                *(-(-log.least_bytes >> 20), log.file.size_bytes >> 20),
            )
            return None
        self._tell_copies(structure, update, held, 0, 0)
        return RecordState(structure, update, held, log, peers=peers)

    def _tell_copies(
        self,
        structure: Structure,
        update: ExportedUpdate,
        held: Held,
        wanted_bytes: int,
        most_bytes: int,
    ) -> None:
        """Tells what would not survive the loss of a failure domain."""
        peers = self.peers
        if peers is None or not peers.copies:
            return
        if wanted_bytes and not held.copies:
            _log.warning(
                "No copies of other processes' state are kept in memory: with them it takes %d "
                "MiB, and may take %d: Shadow(bytes=...).",
                *(-(-wanted_bytes >> 20), most_bytes >> 20),
            )
        args = structure, update.pieces, peers.domains, peers.copies
        parts = holdings.parts_of(*args, is_whole=True)
        alone_bytes = holdings.unprotected_bytes(structure, parts, peers.copies)
        if alone_bytes and jax.process_index() == 0:
            _log.warning(
                "Too few failure domains hold %.1f MiB of %.1f of the state for %d copies in the "
                "memory of others, and it cannot be sent: if one is lost, storage serves.",
                alone_bytes / 2**20,
                sum(each.nbytes for each in structure.leaves) / 2**20,
                peers.copies,
            )

    def may_take(self) -> int:
        """Host memory that may be taken; what the file has already is free to it."""
        if self.most_bytes is not None:
            return self.most_bytes
        return (free_bytes() + (0 if self.place is None else self.place.found_bytes[1])) // 2


def opened(found: FoundFile, structure: Structure, update: ExportedUpdate) -> Journal | RecordLog:
    """Takes a file that another process has left.

    Raises:
        ShadowFileError: there is none that can be taken; the message says why.
    """
    held = found.held or holdings.whole(structure)
    if found.kind not in ("", Journal.kind, RecordLog.kind):
        raise ShadowFileError(
            f"{found.place.path}: expected a file of a kind that is known, found {found.kind!r}"
        )
    if found.kind == RecordLog.kind:
        file = RecordLog(found.place, structure, update, held, found.place.found_bytes[0])
    else:
        # Of another update it would not be known why there is no fold.
        own = state_header(structure, update)
        expect_alike(found.place.path, peek(found.place.path) or own, own)
        fold = fold_of(structure, update, held, is_kept=True)
        if isinstance(fold, str):
            raise ShadowFileError(fold or "the update cannot be computed from the shadow")
        file = Journal(found.place, structure, update, *fold)
    file.open()
    return file
