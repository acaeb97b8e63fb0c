"""Base, replayed delta or differences: the kind of a save, and the reason for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.format.manifest import BaseManifest, Leaf
from adacheck_jax.plan.options import Options
from adacheck_jax.plan.situation import Counts, Facts, Kind, Situation
from adacheck_jax.plan.when_base import BaseDue
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.update import program as update_program
from adacheck_jax.update.recorder_state import next_count


@dataclass(frozen=True, slots=True)
class Decision:
    """The kind of a save.

    Attributes:
        reason: an explanation for the log and the manifest.
        updates: positions of the recorders whose update, one since the parent, is replayed.
        is_planned: True if a user who knows the handler's options expects it.
        notices: messages for the user, each told once a run.
    """

    kind: Kind
    reason: str
    updates: tuple[int, ...] = ()
    is_planned: bool = True
    notices: tuple[str, ...] = ()

    @property
    def is_base(self) -> bool:
        """True if the full state is written."""
        return self.kind == "base"


def unplanned(reason: str) -> Decision:
    """A base that is written because no delta can be."""
    return Decision("base", reason, is_planned=False)


def replayed(updates: tuple[int, ...]) -> Decision:
    """A delta of one update of some recorders."""
    reason = {0: "no update", 1: "one update"}.get(len(updates), f"{len(updates)} updates")
    return Decision("replay", reason, updates)


def advanced(before: Counts, after: Counts) -> tuple[int, ...] | None:
    """The recorders that made one update between two states; None if one made another number."""
    updates = []
    for k, (old, new) in enumerate(zip(before, after, strict=True)):
        if new == next_count(old):
            updates.append(k)
        elif new != old:
            return None
    return tuple(updates)


def shown(counts: Counts) -> str:
    """Counters in a message."""
    return " and ".join(map(str, counts))


def replays(update: ExportedUpdate, options: Options, *, replayable: bool = True) -> bool:
    """True if updates may be replayed onto a step whose leaves are stored in their own types."""
    return bool(update.program) and replayable and options.delta != "bits" and options.has_deltas


def fits(parent: Facts, structure: Structure, update: ExportedUpdate) -> bool:
    """True if an update of a structure can be replayed onto a restored step."""
    lineage = parent.lineage
    if lineage is None or lineage.problem or parent.leaves != structure.leaves:
        return False
    return not _unlike(lineage.base, structure, update)


def decide(situation: Situation, options: Options) -> Decision:
    """Base, replayed delta or differences, and notices to the user."""
    update, only_bits = situation.update, options.delta == "bits"
    if not situation.replayable and not only_bits:
        return _bases_only("save_args cast leaves that the update consumes or computes")
    decision, parent = by_counters(situation, options), situation.parent
    if not decision.is_base and parent is not None and parent.lineage is not None:
        decision = _followed(decision, parent, parent.lineage, situation, options)
    if not update.problem or not situation.structure.bindings or only_bits:
        return decision
    notice = f"Saving bit-pattern deltas: {update.problem}."
    return dataclasses.replace(decision, notices=(notice, *decision.notices))


def _followed(
    decision: Decision, parent: Facts, lineage: Lineage, situation: Situation, options: Options
) -> Decision:
    """The decision for a delta, or a base where none can follow the parent."""
    structure, update = situation.structure, situation.update
    base, saved = lineage.base, parent.structure
    if saved is not None and saved.primary != structure.primary:
        return Decision("base", "replicas differ, and another one is saved from now on")
    if parent.leaves != structure.leaves:
        return unplanned(_first_difference(parent.leaves, structure.leaves))
    if not situation.keeps_ancestors:
        return _bases_only(
            "the storage has no hard links, and no policy that handler and manager share keeps "
            "what deltas refer to, also those that are there already; make the manager with "
            "adacheck.checkpoint_manager(root, recorder), or give both the same keep = "
            "adacheck.KeepLineage(LatestN(3)), as keep_lineage and as preservation_policy"
        )
    if decision.kind == "bits":
        if options.delta == "auto" and lineage.problem and not update.problem:
            return Decision("base", "updates can be replayed from here on")
        if len(parent.copied) < len(structure.leaves) - len(structure.ephemeral):
            return Decision("base", f"step {lineage.manifest.step} is not in host memory")
    elif reason := _unlike(base, structure, update):
        return unplanned(reason)
    if parent.deferred_count and not situation.is_only:
        return Decision("base", "another step was restored meanwhile")
    if decision.kind == "bits":
        return decision
    if parent.has_moved:
        return unplanned("the sharding of the state changed, or its update did")
    if not parent.has_baseline:
        return Decision("base", "the step before is not known here well enough to check")
    if situation.shadow_problem:
        return Decision("base", situation.shadow_problem)
    return decision


def by_counters(situation: Situation, options: Options) -> Decision:
    """The decision by step, counters and length of the lineage.

    A counter that skipped means that records were missed, so a base is due where updates are
    replayed.
    """
    parent, counts = situation.parent, situation.counts or ()
    if options.delta != "bits" and not counts:
        return Decision("base", "no recorder")
    if parent is None or parent.lineage is None:
        reason = "no parent step to build on"
        return Decision("base", reason, is_planned=situation.is_first)
    step = number_of(situation)
    if step <= parent.step:
        return unplanned(f"step {step} does not follow step {parent.step}")
    if (length := situation.length).due is BaseDue.NOW:
        return Decision("base", length.reason)
    if options.delta == "bits":
        return Decision("bits", "as the handler was told")
    before = parent.counts
    if parent.lineage.base.update is None or not before or len(before) != len(counts):
        return unplanned("the base has no update program to replay")
    if parent.lineage.problem:
        return Decision("bits", parent.lineage.problem)
    updates = advanced(before, counts)
    if updates is None:
        return unplanned(
            f"the update counter went from {shown(before)} to {shown(counts)}: not one update"
        )
    return replayed(updates)


def number_of(situation: Situation) -> int:
    """The step's number: the caller's, else the first counter, else 0."""
    if situation.step is not None:
        return situation.step
    return situation.counts[0] if situation.counts else 0


def _bases_only(reason: str) -> Decision:
    return Decision("base", reason, notices=(f"Saving bases only: {reason}.",))


def _unlike(base: BaseManifest, structure: Structure, update: ExportedUpdate) -> str:
    """Reason why an update cannot be replayed from a base of the same leaves; empty if it can."""
    saved = base.update
    if not update.program:
        return update.problem
    if saved is None or update.digest != saved.programs.get(update_program.platform()):
        return "the update program changed"
    if (saved.reducing or update.reducing) and saved.placement != structure.placement:
        # Sums are added up in another order there: a restore replays where the base lay.
        return "the mesh changed, and the update adds up elements"
    return ""


def _first_difference(before: Sequence[Leaf], after: Sequence[Leaf]) -> str:
    if len(before) != len(after):
        return f"the state has {len(after)} leaves, the step before {len(before)}"
    old, new = next((a, b) for a, b in zip(before, after, strict=True) if a != b)
    if old.path != new.path:
        return f"the tree changed: {new.path} where {old.path} was"
    if old.description != new.description:
        return f"{new.path} changed from {old.description} to {new.description}"
    return f"the sharding of {new.path} changed"
