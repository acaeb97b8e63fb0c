"""The save that a manager has begun last, until it is known how it has ended."""

# Threads: the training loop's begins a save and joins it; the manager's own begins a delta.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_manager import DEFAULT_ITEM_NAME

from adacheck_jax.adapter.arguments import SaveArgs
from adacheck_jax.adapter.away.acknowledged import AcknowledgedSteps
from adacheck_jax.adapter.away.deciding import SaveState
from adacheck_jax.adapter.away.ending import Ending, goes_on
from adacheck_jax.adapter.away.opening import Opener
from adacheck_jax.adapter.saving.share_future import MOMENT_S
from adacheck_jax.errors import AdaCheckError, is_refusal
from adacheck_jax.store.storage.location import located


class SaveInFlight:
    """The save in flight of a manager that saves nothing but the state.

    Args:
        manager: the manager.
        acknowledged: the steps that stay in memory where a save fails.
        opener: the thread on which deltas begin.
        ending: the end of the save.

    Attributes:
        is_inside: True while Orbax's manager is at work, which asks things of itself.
    """

    def __init__(
        self,
        manager: ocp.CheckpointManager,
        acknowledged: AcknowledgedSteps,
        opener: Opener,
        ending: Ending,
    ) -> None:
        self._manager, self._acknowledged = manager, acknowledged
        self._opener, self._ending = opener, ending
        self._begun: tuple[int, bool] | None = None
        self.is_inside = False

    @property
    def has_begun(self) -> bool:
        """True if a save was begun that was not joined yet."""
        return self._begun is not None

    def call(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> bool:
        """Calls Orbax's save; True if it has begun. ``is_ours`` if it is of a state alone."""
        self._acknowledged.outage.begin()
        self._begun = None
        self._opener.forget()
        self._acknowledged.together.begin()
        with self._inside():
            if save():
                self._begun = (step, is_ours)
        return self.has_begun

    def begin(self, step: int, save: Callable[[], bool], *, is_ours: bool) -> bool:
        """Begins a save; False if storage refuses that, and nothing of it is kept.

        Raises:
            Exception: it cannot be begun; of several processes the others may have begun it.
        """
        acknowledged = self._acknowledged
        try:
            return self.call(step, save, is_ours=is_ours)
        except Exception as error:
            if not is_ours or not is_refusal(error) or jax.process_count() > 1:
                raise
            acknowledged.outage.refuse(error)
            acknowledged.outage.return_to_loop()
            if not acknowledged.lines.backlog.fail(step, error):
                return False
            acknowledged.add(step)
            return True

    def may_open(self, step: int) -> bool:
        """True if Orbax may begin a save behind the caller: it has no reason to refuse the step."""
        newest = self._manager.latest_step()
        is_new = newest is None or newest < step
        return is_new and self._manager._options.enable_async_checkpointing

    def open(
        self, step: int, own: SaveArgs, save: Callable[[SaveArgs], bool], item: str | None = None
    ) -> bool:
        """Takes what is saved out of a state; of a delta the manager's thread does the rest."""
        saves, manager = self._acknowledged.saves, self._manager
        final = manager._get_save_directory(step, manager.directory)
        final /= item or DEFAULT_ITEM_NAME
        prepared = saves.prepare(located(str(final)), own)

        def save_behind() -> bool:
            saves.left.wait(MOMENT_S)
            return save(SaveArgs(prepared))

        saves.left.clear()
        if prepared.save.is_base:
            return save(SaveArgs(prepared))
        self._opener.begin(save_behind)
        return True

    def has_failed(self) -> bool:
        """True if the save could not begin, or has ended by an error; waits for that."""
        self._opener.wait()
        self._ending.wait()
        return self.has_begun and self.error() is not None

    def state(self) -> SaveState:
        """Waits for the save, as long as there is patience."""
        acknowledged, is_open = self._acknowledged, self._opener.wait() is None
        if is_open and not self._ending.wait(0.0):
            outage = acknowledged.outage
            if not self._ending.wait(outage.patience_s(acknowledged.lag.saved_bytes)):
                outage.hang()
                return SaveState.GOES_ON
        return SaveState.FAILED if self.error() is not None and self.has_begun else SaveState.ENDED

    def error(self) -> BaseException | None:
        """The error of the save, which could not begin or has ended."""
        return self._opener.wait() or self._ending.error

    def join(self, why: str = "", *, in_haste: bool = False) -> bool:
        """Waits for the save; False if storage refused it, and it is kept.

        It has failed in process 0 if that gives a reason.

        Raises:
            StorageError: it goes on, and is not waited for in haste.
            Exception: it cannot be written again.
        """
        self._opener.wait()
        acknowledged, longest_s = self._acknowledged, None
        if in_haste:
            longest_s = acknowledged.outage.haste_s(acknowledged.lag.saved_bytes)
        if not self._ending.wait(longest_s):
            raise goes_on(self._manager, acknowledged.lag.steps)
        begun, self._begun = self._begun, None
        try:
            with self._inside():
                self._opener.wait_until_finished()
        except Exception as error:
            if begun is None:  # of a step whose error was raised before
                raise
            self._fail(*begun, error)
            return False
        except BaseException:  # it still flies
            self._begun = begun
            raise
        if begun is not None:
            if why:
                self._fail(*begun, AdaCheckError(f"process 0: {why}"))
            report = acknowledged.saves.last
            took_s = report.durable_s if report is not None else None
            acknowledged.outage.end(took_s)
            if not acknowledged.lag.steps:
                acknowledged.last = -1
        return True

    def _fail(self, step: int, is_ours: bool, error: Exception) -> None:
        self._ending.is_stale = True  # what a save that failed was to delete is forgotten otherwise
        self._acknowledged.keep(step, error, is_ours=is_ours)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before
