"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adacheck_jax import copies, fingerprint, lineage, policy, replicas
from adacheck_jax.base_share import BaseShare, EarlierBase
from adacheck_jax.commit import Proof, Save
from adacheck_jax.copies import HostCopies
from adacheck_jax.decisions import Decisions
from adacheck_jax.delta_share import DeltaShare
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import KeepLineage, Lineage
from adacheck_jax.manifest import Encoding
from adacheck_jax.programs import Program, Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.staging import Blocks, stage, x64_enabled
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)

Prove = Literal["first", "every", "never"]
Compression = Literal["auto", "none"]


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
        recorder: the recorder in the optimizer chain, or None.
        params_path: leaf path of the trained params, None to find it.
        max_deltas: longest lineage, in deltas.
        keep_lineage: the policy that keeps ancestors alive where there are no hard links.
        delta: which deltas may be written.
        prove: which deltas are replayed at save time: the ``"first"`` after a base or a restore,
            ``"every"`` one, or ``"never"``.
        prove_bytes: device memory that a proof may take.
        compression: whether deltas are compressed where that pays.
        check_replicas: what to do about replicas that differ.
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
        compression: Compression,
        check_replicas: replicas.Mode,
    ) -> None:
        self._recorder = recorder
        self._max_deltas = max_deltas
        self._keep_lineage = keep_lineage
        self._snapshots = Snapshots(recorder, params_path)
        self._programs = Programs(recorder, prove_bytes)
        self._delta: policy.Delta = delta
        self._prove: Prove = prove
        self._check_replicas: replicas.Mode = check_replicas
        self._decisions = Decisions(
            self._programs,
            has_recorder=recorder is not None,
            max_deltas=max_deltas,
            keeps_lineage=keep_lineage is not None,
            delta=delta,
        )
        self._copies: dict[Path, HostCopies] = {}
        self._heads: tuple[Path, ...] = ()
        self._saved: tuple[Path, ...] = ()
        self._known: dict[Path, Lineage] = {}
        self._numbers: dict[Path, int | None] = {}
        self._links: dict[Path, bool] = {}
        self._whole: dict[Path, frozenset[str]] = {}
        self._base: EarlierBase | None = None
        self._compression: Compression = compression
        self._choices: dict[int, Encoding] = {}

    def follow(self, restored: Lineage, number: int | None, leaves: Sequence[Any]) -> None:
        """Makes a restored step the parent of the next save.

        Args:
            restored: the step's lineage.
            number: in the name of the step's directory, None if there is none.
            leaves: its leaves, with which the next state is compared; None for one left out.
        """
        update = restored.base.update
        needed = range(len(leaves)) if update is None else (*update.explained, *update.consumed)
        if any(leaves[i] is None for i in needed):
            return  # what was left out will be made anew, and no update leads there
        head = restored.entries[-1].directory
        # The step saved last stays a candidate: an older one may be restored for a look.
        self._heads = tuple(dict.fromkeys((head, *self._saved)))
        self._known = {each: known for each, known in self._known.items() if each in self._heads}
        self._known[head] = restored
        self._numbers = {each: n for each, n in self._numbers.items() if each in self._heads}
        self._numbers[head] = number
        if head not in self._whole:
            self._whole[head] = lineage.files_of(head, restored.manifest.step)
        if self._recorder is not None or self._delta == "bits":
            self._copies[head] = copies.of_restored(
                restored,
                leaves,
                replays=self._delta != "bits" and not restored.problem,
                proves=self._prove != "never",
            )
        self._copies = {each: held for each, held in self._copies.items() if each in self._heads}

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
        before = copies.NOTHING
        if parent is not None:
            before = self._copies.get(parent.entries[-1].directory, copies.NOTHING)
        decision = self._decisions.decide(
            snapshot,
            parent,
            before.blocks,
            step=step,
            has_links=lambda: self._has_links(final_directory),
            replayable=replayable,
        )
        _log.info("step %d: %s (%s)", step, decision.kind, decision.reason)
        earlier = None
        if decision.is_base:
            if parent is not None and self._has_links(final_directory):
                earlier = self._earlier(parent)
            parent, before = None, copies.NOTHING
        if parent is not None:
            self._note_parent(destination, parent)
        # Here, and not in the background, where the caller's jax settings would not hold.
        program = self._programs.of(structure)
        proves = decision.update_count == 1 and before.is_proof_due
        stored = copies.candidates(structure, decision, program)
        kept = self._kept(structure, program, replayable, proves)
        computed = structure.arguments[0] + structure.arguments[1] if proves else ()
        parts = fingerprint.Parts(
            dict(enumerate(snapshot.arrays)),
            structure.picks,
            structure.whole_picks,
            every_replica=self._check_replicas != "off",
        )
        staged = self._blocks(snapshot, parts, {*stored, *kept, *computed})
        is_due = self._is_proof_due(decision, parent, program, replayable, proves)
        sites = copies.sites_of(snapshot) if proves or is_due else {}
        leaves, blocks = structure.leaves, {i: staged[i] for i in (*stored, *computed)}
        base = delta = None
        if decision.is_base:
            base = BaseShare(leaves, blocks, earlier, _still(structure), names={})
        else:
            previous = copies.comparable(before.blocks, structure, decision)
            compresses = self._compression != "none"
            delta = DeltaShare(leaves, blocks, stored, previous, compresses, self._choices)
        whole: dict[Path, frozenset[str]] = {}
        save = Save(
            programs=self._programs,
            links=parent is not None and self._has_links(final_directory),
            step=step,
            count=snapshot.count,
            structure=structure,
            parent=parent,
            decision=decision,
            final_directory=final_directory,
            directory_step=destination.step,
            replayable=replayable,
            fingerprints=parts,
            custom_metadata=custom_metadata,
            base=base,
            delta=delta,
            proof=self._proof(snapshot, before, sites) if proves else None,
            local=stage(
                {i: snapshot.arrays[i] for i in structure.local_picks}, structure.local_picks
            ),
            replicas=replicas.Check(self._check_replicas, tuple(structure.index), snapshot.arrays),
            parent_files=self._files_of(parent),
            whole=whole,
        )
        if decision.is_base:
            self._base = EarlierBase(final_directory, step, structure.leaves, save.sums)
            self._choices = {}
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._heads, self._saved, self._whole = (final_directory,), (final_directory,), whole
        self._numbers = {final_directory: destination.step}
        after = HostCopies({i: staged[i] for i in kept}, is_due, sites if is_due else {})
        if decision.kind == "replay" and not decision.update_count:  # nothing was updated since
            after = HostCopies(after.blocks, before.is_proof_due, before.sites)
        self._copies = {final_directory: after}
        if self._replays(program, replayable):
            self._decisions.remember(snapshot, final_directory)
        return save

    def _files_of(self, parent: Lineage | None) -> frozenset[str]:
        """The files of a step while it was whole, as far as they are known here."""
        directory = parent and parent.entries[-1].directory
        return self._whole.get(directory, frozenset()) if directory else frozenset()

    def _earlier(self, parent: Lineage) -> EarlierBase:
        """What is known of the base that a new one follows."""
        base, last = parent.base, self._base
        sums: Mapping[int, int] = {}
        if last is not None and (last.step, last.leaves) == (base.step, base.leaves):
            sums = last.sums
        elif base.process_count == 1:
            sums = dict(enumerate(base.fingerprints))
        return EarlierBase(parent.base_directory, base.step, base.leaves, sums)

    def _is_proof_due(
        self,
        decision: policy.Decision,
        parent: Lineage | None,
        program: Program,
        replayable: bool,
        proves: bool,
    ) -> bool:
        """Whether the update after this save is to be proved."""
        if self._prove == "never" or not self._replays(program, replayable):
            return False
        # The first update of all starts from moments of zero, which hide how they are rounded, and
        # often from a learning rate of zero. So what follows a base is proved up to the second.
        from_start = proves and parent is not None and not parent.manifest.count
        return decision.is_base or from_start or self._prove == "every"

    def _replays(self, program: Program, replayable: bool) -> bool:
        """Whether updates may be replayed onto the step that is being saved."""
        return bool(program.files) and replayable and self._delta != "bits" and self._max_deltas > 0

    def _kept(
        self, structure: Structure, program: Program, replayable: bool, proves: bool
    ) -> Collection[int]:
        """The leaves of which the next save needs this one's bits."""
        if not self._max_deltas:
            return ()
        if self._replays(program, replayable) and not (proves and self._delta == "auto"):
            return copies.candidates(structure, policy.Decision("replay", ""), program)
        follows_bits = self._delta == "bits" or (self._delta == "auto" and replayable)
        if not follows_bits or (self._recorder is None and self._delta != "bits"):
            return ()
        return range(len(structure.leaves))

    def _note_parent(self, destination: Destination, parent: Lineage) -> None:
        number = self._number_of(parent)
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
        self, snapshot: Snapshot, before: HostCopies, after: dict[int, Blocks]
    ) -> Proof | None:
        if not before.sites or not after:
            return None
        structure = snapshot.structure
        consumed = structure.arguments[2] + structure.arguments[3]
        arrays = {i: snapshot.arrays[i] for i in consumed}
        shardings = {i: getattr(x, "sharding", None) for i, x in enumerate(snapshot.arrays)}
        taken = before.sites | stage(arrays, structure.proof_picks)
        return Proof(taken, after, shardings, x64_enabled())

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
            and not self._is_let_go(known)
            and lineage.reference(final_directory, known.entries[-1].directory) is not None
        ]
        for known in found:
            before = known.manifest.count
            if before is not None and count is not None and count - before in (0, 1):
                return known
        return found[0] if found else None

    def _is_let_go(self, known: Lineage) -> bool:
        """Whether the policy wants a step deleted, which a manager may do later."""
        number = self._number_of(known)
        keep = self._keep_lineage
        return keep is not None and number is not None and keep.lets_go(number)

    def _number_of(self, known: Lineage) -> int | None:
        """The manager's number of a head; its directory, which may be going, does not tell."""
        return self._numbers.get(known.entries[-1].directory)

    def _lineage_of(self, head: Path) -> Lineage | None:
        previous = [known for known in self._known.values() if known is not None]
        try:
            return lineage.follow(previous, head)
        except AdaCheckError as error:
            _log.warning("The last step cannot be built on: %s", error)
            return None

    def _has_links(self, final_directory: Path) -> bool:
        """Whether steps beside this one can be hard-linked; probed once a root."""
        root = final_directory.parent
        while not root.is_dir():
            root = root.parent
        if root not in self._links:
            self._links[root] = lineage.can_link(root)
        return self._links[root]


_MIN_STILL_BYTES = 1 << 16
"""Smaller leaves are no reason for files of their own."""


def _still(structure: Structure) -> frozenset[int]:
    """The leaves that may well be the same at the next base: no update computes them."""
    if structure.binding is None:
        return frozenset()
    touched = frozenset(i for indices in structure.arguments for i in indices)
    return frozenset(
        i
        for i, leaf in enumerate(structure.leaves)
        if i not in touched and leaf.nbytes >= _MIN_STILL_BYTES
    )


def _bound_paths(binding: Binding | None) -> frozenset[str]:
    if binding is None:
        return frozenset()
    return binding.explained | frozenset(binding.consumed) | {binding.count}
