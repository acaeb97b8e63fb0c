"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.commit` does the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from adacheck_jax import copies, cpu_call, heads, lineage, policy, replicas, staging
from adacheck_jax import run as run_of
from adacheck_jax.base_share import BaseShare, EarlierBase
from adacheck_jax.buffers import Buffers
from adacheck_jax.commit import Attempt, Proof, Save, StepShare
from adacheck_jax.compression import Compression, Storage
from adacheck_jax.copies import HostCopies
from adacheck_jax.decisions import Decisions
from adacheck_jax.delta_share import DeltaShare, Habits
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.expectation import Expectation, are_ready, others
from adacheck_jax.heads import Head, Heads
from adacheck_jax.holding import Held, hold
from adacheck_jax.lineage import Lineage
from adacheck_jax.policy import Tip
from adacheck_jax.programs import Program, Programs
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.retention import KeepLineage
from adacheck_jax.run import Recorded, Run
from adacheck_jax.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.staging import Blocks, stage, x64_enabled
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


@dataclass(frozen=True, slots=True)
class _Course:
    """How a state is to be saved.

    Attributes:
        step: its number.
        count: the update counter; None without a recorder, and where it has not been read.
        decision: base or delta.
        head: the step that a delta follows.
        tip: tells the step before: that one, or the last of those recorded since; None for none.
        is_expected: whether the decision was taken without a look at the state's values.
        is_whole: whether a delta stores the whole state.
    """

    step: int
    count: int | None
    decision: policy.Decision
    head: Head | None
    tip: Callable[[], Tip] | None
    is_expected: bool = False
    is_whole: bool = False


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
        run_bytes: host memory that recorded steps may take.
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
        run_bytes: int,
    ) -> None:
        self._recorder = recorder
        self._max_deltas = max_deltas
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
        self._heads = Heads(keep_lineage)
        self._run = Run()
        self._run_bytes = run_bytes
        self._base: EarlierBase | None = None
        self._compression: Compression = compression
        self._habits = Habits()
        self._buffers = Buffers(_KEPT_BYTES)
        self._storage = Storage()
        self._returns_early = returns_early
        self._waiting: Held | None = None

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
        held = copies.NOTHING
        if self._recorder is not None or self._delta == "bits":
            held = copies.of_restored(
                restored,
                leaves,
                replays=self._delta != "bits" and not restored.problem,
                proves=self._prove != "never",
            )
        head = heads.of_restored(restored, number, held)
        with self._lock:
            self._heads.follow(head)

    def forget(self) -> None:
        """Makes the next save a base: what was restored is no step that another can build on."""
        with self._lock:
            self._heads.forget()

    @property
    def has_saved(self) -> bool:
        """Whether a step was saved here."""
        return self._heads.saved is not None

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

    def record(self, state: PyTree, step: int | None) -> bool:
        """Takes hold of a step that the next save writes with its own.

        Args:
            state: the state.
            step: its number; None is the one after the last.

        Returns:
            Whether it did; see :meth:`~adacheck_jax.AdaCheckHandler.record_step`.
        """
        with self._lock:
            return self._record(state, step)

    def wait_until_staged(self) -> None:
        """Waits until the state that was saved last may be donated."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.wait()

    def close(self) -> None:
        """Says what was recorded and is not saved; another manager may still save it."""
        if steps := [each.step for each in self._run.steps]:
            shown = lineage.shown_steps(steps)
            _log.warning("Recorded steps that are not saved: %s; a manager is closed.", shown)

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
        step = destination.step if step is None else step
        again = self._superseded(step)
        course = self._expected(snapshot, destination, step, replayable)
        course = course or self._decided(snapshot, destination, step, replayable)
        decision, head = course.decision, course.head
        _log.info("step %d: %s (%s)", course.step, decision.kind, decision.reason)
        _compare(again, course)
        earlier = self._earlier(head, directory) if decision.is_base else None
        head = None if decision.is_base else head
        parent, before = (head.known, self._copies(head)) if head else (None, copies.NOTHING)
        before = copies.NOTHING if course.is_whole else before
        self._heads.note_parent(destination.step, head)
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
        delta = self._delta_share(structure, held, stored, before, decision)
        share = self._share(
            snapshot, course.step, decision, held, None if decision.is_base else delta
        )
        share.count = course.count
        if course.count is None and course.is_expected:
            assert course.tip is not None
            expectation = Expectation(
                share, structure, held.values, course.tip, program, directory, again
            )
            share.settle = functools.partial(self._settle, expectation, directory)
        elif decision.kind == "replay" and not decision.update_count:
            share.unchanged = others(structure, stored)
        save = Save(
            programs=self._programs,
            links=parent is not None and self._heads.has_links(directory),
            steps=[*self._run.steps, share],
            structure=structure,
            parent=parent,
            final_directory=directory,
            directory_step=destination.step,
            replayable=replayable,
            custom_metadata=custom_metadata,
            base=self._base_share(structure, held, earlier) if decision.is_base else None,
            before=course.tip().step if course.tip else course.step,
            proves=proves,
            proof=self._proof(snapshot, before, sites) if proves else None,
            replicas=replicas.Check(self._check_replicas, structure.replicated),
            parent_files=head.files.get(head.directory, frozenset()) if head else frozenset(),
            whole=files,
            attempt=self._attempt,
        )
        after = HostCopies(held.kept, is_due, sites if is_due else {})
        if decision.kind == "replay" and not decision.update_count:  # nothing was updated since
            after = HostCopies(after.blocks, before.is_proof_due, before.sites)
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        self._advance(Head(directory, destination.step, after, files, parent, save))
        if not course.is_expected and self._replays(program, replayable):
            values = self._decisions.values_of(structure, snapshot.arrays)
            self._decisions.remember(structure, values, directory)
        return save

    def _advance(self, head: Head) -> None:
        save = head.save
        assert save is not None
        if save.is_base:
            leaves = save.structure.leaves
            self._base = EarlierBase(head.directory, save.step, leaves, save.own.sums)
            self._habits = Habits()
        self._heads.advance(head)
        self._run.restart(head.directory)

    def _record(self, state: PyTree, step: int | None) -> bool:
        head, run = self._heads.only, self._run
        if head is None or head.save is None:
            return False
        saved = head.save
        last = run.steps[-1] if run else saved.own
        number = last.step + 1 if step is None else step
        if number < last.step:
            raise ValueError(
                f"expected a step after {last.step}, the last one, found {number}. The state was "
                "not recorded; the steps before are not affected."
            )
        if number == saved.step:
            return True
        if number == last.step:
            run.cut(len(run) - 1)
        snapshot = self._snapshots.take(state)
        structure = snapshot.structure
        if structure is not saved.structure or not self._may_record(head, structure):
            return False
        program, decision = self._programs.of(structure), policy.Decision("replay", "recorded", 1)
        stored = copies.candidates(structure, decision, program)
        if (len(run) + 1) * run_of.bytes_of(structure, stored) > self._run_bytes:
            return False
        before, kept = self._copies(head), self._kept(structure, program, saved.replayable, False)
        small = {i: snapshot.arrays[i] for i in self._decisions.small(structure)}
        is_known = are_ready(small) and head.tip().count is not None
        held = self._hold(snapshot, stored, kept, waits=False, defers=False)
        held.wait()
        delta = self._delta_share(structure, held, stored, before, decision)
        share = self._share(snapshot, number, decision, held, delta)
        expectation = Expectation(
            share, structure, held.values, run.tip(head.tip), program, run.where(number)
        )
        share.settle = functools.partial(self._settle, expectation, f"recorded step {number}")
        drains = any(map(staging.on_accelerator, snapshot.arrays))
        run.add(Recorded(expectation, HostCopies(held.kept, False, {})), drains=drains)
        if is_known and jax.process_count() == 1:  # several would not know it at the same time
            try:
                run.settle(self._decisions)
            except AdaCheckError as error:
                run.cut(len(run) - 1)  # this one is left to a save, which sees the whole state
                self._give_up(run.settled_count, str(error))
                return False
        return True

    def _may_record(self, head: Head, structure: Structure) -> bool:
        """Whether an update of that structure may follow a save that perhaps is not written yet.

        All processes have to answer alike, so that one may look only at what all of them know.
        """
        saved = head.save
        assert saved is not None
        return (
            self._replays(self._programs.of(structure), saved.replayable)
            and saved.own.decision.kind != "bits"
            and not saved.proves
            and not head.copies.is_proof_due
            and saved.depth + len(self._run) + 2 <= self._max_deltas
            and self._heads.keeps_ancestors(head.directory)
        )

    def _share(
        self,
        snapshot: Snapshot,
        step: int,
        decision: policy.Decision,
        held: Held,
        delta: DeltaShare | None,
    ) -> StepShare:
        picks = snapshot.structure.local_picks
        local = stage({i: snapshot.arrays[i] for i in picks}, picks)
        return StepShare(step, decision, held.parts, delta, local)

    def _copies(self, head: Head) -> HostCopies:
        """What the next step is compared with: of the last recorded step, or the one saved."""
        return self._run.copies if self._run else head.copies

    def _superseded(self, step: int | None) -> Expectation | None:
        """Gives up the recorded steps that a save replaces.

        Returns:
            The step that it saves again, if it was recorded last.
        """
        if step is None or not self._run:
            return None
        kept = sum(each.step < step for each in self._run.steps)
        if kept == len(self._run) - 1 and self._run.steps[-1].step == step:
            return self._run.cut(kept)[0].expectation
        self._give_up(kept, f"step {step} is saved after them")
        return None

    def _give_up(self, count: int, why: str) -> None:
        """Gives up recorded steps but for some, and says so."""
        if lost := self._run.cut(count):
            steps = lineage.shown_steps([each.share.step for each in lost])
            _log.warning("Recorded steps that are not saved: %s; %s.", steps, why)

    def _next_attempt(self, directory: Path) -> None:
        saved = self._heads.saved
        is_first = saved is None or saved.directory != directory
        self._attempt.is_over = not is_first
        self._attempt = Attempt(self._attempt.turn, is_first)

    def _base_share(
        self, structure: Structure, held: Held, earlier: EarlierBase | None
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
        held: Held,
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

    def _hold(
        self,
        snapshot: Snapshot,
        wanted: Collection[int],
        kept: Collection[int],
        *,
        waits: bool,
        defers: bool,
    ) -> Held:
        small = () if waits else self._decisions.small(snapshot.structure)
        every_replica = self._check_replicas != "off"
        return hold(
            snapshot, wanted, kept, small, waits=waits, defers=defers, every_replica=every_replica
        )

    def _decided(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course:
        """Decides from the state's values; waits for the running step."""
        count = snapshot.count()
        numbers = (step, count, 0)
        step = next(number for number in numbers if number is not None)
        saved, directory = self._heads.saved, destination.directory
        if self._run and saved is not None and self._heads.is_there(saved, directory):
            head = saved
        else:
            self._give_up(0, "the step that they follow is not there")
            head = self._heads.parent(directory, count)
        try:
            self._run.settle(self._decisions)
        except AdaCheckError as error:
            self._give_up(self._run.settled_count, str(error))
        tip = self._run.tip(head.tip) if head else None
        decision = self._decisions.decide(
            snapshot,
            head.known if head else None,
            tip() if tip else None,
            self._copies(head).blocks if head else (),
            step=step,
            count=count,
            has_links=lambda: self._heads.has_links(destination.directory),
            replayable=replayable,
        )
        if self._run and not decision.is_base and self._heads.only is None:
            decision = policy.Decision("base", "another step was restored meanwhile")
        if not decision.is_base or not self._run:
            return _Course(step, count, decision, head, tip)
        assert head is not None
        assert head.known is not None
        if head.known.base.leaves == snapshot.structure.leaves:
            # A base has no room for what was recorded, a delta has room for all of a state.
            why = f"{decision.reason}, and {len(self._run)} recorded steps are saved with it"
            whole = policy.Decision("bits", why)
            return _Course(step, count, whole, head, tip, is_whole=True)
        self._give_up(0, decision.reason)
        return _Course(step, count, decision, head, tip)

    def _expected(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course | None:
        """A delta of one update, if all that can be known without the state's values speaks for it.

        Saves that are as far apart as the last two were lie one update apart, or none, if those
        did; so do a save and a step that was recorded before. Where the step is still computing,
        whether they do is found in the background (:meth:`Expectation.settle`).
        """
        head, structure, run = self._heads.only, snapshot.structure, self._run
        if step is None or head is None or head.save is None or not replayable:
            return None
        last, parent = head.save, head.save.parent
        if last.structure is not structure or head.copies.is_proof_due:
            return None
        if not run and (
            last.own.decision.kind != "replay"
            or parent is None
            or step - last.step != last.step - last.before
        ):
            return None
        known = self._heads.committed(head)
        tip, program = run.tip(head.tip), self._programs.of(structure)
        if (
            known is None
            or known.problem
            or tip().depth >= self._max_deltas
            or not program.files
            or not known.exists()
            or not self._heads.may_follow(head, destination.directory)
        ):
            return None
        course = _Course(step, None, policy.Decision("replay", "one update", 1), head, tip, True)
        small = {i: snapshot.arrays[i] for i in self._decisions.small(structure)}
        try:
            if are_ready(small):  # then there is no need to guess
                run.settle(self._decisions)
                values = self._decisions.values_of(structure, snapshot.arrays)
                decision, count = self._decisions.settle(
                    structure, values, tip(), program, destination.directory
                )
                course = dataclasses.replace(course, decision=decision, count=count)
        except AdaCheckError:
            return None
        return course if course.decision.update_count else None

    def _earlier(self, head: Head | None, directory: Path) -> EarlierBase | None:
        """What is known of the base that a new one follows, where its files can be linked."""
        if head is None or head.known is None or not self._heads.has_links(directory):
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

    def _settle(self, expectation: Expectation, what: object) -> None:
        """Makes sure, in the background, that a step is what it was expected to be."""
        try:
            expectation.settle(self._decisions)
        except AdaCheckError as error:
            raise AdaCheckError(f"{what}: {error}") from error

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


def _compare(again: Expectation | None, course: _Course) -> None:
    """Says so where a step is not saved as it was recorded."""
    if again is not None and course.count is not None and again.count != course.count:
        _log.warning(
            "Step %d was recorded with %d updates and is saved with %d: what was recorded is not "
            "saved. Give record_step the numbers of the steps, as the manager counts them.",
            *(course.step, again.count, course.count),
        )


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
