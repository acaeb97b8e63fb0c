"""Every decision of a save, taken once: a pure function of what is known about state and parent.

:func:`plan` answers for a save, :func:`plan_deferred` for a step that stays in memory until the
next save. Where the update counters are still being computed, :func:`speculate` assumes one update,
and :meth:`SavePlan.check` gives the plan that holds once they are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.plan.decision import (
    Decision,
    advanced,
    decide,
    fits,
    number_of,
    replayed,
    replays,
    shown,
)
from adacheck_jax.plan.options import Options
from adacheck_jax.plan.situation import Counts, Situation
from adacheck_jax.plan.when_base import BaseDue
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A save, decided.

    Attributes:
        counts: update counters of the state; None in a speculative plan.
        stored: leaves that are written, unless they turn out to be the parent's.
        kept: leaves of which the next save needs host copies.
        unreplayed: leaves that the update computes and that are stored nevertheless.
        unhealed: leaves that replay was found to get wrong and that this process cannot store
            alone, since another one owns some of what it found wrong.
        unchanged: leaves that must have the parent's bits: neither stored nor computed.
        spare: leaves that are copied too, to be stored if replay is found to get them wrong when
            the state is gone. Derived trees are computed by the train step's own calls, and so are
            sooner left out or edited than what the optimizer computes.
        stores_all: True for a delta of bits that stores every leaf, and compares with nothing.
        has_baseline: True if an update onto this state could be replayed and checked.
        interval: steps since the one before it, saved or deferred.
        becomes_base: True if the delta is to become a base once it is saved.
        given_up: reason why deferred steps are given up; empty if they are saved too.
    """

    step: int
    decision: Decision
    counts: Counts | None
    structure: Structure
    update: ExportedUpdate
    stored: tuple[int, ...]
    kept: tuple[int, ...]
    unreplayed: frozenset[int] = frozenset()
    unhealed: tuple[int, ...] = ()
    unchanged: tuple[int, ...] = ()
    spare: tuple[int, ...] = ()
    stores_all: bool = False
    has_baseline: bool = False
    becomes_base: bool = False
    interval: int = 0
    given_up: str = ""

    @property
    def is_base(self) -> bool:
        """True if the full state is written."""
        return self.decision.is_base

    @property
    def updates(self) -> tuple[int, ...]:
        """Positions of the recorders whose update a restore replays."""
        return self.decision.updates

    @property
    def stale(self) -> tuple[int, ...]:
        """Ephemeral leaves that are not stored: a restore gives what an earlier step had."""
        return tuple(sorted(self.structure.ephemeral.difference(self.stored)))

    @property
    def is_speculative(self) -> bool:
        """True if the update counters are not known yet, and one update is assumed."""
        return self.counts is None

    @property
    def checked_by(self) -> str:
        """Engine that compares the replay with the state; ``"stored"`` if nothing is replayed."""
        if not self.decision.updates:
            return "stored"
        update = self.update
        samples_all = update.engine == "sample" and update.is_sampled_whole(self.structure)
        return "full" if samples_all else update.engine

    def storing(self, wrong: Collection[int]) -> SavePlan:
        """The plan that stores some of the spare leaves besides."""
        return dataclasses.replace(
            self,
            stored=tuple(sorted({*self.stored, *wrong})),
            unreplayed=self.unreplayed.union(wrong),
            unchanged=tuple(i for i in self.unchanged if i not in wrong),
        )

    def check(self, counts: Counts, before: Counts, before_step: int) -> SavePlan:
        """The plan that holds once the counters of a speculative one are known.

        Raises:
            AdaCheckError: a recorder made another number of updates than one or none.
        """
        if self.counts is not None:
            return self
        updates = advanced(before, counts)
        if updates is None:
            raise AdaCheckError(
                f"expected one update since step {before_step}, as between the steps before; but "
                f"the update counter went from {shown(before)} to {shown(counts)}: not one update. "
                "A save does not wait for a step that is still computed, and so this was found "
                "when a full state could not be had any more. The step is not saved; the next one "
                "will be a base."
            )
        decision, stored = replayed(updates), self.stored
        if len(updates) < len(counts):
            wanted = _stored(self.structure, decision, self.update, self.unreplayed, whole=True)
            stored = tuple(i for i in wanted if i in frozenset(stored))
        return dataclasses.replace(
            self,
            decision=decision,
            counts=counts,
            stored=stored,
            unchanged=_unchanged(self.structure, stored, updates),
        )


def plan(situation: Situation, options: Options) -> SavePlan:
    """Plans a save whose update counters are known."""
    return decided(situation, decide(situation, options), options)


def speculate(situation: Situation, options: Options) -> SavePlan | None:
    """Plans a delta of one update; None if the counters have to be known first.

    Saves that are as far apart as the last two were lie one update apart, or none, if those did; so
    do a save and a step that was deferred before.
    """
    parent = situation.parent
    if situation.step is None or parent is None or not situation.is_only:
        return None
    goes_on = parent.kind == "replay" and situation.step - parent.step == parent.interval
    lineage = parent.lineage
    if (
        parent.structure is not situation.structure
        or not parent.has_baseline
        or not (goes_on or parent.deferred_count)
        or situation.update.engine == "identity"  # which has nothing to wait for
        or not situation.is_checker_ready
        or lineage is None
        or lineage.problem
        or situation.length.due is BaseDue.NOW
        or situation.shadow_problem
    ):
        return None
    return _one_update(situation, options)


def plan_deferred(
    situation: Situation, options: Options, *, is_away: bool = False
) -> SavePlan | str:
    """Plans a step that stays in memory until the next save; or the reason why it cannot.

    All processes have to answer alike, so the facts are those alone that all of them know. While
    storage ``is_away`` a lineage may become longer than it should.
    """
    structure, update, parent = situation.structure, situation.update, situation.parent
    if parent is None or situation.step is None:
        return "there is nothing yet to build on"
    saved = parent.structure
    if not replays(update, options, replayable=situation.replayable):
        return update.problem or "the step has to be stored in full"
    if saved is not None:
        if structure.primary != saved.primary:
            return "replicas differ, and another one is saved from now on"
        if structure is not saved:
            return "the state has another tree or other shardings than the step before"
        if parent.kind == "bits":
            return "the step before was stored as differences"
    elif not fits(parent, structure, update):
        return "the restored step has another tree, update, or other shardings"
    if not parent.has_baseline:
        return "the step before is not known well enough to check the update"
    if situation.shadow_problem:
        return situation.shadow_problem
    if not (is_away or situation.length.has_room_for_deferred):
        return f"the lineage would be longer than max_deltas={situation.longest_lineage}"
    if not situation.keeps_ancestors:
        return "nothing keeps the steps that it builds on"
    if parent.is_lost and situation.process_count == 1:
        return f"the step before step {situation.step} was not saved"
    return _one_update(situation, options)


def _one_update(situation: Situation, options: Options) -> SavePlan:
    """The plan of a delta of one update of each recorder."""
    every = tuple(range(len(situation.structure.bindings)))
    return planned(situation, replayed(every), options)


def known_unreplayed(situation: Situation) -> frozenset[int]:
    """The leaves that the update computes, and that are stored since replay is not relied on."""
    return (situation.update.unreplayed | situation.quarantined) & situation.structure.computed


def decided(situation: Situation, decision: Decision, options: Options) -> SavePlan:
    """The plan of a decision; after deferred steps, which a base cannot hold, it is a delta."""
    made, parent = planned(situation, decision, options), situation.parent
    if not decision.is_base or parent is None or not parent.deferred_count:
        return made
    if parent.lineage is None or parent.leaves != situation.structure.leaves:
        return dataclasses.replace(made, given_up=decision.reason)
    reason = f"{decision.reason}, and {parent.deferred_count} deferred steps are saved with it"
    decision = Decision("bits", reason, notices=decision.notices)
    made = planned(situation, decision, options)
    every = tuple(range(len(situation.structure.leaves)))
    return dataclasses.replace(made, stores_all=True, stored=every)


def planned(
    situation: Situation,
    decision: Decision,
    options: Options,
    *,
    wrong: frozenset[int] = frozenset(),
) -> SavePlan:
    """A plan with all that follows from its decision; it stores what replay gets ``wrong``."""
    structure, update, replayable = situation.structure, situation.update, situation.replayable
    not_replayed = known_unreplayed(situation) | (wrong & structure.computed)
    is_due = situation.length.due is BaseDue.IN_BACKGROUND
    becomes_base = decision.kind == "replay" and is_due
    stored = _stored(
        structure, decision, update, not_replayed | wrong, whole=decision.is_base or becomes_base
    )
    is_alone = situation.process_count == 1  # several may not find the same leaves wrong
    unreplayed: frozenset[int] = frozenset()
    unchanged: tuple[int, ...] = ()
    if decision.kind == "replay":
        unreplayed = not_replayed if is_alone else update.unreplayed
        unchanged = _unchanged(structure, stored, decision.updates)
    has_spare = situation.counts is None and is_alone
    quarantined, step = situation.quarantined | wrong, number_of(situation)
    parent = situation.parent
    return SavePlan(
        step=step,
        decision=decision,
        counts=situation.counts,
        structure=structure,
        update=update,
        stored=stored,
        kept=kept(structure, update, quarantined, options, replayable=replayable),
        unreplayed=unreplayed,
        unchanged=unchanged,
        spare=tuple(sorted(structure.derived.difference(stored))) if has_spare else (),
        has_baseline=replays(update, options, replayable=replayable),
        becomes_base=becomes_base,
        interval=0 if parent is None else step - parent.step,
    )


def kept(
    structure: Structure,
    update: ExportedUpdate,
    quarantined: frozenset[int],
    options: Options,
    *,
    replayable: bool,
) -> tuple[int, ...]:
    """The leaves of which the next save needs this state's bits."""
    if not options.has_deltas:
        return ()
    if replays(update, options, replayable=replayable):
        unreplayed = (update.unreplayed | quarantined) & structure.computed
        return _stored(structure, Decision("replay", ""), update, unreplayed, whole=False)
    follows_bits = options.delta == "bits" or (replayable and bool(structure.bindings))
    every = range(len(structure.leaves)) if follows_bits else ()
    return tuple(i for i in every if i not in structure.ephemeral)


def _stored(
    structure: Structure,
    decision: Decision,
    update: ExportedUpdate,
    wrong: Collection[int],
    *,
    whole: bool,
) -> tuple[int, ...]:
    """The leaves that a save stores; what is, or becomes, a base (``whole``) the ephemeral too."""
    left_out = frozenset[int]() if whole else structure.ephemeral
    every = [i for i in range(len(structure.leaves)) if i not in left_out]
    if decision.kind != "replay":
        return tuple(every)
    replayed = structure.computed - update.stored - frozenset(wrong)
    # Without an update the record is the parent's, and the next step does not need it.
    idle = structure.consumed - structure.consumed_by(decision.updates)
    return tuple(i for i in every if i in wrong or not (i in replayed or i in idle))


def _unchanged(
    structure: Structure, stored: Collection[int], updates: Sequence[int]
) -> tuple[int, ...]:
    touched = structure.computed_by(updates).union(stored, structure.ephemeral)
    return tuple(i for i in range(len(structure.leaves)) if i not in touched)
