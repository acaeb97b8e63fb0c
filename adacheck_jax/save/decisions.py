"""Base, replayed updates, or differences: a decision for one state, with its reasons.

:mod:`~adacheck_jax.save.policy` decides from numbers; here the state itself is looked at: whether
it has the parent's structure and update. Users hear of bases that they did not plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from adacheck_jax.device import fingerprint
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.save import policy
from adacheck_jax.save.exported_update import Program, Programs
from adacheck_jax.save.policy import Counts, Decision, Delta, Tip, unplanned
from adacheck_jax.save.snapshot import Snapshot, Structure
from adacheck_jax.update import program as update_program

_log = logging.getLogger(__name__)


def tip_of(parent: Lineage) -> Tip:
    """The saved step at the end of a lineage."""
    saved = parent.manifest
    return Tip(saved.step, saved.counts, saved.depth)


class Decisions:
    """Decides how the states of one training run are saved, and says once what it costs.

    Args:
        programs: the updates of the run.
        has_recorder: whether the optimizer has a recorder.
        max_deltas: longest lineage, in deltas.
        keeps_lineage: whether a policy keeps ancestors alive where there are no hard links.
        delta: which deltas may be written.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        has_recorder: bool,
        max_deltas: int,
        keeps_lineage: bool,
        delta: Delta,
    ) -> None:
        self._programs = programs
        self._has_recorder = has_recorder
        self._max_deltas = max_deltas
        self._keeps_lineage = keeps_lineage
        self._delta: Delta = delta
        self._unplanned_count = 0
        self._said: set[str] = set()

    def decide(
        self,
        snapshot: Snapshot,
        parent: Lineage | None,
        tip: Tip | None,
        held: Collection[int],
        *,
        step: int,
        counts: Counts,
        has_links: Callable[[], bool],
        replayable: bool,
        is_first: bool,
    ) -> Decision:
        """Decides how a state is saved.

        Args:
            snapshot: the state.
            parent: the lineage that a delta would follow; None where there is none.
            tip: its last step, or the last of those that were recorded since.
            held: the leaves of that step that are in host memory.
            step: the step's number.
            counts: each recorder's update counter.
            has_links: tells whether the file system has hard links.
            replayable: whether every leaf of the updates is stored as it is trained.
            is_first: whether nothing was saved or restored before.
        """
        if not replayable and self._delta != "bits":
            return self._base_once("save_args cast leaves that the update consumes or computes")
        decision = policy.decide(
            parent.base if parent else None,
            tip,
            problem=parent.problem if parent else "",
            step=step,
            counts=counts,
            max_deltas=self._max_deltas,
            delta=self._delta,
            is_first=is_first,
        )
        program = self._programs.of(snapshot.structure)
        if program.problem and self._has_recorder and self._delta != "bits":
            self._say(program.problem)
        if decision.is_base or parent is None or tip is None:
            return decision
        if parent.base.leaves != snapshot.structure.leaves:
            return unplanned(_first_difference(parent.base, snapshot.structure))
        if not has_links() and not self._keeps_lineage:
            return self._base_once(
                "the file system has no hard links, and the handler has no KeepLineage policy that "
                "would keep the steps that deltas refer to (AdaCheckHandler(keep_lineage=...))"
            )
        if decision.kind == "bits":
            return self._check_bits(decision, snapshot, parent, program, held)
        return self._check_replay(decision, snapshot.structure, parent, program)

    def _check_bits(
        self,
        decision: Decision,
        snapshot: Snapshot,
        parent: Lineage,
        program: Program,
        held: Collection[int],
    ) -> Decision:
        if self._delta == "auto" and parent.problem and not program.problem:
            return Decision("base", "updates can be replayed from here on")
        if len(held) < len(snapshot.structure.leaves):
            return Decision("base", f"step {parent.manifest.step} is not in host memory")
        return decision

    def _check_replay(
        self, decision: Decision, structure: Structure, parent: Lineage, program: Program
    ) -> Decision:
        if not program.files:
            return unplanned(program.problem)
        update = parent.base.update
        if update is None or program.digest != update.programs.get(update_program.platform()):
            return unplanned("the update program changed")
        if update.reducing and update.placement != structure.placement:
            # Cut alike, but added up in another order: a restore replays where the base lay.
            return unplanned("the mesh changed, and the update adds up elements")
        return decision

    def note(self, decision: Decision, step: int) -> None:
        """Warns once where two bases in a row were not planned.

        Args:
            decision: of the step that is being saved.
            step: its number.
        """
        if decision.is_planned:
            self._unplanned_count = 0 if not decision.is_base else self._unplanned_count
            return
        self._unplanned_count += 1
        if self._unplanned_count >= 2:
            remedy = _remedy(decision.reason)
            self._warn_once(
                f"Steps are saved as full states, one after another, and not as deltas: at step "
                f"{step} since {decision.reason}. {remedy}",
                key=remedy,  # the reason has other numbers at each step
            )

    def _say(self, problem: str) -> None:
        form = "bit-pattern deltas" if self._delta == "auto" else "bases only"
        self._warn_once(f"Saving {form}: {problem}.")

    def _base_once(self, reason: str) -> Decision:
        self._warn_once(f"Saving bases only: {reason}.")
        return Decision("base", reason)

    def _warn_once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._said:
            self._said.add(key or message)
            _log.warning("%s", message)


_REMEDIES = {
    "the update counter": "Save or record (record_step) every step that makes an update; of two "
    "handlers that take turns each sees every second step alone.",
    "does not follow": "Give steps ascending numbers, and each training run a root and a handler "
    "of its own.",
    "no parent step": "Another handler or process writes to this root, or removes steps from it: "
    "give each training run a root and a handler of its own.",
    "the tree changed": "Save states of one structure.",
    "the state has": "Save states of one structure.",
    "changed from": "Save states of one structure.",
    "the sharding of": "Keep the shardings of the state: give the train step's jit out_shardings.",
}


def _remedy(reason: str) -> str:
    return next((text for key, text in _REMEDIES.items() if key in reason), "See the log.")


def changed(snapshot: Snapshot, parent: Lineage, indices: Collection[int]) -> list[int]:
    """Finds the leaves whose bits are not those of the parent; collective across processes.

    Args:
        snapshot: the state.
        parent: the lineage that it follows.
        indices: the leaves to compare.
    """
    expected = parent.manifest.fingerprints
    found = fingerprint.of_leaves({i: snapshot.arrays[i] for i in indices})
    return [i for i, value in found.items() if value != expected[i]]


def _first_difference(base: BaseManifest, structure: Structure) -> str:
    if len(base.leaves) != len(structure.leaves):
        return f"the state has {len(structure.leaves)} leaves, the base {len(base.leaves)}"
    old, new = next((a, b) for a, b in zip(base.leaves, structure.leaves, strict=True) if a != b)
    if old.path != new.path:
        return f"the tree changed: {new.path} where {old.path} was"
    if old.description != new.description:
        return f"{new.path} changed from {old.description} to {new.description}"
    return f"the sharding of {new.path} changed"
