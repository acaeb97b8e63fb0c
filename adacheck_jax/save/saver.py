"""The way of a save, up to where it leaves the caller's thread; knows no Orbax.

:meth:`Saver.begin` decides between base and delta and stages what must leave the device. When it
returns, the state may be donated; :mod:`~adacheck_jax.save.commit` does the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from adacheck_jax.device import fingerprint, replicas, transfer, xla_call
from adacheck_jax.device.transfer import stage
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, ReplayError
from adacheck_jax.format import lineage
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.format.manifest import Caution
from adacheck_jax.save import checks, decisions, heads, host_copies, policy
from adacheck_jax.save import run as run_of
from adacheck_jax.save.checks import Check, Checker, State, Witness
from adacheck_jax.save.commit import Attempt, Save, StepShare
from adacheck_jax.save.decisions import Decisions
from adacheck_jax.save.expectation import CAUSES, Expectation, are_ready, told
from adacheck_jax.save.exported_update import Program, Programs
from adacheck_jax.save.heads import Head, Heads
from adacheck_jax.save.host_copies import Held, hold
from adacheck_jax.save.policy import Counts, Decision, Tip
from adacheck_jax.save.run import Recorded, Run
from adacheck_jax.save.snapshot import Snapshot, Snapshots, Structure
from adacheck_jax.store import claims
from adacheck_jax.store.base_writer import BaseShare, EarlierBase
from adacheck_jax.store.buffers import Buffers
from adacheck_jax.store.compression import Compression, Storage
from adacheck_jax.store.delta_writer import DeltaShare, Habits
from adacheck_jax.store.retention import KeepLineage
from adacheck_jax.update import program as update_program
from adacheck_jax.update.binding import Recorders
from adacheck_jax.update.recorder_state import find_nodes

_log = logging.getLogger(__name__)

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
        counts: the update counters; none without a recorder, None where they were not read.
        decision: base or delta.
        head: the step that a delta follows.
        tip: tells the step before: that one, or the last of those recorded since; None for none.
        is_expected: whether the decision was taken without a look at the state's values.
        is_whole: whether a delta stores the whole state.
        wrong: leaves that replay does not reproduce, and that have to be stored.
        check: of its replay, before the save returns; None where none is made then.
    """

    step: int
    counts: Counts | None
    decision: Decision
    head: Head | None
    tip: Callable[[], Tip] | None
    is_expected: bool = False
    is_whole: bool = False
    wrong: frozenset[int] = frozenset()
    check: Check | None = None


@dataclass(frozen=True, slots=True)
class _Staged:
    """A save whose state is on its way to the host.

    Attributes:
        head: the step that a delta follows.
        held: what is taken of the state.
        share: what this process has to write.
        witness: of the state, to check the next step with.
        expectation: of a step that is settled and checked in the background.
    """

    head: Head | None
    held: Held
    share: StepShare
    witness: Witness
    expectation: Expectation | None


class Saver:
    """Saves the states of one training run.

    Args:
        recorders: of the optimizers (:func:`~adacheck_jax.update.binding.recorders_of`).
        params_path: leaf path of the trained params, None to find it.
        max_deltas: longest lineage, in deltas.
        keep_lineage: the policy that keeps ancestors alive where there are no hard links.
        delta: which deltas may be written.
        check: of a delta's replay, what is compared with the state.
        compression: what is compressed, and how.
        check_replicas: what to do about replicas that differ.
        returns_early: whether a base's state is donated only after :meth:`wait_until_staged`.
        run_bytes: host memory that recorded steps may take.
    """

    def __init__(
        self,
        recorders: Recorders,
        params_path: str | Mapping[str, str] | None,
        *,
        max_deltas: int,
        keep_lineage: KeepLineage | None,
        delta: policy.Delta,
        check: Literal["sample", "full"],
        compression: Compression,
        check_replicas: replicas.Mode,
        returns_early: bool,
        run_bytes: int,
    ) -> None:
        self._has_recorder = bool(recorders)
        self._max_deltas = max_deltas
        self._snapshots = Snapshots(recorders, params_path)
        self._programs = Programs(check)
        self._checker: tuple[Structure, Program, Checker] | None = None
        self._caution = ""
        self._distrusted: frozenset[str] = frozenset()
        self._wrong: frozenset[int] = frozenset()
        self._delta: policy.Delta = delta
        self._check_replicas: replicas.Mode = check_replicas
        self._decisions = Decisions(
            self._programs,
            has_recorder=self._has_recorder,
            max_deltas=max_deltas,
            keeps_lineage=keep_lineage is not None,
            delta=delta,
        )
        xla_call.begin()
        # A step may be restored, to look at it, while another thread saves the next one.
        self._lock = threading.Lock()
        self._attempt = Attempt(threading.Lock(), claims.new_token())
        self._heads = Heads(keep_lineage)
        self._run = Run()
        self._run_bytes = run_bytes
        self._unrecorded: tuple[int, str] | None = None
        self._base: EarlierBase | None = None
        self._compression: Compression = compression
        self._habits = Habits()
        self._buffers = Buffers(_KEPT_BYTES)
        self._storage = Storage()
        self._returns_early = returns_early
        self._waiting: Held | None = None
        self._said: set[str] = set()
        self._told_wrong: set[str] = set()

    def follow(
        self, restored: Lineage, number: int | None, leaves: Sequence[Any], state: PyTree
    ) -> None:
        """Makes a restored step the parent of the next save.

        Args:
            restored: the step's lineage.
            number: in the name of the step's directory, None if there is none.
            leaves: its leaves, with which the next state is compared; None for one left out.
            state: the same, as the caller gets them.
        """
        update = restored.base.update
        needed = range(len(leaves)) if update is None else (*update.explained, *update.consumed)
        if any(leaves[i] is None for i in needed):
            return  # what was left out will be made anew, and no update leads there
        held, witness = host_copies.NOTHING, None
        caution, specs = restored.manifest.caution, restored.base.leaves
        if self._has_recorder or self._delta == "bits":
            kept = None
            if self._delta != "bits" and update is not None and not restored.problem:
                replayed = update.explained.difference(update.passed, caution.distrusted)
                kept = frozenset(range(len(leaves))) - replayed - frozenset(update.consumed)
            held = host_copies.of_restored(restored, leaves, kept)
            witness = self._witness_of(restored, state)
        head = heads.of_restored(restored, number, held, witness)
        with self._lock:
            self._caution = self._caution or caution.reason
            self._distrusted |= {specs[i].path for i in caution.distrusted}
            self._heads.follow(head)

    def _witness_of(self, restored: Lineage, state: PyTree) -> Witness:
        """A witness of a restored state; None where the next save cannot be a replayed delta."""
        try:
            snapshot = self._snapshots.take(state)
        except AdaCheckError as error:
            _log.info("The next save will be a base: %s", error)
            return None
        structure = snapshot.structure
        program = self._programs.of(structure)
        if structure.leaves != restored.base.leaves or not self._replays(program, True):
            return None
        step = restored.manifest.step
        checker = self._checker_of(structure, program)
        return checker.witness(State(snapshot.arrays, step, lambda: {}))

    def _checker_of(self, structure: Structure, program: Program) -> Checker:
        known = self._checker
        if known is None or known[0] is not structure or known[1] is not program:
            known = (structure, program, checks.checker_of(structure, program))
            self._checker = known
        return known[2]

    def forget(self) -> None:
        """Makes the next save a base: what was restored is no step that another can build on."""
        with self._lock:
            self._heads.forget()

    @property
    def has_steps(self) -> bool:
        """Whether a step was saved or restored here."""
        return self._heads.saved is not None or not self._heads.is_empty

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
        self._hint_at_recorder(structure)
        self._learn()
        replayable = not cast & _bound_paths(structure)
        step = destination.step if step is None else step
        again = self._superseded(step)
        course = self._expected(snapshot, destination, step, replayable)
        course = course or self._decided(snapshot, destination, step, replayable)
        staged = self._stage(snapshot, course, directory, again, replayable)
        if course.check is not None:  # devices replay meanwhile
            checked = self._checked(snapshot, course, course.check)
            if checked is not course:
                course = self._with_recorded(checked, structure)
                staged = self._stage(snapshot, course, directory, again, replayable)
        decision = course.decision
        _log.info("step %d: %s (%s)", course.step, decision.kind, decision.reason)
        self._decisions.note(decision, course.step)
        self._hint_at_gap(course.step)
        _compare(again, course)
        head, held, share = staged.head, staged.held, staged.share
        parent = head.known if head else None
        earlier = self._earlier(course.head, directory) if decision.is_base else None
        self._heads.note_parent(destination.step, head)
        self._waiting = held
        if not (self._returns_early and decision.is_base):
            self.wait_until_staged()
        files: dict[Path, frozenset[str]] = {}
        self._next_attempt(directory)
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
            caution=self._caution_of(structure),
            replicas=replicas.Check(self._check_replicas, structure.replicated),
            parent_files=head.files.get(head.directory, frozenset()) if head else frozenset(),
            whole=files,
            attempt=self._attempt,
        )
        # Until the save is committed this directory does not exist, and if it fails it never will:
        # the next save looks at the disk, finds no parent, and writes a base.
        following = Head(directory, destination.step, held.kept, files, parent, save)
        following.witness, following.expectation = staged.witness, staged.expectation
        self._advance(following)
        return save

    def _stage(
        self,
        snapshot: Snapshot,
        course: _Course,
        directory: Path,
        again: Expectation | None,
        replayable: bool,
    ) -> _Staged:
        """Starts to bring to the host what a save stores, and takes what its check needs."""
        structure, decision = snapshot.structure, course.decision
        head = None if decision.is_base else course.head
        before = self._copies(head) if head and not course.is_whole else host_copies.NOTHING
        # Here, and not in the background, where the caller's jax settings would not hold.
        program = self._programs.of(structure)
        unreplayed = self._unreplayed(structure, program, course.wrong)
        stored = host_copies.candidates(structure, decision, program, unreplayed | course.wrong)
        kept = self._kept(structure, program, replayable, unreplayed)
        defers = self._returns_early and decision.is_base
        held = self._hold(snapshot, stored, kept, waits=not course.is_expected, defers=defers)
        delta = self._delta_share(structure, held, stored, before, decision)
        share = self._share(
            snapshot, course.step, decision, held, None if decision.is_base else delta
        )
        share.counts, expectation = course.counts, None
        if decision.kind == "replay":
            share.unreplayed = unreplayed if jax.process_count() == 1 else program.unreplayed
            share.unchanged = host_copies.unchanged(structure, stored, decision.updates)
            share.checked = program.engine if course.check else ""
        check, witness = self._witness(snapshot, program, replayable, course, share)
        if course.is_expected:
            assert course.tip is not None
            expectation = Expectation(
                share, structure, held.values, course.tip, program, check, again=again
            )
            expectation.before = self._expectation_before(course.head)
            self._await(share, expectation, directory)
        return _Staged(head, held, share, witness, expectation)

    def _witness(
        self,
        snapshot: Snapshot,
        program: Program,
        replayable: bool,
        course: _Course,
        share: StepShare,
    ) -> tuple[Check | None, Witness]:
        """The check of a step where it is made in the background, and what the next one needs."""
        if course.check is not None:
            return None, course.check.witness
        structure = snapshot.structure
        if not self._replays(program, replayable):
            return None, None
        checker = self._checker_of(structure, program)
        state = State(snapshot.arrays, course.step, share.summed)
        if not course.is_expected:
            return None, checker.witness(state)
        assert course.head is not None
        check = checker.begin(self._witness_before(course.head), state)
        return check, check.witness

    def _await(self, share: StepShare, expectation: Expectation, where: object) -> None:
        """Has a step settled and verified in the background."""
        share.settle = functools.partial(_named, expectation.settle, where)
        share.verify = functools.partial(_named, expectation.verify, where)

    def _advance(self, head: Head) -> None:
        save = head.save
        assert save is not None
        if save.is_base:
            leaves = save.structure.leaves
            self._base = EarlierBase(head.directory, save.step, leaves, save.own.sums)
            self._habits = Habits()
        self._heads.advance(head)
        self._run.restart(head)

    def _learn(self) -> None:
        """Becomes cautious where replay was found to be wrong in the background.

        Raises:
            AdaCheckError: recorded steps are lost by it; told once.
        """
        head = self._heads.saved
        if head is not None and (saved := head.save) is not None:
            known = saved.agreed_caution
            leaves = saved.structure.leaves
            self._caution = self._caution or known.reason
            self._distrusted |= {leaves[i].path for i in known.distrusted}
            if isinstance(saved.error, ReplayError):  # without the path of the step's directory
                self._caution = self._caution or str(saved.error.__cause__ or saved.error)
        # Of several processes one alone may have found a recorded step wrong: the save that writes
        # it fails in all of them.
        if jax.process_count() == 1 and (wrong := self._run.wrong):
            kept, error = wrong
            self._caution = self._caution or str(error)
            steps = lineage.shown_steps([each.share.step for each in self._run.cut(kept)])
            raise type(error)(
                f"Recorded steps that are not saved: {steps}, and neither is this one; those "
                f"before are kept. {error}"
            ) from error

    def _caution_of(self, structure: Structure) -> Caution:
        distrusted = (structure.index[path] for path in self._distrusted if path in structure.index)
        return Caution(self._caution[:_REASON_LENGTH], tuple(sorted(distrusted)))

    def _unreplayed(
        self, structure: Structure, program: Program, wrong: frozenset[int]
    ) -> frozenset[int]:
        """The leaves that the update computes and a delta stores instead."""
        distrusted = {structure.index.get(path, -1) for path in self._distrusted}
        return (program.unreplayed | wrong | distrusted) & structure.computed

    def _hint_at_recorder(self, structure: Structure) -> None:
        """Says once that a state holds a record that the handler does not know of."""
        if self._has_recorder or self._delta == "bits" or self._max_deltas == 0:
            return
        if nodes := find_nodes(list(structure.index)):
            self._warn_once(
                f"Every step is saved as a full state: the state holds a Recorder's record at "
                f"{nodes[0].prefix!r}, but the handler was given no recorder. Give it: "
                "AdaCheckHandler(recorder)."
            )

    def _warn_once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._said:
            self._said.add(key or message)
            _log.warning("%s", message)

    def _hint_at_gap(self, step: int) -> None:
        """Says once that a step was neither recorded nor saved."""
        unrecorded, self._unrecorded = self._unrecorded, None
        if unrecorded is not None and unrecorded[0] < step:
            self._warn_once(
                f"Step {unrecorded[0]} was neither recorded nor saved: record_step answered False "
                f"({unrecorded[1]}), and no save followed, which save_interval_steps may refuse. "
                "Where record_step answers False, save with manager.save(..., force=True).",
                key="gap",  # the message has another number for each step
            )

    def _record(self, state: PyTree, step: int | None) -> bool:
        why = self._why_not_recorded(state, step)
        number = step
        if why and number is None:
            last = self._run.steps[-1].step if self._run else None
            number = None if last is None else last + 1
        if number is not None:
            self._hint_at_gap(number)
            self._unrecorded = (number, why) if why else None
        return not why

    def _why_not_recorded(self, state: PyTree, step: int | None) -> str:
        """Records a step, or tells why it has to be saved."""
        self._learn()
        head, run = self._heads.only, self._run
        if head is None:
            return "there is nothing yet to build on"
        last = run.steps[-1].step if run else head.tip().step
        number = last + 1 if step is None else step
        if number < last:
            raise ValueError(
                f"expected a step after {last}, the last one, found {number}. The state was "
                "not recorded; the steps before are not affected."
            )
        if number == head.tip().step:
            return ""
        if number == last:
            run.cut(len(run) - 1)
        snapshot = self._snapshots.take(state)
        structure = snapshot.structure
        if why := self._why_none_follows(head, structure):
            return why
        if head.save is not None and head.save.error is not None and jax.process_count() == 1:
            return f"step {head.save.step}, which it would follow, was not saved"
        if not run:
            run.restart(head)
        program = self._programs.of(structure)
        every = tuple(range(len(structure.bindings)))
        decision = Decision("replay", "recorded", every)
        unreplayed = self._unreplayed(structure, program, frozenset())
        stored = host_copies.candidates(structure, decision, program, unreplayed)
        if (len(run) + 1) * run_of.bytes_of(structure, stored) > self._run_bytes:
            return "the recorded steps fill run_bytes"
        before = self._copies(head)
        kept = self._kept(structure, program, True, unreplayed)
        small = {i: snapshot.arrays[i] for i in structure.counts}
        is_known = are_ready(small) and head.tip().counts is not None
        held = self._hold(snapshot, stored, kept, waits=False, defers=False)
        delta = self._delta_share(structure, held, stored, before, decision)
        share = self._share(snapshot, number, decision, held, delta)
        share.unreplayed = unreplayed if jax.process_count() == 1 else program.unreplayed
        checker = self._checker_of(structure, program)
        check = checker.begin(
            self._witness_before(head), State(snapshot.arrays, number, share.summed)
        )
        held.wait()
        expectation = Expectation(share, structure, held.values, run.tip(head.tip), program, check)
        expectation.before = self._expectation_before(head)
        self._await(share, expectation, f"recorded step {number}")
        drains = any(map(transfer.on_accelerator, snapshot.arrays))
        run.add(Recorded(expectation, held.kept, check.witness), drains=drains)
        if jax.process_count() == 1 and (self._caution or is_known):
            # Several processes would not know it at the same time.
            return self._settle_last()
        return ""

    def _settle_last(self) -> str:
        """Settles the steps recorded so far; in a cautious run they are compared too."""
        run = self._run
        try:
            run.settle()
            if self._caution:
                run.last.expectation.verify()
        except AdaCheckError as error:
            run.cut(len(run) - 1)  # this one is left to a save, which sees the whole state
            self._give_up(run.settled_count, str(error))
            return str(error)
        return ""

    def _why_none_follows(self, head: Head, structure: Structure) -> str:
        """Tells why a recorded update may not follow a step that perhaps is not written yet.

        All processes have to answer alike, so that one may look only at what all of them know.
        """
        program, saved = self._programs.of(structure), head.save
        if not self._replays(program, saved is None or saved.replayable):
            return program.problem or "the step has to be stored in full"
        if saved is not None:
            if structure is not saved.structure:
                return "the state has another tree or other shardings than the step before"
            if saved.own.decision.kind == "bits":
                return "the step before was stored as differences"
        elif head.known is None or not _fits(head.known, structure, program):
            return "the restored step has another tree, update, or other shardings"
        if self._witness_before(head) is None:
            return "the step before is not known well enough to check the update"
        if head.tip().depth + len(self._run) + 2 > self._max_deltas:
            return f"the lineage would be longer than max_deltas={self._max_deltas}"
        if not self._heads.keeps_ancestors(head.directory):
            return "nothing keeps the steps that it builds on"
        return ""

    def _witness_before(self, head: Head) -> Witness:
        """Of the last recorded step, or the one saved or restored."""
        return self._run.last.witness if self._run else head.witness

    def _expectation_before(self, head: Head | None) -> Expectation | None:
        """Of the last recorded step, or the one saved, so that checks are made in order."""
        if self._run:
            return self._run.last.expectation
        return head.expectation if head else None

    def _share(
        self,
        snapshot: Snapshot,
        step: int,
        decision: Decision,
        held: Held,
        delta: DeltaShare | None,
    ) -> StepShare:
        picks = snapshot.structure.local_picks
        local = stage({i: snapshot.arrays[i] for i in picks}, picks)
        return StepShare(step, decision, held.parts, delta, local)

    def _copies(self, head: Head) -> Mapping[int, Blocks]:
        """Host copies of the last recorded step, or of the one saved or restored."""
        return self._run.last.copies if self._run else head.copies

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
        self._attempt.is_over = saved is not None and saved.directory == directory
        self._attempt = Attempt(self._attempt.turn, self._attempt.token)

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
        before: Mapping[int, Blocks],
        decision: Decision,
    ) -> DeltaShare:
        return DeltaShare(
            structure.leaves,
            held.staged,
            stored,
            host_copies.comparable(before, structure, decision),
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
        small = () if waits else snapshot.structure.counts
        every_replica = self._check_replicas != "off"
        return hold(
            snapshot, wanted, kept, small, waits=waits, defers=defers, every_replica=every_replica
        )

    def _decided(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course:
        """Decides from the state's values; waits for the running step."""
        counts, structure = snapshot.counts(), snapshot.structure
        numbers = (step, counts[0] if counts else None, 0)
        step = next(number for number in numbers if number is not None)
        directory, only = destination.directory, self._heads.only
        self._settle_run()
        if self._run and (head := self._run.follows) and self._heads.is_there(head, directory):
            pass
        else:
            self._give_up(0, "the step that they follow is not there")
            head = self._heads.parent(directory, counts)
        tip = self._run.tip(head.tip) if head else None
        decision = self._decisions.decide(
            snapshot,
            head.known if head else None,
            tip() if tip else None,
            self._copies(head) if head else (),
            step=step,
            counts=counts,
            has_links=lambda: self._heads.has_links(destination.directory),
            replayable=replayable,
            is_first=self._heads.is_empty,
        )
        if self._run and not decision.is_base and only is not self._run.follows:
            decision = Decision("base", "another step was restored meanwhile")
        course = _Course(step, counts, decision, head, tip)
        if decision.kind == "replay":
            course = self._compared(snapshot, course)
        return self._with_recorded(course, structure)

    def _with_recorded(self, course: _Course, structure: Structure) -> _Course:
        """Has a base give way to a delta of the whole state where recorded steps come before it."""
        if not course.decision.is_base or not self._run:
            return course
        head, reason = course.head, course.decision.reason
        if head and head.known and head.known.base.leaves == structure.leaves:
            # A base has no room for what was recorded, a delta has room for all of a state.
            why = f"{reason}, and {len(self._run)} recorded steps are saved with it"
            whole = Decision("bits", why)
            return dataclasses.replace(
                course, decision=whole, is_whole=True, check=None, wrong=frozenset()
            )
        self._give_up(0, reason)
        return course

    def _settle_run(self) -> None:
        """Settles and verifies what was recorded; gives up what is not as it was expected."""
        try:
            self._run.settle()
            if self._run and jax.process_count() == 1:
                self._run.last.expectation.verify()
        except AdaCheckError:
            pass  # the first that failed tells why, below
        self._learn()
        if (count := self._run.settled_count) < len(self._run):
            self._give_up(count, "they are not one update apart")

    def _compared(self, snapshot: Snapshot, course: _Course) -> _Course:
        """Begins to replay the updates of a delta, to compare them before the save returns."""
        structure, head = snapshot.structure, course.head
        assert head is not None
        program, before = self._programs.of(structure), self._witness_before(head)
        if before is None:
            decision = Decision("base", "the step before is not known here well enough to check")
            return dataclasses.replace(course, decision=decision)
        if (last := self._expectation_before(head)) is not None:
            with contextlib.suppress(AdaCheckError):  # its own save is told
                last.verify()
        sums = functools.partial(_sums_of, snapshot)
        state = State(snapshot.arrays, course.step, sums)
        check = self._checker_of(structure, program).begin(before, state)
        return dataclasses.replace(course, check=check)

    def _checked(self, snapshot: Snapshot, course: _Course, check: Check) -> _Course:
        """Compares replay with a state that is still there, and finds what has to be stored.

        Returns:
            The same course if nothing has.
        """
        structure, decision, head = snapshot.structure, course.decision, course.head
        program = self._programs.of(structure)
        findings = check.findings(decision.updates)
        if findings and program.engine == "identity":
            self._programs.compare_in_full()
            decision = policy.unplanned(
                "the arrays are not those that separate_update took and returned; from now on its "
                "updates are compared in full"
            )
            return dataclasses.replace(course, decision=decision, check=None)
        known = self._unreplayed(structure, program, frozenset())
        wrong = {i for i in findings if i not in known}
        tip = course.tip() if course.tip else None
        is_alone = jax.process_count() == 1  # of several others may not know the values yet
        if is_alone and head and head.known and tip and tip.step == head.known.manifest.step:
            stored = host_copies.candidates(structure, decision, program, known | wrong)
            rest = host_copies.unchanged(structure, stored, decision.updates)
            if rest:
                wrong.update(decisions.changed(snapshot, head.known, rest))
        if not wrong:
            return course
        self._tell_wrong(structure, course.step, wrong)
        sparse = (i for i in findings if checks.is_sparse(structure, i, findings[i]))
        self._distrusted |= {structure.leaves[i].path for i in sparse}
        wrong_bytes = sum(structure.leaves[i].nbytes for i in wrong)
        whole_bytes = sum(leaf.nbytes for leaf in structure.leaves)
        if jax.process_count() == 1 and 2 * wrong_bytes > whole_bytes:
            decision = Decision("base", told(structure, sorted(wrong)))
            return dataclasses.replace(course, decision=decision, check=None)
        check.renew(State(snapshot.arrays, course.step, dict), wrong)
        return dataclasses.replace(course, wrong=frozenset(wrong))

    def _tell_wrong(self, structure: Structure, step: int, wrong: Collection[int]) -> None:
        text, paths = told(structure, sorted(wrong)), {structure.leaves[i].path for i in wrong}
        self._caution = self._caution or f"step {step}: {text}"
        if not paths.issubset(self._told_wrong):
            self._told_wrong |= paths
            _log.warning(
                "Step %d, and perhaps others after it: %s. They are stored as they are; nothing is "
                "lost, and the other leaves are replayed. %s",
                *(step, text, CAUSES),
            )

    def _expected(
        self, snapshot: Snapshot, destination: Destination, step: int | None, replayable: bool
    ) -> _Course | None:
        """A delta of one update, if all that can be known without the state's values speaks for it.

        Saves that are as far apart as the last two were lie one update apart, or none, if those
        did; so do a save and a step that was recorded before. Where the step is still computing,
        whether they do, and whether replay gives the state, is found in the background
        (:class:`Expectation`); else before the save returns, as always in a cautious run.
        """
        head, structure, run = self._heads.only, snapshot.structure, self._run
        waits = bool(self._caution) or are_ready({i: snapshot.arrays[i] for i in structure.counts})
        if waits:
            self._settle_run()
        if step is None or head is None or head.save is None or not replayable:
            return None
        last, parent = head.save, head.save.parent
        if last.structure is not structure or self._witness_before(head) is None:
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
            or not self._checker_of(structure, program).is_ready
            or not known.exists()
            or not self._heads.may_follow(head, destination.directory)
        ):
            return None
        if program.engine == "identity" or waits:  # then there is no need to guess
            counts, before = snapshot.counts(), tip().counts
            updates = policy.advanced(before, counts) if before else None
            if updates is None:
                return None
            decision = Decision("replay", policy.described(updates), updates)
            course = _Course(step, counts, decision, head, tip)
            return self._with_recorded(self._compared(snapshot, course), structure)
        every = tuple(range(len(structure.bindings)))
        return _Course(step, None, Decision("replay", "one update", every), head, tip, True)

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

    def _replays(self, program: Program, replayable: bool) -> bool:
        """Whether updates may be replayed onto the step that is being saved."""
        return bool(program.files) and replayable and self._delta != "bits" and self._max_deltas > 0

    def _kept(
        self, structure: Structure, program: Program, replayable: bool, unreplayed: Collection[int]
    ) -> Collection[int]:
        """The leaves of which the next save needs this one's bits."""
        if not self._max_deltas:
            return ()
        if self._replays(program, replayable):
            none = Decision("replay", "")
            return host_copies.candidates(structure, none, program, unreplayed)
        follows_bits = self._delta == "bits" or (self._delta == "auto" and replayable)
        if not follows_bits or (not self._has_recorder and self._delta != "bits"):
            return ()
        return range(len(structure.leaves))


_REASON_LENGTH = 1000


def _named(act: Callable[[], None], where: object) -> None:
    """Says of which step an error is."""
    try:
        act()
    except AdaCheckError as error:
        raise type(error)(f"{where}: {error}") from error


def _sums_of(snapshot: Snapshot) -> Mapping[int, int]:
    """What this process contributes to the fingerprint of each leaf; waits for the state."""
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    return fingerprint.Parts(arrays, structure.picks, structure.whole_picks, summing=summing).sums()


def _fits(known: Lineage, structure: Structure, program: Program) -> bool:
    """Whether an update of a structure can be replayed onto a restored step."""
    update = known.base.update
    return (
        update is not None
        and not known.problem
        and known.base.leaves == structure.leaves
        and program.digest == update.programs.get(update_program.platform())
        and (not update.reducing or update.placement == structure.placement)
    )


def _compare(again: Expectation | None, course: _Course) -> None:
    """Says so where a step is not saved as it was recorded."""
    if again is not None and course.counts is not None and again.counts != course.counts:
        _log.warning(
            "Step %d was recorded with %s updates and is saved with %s: what was recorded is not "
            "saved. Give record_step the numbers of the steps, as the manager counts them.",
            *(course.step, policy.shown(again.counts), policy.shown(course.counts)),
        )


_MIN_STILL_BYTES = 1 << 16
"""Smaller leaves are no reason for files of their own."""


def _still(structure: Structure) -> frozenset[int]:
    """The leaves that may well be the same at the next base: no update computes them."""
    if not structure.bindings:
        return frozenset()
    touched = frozenset(i for indices in structure.arguments for i in indices)
    return frozenset(
        i
        for i, leaf in enumerate(structure.leaves)
        if i not in touched and leaf.nbytes >= _MIN_STILL_BYTES
    )


def _bound_paths(structure: Structure) -> frozenset[str]:
    """The leaf paths that updates consume, compute or count."""
    return frozenset(
        path
        for each in structure.bindings
        for path in (*each.explained, *each.consumed, each.count)
    )
