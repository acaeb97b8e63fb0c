"""Stages a planned save: copies what must leave the devices, and begins what checks it.

Nothing here decides. It makes of a plan a :class:`~adacheck_jax.save.pending.Pending`, whose state
may be donated.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.device.loops import programs
from adacheck_jax.device.transfer import Joined
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.memory.sending.wire import Received, Wire
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.memory.shadow_state import ShadowStep
from adacheck_jax.plan.decision import replays
from adacheck_jax.plan.options import Options
from adacheck_jax.plan.save_plan import SavePlan, kept
from adacheck_jax.processes.consent import Consent
from adacheck_jax.proof.checker import Baseline
from adacheck_jax.save import copies as host_copies
from adacheck_jax.save.copies import HostCopies
from adacheck_jax.save.line.planner import Planner, Proposal
from adacheck_jax.save.one_save import Save
from adacheck_jax.save.pending import KnownStep, Pending
from adacheck_jax.state.exported_update import NOT_YET, ExportedUpdate
from adacheck_jax.state.snapshot import Snapshot, Structure
from adacheck_jax.store.base_writer import BaseWriter, EarlierBase, seldom_changed
from adacheck_jax.store.delta_writer import DeltaEncodings, DeltaWriter
from adacheck_jax.store.host_memory import ReusedMemory
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath

_LONGEST_S = 1.0
"""Time for which an export waits until the caller has its thread back, who may fail before."""
_REUSED_BYTES = 1 << 30
"""Host memory that is kept from one save to the next."""


class Stager:
    """Stages the saves of one training run.

    Attributes:
        worker: the thread that moves the line's steps on, in order.
        returned: set once the caller has its thread back.
        wire: sends copies; ``finish`` has to follow :meth:`hand_to_shadow`, whatever happens.
        last_base: the save of the base that was begun last, or of the step that became one; None
            if it failed, or there is none.
    """

    def __init__(self, options: Options, planner: Planner, shadow: ShadowThread) -> None:
        self._options, self._planner, self._shadow = options, planner, shadow
        self.last_base: Save | None = None
        self._encodings, self._memory = DeltaEncodings(), ReusedMemory(_REUSED_BYTES)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="adacheck_line")
        self.returned = threading.Event()
        self._second_copies: tuple[Any, dict[int, tuple[transfer.Pick, ...]]] | None = None
        self.wire = Wire(shadow)

    def begin_line(self, base: Save) -> None:
        """Notes the base that following deltas build on."""
        self.last_base, self._encodings = base, DeltaEncodings()

    def export(self, structure: Structure) -> Future[ExportedUpdate]:
        """Has the worker export the updates of a structure, under the caller's settings."""
        arithmetic = Arithmetic.current()

        def export() -> ExportedUpdate:
            self.returned.wait(_LONGEST_S)  # it holds Python's lock for tens of milliseconds
            with jax_settings.own(), arithmetic.applied():
                update = self._planner.updates.of(structure)
            self._planner.updates.tell(update)
            return update

        return self.worker.submit(export)

    def stage(
        self, snapshot: Snapshot, proposal: Proposal, label: str
    ) -> tuple[Proposal, Pending, HostCopies]:
        """The step on its way to the disk, and copies of its state to wait for.

        The proposal is another one where a check that was begun found a replay to be wrong: it is
        waited for here, behind all that needs no device.
        """
        gathering = programs.Gathering()
        with gathering.open():
            own, copies = self._taken(snapshot, proposal, label)
        # Until here the check has the devices for itself.
        if (confirmed := self._planner.confirmed(snapshot, proposal)) is not proposal:
            gathering.drop()
            del own, copies
            proposal = confirmed
            with gathering.open():
                own, copies = self._taken(snapshot, proposal, label)
        with gathering.open():  # on accelerators a sample is dispatched at once, and all with it
            self._compare(snapshot, proposal, own)
        gathering.dispatch()  # before other threads take turns with this one
        own.dispatched = gathering.wait
        return proposal, own, copies

    def _taken(
        self, snapshot: Snapshot, proposal: Proposal, label: str
    ) -> tuple[Pending, HostCopies]:
        """The step with what is written of it, and the copies that are taken of its state."""
        planned, before, delta = proposal.plan, proposal.before, None
        structure, wanted = planned.structure, _wanted(planned)
        if planned.is_base:  # the shadow gets all that is here of the leaves of updates
            wanted -= structure.touched
        seconds = self.second_copies(snapshot, wanted, is_base=planned.is_base)
        every_replica = self._options.check_replicas != "off"
        copies = host_copies.take_copies(snapshot, planned, seconds, every_replica=every_replica)
        picks, copied = structure.local_picks, before.kept if before else host_copies.NOTHING
        if not planned.is_base:
            delta = DeltaWriter(
                structure.leaves,
                copies.staged,
                planned.stored,
                host_copies.comparable(copied, planned),
                self._options.compression,
                self._encodings,
                self._memory,
            )
        own = Pending(
            planned,
            label,
            copies,
            delta,
            transfer.stage({i: snapshot.arrays[i] for i in picks}, picks),
            self.worker,
            before=before,
            again=proposal.again,
        )
        return own, copies

    def hand_to_shadow(
        self,
        snapshot: Snapshot,
        proposal: Proposal,
        own: Pending,
        copies: HostCopies,
        consent: Consent | None,
    ) -> ShadowStep | None:
        """Hands a staged step to the shadow, and what other processes own of it to theirs.

        Returns:
            What the shadow starts from once the update of a base is exported.
        """
        planned, before, structure = proposal.plan, proposal.before, snapshot.structure
        follows = not (planned.is_base or planned.stores_all) and before is not None
        # All shadows follow a step, or all begin with one.
        received = self.wire.begin(
            snapshot,
            planned.update,
            _wanted(planned),
            consent,
            f"{planned.step} {follows}",
            is_followed=self._shadow.follows if follows else planned.has_baseline,
        )
        if follows:
            # What replay gets wrong is put over the shadow, whose boxes may have other owners; and
            # each process takes the numbers that all arrays are computed from.
            others = structure.computed.intersection(planned.stored)
            others |= structure.everywhere.intersection(structure.consumed)
            blocks = _with_others(snapshot, copies.held, others)
            step = _shadow_step(own, blocks, own.sums, received)
            step = dataclasses.replace(step, before=before, again=proposal.again)
            own.proof = self._shadow.follow(step)
        elif planned.has_baseline or planned.update is NOT_YET:
            blocks = _with_others(snapshot, copies.held, structure.touched)
            step = _shadow_step(own, blocks, own.sums, received)
            if planned.update is NOT_YET:
                return step
            own.readers.extend(self._shadow.start(structure, planned.update, step))
        return None

    def _compare(self, snapshot: Snapshot, proposal: Proposal, own: Pending) -> None:
        """Begins the comparison of a step that is made after its save; takes its baseline."""
        planned, before, check = proposal.plan, proposal.before, proposal.check
        own.compare = proposal.compare
        if check is None and planned.has_baseline:
            checker = self._planner.checker_of(planned.structure, planned.update)
            if planned.is_speculative and before is not None and before.baseline is not None:
                check = checker.begin(before.baseline, snapshot.arrays, planned.step, own.sums)
                own.compare = check.findings
            else:
                own.baseline = checker.baseline(snapshot.arrays, planned.step)
        if check is not None:
            own.baseline = check.baseline()

    def second_copies(
        self, snapshot: Snapshot, wanted: Collection[int], *, is_base: bool
    ) -> dict[int, tuple[transfer.Pick, ...]]:
        """The boxes of some leaves that other processes own and the shadow takes."""
        structure, arrays = snapshot.structure, snapshot.arrays
        boxes = self._shadow.copied(structure, is_base=is_base)
        if not boxes:
            return {}
        if self._second_copies is None or self._second_copies[0] is not boxes:
            picks = {i: transfer.picks_of(arrays[i], x, structure.ranks) for i, x in boxes.items()}
            self._second_copies = boxes, picks
        return {i: picks for i, picks in self._second_copies[1].items() if i in wanted}

    def restored(
        self, snapshot: Snapshot, known: KnownStep, sums: Mapping[int, int], consent: Consent | None
    ) -> ShadowStep:
        """A restored step for the shadow to begin with; collective where boxes are sent."""
        structure, arrays, received = snapshot.structure, dict(enumerate(snapshot.arrays)), None
        untouched = arrays.keys() - structure.touched
        picks, others = structure.picks, self.second_copies(snapshot, untouched, is_base=True)
        if others:
            picks = {i: (*own, *others.get(i, ())) for i, own in picks.items()}
        blocks = _with_others(snapshot, transfer.stage(arrays, picks), structure.touched)
        if self._shadow.may_be_sent(structure) and not self._shadow.stays:
            update, every = self._planner.updates.of(structure), range(len(structure.leaves))
            is_followed = replays(update, self._options)
            received = self.wire.begin(
                *(snapshot, update, every, consent, f"{known.step} restored"),
                is_followed=is_followed,
            )
            self.wire.finish()
        return _shadow_step(known, blocks, lambda: sums, received)

    def prepare_next(
        self,
        own: KnownStep,
        snapshot: Snapshot,
        step: ShadowStep | None,
        *,
        is_restored: bool,
    ) -> None:
        """Prepares the check of the save that follows a step, in the background.

        The update has to be exported and looked through for that, which takes longer than to read
        or copy a state; whoever plans the next save waits for it. On an accelerator the arrays,
        which the caller may donate, are looked at before this returns. The shadow starts from the
        ``step``; without one it stays as it is.
        """
        structure, arithmetic = snapshot.structure, Arithmetic.current()
        planner, held = self._planner, None
        readers = own.readers if isinstance(own, Pending) else []
        if not structure.on_accelerator:
            held = [transfer.held(each) for each in snapshot.arrays]

        def baseline() -> Baseline | None:
            found, arrays = None, snapshot.arrays
            with jax_settings.own(), arithmetic.applied():
                is_begun = False
                try:
                    update = planner.updates.of(structure)
                    if replays(update, self._options):
                        if step is not None:  # first, since a sample depends on what it proves
                            begun = structure, update, step
                            readers.extend(self._shadow.start(*begun, is_restored=is_restored))
                            is_begun = True
                        if held is not None and update.engine != "identity":
                            arrays = [each() for each in held]
                        checker = planner.checker_of(structure, update)
                        found = checker.baseline(arrays, own.step, is_restored=is_restored)
                finally:
                    if step is not None and not is_begun:
                        self._shadow.miss(own.step, is_restored=is_restored)
                if isinstance(own, Pending):
                    wrong = planner.quarantine.leaves_of(structure)
                    own.keep(kept(structure, update, wrong, self._options, replayable=True))
                return found

        if held is None:
            own.baseline = baseline()
        else:
            own.preparing = self.worker.submit(baseline)
            readers.append(own.preparing)

    def base_writer(self, proposal: Proposal, copies: HostCopies, directory: AnyPath) -> BaseWriter:
        """The writer of this process's part of a base."""
        structure, parent = proposal.plan.structure, proposal.parent
        found = parent.lineage if parent else None
        earlier, still = None, frozenset[int]()
        if structure.bindings:  # what no update computes may well be the same at the next base
            still = seldom_changed(structure.leaves, structure.touched)
        if found is not None and self._planner.line.has_links(directory):
            earlier = self.earlier_base(found)
        return BaseWriter(
            structure.leaves,
            copies.staged,
            earlier,
            still,
            compression=self._options.compression,
        )

    def earlier_base(self, parent: Lineage) -> EarlierBase:
        """The base before the one that is written, whose files serve where nothing changed."""
        base, last = parent.base, self.last_base
        sums: Mapping[int, int] = {}
        own = (last.plan.step, last.structure.leaves) if last is not None else None
        if last is not None and own == (base.step, base.leaves):
            sums = last.own.sums()
        elif base.process_count == 1:
            sums = dict(enumerate(base.fingerprints))
        return EarlierBase(parent, sums)


def _wanted(planned: SavePlan) -> set[int]:
    """The leaves that are copied."""
    return {*planned.stored, *planned.kept, *planned.spare}


def _shadow_step(
    known: KnownStep,
    blocks: Mapping[int, Blocks],
    sums: Callable[[], Mapping[int, int]],
    received: Received | None,
) -> ShadowStep:
    """A step for the shadow, with the boxes that were sent here, if any are."""
    if received is None:
        return ShadowStep(known, known.step, blocks, sums)
    return ShadowStep(known, known.step, received.joined(blocks), sums, lost=received.lost)


def _with_others(
    snapshot: Snapshot, blocks: Mapping[int, Blocks], leaves: Collection[int]
) -> Mapping[int, Blocks]:
    """Blocks of a state, with what other processes own of some leaves and this one's shadow has."""
    if jax.process_count() == 1 or not leaves:
        return blocks
    arrays, picks = snapshot.arrays, dict[int, tuple[transfer.Pick, ...]]()
    for i in leaves:
        if (local := snapshot.structure.local_picks.get(i)) is not None:
            picks[i] = local
        else:
            boxes = transfer.boxes_here(arrays[i].shape, arrays[i].sharding)
            picks[i] = transfer.picks_of(arrays[i], boxes, snapshot.structure.ranks)
    others = transfer.stage({i: arrays[i] for i in leaves}, picks)
    return Joined(dict.fromkeys(blocks, blocks) | dict.fromkeys(others, others))
