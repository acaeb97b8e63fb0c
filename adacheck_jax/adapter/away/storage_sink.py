"""Saves of a training loop that goes on while storage is away.

A save that storage refused is written again, and steps that come meanwhile are recorded in memory
behind it (:mod:`~adacheck_jax.save.line.backlog`), as long as they have room. Then ``save`` waits
for a storage that does not answer, and raises the error of one that refuses.
"""

# Threads: the training loop's alone saves, waits and closes here.
#
# Several processes do alike: process 0 decides, and what it decided goes through ``together``.
# What all find out alike is not sent: how the save in flight has ended, since Orbax's last barrier
# is behind a failure too, and which steps are in memory.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME

from adacheck_jax.adapter.arguments import KEPT, SaveArgs, in_item
from adacheck_jax.adapter.away import outage as outages
from adacheck_jax.adapter.away.acknowledged import AcknowledgedSteps
from adacheck_jax.adapter.away.deciding import Action, SaveState, StorageFacts, decide
from adacheck_jax.adapter.away.ending import Ending
from adacheck_jax.adapter.away.in_flight import SaveInFlight
from adacheck_jax.adapter.away.opening import Opener, beginning
from adacheck_jax.adapter.away.outage import Look
from adacheck_jax.adapter.training_run import TrainingRun
from adacheck_jax.errors import DifferingCallsError, StorageError
from adacheck_jax.processes.lockstep import Lockstep
from adacheck_jax.processes.messages import Report
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.store.storage.location import at, located


class StorageSink:
    """Saves each step of a training loop, or keeps it in memory to be written when storage answers.

    Args:
        manager: the manager.
        run: its training run.
        together: the processes that save with it.
        opener: the beginning of its saves.
        ending: their end.

    Attributes:
        acknowledged: the steps in memory.
    """

    def __init__(
        self,
        manager: ocp.CheckpointManager,
        run: TrainingRun,
        together: Lockstep,
        opener: Opener,
        ending: Ending,
    ) -> None:
        self._manager, self._run, self._together = manager, run, together
        self.acknowledged = AcknowledgedSteps(run, together)
        self._in_flight = SaveInFlight(manager, self.acknowledged, opener, ending)
        self._thread = threading.get_ident()
        self._look: Look | None = None
        self._item: str | None = None

    @property
    def is_asked(self) -> bool:
        """True in the training loop's thread, but where Orbax's manager asks something of itself.

        Other threads may wait too, and then they write nothing.
        """
        return threading.get_ident() == self._thread and not self._in_flight.is_inside

    def save(
        self,
        step: int,
        args: Any,
        save: Callable[..., bool],
        check: Callable[[], None],
        item: str | None = None,
        *,
        is_ours: bool,
    ) -> bool:
        """Saves a step, or keeps it in memory.

        Args:
            step: number of the step.
            args: its arguments, of the state.
            save: calls Orbax's save of it, with other arguments if given.
            check: refuses arguments of another kind.
            item: name of the state's item; None if it has no name.
            is_ours: True if it is a state alone; process 0's is taken, which alone has Orbax write
                anything beside it.

        Raises:
            StorageError: as :meth:`AdaCheckManager.save`.
        """
        self._thread = threading.get_ident()
        acknowledged, in_flight = self.acknowledged, self._in_flight
        if is_ours := is_ours and self._run.lines.is_only(item or DEFAULT_ITEM_NAME):
            self._item = item
        try:
            action, answer = self._decided(step, args, check, is_ours=is_ours)
        except BaseException:
            self._run.lines.note_gap()
            raise
        is_ours, begin = answer["is_ours"], save
        if is_ours and in_flight.may_open(step):
            begin = functools.partial(in_flight.open, step, args, save, item)
        if action is Action.SAVE and in_flight.begin(step, begin, is_ours=is_ours):
            return True
        if action is Action.WRITE:
            self._write(answer)
        is_recorded = action is not Action.WAIT and step > acknowledged.last
        if is_recorded and is_ours and acknowledged.record(args, step):
            return True
        try:
            self._write_all()
            return in_flight.call(step, save, is_ours=is_ours)
        except BaseException:
            acknowledged.has_gap = True  # nothing that is recorded would follow by one update
            raise

    def _decided(
        self, step: int, args: Any, check: Callable[[], None], *, is_ours: bool
    ) -> tuple[Action, Report]:
        """The action of all processes on a step, and what goes with that."""
        call = f"save({step})"
        while True:
            decide = functools.partial(self._decision, step, args, is_ours=is_ours)
            answer = self._together.decided(decide, call, check)
            call = ""
            action = Action(answer["action"])
            if action is Action.RESOLVE:
                try:
                    self._in_flight.join(answer["why"])
                except Exception as error:
                    error.add_note(f"Nor is step {step}, whose save tells it: save it again.")
                    raise
            else:
                if answer["has_ended"]:
                    self._end(step)
                return action, answer

    def _decision(self, step: int, args: Any, *, is_ours: bool) -> Report:
        """The action on a step, as process 0 sees it."""
        acknowledged, in_flight = self.acknowledged, self._in_flight.state()
        if in_flight is SaveState.ENDED:
            self._end(step)
        lag = acknowledged.lag
        facts = StorageFacts(
            in_flight=in_flight,
            is_due=acknowledged.outage.is_due,
            has_gap=acknowledged.has_gap,
            is_ours=is_ours,
            is_new=step > acknowledged.last,
            is_acknowledged=acknowledged.are_some,
            has_refused=lag.refused is not None,
            deferred=len(lag.deferred),
            portion=lag.portion,
            fits=not (is_ours and lag.deferred) or self._run.lines.fits(args.state),
        )
        if (action := decide(facts)) is Action.LOOK:
            if self._look is None:
                self._look = Look(at(located(str(self._manager.directory))), acknowledged.outage)
            answers = self._look.answers(step)
            action = decide(dataclasses.replace(facts, answers=answers))
        has_ended = in_flight is SaveState.ENDED
        answer: Report = {"action": action.value, "is_ours": is_ours, "has_ended": has_ended}
        if in_flight is SaveState.FAILED:
            answer["why"] = str(self._in_flight.error())
        return answer | (acknowledged.next_write() if action is Action.WRITE else {})

    def _end(self, step: int) -> None:
        """Notes that no save is in flight when a step is saved."""
        self._in_flight.join()
        self.acknowledged.replace(step)

    def _write(self, answer: Report) -> None:
        """Writes again what was refused, or else what is recorded up to a step, as that step."""
        number, manager = answer["number"], self._manager
        if answer["is_there"]:  # an error came after all was done
            self._run.lines.backlog.end(number)
            manager.reload()
        elif answer["is_there"] is not None:

            def save() -> bool:
                args = in_item(SaveArgs(KEPT), self._item)
                with beginning():
                    return ocp.CheckpointManager.save(manager, number, args=args, force=True)

            self._in_flight.begin(number, save, is_ours=True)

    def _write_all(self, *, until_s: float = 0.0, in_haste: bool = False) -> None:
        """Writes all that is in memory, and waits for it.

        Raises:
            StorageError: storage refuses it, also after a pause as long as there is time.
        """
        in_flight, acknowledged = self._in_flight, self.acknowledged
        try:
            in_flight.join(in_haste=in_haste)
        except DifferingCallsError:
            if not until_s:
                raise
        if until_s and self._together.calls.error:
            acknowledged.cut_to_common()
        is_told, pause_s = False, outages.RETRY_S  # Orbax may tell of an earlier error at first
        while (lag := acknowledged.lag).next_number(in_portions=False) is not None:
            try:
                left_s = acknowledged.meet_closing(until_s) if until_s else 0.0
            except DifferingCallsError:
                acknowledged.cut_to_common()
                continue
            answer = self._together.decided(acknowledged.next_write)
            self._write(answer)
            has_begun = in_flight.has_begun
            if in_flight.join(in_haste=in_haste) and acknowledged.lag.steps != lag.steps:
                continue
            if not has_begun and not is_told:
                is_told = True
            elif left_s:
                time.sleep(min(pause_s, left_s))
                pause_s *= 2  # Orbax logs three tracebacks of each try
            else:
                raise self._unwritten(is_closing=until_s > 0.0) from acknowledged.outage.error
        acknowledged.end()

    def _unwritten(self, *, is_closing: bool) -> StorageError:
        """The error of steps in memory that storage refuses."""
        error = self.acknowledged.outage.error
        reason = outages.refusal(error) if error is not None else "it was not saved"
        return StorageError(
            f"{self._manager.directory}: expected to write steps that are in memory, found: "
            f"{reason}. Steps that are not written: {shown_steps(self.acknowledged.lag.steps)}. "
            + ("They are lost." if is_closing else "They are in memory; the next save tries again.")
        )

    def wait(self) -> None:
        """Waits for the save in flight, and writes the steps in memory since storage was away."""
        if self.acknowledged.are_some or self._in_flight.has_failed():
            self._together.decided(dict, "wait_until_finished()")  # else one alone may wait
        self._in_flight.join()
        if self.acknowledged.are_some:
            self._write_all()

    def close(self, *, in_haste: bool) -> None:
        """Writes all recorded steps, as long as a closing manager has time; in haste once."""
        self._together.longest_s = outages.PATIENCE_S if in_haste else outages.CLOSING_S
        with contextlib.suppress(DifferingCallsError):  # which it finds again
            self._together.calls.note("close()")
        until_s = time.monotonic() + (0.0 if in_haste else outages.CLOSING_S)
        self._write_all(until_s=until_s, in_haste=in_haste)
