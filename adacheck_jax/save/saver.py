"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` takes a state apart, plans its save, takes the copies that must leave the
devices, and hands a :class:`~adacheck_jax.save.commit.Save` to whoever writes and commits it. When
it returns, the state may be donated. Nothing here decides: :mod:`~adacheck_jax.save.plan` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from adacheck_jax.device import fingerprint, replicas, transfer, xla_call
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.format import lineage as lineages
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.save import checks, deferred, parents, plan, staged
from adacheck_jax.save.checks import Check, Checker, State, Witness
from adacheck_jax.save.commit import Save
from adacheck_jax.save.deferred import DeferredSteps
from adacheck_jax.save.exported_update import ExportedUpdate, ExportedUpdates
from adacheck_jax.save.notices import Distrust, Notices, tell_given_up
from adacheck_jax.save.options import Options
from adacheck_jax.save.parents import Parent, Parents, Tip
from adacheck_jax.save.plan import SavePlan, Situation
from adacheck_jax.save.share import Attempt, Destination, StagedSave
from adacheck_jax.save.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.save.staged import HostCopies, StagedStep
from adacheck_jax.store.base_writer import BaseShare, EarlierBase
from adacheck_jax.store.buffers import Buffers
from adacheck_jax.store.compression import Storage
from adacheck_jax.store.delta_writer import DeltaShare, Habits
from adacheck_jax.update.binding import Recorders

_log = logging.getLogger(__name__)

_REUSED_BYTES = 1 << 30
"""Host memory that is kept from one save to the next."""


@dataclass(frozen=True, slots=True)
class _Course:
    """A plan, with the step in memory that it follows.

    Attributes:
        situation: the facts that the plan was made from.
        plan: the plan.
        parent: the step on the disk that a delta follows, also where the plan is a base.
        tip: the last step in memory behind that parent.
        check: comparison of the replay that is made before the save returns.
    """

    situation: Situation
    plan: SavePlan
    parent: Parent | None
    tip: Tip | None
    check: Check | None = None


class Saver:
    """Saves the states of one training run.

    Args:
        recorders: recorders of the optimizers (:func:`~adacheck_jax.update.binding.recorders_of`).
        options: the caller's choices.
    """

    def __init__(self, recorders: Recorders, options: Options) -> None:
        self._options = options
        self._has_recorder = bool(recorders)
        self._snapshots = Snapshots(recorders, options.params_path)
        self._updates = ExportedUpdates(options.check)
        self._checker: tuple[Structure, ExportedUpdate, Checker] | None = None
        self._distrust, self._notices = Distrust(), Notices()
        # A step may be restored, to look at it, while another thread saves the next one.
        self._lock = threading.Lock()
        self._attempt = Attempt.first()
        self._parents = Parents(options.keep_lineage)
        self._deferred = DeferredSteps()
        self._last_base: Save | None = None
        self._habits, self._buffers, self._storage = Habits(), Buffers(_REUSED_BYTES), Storage()
        xla_call.begin()

    def follow(
        self, restored: Lineage, number: int | None, leaves: Sequence[Any], state: PyTree
    ) -> None:
        """Makes a restored step the parent of the next save.

        Args:
            restored: the step's lineage.
            number: the number in the name of the step's directory, None if there is none.
            leaves: its leaves, with which the next state is compared; None for one left out.
            state: the state that the caller gets.
        """
        update = restored.base.update
        needed = range(len(leaves)) if update is None else (*update.explained, *update.consumed)
        if any(leaves[i] is None for i in needed):
            return  # what was left out will be made anew, and no update leads there
        copies, witness = staged.NOTHING, None
        saved, specs = restored.manifest, restored.base.leaves
        if self._has_recorder or self._options.delta == "bits":
            kept = None
            if self._options.delta != "bits" and update is not None and not restored.problem:
                replayed = update.explained.difference(update.passed, saved.caution.distrusted)
                kept = frozenset(range(len(leaves))) - replayed - frozenset(update.consumed)
            copies = staged.copies_of_restored(restored, leaves, kept)
            witness = self._witness_of_restored(restored, state)
        tip = Tip(saved.step, saved.depth, None, copies, witness)
        parent = Parent(restored.entries[-1].holder, number, tip, None, restored)
        with self._lock:
            distrusted = [specs[i].path for i in saved.caution.distrusted]
            self._distrust.learn(saved.caution.reason, distrusted)
            self._parents.follow(parent)

    def _witness_of_restored(self, restored: Lineage, state: PyTree) -> Witness:
        """A witness of a restored state; None where the next save cannot be a replayed delta."""
        try:
            snapshot = self._snapshots.take(state)
        except AdaCheckError as error:
            _log.info("The next save will be a base: %s", error)
            return None
        structure = snapshot.structure
        update = self._updates.of(structure)
        if structure.leaves != restored.base.leaves or not plan.replays(update, self._options):
            return None
        step = restored.manifest.step
        return self._checker_of(structure, update).witness(State(snapshot.arrays, step, dict))

    def forget(self) -> None:
        """Makes the next save a base: what was restored is no step that another can build on."""
        with self._lock:
            self._parents.forget()

    @property
    def has_steps(self) -> bool:
        """True if a step was saved or restored here."""
        return self._parents.saved is not None or not self._parents.is_empty

    def begin(
        self,
        destination: Destination,
        state: PyTree,
        step: int | None,
        *,
        cast: frozenset[str] = frozenset(),
        custom_metadata: Any = None,
    ) -> Save:
        """Plans and stages a save; the only part of it that blocks the caller.

        Args:
            destination: place of the item once it is committed.
            state: the state to save.
            step: its number; None takes it from the directory's name, else from the counter.
            cast: leaf paths that are stored in another data type than they are trained in.
            custom_metadata: the caller's own JSON.

        Returns:
            The save, to be written and committed.
        """
        with self._lock:
            return self._begin(destination, state, step, cast, custom_metadata)

    def _begin(
        self,
        destination: Destination,
        state: PyTree,
        step: int | None,
        cast: frozenset[str],
        custom_metadata: Any,
    ) -> Save:
        snapshot = self._snapshots.take(state)
        structure, options = snapshot.structure, self._options
        if not (self._has_recorder or options.delta == "bits" or options.max_deltas == 0):
            self._notices.hint_at_recorder(structure)
        self._learn()
        replayable = not cast & _bound_paths(structure)
        step = destination.step if step is None else step
        again = self._superseded(step)
        course = self._course(snapshot, destination, step, replayable)
        copies = self._copies(snapshot, course.plan)
        if course.check is not None:  # devices replay meanwhile
            checked = self._checked(snapshot, course, course.check)
            if checked is not course:
                course = checked
                copies = self._copies(snapshot, course.plan)
        if course.plan.given_up:
            self._give_up(0, course.plan.given_up)
        staged_step, witness = self._staged(snapshot, course, copies, again, destination.directory)
        planned, parent = course.plan, None if course.plan.is_base else course.parent
        _log.info("step %d: %s (%s)", planned.step, planned.decision.kind, planned.decision.reason)
        self._notices.note_plan(planned)
        self._notices.note_step(planned.step)
        if again is not None:
            _warn_of_other_counts(again, planned)
        self._parents.note_parent(destination.step, parent)
        copies.wait()
        found = parent.lineage if parent else None
        self._attempt = self._next_attempt(destination)
        save = Save(
            StagedSave(
                steps=[*self._deferred.steps, staged_step],
                destination=destination,
                parent=found,
                parent_files=parent.files if parent else frozenset(),
                links=found is not None and self._parents.has_links(destination.directory),
                before=course.tip.step if course.tip else planned.step,
                caution=self._distrust.caution(structure),
                replicas=replicas.Check(options.check_replicas, structure.replicated),
                attempt=self._attempt,
                replayable=replayable,
                custom_metadata=custom_metadata,
            ),
            self._base_share(course, copies, destination) if planned.is_base else None,
        )
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        tip = Tip(planned.step, save.staged.depth, staged_step, copies.kept, witness)
        if planned.is_base:
            self._last_base, self._habits = save, Habits()
        following = Parent(destination.directory, destination.step, tip, save)
        self._parents.advance(following)
        self._deferred.restart(following)
        return save

    def _course(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course:
        """Plans a save: without a look at the state's values if it is still being computed."""
        structure, directory, options = snapshot.structure, destination.directory, self._options
        counters = {i: snapshot.arrays[i] for i in structure.counts}
        only = self._parents.only
        waits = self._distrust.is_cautious or staged.are_ready(counters)
        if not waits and step is not None and only is not None and only.save is not None:
            self._parents.look(only, directory)
            situation, tip = self._situation(snapshot, directory, step, None, only, replayable)
            if (planned := plan.speculate(situation, options)) is not None:
                return _Course(situation, planned, only, tip)
        counts = snapshot.counts()  # waits for the running step
        self._settle_deferred()
        parent = self._deferred.follows if len(self._deferred) else None
        if parent is not None and not self._parents.look(parent, directory):
            self._give_up(0, "the step that they follow is not there")
            parent = None
        parent = parent or self._parents.choose(directory, counts)
        situation, tip = self._situation(snapshot, directory, step, counts, parent, replayable)
        course = _Course(situation, plan.plan(situation, options), parent, tip)
        return self._compared(snapshot, course) if course.plan.is_replayed else course

    def _situation(
        self,
        snapshot: Snapshot,
        directory: Path,
        step: int | None,
        counts: plan.Counts | None,
        parent: Parent | None,
        replayable: bool,
    ) -> tuple[Situation, Tip | None]:
        """All that a plan may know, and the last step in memory behind the parent."""
        structure, options, facts, tip = snapshot.structure, self._options, None, None
        update = self._updates.of(structure)
        is_ready = plan.replays(update, options, replayable=replayable)
        if parent is not None:
            tip = self._deferred.tip_behind(parent)
            facts = parents.facts_of(parent, tip, knows_counts=counts is not None)
        situation = Situation(
            step=step,
            structure=structure,
            update=update,
            counts=counts,
            replayable=replayable,
            distrusted=self._distrust.leaves_of(structure),
            parent=facts,
            is_only=parent is not None and self._parents.only is parent,
            is_first=self._parents.is_empty,
            keeps_ancestors=parent is not None and self._parents.keeps_ancestors(directory),
            process_count=jax.process_count(),
            is_checker_ready=is_ready and self._checker_of(structure, update).is_ready,
        )
        return situation, tip

    def _copies(self, snapshot: Snapshot, planned: SavePlan) -> HostCopies:
        every_replica = self._options.check_replicas != "off"
        return staged.take_copies(snapshot, planned, every_replica=every_replica)

    def _staged(
        self,
        snapshot: Snapshot,
        course: _Course,
        copies: HostCopies,
        again: StagedStep | None,
        label: object,
    ) -> tuple[StagedStep, Witness]:
        """The step on its way to the disk, and the witness of its state for the next one."""
        planned, tip = course.plan, course.tip
        before = tip.staged if tip else None
        parent = None
        if tip is not None and before is None and course.parent is not None:
            parent = (tip.step, course.parent.counts())
        picks = planned.structure.local_picks
        own = StagedStep(
            planned,
            str(label),
            copies.fingerprints,
            None if planned.is_base else self._delta_share(planned, copies, tip),
            transfer.stage({i: snapshot.arrays[i] for i in picks}, picks),
            counters=copies.counters,
            parent=parent,
            before=before if planned.is_speculative else None,
            again=again if planned.is_speculative else None,
        )
        if course.check is not None:
            return own, course.check.witness
        if not planned.has_witness:
            return own, None
        checker = self._checker_of(planned.structure, planned.update)
        if planned.is_speculative and tip is not None:
            return own, own.begin_check(checker, tip.witness, snapshot.arrays)
        return own, checker.witness(State(snapshot.arrays, planned.step, own.sums))

    def _delta_share(self, planned: SavePlan, copies: HostCopies, tip: Tip | None) -> DeltaShare:
        return DeltaShare(
            planned.structure.leaves,
            copies.staged,
            planned.stored,
            staged.comparable(tip.host_copies if tip else staged.NOTHING, planned),
            self._options.compression,
            self._storage,
            self._habits,
            self._buffers,
        )

    def _base_share(
        self, course: _Course, copies: HostCopies, destination: Destination
    ) -> BaseShare:
        structure, parent = course.plan.structure, course.parent
        found = parent.lineage if parent else None
        earlier = None
        if found is not None and self._parents.has_links(destination.directory):
            earlier = self._earlier_base(found)
        return BaseShare(
            structure.leaves,
            copies.staged,
            earlier,
            _still(structure),
            names={},
            compression=self._options.compression,
            storage=self._storage,
        )

    def _earlier_base(self, parent: Lineage) -> EarlierBase:
        """The base before the one that is written, whose files serve where nothing changed."""
        base, last = parent.base, self._last_base
        sums: Mapping[int, int] = {}
        last_plan = last.staged.plan if last else None
        if last and last_plan and last_plan.step == base.step:
            if last_plan.structure.leaves == base.leaves:
                sums = last.staged.own.sums()
        elif base.process_count == 1:
            sums = dict(enumerate(base.fingerprints))
        return EarlierBase(parent.base_directory, base.step, base.leaves, sums)

    def _compared(self, snapshot: Snapshot, course: _Course) -> _Course:
        """Begins to replay the updates of a delta, to compare them before the save returns."""
        planned, tip = course.plan, course.tip
        if tip is None:
            return course
        if tip.staged is not None:
            with contextlib.suppress(AdaCheckError):  # raised by the save of that step
                tip.staged.verify()
        sums = functools.partial(_sums_of, snapshot)
        checker = self._checker_of(planned.structure, planned.update)
        check = checker.begin(tip.witness, State(snapshot.arrays, planned.step, sums))
        return dataclasses.replace(course, check=check)

    def _checked(self, snapshot: Snapshot, course: _Course, check: Check) -> _Course:
        """Compares replay with a state that is still there, and plans anew what it gets wrong.

        Returns:
            The same course if replay gives the state.
        """
        planned, situation, structure = course.plan, course.situation, course.plan.structure
        findings = check.findings(planned.decision.updates)
        if findings and planned.update.engine == "identity":
            self._updates.compare_in_full()
            situation = dataclasses.replace(situation, update=self._updates.of(structure))
            return self._as_base(
                dataclasses.replace(course, situation=situation),
                plan.unplanned(
                    "the arrays are not those that separate_update took and returned; from now on "
                    "its updates are compared in full"
                ),
            )
        wrong = frozenset(findings) - plan.known_unreplayed(situation)
        corrected = plan.with_wrong(planned, situation, wrong, self._options)
        wrong |= self._changed(snapshot, course, corrected)
        if not wrong:
            return course
        self._distrust.tell(planned, wrong)
        sparse = [i for i in findings if i in wrong and checks.is_sparse(structure, i, findings[i])]
        self._distrust.learn("", [structure.leaves[i].path for i in sparse])
        wrong_bytes = sum(structure.leaves[i].nbytes for i in wrong)
        whole_bytes = sum(leaf.nbytes for leaf in structure.leaves)
        distrusted = self._distrust.leaves_of(structure)
        situation = dataclasses.replace(situation, distrusted=distrusted)
        course = dataclasses.replace(course, situation=situation)
        if situation.process_count == 1 and 2 * wrong_bytes > whole_bytes:
            reason = staged.told(structure, sorted(wrong))
            return self._as_base(course, plan.Decision("base", reason))
        check.renew(State(snapshot.arrays, planned.step, dict), wrong)
        corrected = plan.with_wrong(planned, situation, wrong, self._options)
        return dataclasses.replace(course, plan=corrected)

    def _as_base(self, course: _Course, decision: plan.Decision) -> _Course:
        made = plan.as_base(course.situation, decision, self._options)
        return dataclasses.replace(course, plan=made, check=None)

    def _changed(self, snapshot: Snapshot, course: _Course, corrected: SavePlan) -> set[int]:
        """The leaves that a delta leaves to the parent, and whose bits are not the parent's."""
        parent, tip = course.parent, course.tip
        found = parent.lineage if parent else None
        # Of several processes the others may not know the values yet.
        is_alone = course.situation.process_count == 1
        if not is_alone or found is None or tip is None or tip.step != found.manifest.step:
            return set()
        if not corrected.unchanged:
            return set()
        expected = found.manifest.fingerprints
        own = fingerprint.of_leaves({i: snapshot.arrays[i] for i in corrected.unchanged})
        return {i for i, value in own.items() if value != expected[i]}

    def _checker_of(self, structure: Structure, update: ExportedUpdate) -> Checker:
        known = self._checker
        if known is None or known[0] is not structure or known[1] is not update:
            known = self._checker = (structure, update, checks.checker_of(structure, update))
        return known[2]

    def _learn(self) -> None:
        """Becomes cautious where replay was found to be wrong in the background.

        Raises:
            AdaCheckError: deferred steps are lost by it; told once.
        """
        saved = self._parents.saved
        if saved is not None and (save := saved.save) is not None:
            known, leaves = save.agreed_caution, save.staged.structure.leaves
            self._distrust.learn(known.reason, [leaves[i].path for i in known.distrusted])
            if isinstance(save.error, ReplayError):  # without the path of the step's directory
                self._distrust.learn(str(save.error.__cause__ or save.error))
        # Of several processes one alone may have found a deferred step wrong: the save that writes
        # it fails in all of them.
        if jax.process_count() == 1 and (wrong := self._deferred.wrong):
            kept, error = wrong
            self._distrust.learn(str(error))
            steps = lineages.shown_steps([each.step for each in self._deferred.cut(kept)])
            raise type(error)(
                f"Recorded steps that are not saved: {steps}, and neither is this one; those "
                f"before are kept. {error}"
            ) from error

    def _settle_deferred(self) -> None:
        """Settles and verifies deferred steps; gives up those that are not one update apart."""
        # The first that failed tells why, below.
        with contextlib.suppress(AdaCheckError):
            self._deferred.settle(verify=jax.process_count() == 1)
        self._learn()
        if (count := self._deferred.settled_count) < len(self._deferred):
            self._give_up(count, "they are not one update apart")

    def _superseded(self, step: int | None) -> StagedStep | None:
        """Gives up the deferred steps that a save replaces.

        Returns:
            The step that it saves again, if it was deferred last.
        """
        if step is None or not len(self._deferred):
            return None
        steps = self._deferred.steps
        kept = sum(each.step < step for each in steps)
        if kept == len(steps) - 1 and steps[-1].step == step:
            return self._deferred.cut(kept)[0]
        self._give_up(kept, f"step {step} is saved after them")
        return None

    def _give_up(self, count: int, why: str) -> None:
        """Gives up deferred steps but for the first ones, and says so."""
        tell_given_up([each.step for each in self._deferred.cut(count)], why)

    def _next_attempt(self, destination: Destination) -> Attempt:
        saved = self._parents.saved
        repeats = saved is not None and saved.directory == destination.directory
        return self._attempt.next(repeats=repeats)

    def defer(self, state: PyTree, step: int | None) -> bool:
        """Keeps a step in memory, for the next save to write with its own.

        Args:
            state: the state.
            step: its number; None for the one after the last.

        Returns:
            True if it was kept; see :meth:`~adacheck_jax.AdaCheckHandler.record_step`.
        """
        with self._lock:
            why = self._why_not_deferred(state, step)
            number = step
            if why and number is None and len(self._deferred):
                number = self._deferred.steps[-1].step + 1
            if number is not None and why:
                self._notices.note_missed(number, why)
            elif number is not None:
                self._notices.note_step(number)
            return not why

    def _why_not_deferred(self, state: PyTree, step: int | None) -> str:
        """Defers a step, or gives the reason why it has to be saved."""
        self._learn()
        parent, kept = self._parents.only, self._deferred
        if parent is None:
            return "there is nothing yet to build on"
        last = kept.tip_behind(parent).step
        number = last + 1 if step is None else step
        if number < last:
            raise ValueError(
                f"expected a step after {last}, the last one, found {number}. The state was "
                "not recorded; the steps before are not affected."
            )
        if number == parent.tip.step:
            return ""
        if number == last:
            kept.cut(len(kept) - 1)
        snapshot = self._snapshots.take(state)
        if not len(kept):
            kept.restart(parent)
        situation, tip = self._situation(snapshot, parent.directory, number, None, parent, True)
        planned = plan.plan_deferred(situation, self._options)
        if isinstance(planned, str):
            return planned
        structure = planned.structure
        own_bytes = deferred.bytes_of(structure, planned.stored)
        if (len(kept) + 1) * own_bytes > deferred.most_bytes(structure):
            return "the recorded steps fill the memory that they may take"
        counters = {i: snapshot.arrays[i] for i in structure.counts}
        is_known = staged.are_ready(counters) and not (
            parent.tip.staged and parent.tip.staged.plan.is_speculative
        )
        copies = self._copies(snapshot, planned)
        course = _Course(situation, planned, parent, tip)
        own, witness = self._staged(snapshot, course, copies, None, f"recorded step {number}")
        copies.wait()
        drains = any(map(transfer.on_accelerator, snapshot.arrays))
        depth = parent.tip.depth + len(kept) + 1
        kept.add(Tip(number, depth, own, copies.kept, witness), own, drains=drains)
        if jax.process_count() == 1 and (self._distrust.is_cautious or is_known):
            # Several processes would not know it at the same time.
            return self._settle_last()
        return ""

    def _settle_last(self) -> str:
        """Settles the steps deferred so far; in a cautious run they are compared too."""
        kept = self._deferred
        try:
            kept.settle(verify=self._distrust.is_cautious)
        except AdaCheckError as error:
            kept.cut(len(kept) - 1)  # this one is left to a save, which sees the whole state
            self._give_up(kept.settled_count, str(error))
            return str(error)
        return ""

    def close(self) -> None:
        """Tells of deferred steps that are not saved; another manager may still save them."""
        if steps := [each.step for each in self._deferred.steps]:
            shown = lineages.shown_steps(steps)
            _log.warning("Recorded steps that are not saved: %s; a manager is closed.", shown)


def _sums_of(snapshot: Snapshot) -> Mapping[int, int]:
    """This process's contribution to the fingerprint of each leaf; waits for the state."""
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    return fingerprint.Parts(arrays, structure.picks, structure.whole_picks, summing=summing).sums()


def _warn_of_other_counts(again: StagedStep, planned: SavePlan) -> None:
    """Says so where a step is not saved as it was deferred."""
    if planned.counts is not None and again.counts() != planned.counts:
        _log.warning(
            "Step %d was recorded with %s updates and is saved with %s: what was recorded is not "
            "saved. Give record_step the numbers of the steps, as the manager counts them.",
            *(planned.step, plan.shown(again.counts()), plan.shown(planned.counts)),
        )


_MIN_STILL_BYTES = 1 << 16
"""Smaller leaves are no reason for files of their own."""


def _still(structure: Structure) -> frozenset[int]:
    """The leaves that may well be the same at the next base: no update computes them."""
    if not structure.bindings:
        return frozenset()
    touched = frozenset(i for indices in structure.arguments for i in indices)
    return frozenset(
        i
        for i, leaf in enumerate(structure.leaves)
        if i not in touched and leaf.nbytes >= _MIN_STILL_BYTES
    )


def _bound_paths(structure: Structure) -> frozenset[str]:
    """The leaf paths that updates consume, compute or count."""
    return frozenset(
        path
        for each in structure.bindings
        for path in (*each.explained, *each.consumed, each.count)
    )
