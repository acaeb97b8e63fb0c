"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from adacheck_jax import copies, cpu_call, fingerprint, lineage, policy, replicas, staging
from adacheck_jax import manifest as manifests
from adacheck_jax.base_share import BaseShare, EarlierBase
from adacheck_jax.buffers import Buffers
from adacheck_jax.commit import Attempt, Proof, Save
from adacheck_jax.compression import Compression, Storage
from adacheck_jax.copies import HostCopies
from adacheck_jax.decisions import Decisions
from adacheck_jax.delta_share import DeltaShare, Habits
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import KeepLineage, Lineage
from adacheck_jax.manifest import DeltaManifest
from adacheck_jax.programs import Program, Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.staging import Blocks, Staged, stage, x64_enabled
from adacheck_jax.trees import PyTree

_log = logging.getLogger(__name__)

Prove = Literal["first", "every", "never"]
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
        save: that saved it, None if it was restored.
    """

    directory: Path
    number: int | None
    copies: HostCopies
    files: dict[Path, frozenset[str]]
    known: Lineage | None
    save: Save | None = None


@dataclass(frozen=True, slots=True)
class _Course:
    """How a state is to be saved.

    Attributes:
        step: its number.
        count: the update counter; None without a recorder, and where it has not been read.
        decision: base or delta.
        head: the step that a delta follows.
        is_expected: whether the decision was taken without a look at the state's values.
    """

    step: int
    count: int | None
    decision: policy.Decision
    head: _Head | None
    is_expected: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """What a save has got hold of.

    Attributes:
        staged: this process's boxes of what it needs on the host.
        kept: those of them that the next save will compare with.
        parts: the fingerprints.
        values: the small leaves that tell whether the state is what was expected.
        waiting: what has to be on the host before the state may be donated.
    """

    staged: Mapping[int, Blocks]
    kept: Mapping[int, Blocks]
    parts: fingerprint.Parts
    values: Mapping[int, Any]
    waiting: list[Staged | fingerprint.Parts]

    def wait(self) -> None:
        """Waits until the state may be donated."""
        while self.waiting:
            self.waiting[-1].wait()
            self.waiting.pop()


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
        compression: what is compressed, and how.
        check_replicas: what to do about replicas that differ.
        returns_early: whether a base's state is donated only after :meth:`wait_until_staged`.
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
        returns_early: bool,
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
        cpu_call.begin()
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
        self._storage = Storage()
        self._returns_early = returns_early
        self._waiting: _Held | None = None

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

    def wait_until_staged(self) -> None:
        """Waits until the state that was saved last may be donated."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.wait()

    def _begin(
        self,
        destination: Destination,
        state: PyTree,
        step: int | None,
        cast: frozenset[str],
        custom_metadata: Any,
    ) -> Save:
        snapshot = self._snapshots.take(state)
        structure, directory = snapshot.structure, destination.directory
        replayable = not cast & _bound_paths(structure.binding)
        course = self._expected(snapshot, destination, step, replayable)
        course = course or self._decided(snapshot, destination, step, replayable)
        decision, head = course.decision, course.head
        _log.info("step %d: %s (%s)", course.step, decision.kind, decision.reason)
        earlier = self._earlier(head, directory) if decision.is_base else None
        head = None if decision.is_base else head
        parent, before = (head.known, head.copies) if head else (None, copies.NOTHING)
        self._note_parent(destination, head)
        # Here, and not in the background, where the caller's jax settings would not hold.
        program = self._programs.of(structure)
        proves = decision.update_count == 1 and before.is_proof_due
        stored = copies.candidates(structure, decision, program)
        kept = self._kept(structure, program, replayable, proves)
        computed = structure.arguments[0] + structure.arguments[1] if proves else ()
        defers = self._returns_early and decision.is_base
        held = self._hold(
            snapshot, {*stored, *computed}, kept, waits=not course.is_expected, defers=defers
        )
        is_due = self._is_proof_due(decision, parent, program, replayable, proves)
        sites: Mapping[int, Blocks] = {}
        if proves or is_due:
            sites, own = copies.sites_of(snapshot, held.staged)
            held.waiting.append(own)
        self._waiting = held
        if not defers:
            self.wait_until_staged()
        files: dict[Path, frozenset[str]] = {}
        self._next_attempt(directory)
        local = {i: snapshot.arrays[i] for i in structure.local_picks}
        save = Save(
            programs=self._programs,
            links=parent is not None and self._has_links(directory),
            step=course.step,
            count=course.count,
            structure=structure,
            parent=parent,
            decision=decision,
            final_directory=directory,
            directory_step=destination.step,
            replayable=replayable,
            fingerprints=held.parts,
            custom_metadata=custom_metadata,
            base=self._base_share(structure, held, earlier) if decision.is_base else None,
            delta=None
            if decision.is_base
            else self._delta_share(structure, held, stored, before, decision),
            proof=self._proof(snapshot, before, sites) if proves else None,
            local=stage(local, structure.local_picks),
            replicas=replicas.Check(self._check_replicas, structure.replicated),
            parent_files=head.files.get(head.directory, frozenset()) if head else frozenset(),
            whole=files,
            attempt=self._attempt,
        )
        if decision.is_base:
            self._base = EarlierBase(directory, course.step, structure.leaves, save.sums)
            self._habits = Habits()
        after = HostCopies(held.kept, is_due, sites if is_due else {})
        if decision.kind == "replay" and not decision.update_count:  # nothing was updated since
            after = HostCopies(after.blocks, before.is_proof_due, before.sites)
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._saved = _Head(directory, destination.step, after, files, parent, save)
        self._heads = (self._saved,)
        if course.is_expected and course.count is None:
            assert parent is not None
            save.settle = functools.partial(self._settle, save, parent, program, held.values)
        elif not course.is_expected and self._replays(program, replayable):
            values = self._decisions.values_of(structure, snapshot.arrays)
            self._decisions.remember(structure, values, directory)
        return save

    def _next_attempt(self, directory: Path) -> None:
        is_first = self._saved is None or self._saved.directory != directory
        self._attempt.is_over = not is_first
        self._attempt = Attempt(self._attempt.turn, is_first)

    def _base_share(
        self, structure: Structure, held: _Held, earlier: EarlierBase | None
    ) -> BaseShare:
        return BaseShare(
            structure.leaves,
            held.staged,
            earlier,
            _still(structure),
            names={},
            compression=self._compression,
            storage=self._storage,
        )

    def _delta_share(
        self,
        structure: Structure,
        held: _Held,
        stored: tuple[int, ...],
        before: HostCopies,
        decision: policy.Decision,
    ) -> DeltaShare:
        return DeltaShare(
            structure.leaves,
            held.staged,
            stored,
            copies.comparable(before.blocks, structure, decision),
            self._compression,
            self._storage,
            self._habits,
            self._buffers,
        )

    def _decided(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course:
        """Decides from the state's values; waits for the running step."""
        count = snapshot.count()
        numbers = (step, destination.step, count, 0)
        step = next(number for number in numbers if number is not None)
        head = self._parent(destination.directory, count)
        decision = self._decisions.decide(
            snapshot,
            head.known if head else None,
            head.copies.blocks if head else (),
            step=step,
            count=count,
            has_links=lambda: self._has_links(destination.directory),
            replayable=replayable,
        )
        return _Course(step, count, decision, head)

    def _expected(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course | None:
        """A delta of one update, if all that can be known without the state's values speaks for it.

        Saves that are as far apart as the last two were lie one update apart, or none, if those
        did. Where the step is still computing, whether they do is found in the background
        (:meth:`Decisions.settle`).
        """
        step = destination.step if step is None else step
        head, structure = self._saved, snapshot.structure
        if step is None or head is None or self._heads != (head,) or head.save is None:
            return None
        last, parent = head.save, head.save.parent
        if (
            not replayable
            or last.structure is not structure
            or last.decision.kind != "replay"
            or head.copies.is_proof_due
            or parent is None
            or step - last.step != last.step - parent.manifest.step
        ):
            return None
        known = self._committed(head)
        if (
            known is None
            or known.problem
            or len(known.entries) > self._max_deltas
            or not self._programs.of(structure).files
            or not known.exists()
            or self._is_let_go(head)
            or lineage.reference(destination.directory, head.directory) is None
        ):
            return None
        decision, count = policy.Decision("replay", "as the step before", 1), None
        small = {i: snapshot.arrays[i] for i in self._decisions.small(structure)}
        if all(map(staging.is_ready, small.values())):  # then there is no need to guess
            try:
                decision, count = self._decisions.settle(
                    structure,
                    self._decisions.values_of(structure, snapshot.arrays),
                    known,
                    self._programs.of(structure),
                    destination.directory,
                )
            except AdaCheckError:
                return None
            if not decision.update_count:
                return None
        return _Course(step, count, decision, head, is_expected=True)

    def _earlier(self, head: _Head | None, directory: Path) -> EarlierBase | None:
        """What is known of the base that a new one follows, where its files can be linked."""
        if head is None or head.known is None or not self._has_links(directory):
            return None
        parent = head.known
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

    def _hold(
        self,
        snapshot: Snapshot,
        wanted: Collection[int],
        kept: Collection[int],
        *,
        waits: bool,
        defers: bool,
    ) -> _Held:
        """Gets hold of all that the save will need of the state, which may be donated then.

        Args:
            snapshot: the state.
            wanted: the leaves that this save needs on the host.
            kept: those that the next one will compare with.
            waits: whether this may wait for the running step. If not, what is still being computed
                or lies on an accelerator is copied there first.
            defers: whether the state stays as it is until :meth:`wait_until_staged` is called.
        """
        structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
        summing = structure.summing(snapshot.arrays)
        small = () if waits else self._decisions.small(structure)
        # One program makes the copies of all processes; on CPU devices each would make its own.
        owned = not waits and (
            jax.process_count() == 1 or any(map(staging.on_accelerator, snapshot.arrays))
        )
        if owned:
            copied = {*wanted, *kept, *small}
            copied |= {i for i in arrays if i not in summing.placed}
            arrays |= staging.copies({i: arrays[i] for i in copied})
        groups = [tuple(kept), tuple(i for i in wanted if i not in kept)]
        staged = [Staged({i: arrays[i] for i in each}, structure.picks) for each in groups]
        if not owned:  # all transfers are started before the first is awaited
            for each in staged:
                each.begin()
        joined = staging.Joined({i: group for group in staged for i in group})
        parts = fingerprint.Parts(
            arrays,
            structure.picks,
            structure.whole_picks,
            every_replica=self._check_replicas != "off",
            staged=joined,
            owned=owned or defers,
            summing=summing,
        )
        values = {i: arrays[i] if owned else np.array(arrays[i]) for i in small}
        return _Held(joined, staged[0], parts, values, [] if owned else [*staged, parts])

    def _settle(
        self,
        save: Save,
        parent: Lineage,
        program: Program,
        values: Mapping[int, Any],
    ) -> None:
        """Makes sure, in the background, that a save is what it was expected to be."""
        structure = save.structure
        read = {i: np.asarray(value) for i, value in values.items()}
        save.decision, save.count = self._decisions.settle(
            structure, read, parent, program, save.final_directory
        )
        if not save.decision.update_count:
            assert save.delta is not None
            save.delta.candidates = copies.candidates(structure, save.decision, program)
            save.unchanged = tuple(
                i for i in range(len(structure.leaves)) if i not in save.delta.candidates
            )

    def _committed(self, head: _Head) -> Lineage | None:
        """The lineage of a step that was saved here, if it is on disk as it was committed."""
        save = head.save
        assert save is not None
        try:
            if save.manifest is None:  # another process committed it
                head.known = lineage.follow([save.parent] if save.parent else [], head.directory)
            elif save.stamp != manifests.stamp(head.directory):
                return None
            elif isinstance(save.manifest, DeltaManifest) and save.parent is not None:
                head.known = save.parent.followed_by(
                    save.manifest, head.directory, linked=save.links
                )
        except (AdaCheckError, OSError):  # the disk is looked at again by whoever decides
            return None
        return head.known

    def _proof(
        self, snapshot: Snapshot, before: HostCopies, after: Mapping[int, Blocks]
    ) -> Proof | None:
        if not before.sites or not after:
            return None
        structure = snapshot.structure
        consumed = structure.arguments[2] + structure.arguments[3]
        arrays = {i: snapshot.arrays[i] for i in consumed}
        shardings = {i: getattr(x, "sharding", None) for i, x in enumerate(snapshot.arrays)}
        taken = {**before.sites, **stage(arrays, structure.proof_picks)}
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
