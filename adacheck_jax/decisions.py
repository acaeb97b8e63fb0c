"""Base, replayed update, or differences: a decision for one state, with its reasons.

:mod:`~adacheck_jax.policy` decides from numbers; here the state itself is looked at: whether it has
the parent's structure and update, and whether something else than the update has changed it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax import fingerprint, policy, replay
from adacheck_jax.copies import candidates
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import Lineage
from adacheck_jax.manifest import BaseManifest
from adacheck_jax.policy import Decision, Delta, Tip
from adacheck_jax.programs import Program, Programs
from adacheck_jax.snapshot import Snapshot, Structure

_log = logging.getLogger(__name__)


def tip_of(parent: Lineage) -> Tip:
    """The saved step at the end of a lineage."""
    saved = parent.manifest
    return Tip(saved.step, saved.count, saved.depth, parent.entries[-1].holder)


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
        self._small: dict[Hashable, list[np.ndarray]] = {}
        self._forecasts = True
        self._surprised_at: int | None = None
        self._said: set[str] = set()

    def decide(
        self,
        snapshot: Snapshot,
        parent: Lineage | None,
        tip: Tip | None,
        held: Collection[int],
        *,
        step: int,
        count: int | None,
        has_links: Callable[[], bool],
        replayable: bool,
    ) -> Decision:
        """Decides how a state is saved.

        Args:
            snapshot: the state.
            parent: the lineage that a delta would follow; None where there is none.
            tip: its last step, or the last of those that were recorded since.
            held: the leaves of that step that are in host memory.
            step: the step's number.
            count: the recorder's update counter.
            has_links: tells whether the file system has hard links.
            replayable: whether every leaf of the update is stored as it is trained.
        """
        if not replayable and self._delta != "bits":
            return self._base_once("save_args cast leaves that the update consumes or computes")
        self._learn_problem(parent)
        decision = policy.decide(
            parent.base if parent else None,
            tip,
            problem=parent.problem if parent else "",
            step=step,
            count=count,
            max_deltas=self._max_deltas,
            delta=self._delta,
        )
        program = self._programs.of(snapshot.structure)
        if program.problem and self._has_recorder and self._delta != "bits":
            self._say(program.problem)
        if decision.is_base or parent is None or tip is None:
            return decision
        if parent.base.leaves != snapshot.structure.leaves:
            return Decision("base", _first_difference(parent.base, snapshot.structure))
        if not has_links() and not self._keeps_lineage:
            return self._base_once(
                "the file system has no hard links, and the handler has no KeepLineage policy that "
                "would keep the steps that deltas refer to (AdaCheckHandler(keep_lineage=...))"
            )
        if decision.kind == "bits":
            return self._check_bits(decision, snapshot, parent, program, held)
        return self._check_replay(decision, snapshot, count, parent, tip, program)

    def _learn_problem(self, parent: Lineage | None) -> None:
        """What disproved a lineage, in this process or another, speaks against its program."""
        if parent is None or parent.base.update is None or parent.base.update.problem:
            return
        if parent.problem:
            digest = parent.base.update.programs.get(replay.platform(), "")
            self._programs.disprove(digest, parent.problem)

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
        self,
        decision: Decision,
        snapshot: Snapshot,
        count: int | None,
        parent: Lineage,
        tip: Tip,
        program: Program,
    ) -> Decision:
        if not program.files:
            return Decision("base", program.problem)
        update = parent.base.update
        if update is None or program.digest != update.programs.get(replay.platform()):
            return Decision("base", "the update program changed")
        if update.reducing and update.placement != snapshot.structure.placement:
            # Cut alike, but added up in another order: a restore replays where the base lay.
            return Decision("base", "the mesh changed, and the update adds up elements")
        if decision.update_count:
            values = self.values_of(snapshot.structure, snapshot.arrays)
            changed = self._set_by_hand(snapshot.structure, values, count, tip, program)
            by = "was changed by something else than the update"
        elif tip.step != parent.manifest.step:  # recorded: whoever writes knows its fingerprints
            changed, by = "", ""
        else:
            changed = _changed(snapshot, parent, candidates(snapshot.structure, decision, program))
            by = "changed without an update"
        return Decision("base", f"{changed} {by}") if changed else decision

    def settle(
        self,
        structure: Structure,
        values: Mapping[int, np.ndarray],
        tip: Tip,
        program: Program,
        where: Hashable,
    ) -> tuple[Decision, int]:
        """Decides, when the state may be gone, what was expected to be a delta of an update.

        Args:
            structure: of the state.
            values: of its small leaves, as :meth:`small` chose them.
            tip: the step that it follows.
            program: the update.
            where: under which its small values are remembered.

        Returns:
            A delta of one update or of none, and the update counter.

        Raises:
            AdaCheckError: it can be no such delta.
        """
        binding = structure.binding
        assert binding is not None
        count, before = int(values[structure.index[binding.count]]), tip.count
        assert before is not None
        wrong = ""
        if count - before == 1:
            changed = self._set_by_hand(structure, values, count, tip, program)
            wrong = f"{changed} was changed by something else than the update" if changed else ""
        elif count != before:
            wrong = f"the update counter went from {before} to {count}: not one update"
        if wrong:
            raise AdaCheckError(
                f"expected one update since step {tip.step}, as between the steps before; but "
                f"{wrong}. A save does not wait for a step that is still computed, and so this was "
                "found when a full state could not be had any more. The step is not saved; the "
                "next one will be a base."
            )
        self.remember(structure, values, where)
        advanced = count - before
        return Decision("replay", "one update" if advanced else "no update", advanced), count

    def small(self, structure: Structure) -> tuple[int, ...]:
        """The leaves by whose values a delta of an update is told from anything else."""
        binding = structure.binding
        assert binding is not None
        chosen = (structure.index[binding.count], *structure.positions(binding.extra))
        if not self._forecasts:
            return chosen[:1]
        inner = structure.positions(binding.inner)
        return (*chosen, *(inner[i] for i in self._programs.forecast(structure).inner))

    def values_of(
        self, structure: Structure, arrays: Sequence[Any] | Mapping[int, Any]
    ) -> dict[int, np.ndarray]:
        """The values of the small leaves; waits for them.

        Args:
            structure: of the state.
            arrays: plain arrays by leaf index.
        """
        if not all(_readable(arrays[i]) for i in self.small(structure)):
            self._forecasts = False
        return {i: np.array(arrays[i]) for i in self.small(structure)}

    def _set_by_hand(
        self,
        structure: Structure,
        values: Mapping[int, np.ndarray],
        count: int | None,
        tip: Tip,
        program: Program,
    ) -> str:
        """Names a small leaf of the optimizer's state that the update cannot have set."""
        binding = structure.binding
        before = self._small.get(tip.where)
        if binding is None or before is None or not self._forecasts:
            return ""
        forecast = self._programs.forecast(structure)
        extra = [values[i] for i in structure.positions(binding.extra)]
        expected = forecast.run(before, extra)
        pairs = zip(forecast.inner, expected, self._small_of(structure, values), strict=True)
        changed = [i for i, old, new in pairs if np.asarray(old).tobytes() != new.tobytes()]
        # What the update passes through is what it took, whoever set it: a delta stores it.
        inner = structure.arguments[1]
        changed = [i for i in changed if inner[i] not in program.passed]
        if not changed:
            return ""
        # Twice in a row is no hand: the step computes it otherwise, and the proof is left to tell.
        self._forecasts = self._surprised_at != tip.count
        self._surprised_at = count
        return binding.inner[changed[0]] if self._forecasts else ""

    def remember(
        self, structure: Structure, values: Mapping[int, np.ndarray], where: Hashable
    ) -> None:
        """Keeps what the next save is compared with, if updates may be replayed onto this one.

        Args:
            structure: of the state that is being saved.
            values: of its small leaves.
            where: under which; others are forgotten.
        """
        self._small = {where: self._small_of(structure, values)} if self._forecasts else {}

    def _small_of(self, structure: Structure, values: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        inner = structure.arguments[1]
        return [values[inner[i]] for i in self._programs.forecast(structure).inner]

    def _say(self, problem: str) -> None:
        what = "bit-pattern deltas" if self._delta == "auto" else "bases only"
        self._warn_once(f"Saving {what}: {problem}.")

    def _base_once(self, reason: str) -> Decision:
        self._warn_once(f"Saving bases only: {reason}.")
        return Decision("base", reason)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)


def _readable(array: Any) -> bool:
    """Whether this process can read a whole array without asking others."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable or array.is_fully_replicated


def _changed(snapshot: Snapshot, parent: Lineage, stored: Collection[int]) -> str:
    """Names a leaf that a delta of no update would get wrong; empty if there is none."""
    structure = snapshot.structure
    rest = {i: array for i, array in enumerate(snapshot.arrays) if i not in stored}
    expected = parent.manifest.fingerprints
    found = fingerprint.of_leaves(rest)
    return next((structure.leaves[i].path for i, f in found.items() if f != expected[i]), "")


def _first_difference(base: BaseManifest, structure: Structure) -> str:
    if len(base.leaves) != len(structure.leaves):
        return f"the state has {len(structure.leaves)} leaves, the base {len(base.leaves)}"
    old, new = next((a, b) for a, b in zip(base.leaves, structure.leaves, strict=True) if a != b)
    if old.path != new.path:
        return f"the tree changed: {new.path} where {old.path} was"
    if old.description != new.description:
        return f"{new.path} changed from {old.description} to {new.description}"
    return f"the sharding of {new.path} changed"
