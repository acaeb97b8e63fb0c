"""Bases that the training loop does not write: a saved delta becomes one, from the shadow.

When a lineage is long enough, the shadow's memory is copied once, behind the fold of a step that is
saved as a delta. As soon as that save is committed, a thread turns the delta into a base in its
place (:mod:`~adacheck_jax.store.compaction.in_place`). Until then, and if it fails or the process
ends, the step is the delta that it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.save.checks.replica import Position
from adacheck_jax.save.checks.shadow import Shadow
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps.lineage import Lineage

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A step that is to become a base."""

    copies: Future[Mapping[int, Blocks] | None]
    writing: Future[tuple[float, int]] | None = None


class BackgroundBases:
    """Makes bases of saved deltas, one at a time.

    Args:
        shadow: the copy of the state that they are made of.

    Attributes:
        newest_depth: number of the newest of them among the deltas of its line; 0 for none.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_base")
        self._pending: _Pending | None = None
        self._has_failed = False
        self.newest_depth = 0

    @property
    def are_possible(self) -> bool:
        """True if the next delta could become a base."""
        return self._shadow.has_room_for_copy and not self._has_failed

    def restart(self) -> None:
        """Notes that a line begins: the loop has written a base, or another step was restored."""
        self._has_failed, self.newest_depth = False, 0
        if self._pending is not None and self._pending.writing is None:
            self._pending = None

    def take(self, position: Position, others: Mapping[int, Blocks]) -> bool:
        """Copies the state of a step as soon as the shadow is there; False if one is in work.

        Args:
            position: the step, which the shadow was told to follow.
            others: leaves of its state that the shadow does not hold.
        """
        if self._pending is not None:
            return False
        self._pending = _Pending(self._shadow.copied(position, others))
        return True

    def go_on(self, lineage_of: Callable[[], Lineage | None], *, failed: bool) -> float | None:
        """Begins to write the base once its step is committed.

        Args:
            lineage_of: gives the lineage of the step that was taken, None before it is committed.
            failed: True if its save failed.

        Returns:
            Seconds that a base took which is complete; told once.
        """
        pending = self._pending
        if pending is None:
            return None
        if pending.writing is None:
            if failed or (pending.copies.done() and pending.copies.result() is None):
                self._pending, self._has_failed = None, True
            elif (lineage := lineage_of()) is not None:
                pending.writing = self._thread.submit(_write, lineage, pending.copies)
        elif pending.writing.done():
            self._pending = None
            try:
                seconds, self.newest_depth = pending.writing.result()
                return seconds
            except (AdaCheckError, OSError) as error:
                self._has_failed = True
                _log.info("The next base is written by the loop: %s", error)
        return None

    def wait(self) -> None:
        """Waits for a base that is being written."""
        if self._pending is not None and self._pending.writing is not None:
            self._pending.writing.exception()


def _write(lineage: Lineage, copies: Future[Mapping[int, Blocks] | None]) -> tuple[float, int]:
    """Seconds that it took, and the depth of the base."""
    begin_s, blocks = time.monotonic(), copies.result()
    if blocks is None:
        raise AdaCheckError("the copy of the state went on to another step")
    manifest = in_place.compact(lineage, blocks, read_back=False)
    seconds = time.monotonic() - begin_s
    _log.info("step %d: a base now (%.3g s in the background)", lineage.manifest.step, seconds)
    return seconds, manifest.depth
