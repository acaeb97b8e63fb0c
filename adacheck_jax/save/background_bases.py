"""Bases that the training loop does not write: a saved delta becomes one, from the shadow.

When a lineage is long enough, the shadow's memory is copied once, after the fold of a step that is
saved as a delta. As soon as that save is committed, a thread writes a base beside the delta; and a
later save, in the background and before it is committed, puts it into the delta's place
(:mod:`~adacheck_jax.store.compaction.in_place`). At that moment an Orbax manager deletes nothing:
it deletes steps when a save is committed, and begins no other save meanwhile. Until then, and if
anything fails or the process ends, the step is the delta that it was.

Several processes write one base together, each the part of the state that its shadow has. They
begin at the same save; process 0 puts the base into its place, and tells the others with a later
save. All decisions follow from facts that all were told.
"""

# Threads: take, go_on, learn and restart are called by saves, which are one at a time; put by
# Orbax's writing thread; one thread of this class writes. ``_lock`` guards who has a pending base:
# the thread that puts it into its place, or the save that drops it. Nothing is called under it.

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import jax

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.memory.shadow import Copies, ShadowThread
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.processes.meetings import ALONE, Exchange
from adacheck_jax.save.one_save import Save
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.compaction.in_place import Prepared
from adacheck_jax.store.compaction.new_base import Team
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.store.steps import lookup
from adacheck_jax.store.steps.lineage import Lineage

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A step that is to become a base.

    Attributes:
        save: its save, as a delta.
        copies: gives its elements, those that this process has.
        earlier_sums: this process's contributions to the fingerprints of the base before; None if
            they are not known.
        written: gives the base beside it, and None in other processes than 0; None itself before
            its save is committed.
        placed: gives seconds that the base took, and its number among the deltas of its line. It
            runs while the base is put into its place, and is cancelled if none is wanted any more.
    """

    save: Save
    copies: Future[Copies]
    earlier_sums: Mapping[int, int] | None
    exchange: Exchange
    written: Future[_Written | None] | None = None
    placed: Future[tuple[float, int]] = field(default_factory=Future)

    @property
    def team(self) -> Team:
        """The processes that write it."""
        return Team(
            self.exchange.index,
            lambda topic, own, judge: self.exchange.agree(topic, own, judge, self.placed.cancelled),
        )


@dataclass(frozen=True, slots=True)
class _Written:
    """A base that waits for its place, the seconds that it took, and what removes it."""

    base: Prepared
    seconds: float
    exit: ExitStack


class BackgroundBases:
    """Makes bases of saved deltas, one at a time.

    The policy ``keep`` keeps a step of which one is made.

    Attributes:
        known: what all processes agreed on.
    """

    def __init__(self, shadow: ShadowThread, keep: KeepLineage | None) -> None:
        self._shadow, self._keep = shadow, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adacheck_base")
        self._lock = threading.Lock()
        self._pending: _Pending | None = None
        self._past = ALONE
        self._has_failed = False
        self._placed = (0.0, 0)
        self.known = BackgroundFacts()

    @property
    def own(self) -> BackgroundFacts:
        """Facts as this process knows them, to be told with the next save."""
        seconds, depth = self._placed
        return BackgroundFacts(
            self._shadow.has_room_for_copy and not self._has_failed, depth, seconds
        )

    def restart(self, depth: int = 0) -> None:
        """Notes that a line begins: at a base of the loop's, or after a step that was restored."""
        self._has_failed, self._placed = False, (0.0, depth)
        self.known = BackgroundFacts(newest_depth=depth)
        self._drop()
        self._hold(None)

    def take(
        self, save: Save, others: Mapping[int, Blocks], earlier_sums: Mapping[int, int] | None
    ) -> None:
        """Copies the state of a step as soon as the shadow is there, unless one is in work.

        The shadow does not hold the ``others``. The step's proof has not begun yet.
        """
        if self._pending is not None:
            return
        self._hold(save.number)
        proof = save.own.proof
        copies = Future[Copies]() if proof is None else proof.copied(others)
        if proof is None:
            copies.set_result(None)
        beside = save.attempt.exchange.beside("base")
        self._pending = _Pending(save, copies, earlier_sums, beside)

    def go_on(self) -> None:
        """Begins to write the base once process 0 has the lineage of its step, if that is saved."""
        pending = self._pending
        if pending is None:
            return
        if pending.written is None:
            is_lost = pending.copies.done() and pending.copies.result() is None
            if pending.save.error is not None or (is_lost and pending.exchange.is_alone):
                self._fail("its step was not saved, or the copy of its state is lost")
                return
            is_first = not pending.exchange.index
            lineage = pending.save.lineage() if is_first else None
            if lineage is not None and not lineage.exists():
                lineage = None
                with contextlib.suppress(AdaCheckError):  # deleted; else linked otherwise by now
                    lineage = lookup.resolve(pending.save.directory)
            if lineage is not None or not is_first:
                pending.written = self._thread.submit(self._write, pending, lineage)
        elif pending.placed.done() or (pending.written.done() and pending.written.exception()):
            try:
                pending.written.result()
                self._placed = pending.placed.result()
            except (AdaCheckError, OSError) as error:
                self._fail(str(error))
            except Exception:  # a mistake in here costs the run nothing but this base
                _log.exception("A base could not be made in the background.")
                self._fail("see the error before")

    def learn(self, facts: BackgroundFacts) -> Save | None:
        """Learns what all processes know, at the same save; gives that of a new base, once."""
        newest_depth, self.known = self.known.newest_depth, facts
        if facts.newest_depth > newest_depth or not facts.are_possible:
            self._hold(None)
        if facts.newest_depth > newest_depth:
            pending, self._pending = self._pending, None
            return pending and pending.save
        self.known = dataclasses.replace(facts, newest_depth=newest_depth)
        if not facts.are_possible and jax.process_count() > 1:
            self._drop()
        return None

    def put(self) -> None:
        """Puts the base that is written, if one is, into its place; while no step is deleted."""
        with self._lock:
            pending = self._pending
            if pending is None or pending.placed.running() or pending.placed.done():
                return
            if (written := pending.written) is None or not written.done() or written.exception():
                return
            if (ready := written.result()) is None:
                return
            pending.placed.set_running_or_notify_cancel()
        try:
            pending.placed.set_result(_put(ready))
        except Exception as error:
            pending.placed.set_exception(error)  # told by :meth:`go_on`

    def _hold(self, number: int | None) -> None:
        """Has the policy keep the step with a manager's number; None for none any more.

        All processes call this at the same saves.
        """
        if self._keep is not None:
            self._keep.hold(self, number)

    def close(self) -> None:
        """Waits for the base that is being written, and puts it into its place."""
        self._hold(None)
        pending = self._pending
        if pending is None or pending.written is None:
            return
        if pending.exchange.index:
            self._drop()  # who has written its part is not waited for
        else:
            pending.written.exception()
            self.put()

    def _fail(self, reason: str) -> None:
        """No other base is made before the loop has written one."""
        self._has_failed = True
        _log.info("The next base is written by the loop: %s", reason)
        self._drop()

    def _drop(self) -> None:
        """Lets go of the base that is in work, unless it is about to be in its place."""
        with self._lock:
            pending, self._pending = self._pending, None
            if pending is None or not pending.placed.cancel():
                return
        if pending.written is not None:
            pending.written.add_done_callback(_removed)
        elif not pending.exchange.index:
            pending.exchange.fail(AdaCheckError("the base is not wanted any more"))

    def _write(self, pending: _Pending, lineage: Lineage | None) -> _Written | None:
        """Writes this process's part of the base; process 0 makes the base of the parts of all."""
        begin_s, exit = time.monotonic(), ExitStack()
        sums, team = pending.earlier_sums, pending.team
        try:
            if (blocks := pending.copies.result()) is None:
                raise AdaCheckError("the copy of the state went on to another step")
            if lineage is None:
                in_place.contribute(pending.save.directory, blocks, team, sums or {})
                return None
            prepared = in_place.prepared(lineage, blocks, team, sums)
            base = exit.enter_context(prepared)
        except Exception as error:
            pending.exchange.fail(error)  # who waits for this part is told
            raise
        self._past.forget()  # all are past it
        self._past = pending.exchange
        return _Written(base, time.monotonic() - begin_s, exit)


def _removed(written: Future[_Written | None]) -> None:
    """Removes what was written of a base that is not wanted any more."""
    if written.exception() is None and (ready := written.result()) is not None:
        ready.exit.close()


def _put(written: _Written) -> tuple[float, int]:
    begin_s, manifest = time.monotonic(), written.base.manifest
    with written.exit:
        written.base.put()
    seconds = written.seconds + time.monotonic() - begin_s
    _log.info("step %d: a base now (%.3g s in the background)", manifest.step, seconds)
    return seconds, manifest.depth
