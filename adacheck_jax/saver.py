"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adacheck_jax import copies, fingerprint, lineage, policy, replicas
from adacheck_jax.base_share import BaseShare, EarlierBase
from adacheck_jax.buffers import Buffers
from adacheck_jax.commit import Attempt, Proof, Save
from adacheck_jax.copies import HostCopies
from adacheck_jax.decisions import Decisions
from adacheck_jax.delta_share import DeltaShare, Habits
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import KeepLineage, Lineage
from adacheck_jax.programs import Program, Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.staging import Blocks, stage, x64_enabled
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)

Prove = Literal["first", "every", "never"]
Compression = Literal["auto", "none"]

_KEPT_BYTES = 1 << 30
"""Host memory that is kept from one save to the next."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a save goes.

    Attributes:
        directory: the item's directory once it is committed.
        step: the number in the name of the step's directory, None if there is none.
    """

    directory: Path
    step: int | None


@dataclass(slots=True)
class _Head:
    """A step that the next one may build on: the one saved last, or restored last.

    Attributes:
        directory: its item directory; it is not there before its save is committed.
        number: in the name of the step's directory, None if there is none. A directory that is
            being deleted does not tell it any more.
        copies: what the next save compares with.
        files: by its directory, its files while it was whole; empty if this process does not know.
        known: its lineage as it was found on disk last; before that its parent's, if it has one.
    """

    directory: Path
    number: int | None
    copies: HostCopies
    files: dict[Path, frozenset[str]]
    known: Lineage | None


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
        # A step may be restored, to look at it, while another thread saves the next one.
        self._lock = threading.Lock()
        self._attempt = Attempt(threading.Lock())
        self._heads: tuple[_Head, ...] = ()
        self._saved: _Head | None = None
        self._links: dict[Path, bool] = {}
        self._base: EarlierBase | None = None
        self._compression: Compression = compression
        self._habits = Habits()
        self._buffers = Buffers(_KEPT_BYTES)

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
        directory, held = restored.entries[-1].directory, copies.NOTHING
        files = {directory: lineage.files_of(directory, restored.manifest.step)}
        if self._recorder is not None or self._delta == "bits":
            held = copies.of_restored(
                restored,
                leaves,
                replays=self._delta != "bits" and not restored.problem,
                proves=self._prove != "never",
            )
        head = _Head(directory, number, held, files, restored)
        with self._lock:
            # The step saved last stays a candidate: an older one may be restored for a look.
            saved = self._saved
            others = (saved,) if saved is not None and saved.directory != directory else ()
            self._heads = (head, *others)

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
        structure, final_directory = snapshot.structure, destination.directory
        numbers = (step, destination.step, snapshot.count, 0)
        step = next(number for number in numbers if number is not None)
        replayable = not cast & _bound_paths(structure.binding)
        head = self._parent(final_directory, snapshot.count)
        parent, before = (head.known, head.copies) if head else (None, copies.NOTHING)
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
            head, parent, before = None, None, copies.NOTHING
        self._note_parent(destination, head)
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
            delta = DeltaShare(
                leaves, blocks, stored, previous, compresses, self._habits, self._buffers
            )
        files: dict[Path, frozenset[str]] = {}
        is_first = self._saved is None or self._saved.directory != final_directory
        self._attempt.is_over = not is_first
        self._attempt = Attempt(self._attempt.turn, is_first)
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
            parent_files=head.files.get(head.directory, frozenset()) if head else frozenset(),
            whole=files,
            attempt=self._attempt,
        )
        if decision.is_base:
            self._base = EarlierBase(final_directory, step, structure.leaves, save.sums)
            self._habits = Habits()
        after = HostCopies({i: staged[i] for i in kept}, is_due, sites if is_due else {})
        if decision.kind == "replay" and not decision.update_count:  # nothing was updated since
            after = HostCopies(after.blocks, before.is_proof_due, before.sites)
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._saved = _Head(final_directory, destination.step, after, files, parent)
        self._heads = (self._saved,)
        if self._replays(program, replayable):
            self._decisions.remember(snapshot, final_directory)
        return save

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

    def _note_parent(self, destination: Destination, head: _Head | None) -> None:
        keep = self._keep_lineage
        if keep is not None and head and head.number is not None and destination.step is not None:
            keep.note(destination.step, head.number)

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

    def _parent(self, final_directory: Path, count: int | None) -> _Head | None:
        """The head that a delta would follow, with its lineage as it is on disk now.

        Of the step restored last and the step saved last, the first that the counter follows.
        """
        found = []
        known = [head.known for head in self._heads if head.known is not None]
        for head in self._heads:
            try:
                head.known = lineage.follow(known, head.directory)
            except AdaCheckError as error:
                _log.warning("The last step cannot be built on: %s", error)
                continue
            if (
                head.known.exists()
                and not self._is_let_go(head)
                and lineage.reference(final_directory, head.directory) is not None
            ):
                found.append(head)
        for head in found:
            assert head.known is not None
            before = head.known.manifest.count
            if before is not None and count is not None and count - before in (0, 1):
                return head
        return found[0] if found else None

    def _is_let_go(self, head: _Head) -> bool:
        """Whether the policy wants a step deleted, which a manager may do later."""
        keep = self._keep_lineage
        return keep is not None and head.number is not None and keep.lets_go(head.number)

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
