"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from adacheck_jax import fingerprint, lineage, policy, replay
from adacheck_jax.commit import Save
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import KeepLineage, Lineage
from adacheck_jax.manifest import BaseManifest
from adacheck_jax.programs import Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.sharding import distinct_boxes
from adacheck_jax.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.staging import Blocks, picks_of, stage, x64_enabled
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)

Prove = Literal["first", "every", "never"]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes.

    Attributes:
        directory: the item's directory once it is committed.
        step: the number in the name of the step's directory, None if there is none.
    """

    directory: Path
    step: int | None


class Saver:
    """Saves the states of one training run.

    Args:
        recorder: the recorder in the optimizer chain; without one every save is a base.
        params_path: leaf path of the trained params, None to find it.
        max_deltas: longest lineage, in deltas.
        keep_lineage: the policy that keeps ancestors alive where there are no hard links.
        prove: which deltas are replayed at save time: the ``"first"`` after a base or a restore,
            ``"every"`` one, or ``"never"``.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        params_path: str | None,
        max_deltas: int,
        keep_lineage: KeepLineage | None,
        prove: Prove,
    ) -> None:
        self._recorder = recorder
        self._max_deltas = max_deltas
        self._keep_lineage = keep_lineage
        self._snapshots = Snapshots(recorder, params_path)
        self._programs = Programs(recorder)
        self._prove: Prove = prove
        self._before: dict[Path, dict[int, Blocks]] = {}
        self._small: dict[Path, list[np.ndarray]] = {}
        self._forecasts = True
        self._surprised_at: int | None = None
        self._heads: tuple[Path, ...] = ()
        self._known: dict[Path, Lineage] = {}
        self._links: dict[Path, bool] = {}
        self._said: set[str] = set()

    def follow(self, restored: Lineage, leaves: Sequence[Any]) -> None:
        """Makes a restored step the parent of the next save.

        Args:
            restored: the step's lineage.
            leaves: its leaves, from which the next delta is proved; None for one that was left out.
        """
        head = restored.entries[-1].directory
        # The step saved last stays a candidate: an older one may be restored for a look.
        self._heads = tuple(dict.fromkeys((head, *self._heads[-1:])))
        self._known[head] = restored
        update = restored.base.update
        if update is None or self._recorder is None or not self._can_prove:
            return
        held = {i: leaves[i] for i in update.explained}
        if all(isinstance(leaf, jax.Array) for leaf in held.values()):
            picks = {i: picks_of(leaf, distinct_boxes(leaf)) for i, leaf in held.items()}
            self._before[head] = stage(held, picks)

    @property
    def _can_prove(self) -> bool:
        # With several processes each would know its own share only, and they must store alike.
        return self._prove != "never" and jax.process_count() == 1

    def begin(
        self,
        destination: Destination,
        state: PyTree,
        step: int | None,
        *,
        cast: frozenset[str] = frozenset(),
        custom_metadata: Any = None,
    ) -> Save:
        """Decides and stages; the only part of a save that blocks the caller.

        Args:
            destination: where the item will be once it is committed.
            state: the state to save.
            step: its number; None takes it from the directory's name, else from the counter.
            cast: leaf paths that are stored in another data type than they are trained in.
            custom_metadata: the caller's own JSON.

        Returns:
            What is left to do.
        """
        snapshot = self._snapshots.take(state)
        final_directory = destination.directory
        numbers = (step, destination.step, snapshot.count, 0)
        step = next(number for number in numbers if number is not None)
        parent = self._parent(final_directory, snapshot.count)
        decision = self._decide(snapshot, parent, final_directory, step, cast)
        _log.info(
            "step %d: %s (%s)", step, "base" if decision.is_base else "delta", decision.reason
        )
        if decision.is_base:
            # Here, and not in the background, where the caller's jax settings would not hold.
            self._programs.of(snapshot.structure)
        elif parent is not None:
            self._note_parent(destination, parent)
        structure = snapshot.structure
        stored = () if decision.is_base else _stored(structure, decision.update_count)
        parts = fingerprint.Parts(dict(enumerate(snapshot.arrays)), structure.picks)
        # On accelerators only what is stored leaves the device; elsewhere all is staged already.
        blocks = self._blocks(snapshot, parts, stored)
        before, after = self._proof(snapshot, parts, decision, parent, final_directory)
        save = Save(
            programs=self._programs,
            links=not decision.is_base and self._has_links(final_directory),
            step=step,
            count=snapshot.count,
            structure=structure,
            parent=None if decision.is_base else parent,
            decision=decision,
            stored=stored,
            final_directory=final_directory,
            replayable=not cast & _bound_paths(structure.binding),
            fingerprints=parts,
            custom_metadata=custom_metadata,
            blocks=blocks,
            before=before,
            after=after,
            x64=x64_enabled(),
        )
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._heads = (final_directory,)
        replayable = self._programs.of(structure).files and save.replayable
        self._small = {final_directory: self._small_of(snapshot)} if replayable else {}
        return save

    def _note_parent(self, destination: Destination, parent: Lineage) -> None:
        number = lineage.place_of(parent.entries[-1].directory).step
        if self._keep_lineage is not None and destination.step is not None and number is not None:
            self._keep_lineage.note(destination.step, number)

    def _blocks(
        self, snapshot: Snapshot, parts: fingerprint.Parts, wanted: Collection[int]
    ) -> dict[int, Blocks]:
        """Host copies of some leaves; those that are fingerprinted on the host are there."""
        staged = {i: parts.blocks[i] for i in wanted if i in parts.blocks}
        rest = {i: snapshot.arrays[i] for i in wanted if i not in staged}
        return staged | stage(rest, snapshot.structure.picks)

    def _proof(
        self,
        snapshot: Snapshot,
        parts: fingerprint.Parts,
        decision: policy.Decision,
        parent: Lineage | None,
        final_directory: Path,
    ) -> tuple[dict[int, Blocks], dict[int, Blocks]]:
        """The computed leaves before and after the update, where this save is to prove it.

        Both are empty where it is not. Remembers what the next save needs for its own proof.
        """
        binding = snapshot.structure.binding
        head = None if parent is None or decision.is_base else parent.entries[-1].directory
        before = self._before.get(head, {}) if head is not None else {}
        self._before = {}
        if binding is None or not self._can_prove or self._programs.any_disproved:
            return {}, {}
        if not decision.is_base and not decision.update_count:
            self._before = {final_directory: before}  # nothing was updated since
            return {}, {}
        if not (decision.is_base or before or self._prove == "every"):
            return {}, {}
        explained = snapshot.structure.positions(binding.params + binding.inner)
        after = self._blocks(snapshot, parts, explained)
        if decision.is_base or self._prove == "every":
            self._before = {final_directory: dict(after)}
        return (before, after) if before else ({}, {})

    def _parent(self, final_directory: Path, count: int | None) -> Lineage | None:
        """The lineage that a delta would follow, as it is on disk now.

        Of the step restored last and the step saved last, the first that the counter follows.
        """
        found = [known for head in self._heads if (known := self._lineage_of(head))]
        self._known = {known.entries[-1].directory: known for known in found}
        found = [
            known
            for known in found
            if known.exists()
            and lineage.reference(final_directory, known.entries[-1].directory) is not None
        ]
        for known in found:
            before = known.manifest.count
            if before is not None and count is not None and count - before in (0, 1):
                return known
        return found[0] if found else None

    def _lineage_of(self, head: Path) -> Lineage | None:
        previous = [known for known in self._known.values() if known is not None]
        try:
            return lineage.follow(previous, head)
        except AdaCheckError as error:
            _log.warning("The last step cannot be built on: %s", error)
            return None

    def _decide(
        self,
        snapshot: Snapshot,
        parent: Lineage | None,
        final_directory: Path,
        step: int,
        cast: frozenset[str],
    ) -> policy.Decision:
        binding = snapshot.structure.binding
        if self._recorder is None or binding is None or snapshot.count is None:
            return policy.Decision(True, "no recorder")
        if cast & _bound_paths(binding):
            return self._base_once("save_args cast leaves that the update consumes or computes")
        decision = policy.decide(
            parent.base if parent else None,
            parent.manifest if parent else None,
            step=step,
            count=snapshot.count,
            max_deltas=self._max_deltas,
        )
        if decision.is_base or parent is None:
            return decision
        if parent.base.leaves != snapshot.structure.leaves:
            return policy.Decision(True, _first_difference(parent.base, snapshot.structure))
        program = self._programs.of(snapshot.structure)
        if not program.files:
            return policy.Decision(True, program.problem)
        update = parent.base.update
        if update is None or program.digest != update.programs.get(replay.platform()):
            return policy.Decision(True, "the update program changed")
        if problem := self._programs.disproved(program):
            return self._base_once(problem)
        if not self._has_links(final_directory) and self._keep_lineage is None:
            return self._base_once(
                "the file system has no hard links, and the handler has no KeepLineage policy that "
                "would keep the steps that deltas refer to (AdaCheckHandler(keep_lineage=...))"
            )
        if not decision.update_count and (changed := _changed(snapshot, parent)):
            return policy.Decision(True, f"{changed} changed without an update")
        if decision.update_count and (changed := self._set_by_hand(snapshot, parent)):
            return policy.Decision(True, f"{changed} was changed by something else than the update")
        return decision

    def _set_by_hand(self, snapshot: Snapshot, parent: Lineage) -> str:
        """Names a small leaf of the optimizer's state that the update cannot have set."""
        structure, binding = snapshot.structure, snapshot.structure.binding
        before = self._small.get(parent.entries[-1].directory)
        if binding is None or before is None or not self._forecasts:
            return ""
        extra = [np.asarray(snapshot.arrays[i]) for i in structure.positions(binding.extra)]
        forecast = self._programs.forecast(structure)
        expected = forecast.run(before, extra)
        pairs = zip(forecast.inner, expected, self._small_of(snapshot), strict=True)
        changed = [i for i, old, new in pairs if np.asarray(old).tobytes() != new.tobytes()]
        if not changed:
            return ""
        # Twice in a row is no hand: the step computes it otherwise, and the proof is left to tell.
        self._forecasts = self._surprised_at != parent.manifest.count
        self._surprised_at = snapshot.count
        return binding.inner[changed[0]] if self._forecasts else ""

    def _small_of(self, snapshot: Snapshot) -> list[np.ndarray]:
        binding = snapshot.structure.binding
        assert binding is not None
        positions = snapshot.structure.positions(binding.inner)
        forecast = self._programs.forecast(snapshot.structure)
        arrays = [snapshot.arrays[positions[i]] for i in forecast.inner]
        if not all(map(_readable, arrays)):
            self._forecasts = False
            return []
        return [np.array(array) for array in arrays]

    def _base_once(self, reason: str) -> policy.Decision:
        if reason not in self._said:
            self._said.add(reason)
            _log.warning("Saving bases only: %s.", reason)
        return policy.Decision(True, reason)

    def _has_links(self, final_directory: Path) -> bool:
        """Whether steps beside this one can be hard-linked; probed once a root."""
        root = final_directory.parent
        while not root.is_dir():
            root = root.parent
        if root not in self._links:
            self._links[root] = lineage.can_link(root)
        return self._links[root]


def _stored(structure: Structure, update_count: int) -> tuple[int, ...]:
    """What a delta stores: what the update consumed, and the leaves that no update explains."""
    binding = structure.binding
    assert binding is not None
    skipped = set(structure.positions(binding.params + binding.inner))
    if not update_count:  # the record is the parent's
        skipped |= set(structure.positions(binding.consumed))
    return tuple(i for i in range(len(structure.leaves)) if i not in skipped)


def _readable(array: Any) -> bool:
    """Whether this process can read a whole array without asking others."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable or array.is_fully_replicated


def _bound_paths(binding: Binding | None) -> frozenset[str]:
    if binding is None:
        return frozenset()
    return binding.explained | frozenset(binding.consumed) | {binding.count}


def _changed(snapshot: Snapshot, parent: Lineage) -> str:
    """Names a leaf that replay of no update would get wrong; empty if there is none."""
    structure = snapshot.structure
    stored = set(_stored(structure, 0))
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
