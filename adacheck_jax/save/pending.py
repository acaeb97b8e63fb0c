"""One step of the line, as it lies in memory: on its way to the disk, or restored.

A step that was appended to the line goes through the phases of :data:`MOVES`, moved on by the
line's worker alone, in the order of the steps:

- *staged*: its state may be donated; the plan may be speculative.
- *settled*: the update counters are known, so the plan holds, and what it stores is on the host.
- *packed*: the bytes of a delta are made; spare leaves that replay got wrong are among them.
- *proved*: samples and the shadow agree, and no array changed while it was packed.
- *failed*: it cannot be saved; the reason is raised for whoever waits for a later phase.

Threads: whoever needs a phase waits for it (:meth:`Pending.settled`, :meth:`Pending.packed`,
:meth:`Pending.verify`); the fields that say how the comparisons went are the worker's until the
step is proved. The fields of a :class:`KnownStep` are the caller's. Three locks: one is held while
the step is given to the worker, after the step before it; one while the packed bytes change hands;
one while a first caller adds up the fingerprints. Nothing else is called under them
but the wait for the devices.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import enum
import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.device import jax_settings
from adacheck_jax.device.loops import programs
from adacheck_jax.device.transfer import Joined
from adacheck_jax.errors import AdaCheckError, MismatchError, ReplayError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.memory.shadow import Proof
from adacheck_jax.plan import situation
from adacheck_jax.plan.decision import shown
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import Counts
from adacheck_jax.proof.checker import Baseline, Comparison
from adacheck_jax.save import copies as host_copies
from adacheck_jax.save.copies import NOTHING, HostCopies
from adacheck_jax.state.exported_update import NOT_YET
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store import equality, host_memory
from adacheck_jax.store.delta_writer import DeltaWriter, Packed
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.update.recorder_state import count_of

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class KnownStep:
    """A step that the next one may follow, as this process has it in memory; a restored one.

    Attributes:
        depth: number of deltas since the base that began its line.
        leaves: every leaf, in the boxes that this process has of it.
        kept: copies of the leaves that the next delta may be stored as differences from.
        lineage: a restored step, as it was found on the disk.
        baseline: what the check of the next step needs of its state; None if there is nothing.
        preparing: gives the baseline where another thread makes it.
    """

    step: int
    depth: int
    leaves: tuple[Leaf, ...]
    kept: Mapping[int, Blocks]
    lineage: Lineage | None = None
    baseline: Baseline | None = None
    preparing: Future[Baseline | None] | None = None

    def wait(self) -> None:
        """Waits until the baseline is there."""
        if (preparing := self.preparing) is not None:
            try:
                self.baseline = preparing.result()
            except Exception:  # costs a base, and no step
                _log.exception("The check of the next save cannot be prepared; it will be a base.")
            self.preparing = None

    def forget(self) -> None:
        """Lets go of what is kept of its state, since another step is followed."""
        self.kept, self.baseline = NOTHING, None

    def counts(self) -> Counts:
        """Update counters of the state; waits for them."""
        return self.lineage.manifest.counts if self.lineage is not None else ()

    def sums(self) -> Mapping[int, int]:
        """This process's contribution to the fingerprint of each leaf, if known; may wait."""
        if self.lineage is None or jax.process_count() > 1:
            return {}
        return dict(enumerate(self.lineage.manifest.fingerprints))


class Phase(enum.Enum):
    """State of a step on its way."""

    STAGED = enum.auto()
    SETTLED = enum.auto()
    PACKED = enum.auto()
    PROVED = enum.auto()
    FAILED = enum.auto()


MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.STAGED: frozenset({Phase.SETTLED, Phase.FAILED}),
    Phase.SETTLED: frozenset({Phase.PACKED, Phase.FAILED}),
    Phase.PACKED: frozenset({Phase.PROVED, Phase.FAILED}),
    Phase.PROVED: frozenset(),
    Phase.FAILED: frozenset(),
}
"""The phases that may follow each."""


class Pending(KnownStep):
    """A planned step, with the copies of its state that are written.

    It follows the step ``before``, and is saved ``again`` if it was deferred before.

    Attributes:
        plan: its plan as far as it is known; see :meth:`settled`.
        refused: reason why it cannot be saved, once a check has found one.
        label: name of the step in messages of background checks.
        delta: copies of what a delta stores; None for a base, and once it is packed.
        local: digests of the leaves that every process has for itself, once it is settled.
        dispatched: waits until programs that were dispatched for it have read its state.
        readers: other readers of the state in the background, until they are done.
        fingerprints: the fingerprints of its state, perhaps still being computed.
        compare: comparison of a sample, or a copy, that is made after the save; None without one.
        proof: comparison of the whole replay with the state by the shadow; None without one.
        replayed: this process's contribution to the fingerprints of the shadow, where it followed
            the step and the step is proved. Of several processes no one can tell alone whether they
            are those of the state.
        disproved: the leaves in which they were not, as a process alone or process 0 knows.
    """

    def __init__(
        self,
        plan: SavePlan,
        label: str,
        copies: HostCopies,
        delta: DeltaWriter | None,
        local: Mapping[int, Blocks],
        worker: Executor,
        *,
        before: KnownStep | None,
        again: Pending | None,
    ) -> None:
        self._known = before.kept if before is not None else NOTHING
        before = None if plan.is_base else before
        depth = 0 if before is None else before.depth + 1
        kept = NOTHING if plan.update is NOT_YET else copies.kept  # the worker finds out of what
        super().__init__(plan.step, depth, plan.structure.leaves, kept)
        self.plan, self.label, self.delta = plan, label, delta
        self.fingerprints, self._counters = copies.fingerprints, copies.counters
        self._spare: Mapping[int, Blocks] = copies.spare
        self._copies: HostCopies | None = copies
        self._own, self.local, self.readers = local, dict[int, str](), list[Future[Any]]()
        self.dispatched: Callable[[], None] = lambda: None
        self._viewed, self._looks = frozenset(copies.viewed), dict[int, int]()
        self._handing = threading.Lock()
        self.compare: Comparison | None = None
        self.proof: Proof | None = None
        self.replayed: dict[int, int] | None = None
        self.disproved = frozenset[int]()
        self._before, self._again = before, again
        self._sums: dict[int, int] = {}
        self._packed: Packed | None = None
        self._is_released = False
        self.refused: AdaCheckError | None = None
        self._lock = threading.Lock()
        self._x64 = jax_settings.x64_enabled()  # which the worker does not inherit
        self._worker, self._has_begun, self._begin_lock = worker, False, threading.Lock()
        self.phase = Phase.STAGED
        self._waits: Mapping[Phase, Future[SavePlan]] = {
            each: Future() for each in (Phase.SETTLED, Phase.PACKED, Phase.PROVED)
        }

    @property
    def saved(self) -> frozenset[int]:
        """The spare leaves that are stored, since replay was found to get them wrong."""
        return frozenset(self.plan.spare).intersection(self.plan.stored)

    def counts(self) -> Counts:
        """Update counters of the state; waits for them."""
        if (counts := self.plan.counts) is not None:
            return counts
        self._counters = {i: programs.now(x) for i, x in self._counters.items()}
        return tuple(count_of(self._counters[i]) for i in self.plan.structure.counts)

    def sums(self) -> Mapping[int, int]:
        """This process's contribution to the fingerprint of each leaf; waits for the devices."""
        with self._lock:
            if not self._sums:
                self._sums |= self.fingerprints.sums()
            return self._sums

    def begin(self) -> None:
        """Has the worker move the step on, after the step before it; once."""
        with self._begin_lock:
            if self._has_begun:
                return
            if isinstance(self._before, Pending):
                self._before.begin()
            self._worker.submit(self._advance)  # raises at the end of the process: nobody waits
            self._has_begun = True

    @property
    def is_moving(self) -> bool:
        """True while the worker has it and its comparisons have not ended."""
        return self._has_begun and bool(MOVES[self.phase])

    def seems_planned(self, counts: Counts) -> bool:
        """True if the counters of the state say what was planned; without the worker.

        False where that has moved the step on meanwhile and knows better.
        """
        try:
            self._settled(counts)
        except AdaCheckError:
            return False
        return True

    def settled(self) -> SavePlan:
        """The plan that holds; waits for the update counters, and until copies are on the host.

        Raises:
            AdaCheckError: a recorder made another number of updates than one or none.
        """
        return self._reached(Phase.SETTLED)

    def packed(self) -> Packed:
        """This process's section of a pack, made once; waits for it.

        Raises:
            AdaCheckError: the step was given up.
        """
        self._reached(Phase.PACKED)
        if (packed := self._packed) is None:
            raise AdaCheckError(f"step {self.step} was given up before it was written")
        return packed

    def verify(self) -> SavePlan:
        """As :meth:`settled`, with the spare leaves that are stored, once all was compared.

        Raises:
            MismatchError: arrays changed while they were packed.
            ReplayError: replay gives something else, and the state is gone.
        """
        return self._reached(Phase.PROVED)

    def _reached(self, phase: Phase) -> SavePlan:
        self.begin()
        return self._waits[phase].result()

    def _advance(self) -> None:
        """Moves the step on, to its end."""
        with jax_settings.own(self._x64):
            self._pass_phases()

    def _pass_phases(self) -> None:
        compare, proof, before = self.compare, self.proof, self._before
        try:
            self._bring()
            plan = self._settled()
            self._move(Phase.SETTLED, plan)
            updates, found = plan.decision.updates, None
            if plan.spare:  # only the comparison tells which of them are stored
                found = compare(updates) if compare else {}
                same = frozenset(plan.unchanged).intersection(plan.spare)
                plan = self._with_spare(plan, {*found, *self._changed(same, before)})
            if proof is not None:
                proof.begin(plan)
            self._pack(plan)
            self._move(Phase.PACKED, plan)
            if found is None:
                found = compare(updates) if compare else {}
            if not plan.is_base:
                self.expect_unchanged()
            if jax.process_count() == 1 and (changed := self._changed(plan.unchanged, before)):
                raise changed_alone(self.label, self.step, plan.structure, changed)
            self._prove(plan, found, proof)
            self._move(Phase.PROVED, plan)
        except BaseException as error:
            self._fail(error)
        finally:
            if proof is not None:
                proof.end()
            self.compare = self._before = self._again = self.proof = None
        every = range(len(self.leaves))
        host_memory.return_freed(situation.bytes_of(self.plan.structure, every))

    def _move(self, phase: Phase, plan: SavePlan) -> None:
        assert phase in MOVES[self.phase]
        self.phase, self.plan = phase, plan
        self._waits[phase].set_result(plan)

    def _fail(self, error: BaseException) -> None:
        self.phase, reason = Phase.FAILED, error
        if not isinstance(reason, AdaCheckError):
            reason = AdaCheckError(
                f"{self.label}: it could not be packed and checked, so it is not saved: "
                f"{type(error).__name__}: {error}"
            )
            reason.__cause__ = error
        self.refused = reason
        for each in self._waits.values():
            if not each.done():
                each.set_exception(reason)

    def _bring(self) -> None:
        """Copies to the host what a delta stores, and for good what later saves read."""
        self.dispatched()
        if (delta := self.delta) is not None:  # a save may let go of it meanwhile
            for index in delta.blocks:
                _ = delta.blocks[index]
        self.local = {i: _digest(blocks) for i, blocks in self._own.items()}
        if self.plan.update is not NOT_YET:
            self.keep(self.plan.kept)
        self._own = NOTHING

    def keep(self, leaves: Collection[int]) -> None:
        """Takes what the next save compares with out of the state's arrays; once."""
        if (copies := self._copies) is not None:
            host_copies.detach(copies, leaves, self._known)
            if self.plan.update is NOT_YET:  # as a base is written, from what they are copied from
                self.kept = {i: copies.kept[i] for i in leaves if i in copies.kept}
                self.look(self.kept, self.kept.keys() & self._viewed)
        self._copies, self._known = None, NOTHING

    def _settled(self, counts: Counts | None = None) -> SavePlan:
        if not self.plan.is_speculative:
            return self.plan
        counts, again = counts or self.counts(), self._again
        if again is not None and again.counts() != counts:
            raise AdaCheckError(
                f"{self.label}: expected step {self.step} as it was recorded, with "
                f"{shown(again.counts())} updates; found {shown(counts)}. The step is not saved. "
                "Give record_step the numbers of the steps, as the manager counts them."
            )
        before = self._before
        if self._is_released or before is None:
            raise AdaCheckError(
                f"{self.label}: step {self.step} was given up before it was written"
            )
        try:
            return self.plan.check(counts, before.counts(), before.step)
        except AdaCheckError as error:
            raise AdaCheckError(f"{self.label}: {error}") from None

    def _changed(self, leaves: Collection[int], before: KnownStep | None) -> list[int]:
        """Those of some leaves that ought to be those of the step before, and are not."""
        if not leaves or before is None:
            return []
        own, last = self.sums(), before.sums()
        return sorted(i for i in leaves if own[i] != last[i])

    def _with_spare(self, plan: SavePlan, wrong: Collection[int]) -> SavePlan:
        """The plan that stores what is wrong of the spare leaves, if there still is a delta."""
        wrong, spare, delta = frozenset(plan.spare).intersection(wrong), self._spare, self.delta
        self._spare = NOTHING
        if not wrong or delta is None:
            return plan
        blocks = dict.fromkeys(delta.blocks, delta.blocks)
        delta.blocks = Joined(blocks | dict.fromkeys(wrong, spare))
        return plan.storing(wrong)

    def _prove(self, plan: SavePlan, found: Collection[int], proof: Proof | None) -> None:
        wrong = {*found}
        if proof is not None and (replayed := proof.sums()) is not None:
            if jax.process_count() == 1:
                own = self.sums()
                self.disproved = frozenset(i for i in replayed if replayed[i] != own[i])
            if not self.disproved or proof.is_trusted():
                self.replayed = replayed
                wrong |= self.disproved
        if paths := sorted(i for i in wrong if i not in plan.unreplayed):
            raise ReplayError(
                f"{self.label}: step {self.step}: {mismatch(plan.structure, paths)}. This was "
                "found after the save had returned, when the state could not be had any more: the "
                f"step is not saved. {CAUSES} From now on each save is checked before it returns, "
                "and stores what replay does not reproduce."
            )

    @property
    def is_in_memory(self) -> bool:
        """True while what a delta stores is in memory, in copies or packed."""
        return self._packed is not None or self.delta is not None

    def _pack(self, plan: SavePlan) -> None:
        """Packs what a delta stores; the copies live no longer than that."""
        if (delta := self.delta) is None:  # a base, or given up
            return
        if self.fingerprints.holds_blocks:
            self.sums()  # else packing could not let go of them
        delta = dataclasses.replace(delta, candidates=plan.stored)
        self.look(delta.blocks, delta.blocks.keys() & self._viewed)
        packed = delta.packed(jax.process_index(), jax.process_count())
        self.look(delta.blocks, delta.blocks)
        with self._handing:
            if self._is_released:
                packed.give_back()
            else:
                self.delta, self._packed = None, packed

    def look(self, blocks: Mapping[int, Blocks], leaves: Collection[int]) -> None:
        """Notes fingerprints of what is stored, for :meth:`expect_unchanged`."""
        if not self.plan.structure.on_accelerator:  # there all are copies
            found = host_copies.look(blocks, leaves)
            # None has two of them.
            self._looks |= {i: x if self._looks.get(i, x) == x else -1 for i, x in found.items()}

    def expect_unchanged(self) -> None:
        """Raises MismatchError if arrays changed while they were saved; waits for the devices."""
        own = self.sums()
        if changed := [i for i, found in self._looks.items() if found != own.get(i, found)]:
            raise MismatchError(
                f"{self.label}: step {self.step}: expected arrays that stay as they are until the "
                f"save has ended, found that {few_of(self.plan.structure, changed)} changed "
                "meanwhile. On CPU devices an array made of a numpy array (jnp.asarray, "
                "jax.device_put) may lie in its memory. The step is not saved, and the next one "
                "will be a base; storage has no part in it. Wait until the save has ended "
                "(wait_until_finished) before you change such memory, or save a copy (jnp.array)."
            )

    def leave_arrays(self) -> None:
        """Waits until nothing reads the state's arrays any more."""
        for each in self.readers:  # and the last reader may add one more
            concurrent.futures.wait([each])

    def release(self) -> None:
        """Lets go of all that was taken of the state."""
        with self._handing:
            packed, self._packed, self._is_released = self._packed, None, True
        if packed is not None:
            packed.give_back()
        self.delta, self._spare = None, NOTHING
        if not self._has_begun:
            if self.proof is not None:
                self.proof.end()
            self.compare = self._before = self._again = self.proof = None


CAUSES = (
    "Look for: params or optimizer state edited by hand, rolled back or swapped between the update "
    "and the save; a transformation or projection after the Recorder; another optimizer than the "
    "handler's recorder; arithmetic that is not pinned (pin=False)."
)


def changed_alone(
    where: object, step: int, structure: Structure, leaves: Collection[int], then: str = ""
) -> AdaCheckError:
    """The error of a step that was changed without an update, and what follows from it."""
    return AdaCheckError(
        f"{where}: expected at step {step} the state of the step before, since the update counter "
        f"is the same; but {few_of(structure, leaves)} changed without an update (edited by hand, "
        f"or rolled back in memory?).{then}"
    )


def mismatch(structure: Structure, wrong: Collection[int]) -> str:
    """The leaves that replay gets wrong, in a message."""
    few = few_of(structure, wrong)
    return f"replaying the update does not give the state that was trained, in {few}"


def few_of(structure: Structure, leaves: Collection[int]) -> str:
    """The paths of some leaves, the first of many."""
    paths = [structure.leaves[i].path for i in leaves]
    return ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")


def _digest(blocks: Blocks) -> str:
    """A digest by which processes see, without an exchange of data, whether they hold the same."""
    digest = hashlib.sha256()
    for _, block in sorted(blocks.items()):
        digest.update(equality.flat_bytes(block).data)
    return digest.hexdigest()
