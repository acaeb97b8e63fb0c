"""The way of a save, up to where it leaves the caller's thread.

:meth:`Saver.begin` takes a state apart, has its save planned, and takes the copies that must leave
the devices. Others write and commit the :class:`~adacheck_jax.save.one_save.Save` that it returns;
the state may be donated then. Nothing here decides.
"""

# Threads: begin and defer run on the caller's threads. ``_lock`` is held through a whole save or
# record_step, waits for devices and compilers included: two callers would plan on the same parent.
# Under it the locks of a step (``pending``) and of a base in work may be taken, never the other way
# round. What Orbax's thread does to a Save is read from its fields.

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import jax

from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.memory.files.step_file import FilePlace
from adacheck_jax.memory.peers import Peers
from adacheck_jax.memory.shadow import ShadowThread
from adacheck_jax.plan.decision import shown
from adacheck_jax.plan.options import Options
from adacheck_jax.plan.situation import BackgroundFacts, sizes_of
from adacheck_jax.processes.consent import Consent
from adacheck_jax.processes.meetings import ALONE, Exchange
from adacheck_jax.proof import second_copy
from adacheck_jax.save.background_bases import BackgroundBases
from adacheck_jax.save.line.backlog import Backlog, repeated
from adacheck_jax.save.line.notices import Notices, tell_given_up
from adacheck_jax.save.line.parents import Parent
from adacheck_jax.save.line.planner import Planner, Proposal, is_computed, name_of, sums_of
from adacheck_jax.save.one_save import Attempt, Save
from adacheck_jax.save.pending import KnownStep, Pending
from adacheck_jax.save.resuming import Resumer
from adacheck_jax.save.staging import Stager
from adacheck_jax.schedule.line import LineSchedule
from adacheck_jax.schedule.stopwatch import Clock, Stopwatch
from adacheck_jax.state.snapshot import Snapshot, bound_paths
from adacheck_jax.store import claims
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update.binding import Recorders

_log = logging.getLogger(__name__)


class Saver:
    """Saves the states of one training run.

    Costs are measured by the ``clock``, which is monotonic. The shadow lies in the file at
    ``place``; in memory of this process, if that is None. ``peers`` are all processes, if several
    have such files. It ``keeps`` what storage refused, for a manager that has it written again
    (:meth:`begin_kept`).
    """

    def __init__(
        self,
        recorders: Recorders,
        options: Options,
        clock: Clock = time.monotonic,
        place: FilePlace | None = None,
        peers: Peers | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._options, self._clock, self._keeps = options, clock, keeps
        self._has_recorder = bool(recorders)
        self._schedule, self._watch = LineSchedule(options.max_deltas), Stopwatch(clock)
        host = options.host_shadow
        most_bytes, records = (0, False) if host is None else (host.bytes, bool(host.records))
        self._shadow = ShadowThread(most_bytes, place, peers, keeps_records=records)
        self._bases = BackgroundBases(self._shadow, options.keep_lineage)
        self._planner = Planner(recorders, options, self._schedule, self._bases, self._shadow)
        self._notices, self._has_gap = Notices(), False
        # A step may be restored, to look at it, while another thread saves the next one.
        self._lock = threading.Lock()
        self.backlog = Backlog(self._planner.line, self._lock)
        self._attempt = Attempt(threading.Lock(), claims.new_token())
        self._stager = Stager(options, self._planner, self._shadow)
        self.resumer = Resumer(
            *(self._planner, self._stager, self._shadow),
            options.delta if recorders or options.delta == "bits" else None,
            *(self._lock, self._resumed),
        )

    def note(self, name: str, seconds: float) -> None:
        """Notes a cost of the schedule that was measured."""
        with self._lock:
            self._watch.note(name, seconds)

    def _resumed(self, measured: Mapping[str, float]) -> None:
        """Notes that the line goes on from another step, and costs that were measured."""
        for name, seconds in measured.items():
            self._watch.note(name, seconds)
        self._note_position()

    @property
    def has_steps(self) -> bool:
        """True if a step was saved or restored here."""
        line = self._planner.line
        return line.save is not None or not line.is_empty

    def leave(self, consent: Consent) -> None:
        """Tells processes that may ask in this call that this one took part in no collective."""
        self._stager.wire.leave(consent)

    def begin(
        self,
        directory: AnyPath,
        number: int | None,
        state: PyTree,
        step: int | None,
        *,
        cast: frozenset[str] = frozenset(),
        exchange: Exchange = ALONE,
        consent: Consent | None = None,
    ) -> Save:
        """Plans and stages a save; the only part of it that blocks the caller.

        The directory is that of the item once it is committed, ``number`` the one in the name of
        the step's directory. A step without a number takes that one; without that the counter. The
        leaves in ``cast`` are stored in another data type than they are trained in.
        """
        with self._lock:
            self._enter(is_save=True)
            if (last := self._stager.last_base) is not None and last.error is not None:
                self._stager.last_base = None  # with the copies of its state
            self._planner.learn()
            self.backlog.let_go()
            snapshot = self._planner.snapshots.take(state)
            options, bindings = self._options, snapshot.structure.bindings
            if options.max_deltas and options.delta != "bits" and not self._has_recorder:
                is_first = self._planner.line.save is None
                self._notices.hint_at_recorder(snapshot.structure, is_first=is_first)
            save = self._begin(
                *(snapshot, directory, number, number if step is None else step),
                *(exchange, consent),
                replayable=not cast or cast.isdisjoint(bound_paths(bindings)),
            )
            if save.is_base and (
                chosen := self._schedule.begin_lineage(sizes_of(snapshot.structure))
            ):
                _log.info("%s", chosen)
            self._note_position()
            self._watch.leave_saved(is_base=save.is_base, deltas=len(save.steps))
            self._has_gap = False
            return save

    def _begin(
        self,
        snapshot: Snapshot,
        directory: AnyPath,
        number: int | None,
        step: int | None,
        exchange: Exchange,
        consent: Consent | None,
        *,
        replayable: bool,
    ) -> Save:
        planner = self._planner
        agrees = functools.partial(self._stager.wire.agrees, consent)
        proposal = planner.plan_save(snapshot, directory, step, agrees, replayable=replayable)
        proposal, own, copies = self._stager.stage(snapshot, proposal, str(directory))
        planned, parent = proposal.plan, None if proposal.plan.is_base else proposal.parent
        if parent is not None and parent.save is None:  # what was looked at is gone on from
            self._bases.restart(parent.base_depth)
        try:
            begun = self._stager.hand_to_shadow(snapshot, proposal, own, copies, consent)
            self._stager.returned.clear()
            exporting = None
            if begun is not None:
                own.begin()  # a base is written meanwhile
                exporting = self._stager.export(planned.structure)
            decision = planned.decision
            _log.debug(
                "step %d: %s (%s); its parent: %s",
                *(planned.step, decision.kind, decision.reason, parent and parent.directory),
            )
            self._notices.note_plan(planned)
            self._notices.note_step(planned.step)
            copies.wait()
        finally:
            self._stager.wire.finish()
        save = self._save([*planner.line.deferred, own], directory, number, parent, exchange)
        save.replayable, save.exporting = replayable, exporting
        if parent is None:
            save.base = self._stager.base_writer(proposal, copies, directory)
        if begun is not None:
            self._stager.prepare_next(own, snapshot, begun, is_restored=False)
        planner.line.advance(save)
        if planned.is_base:
            self._stager.begin_line(save)
            self._bases.restart()
        elif planned.becomes_base:
            followed, sums = save.parent, None
            if followed is not None and not exchange.is_alone:
                sums = self._stager.earlier_base(followed).sums
            self._bases.take(save, copies.staged, sums)
        return save

    def _save(
        self,
        steps: Sequence[Pending],
        directory: AnyPath,
        number: int | None,
        parent: Parent | None,
        exchange: Exchange,
    ) -> Save:
        """A save of staged steps."""
        planner, planned, last = self._planner, steps[-1].plan, self._planner.line.save
        self._attempt = self._attempt.next(
            exchange, repeats=last is not None and last.directory == directory
        )
        found, structure = parent.lineage if parent else None, planned.structure
        links = found is not None and planner.line.has_links(directory)
        if not links:
            planner.line.note_parent(number, parent)
        return Save(
            steps=steps,
            directory=directory,
            number=number,
            parent=found,
            parent_identity=parent.identity if parent else (frozenset(), None),
            links=links,
            caution=planner.quarantine.caution(structure),
            replicas=structure.replica_check(self._options.check_replicas),
            attempt=self._attempt,
            measured=self._watch.take(),
            # Those of the line that a base ends are nothing to the line that it begins.
            background=BackgroundFacts() if planned.is_base else planner.background(directory),
            memory=self._shadow.report,
            clock=self._clock,
            before_commit=self._bases.put,
            keeps=self._keeps,
        )

    def begin_kept(self, directory: AnyPath, number: int | None, exchange: Exchange) -> Save:
        """Begins to write again what storage refused; if nothing, deferred steps up to a number.

        Raises:
            AdaCheckError: steps are lost; told once. Or there is nothing to write.
        """
        with self._lock:
            self._enter(is_save=True)
            planner, saved = self._planner, self._planner.line.saved
            planner.learn()
            if saved is not None and saved.save is not None and saved.save.is_kept:
                self._attempt = self._attempt.next(exchange, repeats=True)
                saved.save = repeated(saved.save, self._attempt)
                if self._stager.last_base is not None and saved.save.is_base:
                    self._stager.last_base = saved.save
                return saved.save
            self.backlog.let_go()
            parent, steps = planner.deferred_until(directory, number)
            save = self._save(steps, directory, number, parent, exchange)
            planner.line.advance(save)
            self._note_position()
            self._watch.leave_saved(is_base=False, deltas=len(steps))
            return save

    def note_gap(self, *, is_lost: bool = False) -> None:
        """Notes that a step is not saved, since its save could not begin: no other follows it.

        Several processes do not look at counters when a step is recorded. If another process may
        have begun it (``is_lost``) all begin a new line: that one has recorded steps in its save.
        """
        with self._lock:
            self._has_gap = True
            self._notices.forget_missed()
            if is_lost:
                why = "the save that was to write them did not begin"
                self._planner.line.give_up(0, why)
                self._planner.line.forget()

    def refuse(self, save: Save, error: Exception, *, is_again: bool) -> None:
        """Notes that another process did not begin a save; if it ``is_again`` it may stay kept."""
        with self._lock:
            save.error, save.keeps = error, save.keeps and is_again
            if not save.is_kept:
                steps = [each.step for each in save.steps[:-1]]
                tell_given_up(steps, "not all processes began the save that was to write them")
                save.release()
        self._stager.returned.set()

    def returns(self) -> None:
        """Notes that a save that began returns to the training loop now."""
        self._stager.returned.set()
        xla_call.begin()  # whose imports would be in the caller's way
        with self._lock:
            self._watch.stay()

    def defer(
        self,
        state: PyTree,
        step: int | None,
        *,
        away_bytes: int | None = None,
        consent: Consent | None = None,
    ) -> bool:
        """Keeps a step in memory, for the next save to write with its own.

        True if it was kept; see :meth:`~adacheck_jax.AdaCheckHandler.record_step`. The step is the
        one after the last if no number is given. While storage is away they may take ``away_bytes``
        of host memory, a number that all processes give alike, and each is known to be one update
        from the last when this returns.

        Raises:
            ValueError: a later step was saved or deferred before, or another state was saved as
                this step.
            AdaCheckError: deferred steps are lost; told once.
        """
        with self._lock:
            self._enter(is_save=False)
            why = self._why_not_deferred(state, step, away_bytes, consent)
            deferred = self._planner.line.deferred
            self._note_position()
            if why and step is None and deferred:
                step = deferred[-1].step + 1
            if step is not None:
                self._notices.note_step(step, why)
            return not why

    def _why_not_deferred(
        self, state: PyTree, step: int | None, away_bytes: int | None, consent: Consent | None
    ) -> str:
        """Defers a step, or gives the reason why it has to be saved."""
        planner, line = self._planner, self._planner.line
        planner.learn()
        if (parent := line.only) is None:
            return "there is nothing yet to build on"
        last = line.last_after(parent).step
        number = last + 1 if step is None else step
        if number < last:
            raise ValueError(
                f"expected a step after {last}, the last one, found {number}. The state was "
                "not recorded; the steps before are not affected."
            )
        if line.deferred and line.deferred_behind is not parent:
            return "another step was restored meanwhile"
        if number == parent.known.step:
            return _why_not_same(planner.snapshots.take(state), parent)
        again = line.supersede(number)
        if not line.deferred:
            line.deferred_behind = parent
        snapshot = planner.snapshots.take(state)
        if self._has_gap and away_bytes is None:  # else it is the step of that save
            return "the save of a step before was refused"
        proposal = planner.plan_deferred(snapshot, parent, number, again, away_bytes)
        if isinstance(proposal, str):
            return proposal
        return self._kept(snapshot, proposal, parent.known, consent, away_bytes is not None)

    def _kept(
        self,
        snapshot: Snapshot,
        proposal: Proposal,
        before: KnownStep,
        consent: Consent | None,
        waits: bool,
    ) -> str:
        """Keeps a step as planned after another one, or gives the reason why not.

        With ``waits`` it is known to be one update from the last when this returns.
        """
        planner = self._planner
        is_known = is_computed(snapshot)
        is_known = is_known and not (isinstance(before, Pending) and before.plan.is_speculative)
        proposal, own, copies = self._stager.stage(
            snapshot, proposal, f"recorded step {proposal.plan.step}"
        )
        try:
            self._stager.hand_to_shadow(snapshot, proposal, own, copies, consent)
            copies.wait()
        finally:
            self._stager.wire.finish()
        is_alone = jax.process_count() == 1
        # Several processes would not know it at the same time, unless all of them wait for it.
        waits = waits or (is_alone and planner.quarantine.is_cautious)
        if is_alone and is_known and not waits:  # before the worker takes turns with this thread
            waits = not own.seems_planned(snapshot.counts())
        is_collective = second_copy.is_collective(snapshot, proposal.plan.update)
        compares = own.compare is not None and is_collective
        with contextlib.ExitStack() as undo:
            undo.callback(own.release)
            if compares and not self._stager.wire.agrees(consent, name_of(proposal.plan, snapshot)):
                return "not all processes compare it with the same replay"
            undo.pop_all()
        planner.line.add(own, drains=snapshot.structure.on_accelerator)
        if compares:
            with contextlib.suppress(AdaCheckError):  # raised by the save of this step
                own.verify()
        self._watch.leave_deferred()
        self._has_gap = False
        return planner.settle_last_deferred() if waits else ""

    def fits(self, state: PyTree) -> bool:
        """True if a save of a state can write the deferred steps too, which have its leaves."""
        if not (deferred := self._planner.line.deferred):
            return True
        try:
            leaves = self._planner.snapshots.take(state).structure.leaves
        except (AdaCheckError, TypeError, ValueError):  # raised by the save
            return True
        return leaves == deferred[-1].leaves

    def finish(self) -> None:
        """Waits until nothing of deferred steps is in the caller's arrays any more."""
        self._stager.worker.submit(lambda: None).result()  # behind all that it was given

    def close(self) -> None:
        """Tells of deferred steps that are not saved; another manager may still save them."""
        self._bases.close()
        tell_given_up([each.step for each in self._planner.line.deferred], "a manager is closed")
        self.finish()
        self._shadow.close()

    def _enter(self, *, is_save: bool) -> None:
        """Begins to measure a call, and learns what all processes know of the costs before it."""
        save = self._planner.line.save
        self._watch.enter(save.durable_s if save is not None else None)
        if save is not None and save.agreed is not None:
            measured, save.measured = save.measured, ()
            self._schedule.add(measured)
        # When a step is recorded, a process may not know yet what another one does.
        if is_save or jax.process_count() == 1:
            self._go_on(save)

    def _go_on(self, save: Save | None) -> None:
        """Goes on with a base that is made in the background."""
        self._bases.go_on()
        facts = self._bases.own
        if jax.process_count() > 1:
            agreed = save.agreed if save is not None else None
            if agreed is not None:
                self._shadow.learn(keeps_records=agreed.memory[0], due=agreed.memory[1])
            facts = agreed.background if agreed is not None else None
            if save is not None and save.error is not None:
                facts = BackgroundFacts()
        if facts is None or (made := self._bases.learn(facts)) is None:
            return
        self._stager.last_base = made  # what has not changed since is linked from its volumes
        self._schedule.add([("base_blocking_s", 0.0, 1), ("base_write_s", facts.newest_s, 1)])
        if chosen := self._schedule.begin_lineage(sizes_of(made.structure)):
            _log.info("%s", chosen)

    def _note_position(self) -> None:
        """Notes how far the line is, for a manager that asks when to save."""
        if (parent := self._planner.line.only) is None:
            self._schedule.note(None)
        else:
            last = self._planner.line.last_after(parent)
            number = parent.known.step if parent.number is None else parent.number
            self._schedule.note(number, last.depth)


def _why_not_same(snapshot: Snapshot, parent: Parent) -> str:
    """Raises ValueError if a step was saved with another state; the reason if it was not saved."""
    if parent.save is not None and parent.save.is_lost:
        return f"step {parent.known.step} was not saved"
    structure, known, found = snapshot.structure, parent.known.sums(), sums_of(snapshot)
    leaves = (i for i in known if i not in structure.ephemeral and known[i] != found[i])
    other = next((f" and other bits in {structure.leaves[i].path}" for i in leaves), "")
    if other or snapshot.counts() != parent.known.counts():
        raise ValueError(
            f"expected step {parent.known.step} as it was saved, with "
            f"{shown(parent.known.counts())} updates, found a state with "
            f"{shown(snapshot.counts())}{other}. It was not recorded; the steps before are not "
            "affected. Give record_step the numbers of the steps as the manager counts them."
        )
    return ""
