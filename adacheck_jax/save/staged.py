"""One step on its way from the devices to the disk: copies of its state, and its check."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.transfer import Joined, Staged
from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.plan.decision import shown
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import Counts
from adacheck_jax.proof.checker import Check, CheckedState, Checker, Findings, Witness
from adacheck_jax.proof.shadow import Proof
from adacheck_jax.state.snapshot import Snapshot, Structure
from adacheck_jax.store.delta_writer import DeltaWriter
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.update.recorder_state import count_of

_COPIED_BYTES = 1 << 18
"""Largest leaf that is copied where it could be viewed."""

NOTHING: Mapping[int, Blocks] = {}
"""Copies of no leaf."""


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies of a state; some of them are perhaps still on their way.

    Attributes:
        staged: this process's boxes of the leaves that the save stores or keeps.
        spare: those of the leaves that it may have to store; nothing waits for them.
        kept: those of them that the next save will compare with.
        fingerprints: the fingerprints, perhaps still being computed.
        counters: the update counters, by leaf index, of a speculative plan.
        waiting: what reads the state until it returns.
    """

    staged: Joined
    spare: Mapping[int, Blocks]
    kept: Mapping[int, Blocks]
    fingerprints: fingerprint.Contributions
    counters: Mapping[int, Any]
    waiting: list[Callable[[], Any]]

    def wait(self) -> None:
        """Waits until the state may be donated."""
        while self.waiting:
            self.waiting[-1]()
            self.waiting.pop()


def take_copies(snapshot: Snapshot, plan: SavePlan, *, every_replica: bool) -> HostCopies:
    """Takes all that a save needs of a state; it may be donated after :meth:`HostCopies.wait`.

    What lies on an accelerator, or is still being computed, is copied there first, and nothing
    waits for that. So are small leaves of a delta that is computed, since one program for all is
    quicker than a look at each; large ones are viewed where the host can.

    Args:
        snapshot: the state.
        plan: the plan of its save.
        every_replica: True if replicas are fingerprinted too.
    """
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    counters = structure.counts if plan.is_speculative else ()
    # One program makes the copies of all processes; on CPU devices each would make its own.
    on_accelerator = any(map(transfer.on_accelerator, snapshot.arrays))
    owned = (plan.is_speculative or not plan.is_base) and (
        jax.process_count() == 1 or on_accelerator
    )
    viewed = list[int]()
    if owned:
        copied = {*plan.stored, *plan.kept, *plan.spare, *counters}
        copied |= {i for i in arrays if i not in summing.placed}
        if not plan.is_speculative and not on_accelerator:
            viewed = [i for i in copied if structure.leaves[i].nbytes > _COPIED_BYTES]
        arrays |= transfer.copies({i: arrays[i] for i in copied.difference(viewed)})
    kept = frozenset(plan.kept)
    groups = [plan.kept, tuple(i for i in plan.stored if i not in kept)]
    staged = [Staged({i: arrays[i] for i in each}, structure.picks) for each in groups]
    if not owned:  # all transfers are started before the first is awaited
        for each in staged:
            each.begin()
    joined = Joined({i: group for group in staged for i in group})
    fingerprints = fingerprint.Contributions(
        arrays,
        structure.picks,
        structure.whole_picks,
        every_replica=every_replica,
        staged=joined,
        owned=owned,
        summing=summing,
    )
    values = {i: arrays[i] if owned else np.array(arrays[i]) for i in counters}
    waiting: list[Callable[[], Any]] = [*(each.wait for each in staged), fingerprints.wait]
    if owned:
        waiting = [lambda: [joined[i] for i in viewed if i in joined]]
        if not joined.keys() >= {*viewed}:
            waiting.append(fingerprints.wait)
    spare = Staged({i: arrays[i] for i in plan.spare}, structure.picks)
    return HostCopies(joined, spare, staged[0], fingerprints, values, waiting)


def copies_of_restored(
    restored: Lineage, leaves: Sequence[Any], kept: Collection[int] | None
) -> Mapping[int, Blocks]:
    """Copies of a restored state that the first save after it may be stored as differences from.

    Args:
        restored: the step's lineage.
        leaves: its leaves; None for one that was left out.
        kept: indices of the leaves to copy; None for all.
    """
    specs, process = restored.base.leaves, jax.process_index()
    plain = {i: transfer.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    boxes = {i: specs[i].boxes_of(process) for i in plain if kept is None or i in kept}
    picks = {i: transfer.picks_of(plain[i], wanted) for i, wanted in boxes.items()}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return transfer.stage({i: plain[i] for i in picks}, picks)


def comparable(copies: Mapping[int, Blocks], plan: SavePlan) -> Mapping[int, Blocks]:
    """The parent's leaves from which differences may be stored.

    A record is read by itself. Of a leaf that is replayed elsewhere one process may store its boxes
    and another not: then all of them have to do without what was there before.

    Args:
        copies: host copies of the parent's leaves.
        plan: the plan of the step that is stored.
    """
    if plan.is_base or plan.is_whole:
        return NOTHING
    if plan.decision.kind == "bits" or not copies:
        return copies
    without = plan.structure.consumed
    if jax.process_count() > 1:
        without |= plan.structure.computed
    return Joined({i: copies for i in copies if i not in without})  # perhaps still on their way


class StagedStep:
    """A planned step, with the copies of its state that are written.

    A speculative plan is settled, and a replay compared with the state, when the devices have
    computed the state: by a background thread, and by whoever needs to know.

    Args:
        plan: the plan of the step; perhaps speculative.
        label: name of the step in messages of background checks.
        fingerprints: fingerprints of its state, perhaps still being computed.
        delta: copies of what a delta stores; None for a base.
        local: copies of the leaves that every process has for itself.
        spare: copies of the plan's spare leaves, until they are known not to be needed.
        counters: arrays of the update counters, by leaf index; needed by a speculative plan alone.
        parent: number and update counters of a step before that was restored, or is on the disk.
        before: the step before, if it is on its way too: it is settled and checked first.
        again: the same step, if it was deferred before it is saved.

    Attributes:
        label: as above.
        fingerprints, delta, local: as above.
        proof: comparison of the whole replay with the state by the shadow; None without one.
        replayed: this process's contribution to the fingerprints of the shadow, where it followed
            the step, once :meth:`verify` was called. Of several processes no one can tell alone
            whether they are those of the state.
        disproved: the leaves in which they were not, as a process alone or process 0 knows.
        saved: the spare leaves that are stored, since replay was found to get them wrong.
    """

    def __init__(
        self,
        plan: SavePlan,
        label: str,
        fingerprints: fingerprint.Contributions,
        delta: DeltaWriter | None,
        local: Mapping[int, Blocks],
        *,
        spare: Mapping[int, Blocks],
        counters: Mapping[int, Any],
        parent: tuple[int, Counts] | None,
        before: StagedStep | None,
        again: StagedStep | None,
    ) -> None:
        self._plan, self.label = plan, label
        self.fingerprints, self.delta, self.local = fingerprints, delta, local
        self._spare, self._counters = spare, counters
        self._check: Check | None = None
        self.proof: Proof | None = None
        self.replayed: dict[int, int] | None = None
        self.disproved = frozenset[int]()
        self.saved = frozenset[int]()
        self._parent, self._before, self._again = parent, before, again
        self._sums: dict[int, int] = {}
        self._is_released = False
        self._refused: AdaCheckError | None = None
        self._copy_lock = threading.Lock()
        self._plan_lock = threading.RLock()
        self._check_lock = threading.RLock()
        self._sample_lock = threading.RLock()
        self._findings: Collection[int] | None = None

    def begin_check(self, checker: Checker, before: Witness, arrays: Sequence[Any]) -> Witness:
        """Takes what comparing the replay with the state needs; :meth:`verify` does that.

        Args:
            checker: checker of the state's structure.
            before: witness of the step before.
            arrays: arrays of the state; they may be donated afterwards.

        Returns:
            The witness of this state.
        """
        self._check = checker.begin(before, CheckedState(arrays, self.step, self.sums))
        return self._check.witness

    @property
    def step(self) -> int:
        """Step number."""
        return self._plan.step

    @property
    def plan(self) -> SavePlan:
        """The plan as far as it is known; see :meth:`settled`."""
        return self._plan

    @property
    def refused(self) -> AdaCheckError | None:
        """Reason why the step cannot be saved, once a check has found one."""
        return self._refused

    def counts(self) -> Counts:
        """Update counters of the state; waits for them."""
        if self._plan.counts is not None:
            return self._plan.counts
        indices = self._plan.structure.counts
        return tuple(count_of(self._counters[i]) for i in indices)

    def settled(self) -> SavePlan:
        """The plan that holds; waits for the update counters.

        Raises:
            AdaCheckError: a recorder made another number of updates than one or none.
        """
        with self._plan_lock:
            if not self._plan.is_speculative:
                return self._plan
            if self._refused is None:
                try:
                    self._plan = self._settle()
                except AdaCheckError as error:
                    self._refused = AdaCheckError(f"{self.label}: {error}")
            if self._refused is not None:
                raise self._refused
            return self._plan

    def _settle(self) -> SavePlan:
        counts, again = self.counts(), self._again
        if again is not None and again.counts() != counts:
            raise AdaCheckError(
                f"expected step {self.step} as it was recorded, with {shown(again.counts())} "
                f"updates; found {shown(counts)}. The step is not saved. Give record_step the "
                "numbers of the steps, as the manager counts them."
            )
        before = self._before
        parent = (before.step, before.counts()) if before is not None else self._parent
        if self._is_released or parent is None:
            raise AdaCheckError(f"step {self.step} was given up before it was written")
        return self._plan.check(counts, parent[1], parent[0])

    def compared(self) -> SavePlan:
        """The plan that holds, once the checker's findings are in it; waits for the devices.

        What it finds wrong of the spare leaves is stored in this very step.

        Raises:
            AdaCheckError: as from :meth:`settled`.
        """
        plan = self.settled()
        with self._sample_lock:
            if self._findings is None:
                found = self._check.findings(plan.decision.updates) if self._check else {}
                changed = self._changed(plan) if plan.spare else frozenset()
                self._save_spare(plan, {*found, *changed})
                self._findings = [i for i in found if i not in self.saved]
        return self.settled()

    def _changed(self, plan: SavePlan) -> frozenset[int]:
        """The spare leaves that ought to be those of the step before, and are not."""
        same, last = frozenset(plan.unchanged).intersection(plan.spare), self._before
        if not same or last is None:
            return frozenset()
        own, before = self.sums(), last.sums()
        return frozenset(i for i in same if own[i] != before[i])

    def _save_spare(self, plan: SavePlan, wrong: Collection[int]) -> None:
        """Stores what is wrong of the spare leaves, if there is still a delta to store it in."""
        wrong = frozenset(plan.spare).intersection(wrong)
        with self._plan_lock, self._copy_lock:
            if wrong and self.delta is not None:
                blocks = dict.fromkeys(self.delta.blocks, self.delta.blocks)
                self.delta.blocks = Joined(blocks | dict.fromkeys(wrong, self._spare))
                self._plan, self.saved = plan.storing(wrong), wrong
            self._spare = NOTHING

    def verify(self) -> None:
        """Compares the replay with the state, after that of the step before; once.

        Raises:
            AdaCheckError: as from :meth:`settled`; raised at every call.
            ReplayError: replay gives something else, and the state is gone.
        """
        with self._check_lock:
            if (self._check or self.proof) and self._refused is None:
                if self._before is not None:
                    with contextlib.suppress(AdaCheckError):  # raised by the save of that step
                        self._before.verify()
                try:
                    self._compare(self.compared())
                except AdaCheckError as error:
                    self._refused = error
            self._check = self._before = self.proof = None
            if self._refused is not None:
                raise self._refused

    def _compare(self, plan: SavePlan) -> None:
        found: Collection[int] = self._findings or ()
        if (proof := self.proof) is not None and (replayed := proof.sums()) is not None:
            if jax.process_count() == 1:
                own = self.sums()
                self.disproved = frozenset(i for i in replayed if replayed[i] != own[i])
            if not self.disproved or proof.is_trusted():
                self.replayed = replayed
                found = {*found, *self.disproved}
        if wrong := sorted(i for i in found if i not in plan.unreplayed):
            raise ReplayError(
                f"{self.label}: step {self.step}: {told(plan.structure, wrong)}. This was found "
                "after the save had returned, when the state could not be had any more: the step "
                f"is not saved. {CAUSES} From now on each save is checked before it returns, and "
                "stores what replay does not reproduce."
            )

    def drain(self) -> None:
        """Copies to the host what is stored, and sums up fingerprints; waits for the devices."""
        self.bring()
        self.sums()

    def begin_proof(self) -> None:
        """Has the shadow follow the step, in the background."""
        if (proof := self.proof) is not None:
            proof.begin()

    def bring(self) -> None:
        """Copies to the host what a delta stores."""
        with self._copy_lock:
            if (delta := self.delta) is not None:  # a save may let go of it meanwhile
                for index in delta.blocks:
                    _ = delta.blocks[index]

    def sums(self) -> Mapping[int, int]:
        """This process's contribution to the fingerprint of each leaf; waits for the devices."""
        with self._copy_lock:
            if not self._sums:
                self._sums |= self.fingerprints.sums()
            return self._sums

    def take_delta(self) -> DeltaWriter:
        """Hands over the copies of a delta, so that they live no longer than its packing."""
        delta, self.delta = self.delta, None
        if delta is None:
            raise AdaCheckError(f"step {self.step} was given up before it was written")
        return delta

    def release(self) -> None:
        """Lets go of all copies of the state."""
        self.delta, self.local, self._is_released = None, {}, True
        self._spare = NOTHING
        self._check = self._before = self._again = self.proof = None


CAUSES = (
    "Look for: params or optimizer state edited by hand, rolled back or swapped between the update "
    "and the save; a transformation or projection after the Recorder; another optimizer than the "
    "handler's recorder; arithmetic that is not pinned (pin=False)."
)


def told(structure: Structure, wrong: Collection[int] | Findings) -> str:
    """Names of the leaves that replay gets wrong, in a message."""
    return (
        f"replaying the update does not give the state that was trained, in {few(structure, wrong)}"
    )


def few(structure: Structure, leaves: Collection[int] | Findings) -> str:
    """The paths of some leaves, the first of many."""
    paths = [structure.leaves[i].path for i in leaves]
    return ", ".join(paths[:5]) + (", ..." if len(paths) > 5 else "")


def are_ready(values: Mapping[int, Any]) -> bool:
    """True if no device is computing any of the values."""
    return all(map(transfer.is_ready, values.values()))
