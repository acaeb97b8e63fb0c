"""A stock Orbax manager whose training loop goes on while storage is away.

A save that storage refused is written again, and steps that come meanwhile are recorded in memory
behind it (:mod:`~adacheck_jax.save.line.kept`), as long as they have room. Then ``save`` waits for
a storage that does not answer, and raises the error of one that refuses.
"""

# Threads: a training loop's thread saves, waits and closes; other threads may wait too, and then
# they write nothing. Orbax's thread ends a save (``_finalize``); a look at the disk has a thread of
# its own, since it may never return.

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter.arguments import KEPT, RestoreArgs, SaveArgs, expect_args
from adacheck_jax.adapter.away import outage as outages
from adacheck_jax.adapter.away.outage import Outage
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.adapter.inputs import step_number
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, StorageError, first_line
from adacheck_jax.save.line.kept import Keeper, KeptSteps
from adacheck_jax.save.one_save import is_refusal
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.store.storage.location import at, located

_log = logging.getLogger(__name__)

_LOOK_S = 0.5
"""Longest wait for a look at storage while it is away."""


class AdaCheckManager(ocp.CheckpointManager):
    """A stock Orbax manager that tells its handler; :func:`checkpoint_manager` makes one.

    In a process alone, and where it saves nothing but the state, its ``save`` goes on while storage
    is away: see ``docs/guide/storage-away.md``.

    Attributes:
        handler: the handler, for ``record_step``, ``recover``, ``restored`` and ``last_save``.
    """

    def __init__(self, handler: AdaCheckHandler, root: epath.Path, **arguments: Any) -> None:
        self.handler = handler
        # Several processes would have to find out alike that storage is away.
        handlers = arguments.get("item_handlers")
        is_alone = jax.process_count() == 1 and handlers is handler
        named = handlers.items() if isinstance(handlers, Mapping) else ()
        self._item = next((name for name, each in named if each is handler), None)
        self._outage = Outage() if is_alone else None
        handler.run.keeps_refused = is_alone
        self._in_flight: tuple[int, bool] | None = None
        self._promised, self._has_gap = -1, False
        self._saving_thread, self._is_inside = threading.get_ident(), False
        self._look: Future[bool] | None = None
        self._is_closed = False
        super().__init__(root, **arguments)
        if handler.run.has_recorder and (newest := self.latest_step()) is not None:
            self.reached_preemption(newest)  # or JAX would end a resumed run at step 1

    def reached_preemption(self, step: int) -> bool:
        """As Orbax's, for the training loop alone.

        JAX ends a run at the step after the last one that it was asked about. Orbax's thread that
        ends a save asks too, for a metric, of a step that the loop may have left behind: no process
        would ever come to the step after it.
        """
        is_orbax = threading.current_thread().name == "save_finalize"
        return not is_orbax and super().reached_preemption(step)

    def restore_newest(self, abstract_state: PyTree) -> tuple[int, PyTree] | None:
        """The newest state that can be had: from memory, here or of other processes, or storage.

        ::

            first = 0
            if (found := manager.restore_newest(state)) is not None:
                newest, state = found
                first = newest + 1

        Memory serves where the handler's shadow has a directory and what is there is as new as
        storage (:meth:`AdaCheckHandler.recover`). Other items stay with storage: where
        ``latest_step()`` is less than the step, a data iterator restored from it is behind by as
        many steps.

        Args:
            abstract_state: tree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays, of the
                whole state.

        Returns:
            The number of the step and its state, verified; None if there is none yet.
        """
        if self.handler.run.has_memory:
            found = self.handler.recover(str(self.directory), abstract_state, item=self._item)
            if found is not None:
                self._tell_behind(found[0])
                return found
        if (newest := self.latest_step()) is None:
            return None
        args: Any = RestoreArgs(abstract_state)
        if self._item is None:
            return newest, self.restore(newest, args=args)
        args = ocp.args.Composite(**{self._item: args})
        return newest, self.restore(newest, args=args)[self._item]

    def _tell_behind(self, recovered: int) -> None:
        """Warns of other items that storage has of an earlier step than was recovered."""
        newest = self.latest_step()
        if self._item is not None and newest is not None and newest < recovered:
            _log.warning(
                "%s: the state of step %d was in memory, and the other items are in storage, of "
                "step %d: %d behind. Restore them with restore(%d, args=...), and move a data "
                "iterator on by as many batches as the steps between took.",
                *(self.directory, recovered, newest, recovered - newest, newest),
            )

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
        step = step_number(step, "give save the number of the step") or 0
        expect_args(args, SaveArgs, self._item)
        if self._is_closed:
            raise AdaCheckError(
                f"{self.directory}: the manager is closed: step {step} is not saved."
            )
        outage, given = self._outage, (items, save_kwargs, metrics, custom_metadata)

        def save(force: bool | None) -> bool:
            self.handler.run.left.clear()
            try:
                return super(AdaCheckManager, self).save(
                    *(step, items, save_kwargs, metrics, force, args, custom_metadata)
                )
            finally:
                self.handler.run.left.set()

        if outage is None:
            return save(force)
        self._saving_thread = threading.get_ident()
        is_ours = isinstance(args, SaveArgs) and not any(each is not None for each in given)
        if not force and (step <= self._promised or not self.should_save(step)):
            return False
        has_ended = self._has_ended()
        is_new = step > self._promised
        if not is_new and (keeper := self._keeper) is not None:
            keeper.replace(step)
        if has_ended and self._goes_on(step, lambda: save(True), is_ours=is_ours):
            return True
        if isinstance(args, SaveArgs) and is_ours and is_new and self._recorded(args, step):
            return True
        try:
            self._write_kept()
            outage.begin()
            with self._inside():
                done = save(True)
        except BaseException:
            self._has_gap = True  # nothing that is recorded would follow by one update
            raise
        self._in_flight = (step, is_ours) if done else None
        return done

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: epath.PathLike | None = None,
        args: ocp.args.CheckpointArgs | None = None,
    ) -> Any:
        """As Orbax's; also of a step that was recorded and that a later one holds.

        Raises:
            ValueError: ``args`` are none of this library.
            FileNotFoundError: no step holds it; or a later one does, and other items than the
                state are asked for, of which there are none.
        """
        expect_args(args, RestoreArgs, self._item)
        try:
            return super().restore(step, items, restore_kwargs, directory, args)
        except FileNotFoundError as error:
            holder, root = None, located(str(directory or self.directory))
            if step is not None:
                holder = roots.holder_of(step, root)
            if holder in (None, step):
                raise
            if isinstance(args, RestoreArgs) and args.step is None:
                args = dataclasses.replace(args, step=step)
                return super().restore(holder, directory=directory, args=args)
            raise FileNotFoundError(
                f"{root}: expected step {step} with all that is asked for, found its state alone, "
                f"recorded in step {holder}. Restore that: manager.restore({holder}, "
                f"args=ocp.args.Composite(state=adacheck.RestoreArgs(state, step={step})))."
            ) from error

    def _goes_on(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> bool:
        """Tries storage if that is due; True if the step is taken care of."""
        outage, kept = self._outage, self._kept()
        if outage is None or not outage.is_due or self._has_gap:
            return False
        if not is_ours and self._promised >= 0:
            return False  # those before are written first
        if not self._answers(step):
            return False
        is_all = self._promised < 0 or len(kept.deferred) < kept.portion
        if kept.refused is None and is_all:
            return self._begins(step, save, is_ours=is_ours)
        if (number := kept.next_number(in_portions=True)) is not None:
            self._begins(number, self._writing(number), is_ours=True)
        return False

    def _recorded(self, args: SaveArgs, step: int) -> bool:
        """Records a step in memory, if nothing is lost by it."""
        run, plain = self.handler.run, (args.step, args.save_args, args.custom_metadata)
        if self._has_gap or any(each is not None for each in plain):
            return False
        if not run.record_step(args.state, step, is_away=True):
            return False
        self._promise(step)
        return True

    def _promise(self, step: int) -> None:
        """Notes that a step is in memory for which ``save`` has answered True."""
        self._promised = max(self._promised, step)
        if self._outage is not None:
            self._outage.tell(self._kept())

    def _has_ended(self) -> bool:
        """Waits for the save in flight, as long as there is patience; False if it goes on."""
        outage, thread = self._outage, self._finalize_thread.get()
        if thread is not None and thread.is_alive() and outage is not None:
            threading.Thread.join(thread, outage.patience_s)  # without its error
            if thread.is_alive():
                outage.hang()
                return False
        self._join()
        return True

    def _join(self) -> bool:
        """Waits for the save in flight; False if storage refused it, and it is kept.

        Raises:
            Exception: it cannot be written again.
        """
        flying, self._in_flight = self._in_flight, None
        try:
            with self._inside():
                super().wait_until_finished()
        except Exception as error:
            if flying is None:  # of a step whose error was raised before
                raise
            self._fail(*flying, error)
            return False
        if flying is not None and self._outage is not None:
            report, was_away = self.handler.last_save, self._outage.is_away
            self._outage.end(report.durable_s if report is not None else None)
            if was_away:  # what a save that failed was to delete is forgotten otherwise
                self.reload()
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
        if is_kept and outage is not None:
            outage.refuse(error)
            self._promise(step)
            return
        lost = self._kept().deferred
        if keeper is not None:
            keeper.give_up(f"step {step}, which they follow, is not saved")
        if not lost:
            raise error
        kind = type(error) if isinstance(error, AdaCheckError) else StorageError
        raise kind(
            f"{error} Not saved either, as they follow it: the recorded steps {shown_steps(lost)}."
        ) from error

    def _begins(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> bool:
        """Begins a save; False if storage refuses that, and nothing of it is kept."""
        outage = self._outage
        assert outage is not None
        outage.begin()
        try:
            with self._inside():
                done = save()
        except Exception as error:
            if not (is_ours and is_refusal(error)):
                raise
            outage.refuse(error)
            outage.return_to_loop()
            keeper = self._keeper
            if keeper is None or not keeper.fail(step, error):
                return False
            self._promise(step)
            return True
        self._in_flight = (step, is_ours) if done else None
        return done

    def _writing(self, number: int) -> Callable[[], bool]:
        """Writes again what was refused, or else what is recorded up to a step, as that step."""

        def write() -> bool:
            keeper = self._keeper
            if keeper is not None and keeper.is_there():  # an error came after all was done
                keeper.end()
                self.reload()
                return False
            return super(AdaCheckManager, self).save(number, args=SaveArgs(KEPT), force=True)

        return write

    def _write_kept(self, *, until_s: float = 0.0) -> None:
        """Writes all that is in memory, and waits for it.

        Raises:
            StorageError: storage refuses it, also after a pause as long as there is time.
        """
        self._join()
        is_told = False  # Orbax may tell of an earlier error when a save begins
        while True:
            kept, in_portions = self._kept(), self._promised >= 0
            if (number := kept.next_number(in_portions=in_portions)) is None:
                break
            self._begins(number, self._writing(number), is_ours=True)
            has_begun = self._in_flight is not None
            if self._join() and self._kept().steps != kept.steps:
                continue
            if not has_begun and not is_told:
                is_told = True
                continue
            if time.monotonic() < until_s:
                time.sleep(min(outages.RETRY_S, max(until_s - time.monotonic(), 0.0)))
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

    @property
    def _keeper(self) -> Keeper | None:
        """The keeper of the steps in memory; None before the first, or if other managers save."""
        with contextlib.suppress(ValueError):
            if (saver := self.handler.run.saver) is not None:
                return saver.kept
        return None

    def _kept(self) -> KeptSteps:
        """Steps in memory that are not on the disk."""
        keeper = self._keeper
        return KeptSteps(None, (), (), 1, None) if keeper is None else keeper.steps()

    def _answers(self, step: int) -> bool:
        """True if the disk answers: what the loop itself asks of it afterwards takes no time.

        The loop asks nothing of an object store.
        """
        outage, place = self._outage, at(located(str(self.directory)))
        if outage is None or not place.on_file_system:
            return True
        patience_s = 0.0
        if (look := self._look) is None:
            outage.begin()
            patience_s = _LOOK_S if outage.is_away else outages.PATIENCE_S
            look = self._look = _asked(lambda: (place / f"{step}").exists)
        if not wait([look], patience_s).done:
            outage.hang()
            return False
        self._look = None
        if (error := look.exception()) is None:
            return True
        if not isinstance(error, OSError):
            raise error
        outage.refuse(error)
        return False

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
            self._write_kept()

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        super()._finalize(*args, **kwargs)
        if (keeper := self._keeper) is not None:
            keeper.end()

    def close(self) -> None:
        """Writes all recorded steps, and closes the manager as Orbax does.

        Raises:
            StorageError: storage refuses them for a minute; the message names the steps that are
                lost.
        """
        try:
            if self._outage is not None:
                self._write_kept(until_s=time.monotonic() + outages.CLOSING_S)
        finally:
            self._outage, self._is_closed = None, True
            super().close()


def _asked(look: Callable[[], bool]) -> Future[bool]:
    """Looks in a thread that the process does not wait for."""
    answer: Future[bool] = Future()

    def ask() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="adacheck_look", daemon=True).start()
    return answer
