"""Plans the saves of one training run: gathers facts, has them planned, and corrects plans.

:mod:`~adacheck_jax.plan.save_plan` decides; what it needs is looked up here, on the disk, in
memory and among what checks have found so far.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from adacheck_jax.device import fingerprint, transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, LineageError, ReplayError
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.plan import save_plan, situation
from adacheck_jax.plan.decision import Decision, replays, shown, unplanned
from adacheck_jax.plan.options import Options
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import BackgroundFacts, Counts, Facts, Situation
from adacheck_jax.proof import second_copy
from adacheck_jax.proof.checker import Check, Checker, Comparison, Findings, is_sparse
from adacheck_jax.proof.identity import Identity
from adacheck_jax.proof.sample import Sampling
from adacheck_jax.save.background_bases import BackgroundBases
from adacheck_jax.save.line.notices import Quarantine
from adacheck_jax.save.line.parents import Line, Parent
from adacheck_jax.save.pending import KnownStep, Pending, mismatch
from adacheck_jax.schedule.line import LineSchedule
from adacheck_jax.state.exported_update import NOT_YET, ExportedUpdate, ExportedUpdates
from adacheck_jax.state.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update.binding import Recorders

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A save as planned: with what it follows, and the check that has begun.

    Attributes:
        parent: the step on the disk that a delta follows, also where the plan is a base.
        before: the last step in memory after that parent.
        check: comparison of the replay that is waited for before the save returns
            (:meth:`Planner.confirmed`).
        facts: what a plan with a check was made from.
        again: the same step, if it was deferred before, as far as is known with the same state.
        compare: the one that is left to the worker, where not all processes enter it.
    """

    plan: SavePlan
    parent: Parent | None
    before: KnownStep | None
    again: Pending | None = None
    check: Check | None = None
    facts: Situation | None = None
    compare: Comparison | None = None


class Planner:
    """Plans the saves of one training run."""

    def __init__(
        self,
        recorders: Recorders,
        options: Options,
        schedule: LineSchedule,
        bases: BackgroundBases,
        shadow: ShadowThread,
    ) -> None:
        self._options, self._schedule = options, schedule
        self._bases, self._shadow = bases, shadow
        self.snapshots = Snapshots(
            recorders,
            options.params_path,
            options.ephemeral,
            compares_replicas=options.check_replicas != "off",
        )
        self.quarantine = Quarantine()
        self.line = Line(options.keep_lineage)
        self.updates = ExportedUpdates(options.check)
        self._checker: tuple[Structure, ExportedUpdate, Checker] | None = None

    def plan_save(
        self,
        snapshot: Snapshot,
        directory: AnyPath,
        step: int | None,
        agrees: Callable[[str], bool],
        *,
        replayable: bool,
    ) -> Proposal:
        """Plans a save: without a look at the state's values if it is still being computed.

        The check of a replayed delta is begun, unless the plan is speculative. ``agrees`` asks all
        processes if they enter a collective of that name.

        Raises:
            AdaCheckError: deferred steps are lost; told once.
        """
        again = self.line.supersede(step)
        only = self.line.only
        waits = self.quarantine.is_cautious or is_computed(snapshot)
        if not waits and step is not None and only is not None and only.save is not None:
            self.line.look(only, directory)
            facts = self._situation(snapshot, directory, step, None, only, again, replayable)
            planned = save_plan.speculate(facts, self._options)
            if planned is not None and not second_copy.is_collective(snapshot, facts.update):
                return Proposal(planned, only, self.line.last_after(only), again)
        counts = snapshot.counts()  # waits for the running step
        self.settle_deferred()
        if again is not None and again.counts() != counts:
            _log.warning(
                "Step %d was recorded with %s updates and is saved with %s: what was recorded is "
                "not saved. Give record_step the numbers of the steps, as the manager counts them.",
                *(again.step, shown(again.counts()), shown(counts)),
            )
            again = None
        parent = self.line.deferred_behind if self.line.deferred else None
        if parent is not None and not self.line.look(parent, directory):
            self.line.give_up(0, "the step that they follow is not there")
            parent = None
        parent = parent or self.line.choose(directory, counts)
        facts = self._situation(snapshot, directory, step, counts, parent, again, replayable)
        before = self.line.last_after(parent) if parent else None
        proposal = self._giving_up(
            Proposal(save_plan.plan(facts, self._options), parent, before, again)
        )
        baseline = before and before.baseline
        if proposal.plan.decision.kind != "replay" or parent is None or baseline is None:
            return proposal
        is_collective = second_copy.is_collective(snapshot, facts.update)
        if is_collective and not agrees(name_of(proposal.plan, snapshot)):
            refuse = functools.partial(_refuse, proposal.plan.step)
            return dataclasses.replace(proposal, compare=refuse)
        if isinstance(before, Pending):
            with contextlib.suppress(AdaCheckError):  # raised by the save of that step
                before.verify()
        checker = self.checker_of(snapshot.structure, facts.update)
        sums = functools.partial(sums_of, snapshot)
        check = checker.begin(baseline, snapshot.arrays, proposal.plan.step, sums)
        return dataclasses.replace(proposal, check=check, facts=facts)

    def plan_deferred(
        self,
        snapshot: Snapshot,
        parent: Parent,
        step: int,
        again: Pending | None,
        away_bytes: int | None,
    ) -> Proposal | str:
        """Plans a step that stays in memory; or gives the reason why it has to be saved instead."""
        replayable = parent.save is None or parent.save.replayable
        facts = self._situation(snapshot, parent.directory, step, None, parent, again, replayable)
        planned = save_plan.plan_deferred(facts, self._options, is_away=away_bytes is not None)
        if isinstance(planned, str):
            return planned
        structure = planned.structure
        given = (snapshot.arrays[i] for i in structure.computed)
        if planned.update.engine == "identity" and not all(isinstance(x, jax.Array) for x in given):
            return "copies are not the arrays that separate_update returned; a save compares them"
        own_bytes = situation.bytes_of(structure, planned.stored)
        taken_bytes = len(self.line.deferred) * own_bytes
        room_bytes = situation.most_bytes(structure) if away_bytes is None else away_bytes
        if taken_bytes + own_bytes > room_bytes:
            return "the recorded steps fill the memory that they may take"
        return Proposal(planned, parent, self.line.last_after(parent))

    def _situation(
        self,
        snapshot: Snapshot,
        directory: AnyPath,
        step: int | None,
        counts: Counts | None,
        parent: Parent | None,
        again: Pending | None,
        replayable: bool,
    ) -> Situation:
        """All that a plan may know."""
        structure, before = snapshot.structure, None
        if parent is not None:
            before = self.line.last_after(parent)
            before.wait()  # the update is exported there already
        is_new = parent is None and replayable and not structure.on_accelerator
        is_new = is_new and not self._shadow.may_be_sent(structure)  # by the caller's thread
        can_wait = is_new and self.updates.can_wait(structure)
        update = NOT_YET if can_wait else self.updates.of(structure)
        self.updates.tell(update)
        is_checked = replays(update, self._options, replayable=replayable)
        return Situation(
            step=step,
            structure=structure,
            update=update,
            counts=counts,
            replayable=replayable,
            quarantined=self.quarantine.leaves_of(structure),
            parent=None if parent is None else self._facts(parent, structure, update, counts),
            is_only=parent is not None and self.line.only is parent,
            is_first=self.line.is_empty,
            keeps_ancestors=parent is not None and self.line.keeps_ancestors(directory),
            process_count=jax.process_count(),
            is_checker_ready=is_checked and self.checker_of(structure, update).is_ready,
            longest_lineage=self._schedule.longest_lineage,
            # All processes have to plan alike.
            can_become_base=self._bases.known.are_possible
            if jax.process_count() > 1
            else self.background(directory).are_possible,
            shadow_problem="" if before is None else self._shadow_problem(before, again),
        )

    def _facts(
        self, parent: Parent, structure: Structure, update: ExportedUpdate, counts: Counts | None
    ) -> Facts:
        """Facts about the step that a state with these counters would follow."""
        before, save = self.line.last_after(parent), parent.save
        base_depth, saved = parent.base_depth, save and save.plan
        if save is not None:
            # Several processes may not see at the same save that a step has become a base.
            made_depth = self._bases.known.newest_depth
            base_depth = max(base_depth, made_depth) if jax.process_count() == 1 else made_depth
        fits = before.baseline is not None and before.baseline.fits(structure, update)
        return Facts(
            step=before.step,
            depth=before.depth - base_depth,
            counts=None if counts is None else before.counts(),
            lineage=parent.lineage,
            deferred_count=before.depth - parent.known.depth,
            has_baseline=fits,
            copied=before.kept,
            leaves=before.leaves,
            has_moved=before.baseline is not None and not fits,
            structure=saved and saved.structure,
            kind=saved and saved.decision.kind,
            interval=saved.interval if saved else 0,
            is_lost=save is not None and save.is_lost,
        )

    def _shadow_problem(self, before: KnownStep, again: Pending | None) -> str:
        """The reason why a base is due: the shadow followed what was given up, or has no room.

        Several processes have to plan alike: by their agreement of the last save.
        """
        if jax.process_count() > 1:
            return self._shadow.due
        is_again = again is not None and not self._shadow.is_beyond(again)
        if self._shadow.is_beyond(before) and not is_again:
            return "the shadow followed another step"
        return self._shadow.base_reason

    def background(self, directory: AnyPath) -> BackgroundFacts:
        """Facts of this process on bases that it makes, or could make, in the background.

        A number of deltas that the caller chose is kept to; and in a store nothing can be renamed.
        """
        shadow, own = self._options.host_shadow, self._bases.own
        may_be = shadow is not None and shadow.background_bases and own.are_possible
        may_be = may_be and not isinstance(self._options.max_deltas, int)
        may_be = may_be and self.line.has_links(directory)
        return dataclasses.replace(own, are_possible=may_be)

    def confirmed(self, snapshot: Snapshot, proposal: Proposal) -> Proposal:
        """Waits for the check, and plans anew what replay gets wrong of a state that is there."""
        check, facts, before = proposal.check, proposal.facts, proposal.before
        if check is None or facts is None or before is None:
            return proposal
        planned, structure = proposal.plan, proposal.plan.structure
        findings = check.findings(planned.decision.updates)
        if findings and planned.update.engine == "identity":
            self.updates.compare_in_full()
            facts = dataclasses.replace(facts, update=self.updates.of(structure))
            reason = (
                "the arrays are not those that separate_update took and returned, or it ran "
                "another program than a restore would; from now on its updates are compared in full"
            )
            made = save_plan.decided(facts, unplanned(reason), self._options)
            return self._giving_up(dataclasses.replace(proposal, plan=made, check=None))
        wrong = frozenset(findings) - save_plan.known_unreplayed(facts)
        if planned.unchanged and jax.process_count() == 1:  # others may not know the values yet
            expected, own = before.sums(), sums_of(snapshot, planned.unchanged)
            wrong |= {i for i, value in own.items() if value != expected[i]}
        if not wrong:
            return proposal
        unhealed = _owned_by_others(snapshot, wrong)
        if healed := wrong - unhealed:
            self.quarantine.tell(planned, healed)
        sparse = [i for i in findings if i in wrong and is_sparse(structure, i, findings[i])]
        self.quarantine.learn("", [structure.leaves[i].path for i in sparse])
        facts = dataclasses.replace(facts, quarantined=self.quarantine.leaves_of(structure))
        wrong_bytes = sum(structure.leaves[i].nbytes for i in wrong)
        whole_bytes = sum(leaf.nbytes for leaf in structure.leaves)
        if facts.process_count == 1 and 2 * wrong_bytes > whole_bytes:
            reason = mismatch(structure, sorted(wrong))
            made = save_plan.decided(facts, Decision("base", reason), self._options)
            return self._giving_up(dataclasses.replace(proposal, plan=made, check=None))
        check.renew(snapshot.arrays, wrong)
        made = save_plan.planned(facts, planned.decision, self._options, wrong=wrong)
        made = dataclasses.replace(made, unhealed=tuple(sorted(unhealed)))
        return dataclasses.replace(proposal, plan=made)

    def _giving_up(self, proposal: Proposal) -> Proposal:
        """Gives up the deferred steps that a plan leaves behind."""
        if reason := proposal.plan.given_up:
            self.line.give_up(0, reason)
        return proposal

    def checker_of(self, structure: Structure, update: ExportedUpdate) -> Checker:
        """The engine that compares a structure's replays; made once, compiles in the background."""
        known = self._checker
        if known is None or known[0] is not structure or known[1] is not update:
            if update.pieces is not None:
                checker: Checker = Sampling(structure, update, update.pieces, self._proves)
            elif update.engine == "full":
                checker = second_copy.Following(structure, update)
            else:
                checker = Identity(structure, update)
            known = self._checker = (structure, update, checker)
        return known[2]

    def _proves(self) -> bool | None:
        """True if a sample is not all that the next step is compared by, nor has found anything.

        None if that can be said of later steps alone.
        """
        return not self.quarantine.is_cautious and self._shadow.proves

    def snapshot_of_restored(self, restored: Lineage, state: PyTree) -> Snapshot | None:
        """A restored state taken apart; None where the next save cannot be a replayed delta.

        Numbers that were asked for as Python's, as in the first state of a run, are taken as they
        were saved: the next state has them so again.
        """
        try:
            snapshot = self.snapshots.take(_as_saved(state, restored.leaves))
        except AdaCheckError as error:
            _log.info("The next save will be a base: %s", error)
            return None
        pairs = zip(snapshot.structure.leaves, restored.leaves, strict=False)
        is_alike = len(snapshot.structure.leaves) == len(restored.leaves)
        return snapshot if is_alike and all(a.is_like(b) for a, b in pairs) else None

    def learn(self) -> None:
        """Becomes cautious where replay was found to be wrong in the background.

        Raises:
            AdaCheckError: deferred steps are lost by it; told once.
        """
        save = self.line.save
        for each in (*(save.steps if save is not None else ()), *self.line.deferred):
            if each.saved:
                self.quarantine.tell(each.plan, each.saved)
        if save is not None:
            known = save.agreed.caution if save.agreed else save.caution
            leaves = save.structure.leaves
            self.quarantine.learn(known.reason, [leaves[i].path for i in known.distrusted])
            if not self.line.deferred:  # else those before are of another replica
                self.snapshots.follow(save.agreed_primary)
            if isinstance(save.error, ReplayError):  # without the path of the step's directory
                self._learn_disproved(str(save.error.__cause__ or save.error), save.steps)
        # One process alone may have found a deferred step wrong: the save that writes it fails in
        # all processes.
        if jax.process_count() == 1 and (wrong := self.line.wrong):
            kept, error = wrong
            self._learn_disproved(str(error), self.line.deferred[kept:])
            steps = lineages.shown_steps([each.step for each in self.line.cut(kept)])
            raise type(error)(
                f"Recorded steps that are not saved: {steps}, and neither is this one; those "
                f"before are kept. {error} If you change the state by hand, as with a learning "
                "rate, save that step instead of recording it."
            ) from error

    def _learn_disproved(self, reason: str, steps: Sequence[Pending]) -> None:
        """Notes what the shadow found wrong: the sample of a later step may miss it.

        Several processes have to plan alike: their next save is a base. With that goes what one of
        them knows: what it could not store, or in process 0 what all shadows together disproved.
        """
        paths = [
            each.plan.structure.leaves[i].path
            for each in steps
            for i in each.disproved.union(each.plan.unhealed)
        ]
        self.quarantine.learn(reason, paths)

    def settle_deferred(self) -> None:
        """Settles and verifies deferred steps; gives up those that are not one update apart."""
        # The first that failed tells why, below.
        with contextlib.suppress(AdaCheckError):
            self.line.settle(verify=jax.process_count() == 1)
        self.learn()
        if (count := self.line.settled_count) < len(self.line.deferred):
            self.line.give_up(count, "they are not one update apart")

    def deferred_until(
        self, directory: AnyPath, number: int | None
    ) -> tuple[Parent, list[Pending]]:
        """The deferred steps up to a number, which a save writes alone, and what they follow.

        Raises:
            AdaCheckError: deferred steps are lost; told once. Or there are none.
        """
        self.settle_deferred()
        parent, every = self.line.deferred_behind, self.line.deferred
        steps = [each for each in every if number is None or each.step <= number]
        if parent is None or not steps:
            raise AdaCheckError(f"{directory}: expected recorded steps, found none.")
        if not self.line.look(parent, directory):
            raise LineageError(
                f"Recorded steps that are not saved: "
                f"{lineages.shown_steps([each.step for each in self.line.cut(0)])}; the step "
                "that they follow is not there. The next save will be a base."
            )
        return parent, steps

    def settle_last_deferred(self) -> str:
        """The reason, if any, why the last step deferred has to be saved instead; waits for all."""
        try:
            self.line.settle(verify=self.quarantine.is_cautious and jax.process_count() == 1)
        except AdaCheckError as error:
            # This one is left to a save, which sees the whole state.
            self.line.cut(len(self.line.deferred) - 1)
            self.line.give_up(self.line.settled_count, str(error))
            return str(error)
        return ""


def _as_saved(state: PyTree, saved: Sequence[Leaf]) -> PyTree:
    """A restored state, its numbers in the types that they were saved in."""
    named, treedef = trees.flatten(state)
    if [*named] != [each.path for each in saved]:
        return state
    pairs = zip(named.values(), saved, strict=True)
    return treedef.unflatten(
        np.asarray(x, leaf.dtype) if isinstance(x, bool | int | float) else x for x, leaf in pairs
    )


def is_computed(snapshot: Snapshot) -> bool:
    """True if the update counters of a state are known without waiting."""
    return transfer.are_ready([snapshot.arrays[i] for i in snapshot.structure.counts])


def name_of(planned: SavePlan, snapshot: Snapshot) -> str:
    """Name of a comparison; all processes have to enter the comparison of one name."""
    counts, updates = planned.counts, planned.decision.updates
    where = f"{planned.update.digest} {snapshot.structure.placement}"
    return f"step {planned.step}, {counts}, {updates}: {where}"


def _refuse(step: int, _updates: Sequence[int]) -> Findings:
    """Stands for a comparison that not all processes enter: the save fails in all of them."""
    raise AdaCheckError(
        f"step {step}: processes did not decide alike: not all of them replay the same update to "
        "compare it with the state. The step is not saved; start all processes from one step, with "
        "the same options."
    )


def _owned_by_others(snapshot: Snapshot, leaves: Collection[int]) -> frozenset[int]:
    """Those of some leaves whose boxes this process holds, and so samples, and another one owns."""
    structure, found = snapshot.structure, set[int]()
    for i in leaves if jax.process_count() > 1 else ():
        array, leaf, held = snapshot.arrays[i], structure.leaves[i], structure.leaves[i].boxes
        if i not in structure.local_picks:  # else every process has all of it
            held = transfer.boxes_here(array.shape, array.sharding)
        own = leaf.boxes_of(jax.process_index())
        if sum(box.size for box in held) != sum(box.size for box in own):
            found.add(i)
    return frozenset(found)


def sums_of(snapshot: Snapshot, leaves: Collection[int] | None = None) -> Mapping[int, int]:
    """This process's contribution to the fingerprint of each leaf; waits for the state."""
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    if leaves is not None:
        arrays, summing = {i: arrays[i] for i in leaves}, None
    return fingerprint.Contributions(
        arrays, structure.picks, structure.whole_picks, summing=summing
    ).sums()
