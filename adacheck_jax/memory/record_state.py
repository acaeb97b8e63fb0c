"""A state and the steps since it, kept where the host's arithmetic cannot move the state on."""

# Threads: as of ``shadow_state``.

from __future__ import annotations

import logging
from collections.abc import Sequence

from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import StepChange, StepFile
from adacheck_jax.memory.shadow_state import NOT_SENT, Followed, ShadowStep
from adacheck_jax.update.elements.host_fold import UnfitError

_log = logging.getLogger(__name__)


class RecordState(Followed):
    """The steps of a run, stored as they were received; it compares none of them."""

    journal: RecordLog | None
    told_until = "No later step can be recovered from memory, until the next base"

    @property
    def _log(self) -> RecordLog:
        """The file.

        Raises:
            ShadowFileError: there is none.
        """
        if self.journal is None:
            raise ShadowFileError("the state lies in no file")
        return self.journal

    def base_reason(self, ahead: int) -> str:
        """See :class:`Followed`."""
        is_filled = self._log.file.is_open and self._log.is_filled(ahead)
        return "memory for the records since the last base is used up" if is_filled else ""

    def _prepare(self) -> None:
        self._make_file()

    def _load(self, begun: ShadowStep) -> None:
        log = self._log
        # Until all of it is here the file keeps the step that it has.
        sums, blocks = begun.sums(), {i: begun.blocks[i] for i in begun.blocks}
        self._drop(begun.lost(), NOT_SENT)
        log.lift()
        self._folded = begun.number, log.put_state(blocks)  # which holders of copies compare
        log.begin(begun.number, (), sums, bad=self._bad)

    def _move(self, change: StepChange, step: ShadowStep) -> Sequence[int] | None:
        if self._peers is not None and not self._is_gated:
            raise ShadowFileError("another process does not follow")
        replayed = self.structure.computed - self.update.stored
        if self._peers is not None and change.updates and replayed.intersection(change.stored):
            raise UnfitError("a process stores what it found wrong, which others may not know")
        if self._log.stores_all(change):
            self._load(step)
        else:
            self._drop(step.lost(), NOT_SENT)
            self._folded = step.number, self._log.append(change, step.blocks)
            self._log.begin(step.number, (), step.sums(), bad=self._bad)
        return self._pass(step, ()) if self._is_gated else None

    def _go_alone(self, journal: StepFile, reason: str) -> None:
        _log.warning("%s: %s.", self.told_until, reason)  # all files have the last that passed

    def _proof(self, step: ShadowStep, change: StepChange) -> dict[int, int] | None:
        return None  # nothing was computed
