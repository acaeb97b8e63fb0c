"""Bases that the training loop does not write: a saved delta becomes one, from the shadow.

When a lineage is long enough, the shadow's memory is copied once, behind the fold of a step that is
saved as a delta. As soon as that save is committed, a thread writes a base beside the delta; and a
later save, in the background and before it is committed, puts it into the delta's place
(:mod:`~adacheck_jax.store.compaction.in_place`). At that moment an Orbax manager deletes nothing:
it deletes steps when a save is committed, and begins no other save meanwhile. Until then, and if
anything fails or the process ends, the step is the delta that it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.save.checks.replica import Position
from adacheck_jax.save.checks.shadow import Shadow
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.compaction.in_place import Prepared
from adacheck_jax.store.steps.lineage import Lineage

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A step that is to become a base.

    Attributes:
        copies: gives its elements.
        written: gives the base beside it; None before its save is committed.
        placed: gives seconds that the base took, and its number among the deltas of its line, once
            it is in its place.
    """

    copies: Future[Mapping[int, Blocks] | None]
    written: Future[_Written] | None = None
    placed: Future[tuple[float, int]] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Written:
    """A base that waits for its place, the seconds that it took, and what removes it."""

    base: Prepared
    seconds: float
    exit: ExitStack


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
        if self._pending is not None and self._pending.written is None:
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
        if pending.written is None:
            if failed or (pending.copies.done() and pending.copies.result() is None):
                self._pending, self._has_failed = None, True
            elif (lineage := lineage_of()) is not None:
                pending.written = self._thread.submit(_write, lineage, pending.copies)
        elif pending.placed.done() or (pending.written.done() and pending.written.exception()):
            self._pending = None
            try:
                pending.written.result()
                seconds, self.newest_depth = pending.placed.result()
                return seconds
            except (AdaCheckError, OSError) as error:
                self._has_failed = True
                _log.info("The next base is written by the loop: %s", error)
        return None

    def put(self) -> None:
        """Puts the base that is written, if one is, into its place; while no step is deleted."""
        pending = self._pending
        if pending is None or pending.placed.done():
            return
        if (written := pending.written) is not None and written.done() and not written.exception():
            try:
                pending.placed.set_result(_put(written.result()))
            except Exception as error:
                pending.placed.set_exception(error)  # told by :meth:`go_on`

    def close(self) -> None:
        """Waits for the base that is being written, and puts it into its place."""
        if self._pending is not None and self._pending.written is not None:
            self._pending.written.exception()
            self.put()


def _write(lineage: Lineage, copies: Future[Mapping[int, Blocks] | None]) -> _Written:
    begin_s, blocks = time.monotonic(), copies.result()
    if blocks is None:
        raise AdaCheckError("the copy of the state went on to another step")
    exit = ExitStack()
    base = exit.enter_context(in_place.prepared(lineage, blocks, read_back=False))
    return _Written(base, time.monotonic() - begin_s, exit)


def _put(written: _Written) -> tuple[float, int]:
    begin_s, manifest = time.monotonic(), written.base.manifest
    with written.exit:
        written.base.put()
    seconds = written.seconds + time.monotonic() - begin_s
    _log.info("step %d: a base now (%.3g s in the background)", manifest.step, seconds)
    return seconds, manifest.depth
