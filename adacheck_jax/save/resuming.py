"""Goes on from a step that was restored, or recovered from memory: the next save builds on it."""

# Threads: all of it runs on the thread that restores or recovers. The ``lock`` is the saver's: what
# others read is changed under it alone.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.trees import PyTree
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.memory import recovered, together
from adacheck_jax.memory.files.step_file import FoundFile
from adacheck_jax.memory.recovered import RecordReplay, Recovered, StoredStep
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.memory.together import Deliver
from adacheck_jax.processes.consent import Consent
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.save import copies as host_copies
from adacheck_jax.save.line.parents import Parent
from adacheck_jax.save.line.planner import Planner
from adacheck_jax.save.pending import KnownStep
from adacheck_jax.save.staging import Stager
from adacheck_jax.state.snapshot import Snapshot
from adacheck_jax.store.steps.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step of a line in storage; no lineage if it cannot be built on.

    The ``number`` is that in the name of its directory.
    """

    step: int
    number: int
    lineage: Lineage | None


class Resumer:
    """Goes on from the restored and recovered steps of one training run.

    Args:
        delta: kind of the deltas that the next saves may be; None where each is a base.
        lock: held through each save and each record of a step.
        moved: called under the lock when the next save has another parent.
    """

    def __init__(
        self,
        planner: Planner,
        stager: Stager,
        shadow: ShadowThread,
        delta: str | None,
        lock: threading.Lock,
        moved: Callable[[Mapping[str, float]], None],
    ) -> None:
        self._planner, self._stager, self._shadow = planner, stager, shadow
        self._delta, self._lock, self._moved = delta, lock, moved

    def follow(
        self,
        restored: Lineage,
        number: int | None,
        leaves: Sequence[Any],
        state: PyTree,
        measured: Mapping[str, float],
        consent: Consent | None,
        *,
        has_shadow: bool = False,
    ) -> None:
        """Makes a restored step the parent of the next save.

        The next state is compared with its ``leaves``; a leaf that was left out is None. The caller
        gets the ``state``. ``measured`` are seconds by the names of costs; ``has_shadow``
        says that the state is the shadow's already.

        The step saved last, as it is restored to be evaluated, is the parent already: all stays.
        """
        update = restored.base.update
        needed = range(len(leaves)) if update is None else (*update.explained, *update.consumed)
        if any(leaves[i] is None for i in needed):
            return  # what was left out will be made anew, and no update leads there
        saved, snapshot = restored.manifest, None
        if self._delta is not None:
            snapshot = self._planner.snapshot_of_restored(restored, state)
        if snapshot is not None and not has_shadow:
            with self._lock:
                if self._planner.line.stay(restored, snapshot.structure):
                    self._moved(measured)
                    return
        specs, copies = self._copied(restored, leaves, snapshot)
        known = KnownStep(saved.step, saved.depth, specs, copies, restored)
        if has_shadow:
            self._shadow.stand_at(known)
        if snapshot is not None:
            sums, begun = dict(enumerate(saved.fingerprints)), None
            if jax.process_index():  # what all contribute adds up to the fingerprints
                sums = dict.fromkeys(sums, 0)
            if not (has_shadow or snapshot.structure.on_accelerator):
                begun = self._stager.restored(snapshot, known, sums, consent)
            self._stager.prepare_next(known, snapshot, begun, is_restored=True)
        parent = Parent(restored.entries[-1].holder, number, known, None, restored)
        with self._lock:
            quarantined = [specs[i].path for i in saved.caution.distrusted]
            self._planner.quarantine.learn(saved.caution.reason, quarantined)
            self._planner.line.follow(parent)
            self._moved(measured)
        xla_call.begin()

    def _copied(
        self, restored: Lineage, leaves: Sequence[Any], snapshot: Snapshot | None
    ) -> tuple[tuple[Leaf, ...], Mapping[int, Blocks]]:
        """The leaves of a restored state in their boxes, and copies for the next delta.

        There is no snapshot where the next save cannot be a delta of an update.
        """
        specs, kept, update = restored.leaves, None, restored.base.update
        if self._delta is None:
            return specs, host_copies.NOTHING
        if snapshot is not None:
            specs = host_copies.cut_as_restored(specs, snapshot)
        if self._delta != "bits" and update is not None and not restored.problem:
            quarantined = restored.manifest.caution.distrusted
            replayed = update.explained.difference(update.passed, quarantined)
            kept = frozenset(range(len(leaves))) - replayed - frozenset(update.consumed)
        return specs, host_copies.copies_of_restored(specs, leaves, kept)

    def recover(
        self,
        abstract_state: PyTree,
        newest: Newest | None,
        files: Sequence[FoundFile],
        exchange: Exchange,
        deliver: Deliver,
        replay: RecordReplay,
        consent: Consent | None,
    ) -> Recovered:
        """Takes the state that other processes have left in files of memory, and goes on from it.

        Every fingerprint was compared. A process alone goes on in the file that it finds. Else all
        take their parts of the ``files`` together; the next run has files of its own, beside which
        these stay until it has passed its gate. Then it is collective. ``replay`` brings a state of
        the files to its step.

        Raises:
            ShadowFileError: there is none that can be taken; the message says why.
            RecorderError: the recorder cannot be tied to the state.
            AdaCheckError: another process failed.
        """
        stored = None
        if newest is not None:
            sums = newest.lineage and newest.lineage.manifest.fingerprints
            stored = StoredStep(newest.step, sums)
        args = self._planner.snapshots, self._planner.updates, abstract_state, stored
        is_alone = jax.process_count() == 1 and not any(each.place.run for each in files)
        if is_alone:
            try:
                found = recovered.state_from(self._shadow, *args, replay)
            except BaseException:
                self._shadow.close()
                raise
        else:
            found = together.state_of(*args, files, exchange, deliver, replay)
            if found.has_records:  # otherwise this run finds that out by itself
                self._shadow.keep_records()
        if newest is None or newest.lineage is None or newest.step != found.step:
            self.forget()
        else:
            self.follow(
                *(newest.lineage, newest.number, found.leaves, found.state, {}, consent),
                has_shadow=is_alone,
            )
        return found

    def forget(self) -> None:
        """Makes the next save a base: what was restored is no step that another can build on."""
        with self._lock:
            self._planner.line.forget()
            self._moved({})
