"""A stock Orbax manager whose saves end in all processes where they fail in one.

Orbax makes and names a step's directory in process 0 alone. Where that fails the others would wait
for it for minutes: for the directory, or in the barrier behind the commit.
"""

# Threads: Orbax's ends a save (``_finalize``), and another one of its own meets (``_meet``).

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter.away.opening import is_own_thread
from adacheck_jax.adapter.away.outage import Outage
from adacheck_jax.adapter.away.restores import RestoringManager
from adacheck_jax.adapter.handler import AdaCheckHandler
from adacheck_jax.errors import StorageError, first_line
from adacheck_jax.save.line.kept import Keeper
from adacheck_jax.save.one_save import is_refusal

_log = logging.getLogger(__name__)

_COMMITTED = "async_commit_complete"
"""Part of the name of Orbax's barrier behind a commit, which process 0 makes alone."""
_MADE = "directory_creation"
"""Part of the names of the signals that a directory is made."""


class EndingManager(RestoringManager):
    """A manager whose saves end alike in all processes."""

    def __init__(self, handler: AdaCheckHandler, root: epath.Path, **arguments: Any) -> None:
        options, is_alone = arguments["options"], jax.process_count() == 1
        is_only = arguments.get("item_handlers") is handler
        goes_on = is_only and (is_alone or options.enable_async_checkpointing)
        self._outage = Outage() if goes_on else None
        handler.run.keeps_refused = goes_on
        self._failure: BaseException | None = None
        self._past_thread: object = None
        self._has_ended = threading.Event()
        self._is_stale = False
        if goes_on and not is_alone:
            known = options.async_options or ocp.AsyncOptions()
            self._barrier = known.barrier_sync_fn or ocp.multihost.get_barrier_sync_fn()
            known = dataclasses.replace(known, barrier_sync_fn=self._meet)
            arguments["options"] = dataclasses.replace(options, async_options=known)
        super().__init__(handler, root, **arguments)

    @property
    def _keeper(self) -> Keeper | None:
        """The keeper of the steps in memory; None before the first, or if other managers save."""
        with contextlib.suppress(ValueError):
            if (saver := self.handler.run.saver) is not None:
                return saver.kept
        return None

    def reached_preemption(self, step: int) -> bool:
        """As Orbax's, for the training loop alone.

        JAX ends a run at the step after the last one that it was asked about. Threads that begin
        and end a save ask too, for a metric, of a step that the loop may have left behind: no
        process would ever come to the step after it.
        """
        return not is_own_thread() and super().reached_preemption(step)

    def _begin_save(self) -> None:
        """Notes that a save begins, and none is in flight."""
        self._past_thread = self._finalize_thread.get()
        self._has_ended.clear()

    def _await_end(self, longest_s: float | None = None) -> bool:
        """Waits for the end of the save that was begun last; False if it goes on.

        Not by joining its thread: where Python 3.11 is interrupted in that, it takes the thread for
        one that has ended.
        """
        thread = self._finalize_thread.get()
        if thread is not None and thread is not self._past_thread:
            if not self._has_ended.wait(longest_s):
                return False
            threading.Thread.join(thread)  # without its error
        return True

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        try:
            self._end_save(step, steps_to_remove)
        finally:
            self._has_ended.set()

    def _end_save(self, step: int, steps_to_remove: list[int]) -> None:
        self._together.forget()
        was_stale, self._failure = self._is_stale, None
        try:  # what Orbax asks before may raise, while this goes on
            super()._wait_for_checkpointers()
        except BaseException as error:
            self._failure = _refused(error)
            self._tell(step, self._failure)
            self._forget_errors()
        try:
            super()._finalize(step, steps_to_remove)
        except Exception as error:
            if self._outage is None or self._failure is not None or not is_refusal(error):
                raise
            self._is_stale = True
            _log.warning("%s: earlier steps could not be deleted: %s", self.directory, error)
        if (keeper := self._keeper) is not None:
            keeper.end(step)
        if was_stale:
            with contextlib.suppress(OSError):
                self.reload()
                self._is_stale = False

    def _wait_for_checkpointers(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _forget_errors(self) -> None:
        """Takes what else has failed with a save: Orbax raises it when the next one begins.

        That is in process 0 alone, and in the midst of what all do together.
        """
        while True:
            with contextlib.suppress(Exception):  # each is raised once
                self._non_blocking_metadata_store.wait_until_finished()
                return

    def _tell(self, step: int, error: BaseException) -> None:
        """Tells the others, which wait for what process 0 alone makes: a directory and its name."""
        if jax.process_count() > 1 and not jax.process_index():
            if (keeper := self._keeper) is not None:
                keeper.tell_others(step, error)
            self._together.fail(error)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barriers; the one behind a commit ends soon also where process 0 fails."""
        if _COMMITTED not in key:
            self._barrier(key=key, timeout_ms=timeout_ms)
            return
        keeper = self._keeper
        told = self._together.commit(timeout_ms / 1000, keeper.committed if keeper else dict)
        if keeper is not None and jax.process_index():
            keeper.learn(told)


def _refused(error: BaseException) -> BaseException:
    """The error of a save; a refusal where Orbax has waited in vain for a directory to be made."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or _MADE not in str(error):
        return error  # of a process alone it is a TimeoutError, which is one
    found = StorageError(f"expected a step's directory, found none in time ({first_line(error)})")
    found.__cause__ = error
    return found
