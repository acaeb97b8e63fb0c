"""A stock Orbax manager whose training loop goes on while storage is away.

A save that storage refused is written again, and steps that come meanwhile are recorded in memory
behind it (:mod:`~adacheck_jax.save.line.kept`), as long as they have room. Then ``save`` waits for
a storage that does not answer, and raises the error of one that refuses.
"""

# Threads: a training loop's thread saves, waits and closes; other threads may wait too, and then
# they write nothing. Orbax's thread ends a save (``_finalize``, ``_meet``).
#
# Several processes do alike: process 0 decides, and what it decided goes through ``_together``.
# What all find out alike is not told: how the save in flight has ended, since Orbax's last barrier
# is behind a failure too, and which steps are in memory.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME

from adacheck_jax.adapter.arguments import KEPT, SaveArgs, expect_args
from adacheck_jax.adapter.away import outage as outages
from adacheck_jax.adapter.away.deciding import Action, Flight, StorageFacts, decide
from adacheck_jax.adapter.away.ending import EndingManager
from adacheck_jax.adapter.away.looking import Look
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.adapter.inputs import expected_step
from adacheck_jax.adapter.reports import expect_outside_callback
from adacheck_jax.adapter.share_future import MOMENT_S
from adacheck_jax.adapter.training_run import absolute
from adacheck_jax.errors import AdaCheckError, DifferingCallsError, StorageError, first_line
from adacheck_jax.save.attempt import Report
from adacheck_jax.save.line.kept import KeptSteps
from adacheck_jax.save.one_save import is_refusal
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.store.storage.location import at, located


class AdaCheckManager(EndingManager):
    """A stock Orbax manager that tells its handler; :func:`checkpoint_manager` makes one.

    Where it saves nothing but the state, its ``save`` goes on while storage is away: see
    ``docs/guide/storage-away.md``.

    Attributes:
        handler: the handler, for ``record_step``, ``recover``, ``restored`` and ``last_save``.
    """

    def __init__(self, handler: AdaCheckHandler, root: epath.Path, **arguments: Any) -> None:
        self._in_flight: tuple[int, bool] | None = None
        self._promised, self._has_gap, self._room_bytes = -1, False, 0
        self._saving_thread, self._is_inside = threading.get_ident(), False
        self._look: Look | None = None
        self._is_closed = False
        super().__init__(handler, root, **arguments)
        if handler.run.has_recorder and (newest := self.latest_step()) is not None:
            self.reached_preemption(newest)  # or JAX would end a resumed run at step 1

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: ocp.args.CheckpointArgs | None = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """As Orbax's; while storage is away the step is kept in memory, if there is room.

        Raises:
            ValueError: ``step`` is no step number, or ``args`` are none of this library.
            AdaCheckError: the manager is closed.
            StorageError: storage refuses the step, and memory has no room for it; or it refused an
                earlier one that cannot be written again. The message names the steps that are in
                memory, and those that are lost.
        """
        step = expected_step(step, "give save the number of the step")
        expect_outside_callback(f"save({step})")
        check = functools.partial(expect_args, args, SaveArgs, self._item)
        if self._is_closed:
            raise AdaCheckError(
                f"{self.directory}: the manager is closed: step {step} is not saved."
            )
        given = (items, save_kwargs, metrics, custom_metadata)

        def save(force: bool | None = True) -> bool:
            self.handler.run.left.clear()
            return super(AdaCheckManager, self).save(
                *(step, items, save_kwargs, metrics, force, args, custom_metadata)
            )

        try:
            if self._outage is None:
                is_called = jax.process_count() > 1 and (force or self.should_save(step))
                if is_called:
                    self._together.begin()
                    self._together.decided(dict, f"save({step})", check)
                else:
                    check()
                return save(is_called or force)
            self._saving_thread = threading.get_ident()
            if not force and (step <= self._promised or not self.should_save(step)):
                check()
                return False
            is_alone = all(each is None for each in given)
            own = args if isinstance(args, SaveArgs) and is_alone else None
            return self._goes_on(step, own, save, check)
        finally:
            self.handler.run.left.set()

    def _goes_on(
        self, step: int, own: SaveArgs | None, save: Callable[[], bool], check: Callable[[], None]
    ) -> bool:
        """Saves a step, or keeps it in memory; ``own`` are its arguments if it is a state alone."""
        is_ours = own is not None
        try:
            action, told = self._decided(step, check, is_ours=is_ours)
        except BaseException:
            self.handler.run.note_gap()
            raise
        begin = save
        if own is not None and self._may_open(step):
            begin = functools.partial(self._opens, step, own)
        if action is Action.SAVE and self._begins(step, begin, is_ours=is_ours):
            return True
        if action is Action.WRITE:
            self._write(told)
        is_recorded = action is not Action.WAIT and step > self._promised
        if is_recorded and own is not None and self._recorded(own, step):
            return True
        try:
            self._write_kept()
            self._call(step, save, is_ours=is_ours)
        except BaseException:
            self._has_gap = True  # nothing that is recorded would follow by one update
            raise
        return self._in_flight is not None

    def _may_open(self, step: int) -> bool:
        """True if Orbax may begin a save behind the caller: it has no reason to refuse the step."""
        is_possible = jax.process_count() == 1 and self._options.enable_async_checkpointing
        newest = self.latest_step()
        return is_possible and (newest is None or newest < step)

    def _opens(self, step: int, own: SaveArgs) -> bool:
        """Takes what is saved out of a state; of a delta the manager's thread does the rest."""
        run, save = self.handler.run, super().save
        final = self._get_save_directory(step, self.directory) / DEFAULT_ITEM_NAME
        prepared = run.prepare(absolute(final), own)

        def begin() -> bool:
            run.left.wait(MOMENT_S)
            return save(step, args=SaveArgs(prepared), force=True)

        run.left.clear()
        if prepared.begun.save.is_base:
            return save(step, args=SaveArgs(prepared), force=True)
        self._open(begin)
        return True

    def _decided(
        self, step: int, check: Callable[[], None], *, is_ours: bool
    ) -> tuple[Action, Report]:
        """The action of all processes on a step, and what goes with that."""
        call = f"save({step})"
        while True:
            decide = functools.partial(self._decision, step, is_ours=is_ours)
            told = self._together.decided(decide, call, check)
            call = ""
            action = Action(told["action"])
            if action is Action.RESOLVE:
                self._join(told["why"])
            else:
                if told["has_ended"]:
                    self._end(step)
                return action, told

    def _decision(self, step: int, *, is_ours: bool) -> Report:
        """The action on a step, as process 0 sees it."""
        outage, flight = self._outage, self._flown()
        assert outage is not None
        if flight is Flight.ENDED:
            self._end(step)
        kept = self._kept()
        facts = StorageFacts(
            flight=flight,
            is_due=outage.is_due,
            has_gap=self._has_gap,
            is_ours=is_ours,
            is_new=step > self._promised,
            is_promised=self._promised >= 0,
            has_refused=kept.refused is not None,
            deferred=len(kept.deferred),
            portion=kept.portion,
        )
        if (action := decide(facts)) is Action.LOOK:
            if self._look is None:
                self._look = Look(at(located(str(self.directory))), outage)
            answers = self._look.answers(step)
            action = decide(dataclasses.replace(facts, answers=answers))
        told: Report = {"action": action.value, "has_ended": flight is Flight.ENDED}
        if flight is Flight.FAILED:
            told["why"] = str(self._flight_error())
        return told | (self._next_write() if action is Action.WRITE else {})

    def _flown(self) -> Flight:
        """Waits for the save in flight, as long as there is patience."""
        outage, has_begun = self._outage, self._await_opening() is None
        if has_begun and outage is not None and not self._await_end(outage.patience_s):
            outage.hang()
            return Flight.GOES_ON
        has_failed = self._flight_error() is not None and self._in_flight is not None
        return Flight.FAILED if has_failed else Flight.ENDED

    def _flight_error(self) -> BaseException | None:
        """The error of the save in flight, which could not begin or has ended."""
        if (error := self._await_opening()) is not None:
            return error
        thread = self._finalize_thread.get()
        return None if thread is None else thread.exception

    def _end(self, step: int) -> None:
        """Notes that no save is in flight when a step is saved."""
        self._join()
        if step <= self._promised and (keeper := self._keeper) is not None:
            keeper.replace(step)

    def _recorded(self, args: SaveArgs, step: int) -> bool:
        """Records a step in memory, in all processes or none, if nothing is lost by it."""
        run, plain = self.handler.run, (args.step, args.save_args, args.custom_metadata)
        if self._has_gap or any(each is not None for each in plain):
            return False
        is_recorded, wrong = False, None
        try:
            is_recorded = run.record_step(args.state, step, away_bytes=self._room_bytes)
        except Exception as error:
            wrong = error
        own = {"is_kept": is_recorded, "room_bytes": self._kept().most_bytes}
        told: Report = {"is_kept": False}
        try:
            told = self._together.agreed(own, _by_all, wrong, f"call save({step})")
            self._room_bytes = told["room_bytes"]
        except BaseException:  # another process may have recorded it
            self._has_gap = jax.process_count() > 1
            raise
        finally:
            if is_recorded and not told["is_kept"] and (keeper := self._keeper) is not None:
                keeper.take_back()
        if told["is_kept"]:
            self._promise(step)
        return told["is_kept"]

    def _promise(self, step: int) -> None:
        """Notes that a step is in memory for which ``save`` has answered True."""
        self._promised = max(self._promised, step)
        if self._outage is not None:
            self._outage.tell(self._kept())

    def _join(self, why: str = "") -> bool:
        """Waits for the save in flight; False if storage refused it, and it is kept.

        It has failed in process 0 if that gives a reason.

        Raises:
            Exception: it cannot be written again.
        """
        flying, self._in_flight = self._in_flight, None
        try:
            self._await_opening()
            self._await_end()
            with self._inside():
                super().wait_until_finished()
        except Exception as error:
            if flying is None:  # of a step whose error was raised before
                raise
            self._fail(*flying, error)
            return False
        except BaseException:  # it still flies
            self._in_flight = flying
            raise
        if flying is not None and why:
            self._fail(*flying, AdaCheckError(f"process 0: {why}"))
        if flying is not None and self._outage is not None:
            report = self.handler.last_save
            self._outage.end(report.durable_s if report is not None else None)
            if not self._kept().steps:
                self._promised = -1
        return True

    def _fail(self, step: int, is_ours: bool, error: Exception) -> None:
        """Keeps a save that failed; or raises its error, with the steps that are lost with it."""
        keeper, outage = self._keeper, self._outage
        try:
            is_kept = keeper is not None and keeper.fail(step, error) and is_ours
        except AdaCheckError as wrong:
            is_kept, error = False, wrong
        self._is_stale = True  # what a save that failed was to delete is forgotten otherwise
        told = self._together.agreed({"is_kept": is_kept, "room_bytes": 0}, _by_all)
        if told["is_kept"] and outage is not None:
            outage.refuse(error)
            self._promise(step)
            return
        if is_kept:
            error = StorageError(f"{error} Another process cannot write it again.")
        lost = [*(keeper.carried(step) if keeper is not None else ()), *self._kept().deferred]
        if keeper is not None:
            keeper.give_up(f"step {step}, which they follow, is not saved")
        if not lost:
            error.add_note(f"Step {step} is not saved.")
            raise error
        kind = type(error) if isinstance(error, AdaCheckError) else StorageError
        raise kind(
            f"{error} Step {step} is not saved, nor are the recorded steps {shown_steps(lost)}, "
            "which were to be written with it or follow it."
        ) from error

    def _call(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> None:
        """Calls Orbax's save."""
        if self._outage is not None:
            self._outage.begin()
        self._in_flight = self._opening = None
        self._begin_save()
        self._together.begin()
        with self._inside():
            if save():
                self._in_flight = (step, is_ours)

    def _begins(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> bool:
        """Begins a save; False if storage refuses that, and nothing of it is kept.

        Raises:
            Exception: it cannot be begun; of several processes the others may have begun it.
        """
        try:
            self._call(step, save, is_ours=is_ours)
        except Exception as error:
            outage, keeper = self._outage, self._keeper
            if not is_ours or not is_refusal(error) or outage is None or jax.process_count() > 1:
                raise
            outage.refuse(error)
            outage.return_to_loop()
            if keeper is None or not keeper.fail(step, error):
                return False
            self._promise(step)
            return True
        return self._in_flight is not None

    def _next_write(self, *, until_s: float = 0.0) -> Report:
        """The next write, as process 0 sees it.

        Its number, and if it is there already; None if storage does not tell.
        """
        kept, keeper, is_there = self._kept(), self._keeper, None
        try:
            is_there = keeper is not None and keeper.is_there()
        except OSError as error:
            if self._outage is not None:
                self._outage.refuse(error)
                self._outage.return_to_loop()
        number = kept.next_number(in_portions=self._promised >= 0)
        left_s = max(until_s - time.monotonic(), 0.0)
        return {"number": number, "is_there": is_there, "left_s": left_s}

    def _write(self, told: Report) -> None:
        """Writes again what was refused, or else what is recorded up to a step, as that step."""
        number, keeper = told["number"], self._keeper
        if told["is_there"] and keeper is not None:  # an error came after all was done
            keeper.end(number)
            self.reload()
            return
        if told["is_there"] is None:
            return
        save = super().save
        self._begins(number, lambda: save(number, args=SaveArgs(KEPT), force=True), is_ours=True)

    def _write_kept(self, *, until_s: float = 0.0) -> None:
        """Writes all that is in memory, and waits for it.

        Raises:
            StorageError: storage refuses it, also after a pause as long as there is time.
        """
        try:
            self._join()
        except DifferingCallsError:
            if not until_s:
                raise
        if until_s and self._together.calls.error:
            self._keep_common()
        is_told = False  # Orbax may tell of an earlier error when a save begins
        while (kept := self._kept()).next_number(in_portions=False) is not None:
            try:
                if until_s:  # a manager may be closed by an error that one process alone has
                    self._meet_closing(kept)
            except DifferingCallsError:
                self._keep_common()
                continue
            told = self._together.decided(lambda: self._next_write(until_s=until_s))
            self._write(told)
            has_begun = self._in_flight is not None
            if self._join() and self._kept().steps != kept.steps:
                continue
            if not has_begun and not is_told:
                is_told = True
                continue
            if left_s := told["left_s"]:
                time.sleep(min(outages.RETRY_S, left_s))
                continue
            outage = self._outage
            error = outage.error if outage is not None else None
            reason = first_line(error) if error is not None else "it was not saved"
            raise StorageError(
                f"{self.directory}: expected to write steps that are in memory, found: {reason}. "
                f"Steps that are not written: {shown_steps(self._kept().steps)}. "
                + ("They are lost." if until_s else "They are kept, and the next save tries again.")
            ) from error
        self._promised, self._has_gap = -1, False

    def _meet_closing(self, kept: KeptSteps) -> None:
        try:
            self._together.agreed({"is_kept": True, "room_bytes": 0}, _by_all)
        except DifferingCallsError:
            raise
        except AdaCheckError as error:
            raise AdaCheckError(
                f"{error} Steps that are not written: {shown_steps(kept.steps)}. They are lost."
            ) from error

    def _keep_common(self) -> None:
        """Lets go of the steps in memory that not all processes have: their calls differed."""
        self._together.begin_anew()
        kept, keeper = self._kept().steps, self._keeper
        told = self._together.agreed({"steps": [*kept]}, _in_all)
        if keeper is not None and (count := len(kept) - told["count"]):
            keeper.take_back(count, "the processes did not call alike")

    def _kept(self) -> KeptSteps:
        """Steps in memory that are not on the disk."""
        keeper = self._keeper
        return KeptSteps(None, (), (), 1, None) if keeper is None else keeper.steps()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Marks what Orbax's manager asks of itself."""
        before, self._is_inside = self._is_inside, True
        try:
            yield
        finally:
            self._is_inside = before

    def wait_until_finished(self) -> None:
        """As Orbax's, and then writes the steps that are kept in memory since storage was away.

        Raises:
            StorageError: storage refuses them; the message names them.
        """
        is_loop = threading.get_ident() == self._saving_thread
        if self._outage is None or self._is_inside or not is_loop:
            super().wait_until_finished()
            return
        self._join()
        if self._promised >= 0:
            self._together.calls.note("wait_until_finished()")
            self._write_kept()

    def close(self) -> None:
        """Writes all recorded steps, and closes the manager as Orbax does.

        Raises:
            StorageError: storage refuses them for a minute; the message names the steps that are
                lost.
        """
        expect_outside_callback("close()")
        try:
            if self._outage is not None:
                self._together.longest_s = outages.CLOSING_S
                with contextlib.suppress(DifferingCallsError):  # which it finds again
                    self._together.calls.note("close()")
                self._write_kept(until_s=time.monotonic() + outages.CLOSING_S)
        finally:
            self._outage, self._is_closed = None, True
            super().close()


def _by_all(reports: Sequence[Report]) -> Report:
    """True if all processes keep a step; and the room that all of them have for steps."""
    return {
        "is_kept": all(each["is_kept"] for each in reports),
        "room_bytes": min(each["room_bytes"] for each in reports),
    }


def _in_all(reports: Sequence[Report]) -> Report:
    """Number of steps, from the first one on, that all processes have in memory."""
    every = [[*each["steps"]] for each in reports]
    alike = [len({*numbers}) == 1 for numbers in zip(*every, strict=False)]
    return {"count": alike.index(False) if False in alike else len(alike)}
