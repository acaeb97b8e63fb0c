"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from adacheck_jax import fingerprint, lineage, policy, proof, replay, staging
from adacheck_jax.boxes import Box
from adacheck_jax.commit import Proof, Save
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import KeepLineage, Lineage
from adacheck_jax.manifest import BaseManifest
from adacheck_jax.programs import Program, Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
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


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Host copies of a saved or restored state, to compare the next one with.

    Attributes:
        blocks: this process's boxes of the leaves that the next delta may store as differences.
        is_proof_due: whether the next update is to be proved, as all processes know alike.
        sites: the proof sites of what the update computes, if this process can prove it.
    """

    blocks: dict[int, Blocks]
    is_proof_due: bool
    sites: dict[int, Blocks]


_NO_COPIES = HostCopies({}, False, {})


class Saver:
    """Saves the states of one training run.

    Args:
        recorder: the recorder in the optimizer chain, or None.
        params_path: leaf path of the trained params, None to find it.
        max_deltas: longest lineage, in deltas.
        keep_lineage: the policy that keeps ancestors alive where there are no hard links.
        delta: which deltas may be written.
        prove: which deltas are replayed at save time: the ``"first"`` after a base or a restore,
            ``"every"`` one, or ``"never"``.
        prove_bytes: device memory that a proof may take.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        params_path: str | None,
        *,
        max_deltas: int,
        keep_lineage: KeepLineage | None,
        delta: policy.Delta,
        prove: Prove,
        prove_bytes: int,
    ) -> None:
        self._recorder = recorder
        self._max_deltas = max_deltas
        self._keep_lineage = keep_lineage
        self._snapshots = Snapshots(recorder, params_path)
        self._programs = Programs(recorder, prove_bytes)
        self._delta: policy.Delta = delta
        self._prove: Prove = prove
        self._copies: dict[Path, HostCopies] = {}
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
            leaves: its leaves, with which the next state is compared; None for one left out.
        """
        head = restored.entries[-1].directory
        # The step saved last stays a candidate: an older one may be restored for a look.
        self._heads = tuple(dict.fromkeys((head, *self._heads[-1:])))
        self._known[head] = restored
        specs, update, process = restored.base.leaves, restored.base.update, jax.process_index()
        if self._recorder is None and self._delta != "bits":
            return
        held = {i: staging.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
        sites: dict[int, list[Box]] = {}
        wanted: Iterable[int] = range(len(specs))
        is_replayed = update is not None and self._delta != "bits" and not restored.problem
        if update is not None and is_replayed:
            wanted = _not_computed(wanted, update.explained, update.passed)
            arguments = (update.params, update.inner, update.record, update.extra)
            every = proof.sites(specs, arguments, process)
            sites = {i: every[i] for i in update.explained if self._prove != "never"}
        boxes = {i: specs[i].boxes_of(process) for i in wanted}
        found = _held(held, sites)
        complete = len(found) == len(sites)
        is_due = is_replayed and self._prove != "never"
        self._copies[head] = HostCopies(_held(held, boxes), is_due, found if complete else {})

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
        structure, final_directory = snapshot.structure, destination.directory
        numbers = (step, destination.step, snapshot.count, 0)
        step = next(number for number in numbers if number is not None)
        replayable = not cast & _bound_paths(structure.binding)
        parent = self._parent(final_directory, snapshot.count)
        decision = self._decide(snapshot, parent, final_directory, step, replayable)
        _log.info("step %d: %s (%s)", step, decision.kind, decision.reason)
        # Here, and not in the background, where the caller's jax settings would not hold.
        program = self._programs.of(structure)
        if parent is not None and not decision.is_base:
            self._note_parent(destination, parent)
        copies = _NO_COPIES
        if parent is not None and not decision.is_base:
            copies = self._copies.get(parent.entries[-1].directory, _NO_COPIES)
        proves = decision.update_count == 1 and copies.is_proof_due
        candidates = _candidates(structure, decision, program)
        kept = self._kept(structure, program, replayable, proves)
        parts = fingerprint.Parts(dict(enumerate(snapshot.arrays)), structure.picks)
        computed = structure.arguments[0] + structure.arguments[1] if proves else ()
        staged = self._blocks(snapshot, parts, {*candidates, *kept, *computed})
        sites = self._sites(snapshot) if proves or decision.is_base else {}
        save = Save(
            programs=self._programs,
            links=not decision.is_base and self._has_links(final_directory),
            step=step,
            count=snapshot.count,
            structure=structure,
            parent=None if decision.is_base else parent,
            decision=decision,
            candidates=candidates,
            final_directory=final_directory,
            replayable=replayable,
            fingerprints=parts,
            custom_metadata=custom_metadata,
            blocks={i: staged[i] for i in (*candidates, *computed)},
            previous=_comparable(copies.blocks, structure, decision),
            proof=self._proof(snapshot, copies, sites) if proves else None,
        )
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._heads = (final_directory,)
        replays = self._replays(program, replayable)
        # The first update of all starts from moments of zero, which hide how they are rounded, and
        # often from a learning rate of zero. So what follows a base is proved up to the second.
        from_start = proves and parent is not None and not parent.manifest.count
        is_due = decision.is_base or from_start or self._prove == "every"
        is_due = is_due and replays and self._prove != "never"
        after = HostCopies({i: staged[i] for i in kept}, is_due, sites if is_due else {})
        if decision.kind == "replay" and not decision.update_count:  # nothing was updated since
            after = HostCopies(after.blocks, copies.is_proof_due, copies.sites)
        self._copies = {final_directory: after}
        self._small = {final_directory: self._small_of(snapshot)} if replays else {}
        return save

    def _replays(self, program: Program, replayable: bool) -> bool:
        """Whether updates may be replayed onto the step that is being saved."""
        return bool(program.files) and replayable and self._delta != "bits"

    def _kept(
        self, structure: Structure, program: Program, replayable: bool, proves: bool
    ) -> Collection[int]:
        """The leaves of which the next save needs this one's bits."""
        if self._replays(program, replayable) and not (proves and self._delta == "auto"):
            return _candidates(structure, policy.Decision("replay", ""), program)
        follows_bits = self._delta == "bits" or (self._delta == "auto" and replayable)
        if not follows_bits or (self._recorder is None and self._delta != "bits"):
            return ()
        return range(len(structure.leaves))

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

    def _sites(self, snapshot: Snapshot) -> dict[int, Blocks]:
        """Host copies of the proof sites of what the update computes; none if not held here."""
        picks = snapshot.structure.proof_picks
        if not picks or self._prove == "never":
            return {}
        computed = snapshot.structure.arguments[0] + snapshot.structure.arguments[1]
        return stage({i: snapshot.arrays[i] for i in computed}, picks)

    def _proof(
        self, snapshot: Snapshot, copies: HostCopies, after: dict[int, Blocks]
    ) -> Proof | None:
        if not copies.sites or not after:
            return None
        structure = snapshot.structure
        consumed = structure.arguments[2] + structure.arguments[3]
        arrays = {i: snapshot.arrays[i] for i in consumed}
        shardings = {i: getattr(x, "sharding", None) for i, x in enumerate(snapshot.arrays)}
        before = copies.sites | stage(arrays, structure.proof_picks)
        return Proof(before, after, shardings, x64_enabled())

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
        replayable: bool,
    ) -> policy.Decision:
        if not replayable and self._delta != "bits":
            return self._base_once("save_args cast leaves that the update consumes or computes")
        self._learn_problem(parent)
        decision = policy.decide(
            parent.base if parent else None,
            parent.manifest if parent else None,
            problem=parent.problem if parent else "",
            step=step,
            count=snapshot.count,
            max_deltas=self._max_deltas,
            delta=self._delta,
        )
        program = self._programs.of(snapshot.structure)
        if program.problem and self._recorder is not None and self._delta != "bits":
            self._say(program.problem)
        if decision.is_base or parent is None:
            return decision
        if parent.base.leaves != snapshot.structure.leaves:
            return policy.Decision("base", _first_difference(parent.base, snapshot.structure))
        if not self._has_links(final_directory) and self._keep_lineage is None:
            return self._base_once(
                "the file system has no hard links, and the handler has no KeepLineage policy that "
                "would keep the steps that deltas refer to (AdaCheckHandler(keep_lineage=...))"
            )
        if decision.kind == "bits":
            return self._check_bits(decision, snapshot, parent, program)
        return self._check_replay(decision, snapshot, parent, program)

    def _learn_problem(self, parent: Lineage | None) -> None:
        """What disproved a lineage, in this process or another, speaks against its program."""
        if parent is None or parent.base.update is None or parent.base.update.problem:
            return
        if parent.problem:
            digest = parent.base.update.programs.get(replay.platform(), "")
            self._programs.disprove(digest, parent.problem)

    def _check_bits(
        self,
        decision: policy.Decision,
        snapshot: Snapshot,
        parent: Lineage,
        program: Program,
    ) -> policy.Decision:
        if self._delta == "auto" and not program.problem:
            return policy.Decision("base", "updates can be replayed from here on")
        head = parent.entries[-1].directory
        held = self._copies.get(head, _NO_COPIES).blocks
        if len(held) < len(snapshot.structure.leaves):
            return policy.Decision("base", f"step {parent.manifest.step} is not in host memory")
        return decision

    def _check_replay(
        self,
        decision: policy.Decision,
        snapshot: Snapshot,
        parent: Lineage,
        program: Program,
    ) -> policy.Decision:
        if not program.files:
            return policy.Decision("base", program.problem)
        update = parent.base.update
        if update is None or program.digest != update.programs.get(replay.platform()):
            return policy.Decision("base", "the update program changed")
        if decision.update_count:
            changed = self._set_by_hand(snapshot, parent, program)
            by = "was changed by something else than the update"
        else:
            changed = _changed(snapshot, parent, _candidates(snapshot.structure, decision, program))
            by = "changed without an update"
        return policy.Decision("base", f"{changed} {by}") if changed else decision

    def _set_by_hand(self, snapshot: Snapshot, parent: Lineage, program: Program) -> str:
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
        # What the update passes through is what it took, whoever set it: a delta stores it.
        inner = structure.arguments[1]
        changed = [i for i in changed if inner[i] not in program.passed]
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

    def _say(self, problem: str) -> None:
        what = "bit-pattern deltas" if self._delta == "auto" else "bases only"
        self._warn_once(f"Saving {what}: {problem}.")

    def _base_once(self, reason: str) -> policy.Decision:
        self._warn_once(f"Saving bases only: {reason}.")
        return policy.Decision("base", reason)

    def _warn_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning("%s", message)

    def _has_links(self, final_directory: Path) -> bool:
        """Whether steps beside this one can be hard-linked; probed once a root."""
        root = final_directory.parent
        while not root.is_dir():
            root = root.parent
        if root not in self._links:
            self._links[root] = lineage.can_link(root)
        return self._links[root]


def _candidates(
    structure: Structure, decision: policy.Decision, program: Program
) -> tuple[int, ...]:
    """What a delta stores, unless it is what it would be without it."""
    if decision.is_base:
        return ()
    every = range(len(structure.leaves))
    if decision.kind == "bits":
        return tuple(every)
    params, inner, record, extra = structure.arguments
    consumed = frozenset(record + extra)
    rest = _not_computed(every, params + inner, program.passed)
    # Without an update the record is the parent's, and so it is none of the next one's business.
    return tuple(i for i in rest if decision.update_count or i not in consumed)


def _comparable(
    blocks: dict[int, Blocks], structure: Structure, decision: policy.Decision
) -> dict[int, Blocks]:
    """The parent's leaves from which differences may be stored: a record is read by itself."""
    if decision.kind == "bits":
        return blocks
    consumed = frozenset(structure.arguments[2] + structure.arguments[3] if blocks else ())
    return {i: held for i, held in blocks.items() if i not in consumed}


def _not_computed(
    every: Iterable[int], computed: Collection[int], passed: Collection[int]
) -> list[int]:
    """The leaves that an update does not compute: it may pass them through."""
    skipped = frozenset(computed) - frozenset(passed)
    return [i for i in every if i not in skipped]


def _held(arrays: Mapping[int, Any], boxes: Mapping[int, Sequence[Box]]) -> dict[int, Blocks]:
    """Host copies of boxes of some leaves; leaves that are not held here in full are left out."""
    picks = {i: picks_of(arrays[i], wanted) for i, wanted in boxes.items() if i in arrays}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return stage({i: arrays[i] for i in picks}, picks)


def _readable(array: Any) -> bool:
    """Whether this process can read a whole array without asking others."""
    if not isinstance(array, jax.Array):
        return True
    return array.is_fully_addressable or array.is_fully_replicated


def _bound_paths(binding: Binding | None) -> frozenset[str]:
    if binding is None:
        return frozenset()
    return binding.explained | frozenset(binding.consumed) | {binding.count}


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
