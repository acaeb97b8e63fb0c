"""The end of a manager's saves, in all processes where it fails in one.

Orbax makes and names a step's directory in process 0 alone. Where that fails the others would wait
for it for minutes: for the directory, or in the barrier behind the commit.
"""

# Threads: Orbax's ends a save (``finalize``), and another one of its own meets (``_meet``).

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Sequence

import jax
import orbax.checkpoint as ocp

from adacheck_jax.adapter.saving.lines import Lines
from adacheck_jax.errors import StorageError, first_line, is_refusal
from adacheck_jax.processes.lockstep import Lockstep
from adacheck_jax.store.steps.lineage import shown_steps

_log = logging.getLogger(__name__)

_COMMITTED = "async_commit_complete"
"""Part of the name of Orbax's barrier behind a commit, which process 0 makes alone."""
_MADE = "directory_creation"
"""Part of the names of the signals that a directory is made."""


class Ending:
    """The end of each save of a manager, told alike in all processes.

    Args:
        manager: the manager.
        lines: lines of steps of its training run.
        together: the processes that save with it.

    Attributes:
        keeps_refused: True if what storage refuses is written again; False once the manager is
            closed.
        is_stale: True if the manager's list of steps may not be what storage has.
    """

    def __init__(self, manager: ocp.CheckpointManager, lines: Lines, together: Lockstep) -> None:
        self._manager, self._lines, self._together = manager, lines, together
        self.keeps_refused, self.is_stale = lines.keeps_refused, False
        self._failure: BaseException | None = None
        self._ended: object = None
        self._news = threading.Condition()

    def met(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManagerOptions:
        """Options by which the processes meet here behind a commit."""
        known = options.async_options or ocp.AsyncOptions()
        self._barrier = known.barrier_sync_fn or ocp.multihost.get_barrier_sync_fn()
        known = dataclasses.replace(known, barrier_sync_fn=self._meet)
        return dataclasses.replace(options, async_options=known)

    def wait(self, longest_s: float | None = None) -> bool:
        """Waits for the end of the save that was begun last; False if it goes on.

        Not by joining its thread: where Python 3.11 is interrupted in that, it takes the thread for
        one that has ended.
        """
        if (thread := self._manager._finalize_thread.get()) is not None:
            with self._news:
                if not self._news.wait_for(lambda: self._ended is thread, longest_s):
                    return False
            threading.Thread.join(thread)  # without its error
        return True

    @property
    def error(self) -> BaseException | None:
        """The error by which the last save has ended."""
        thread = self._manager._finalize_thread.get()
        return None if thread is None else thread.exception

    def finalize(self, step: int, steps_to_remove: list[int]) -> None:
        """Ends a save, in the place of Orbax's method of the same name."""
        try:
            self._finalize(step, steps_to_remove)
        finally:
            with self._news:
                self._ended = threading.current_thread()
                self._news.notify_all()

    def _finalize(self, step: int, steps_to_remove: list[int]) -> None:
        orbax, manager = ocp.CheckpointManager, self._manager
        was_stale, self._failure = self.is_stale, None
        try:  # what Orbax asks before may raise, while this goes on
            orbax._wait_for_checkpointers(manager)
        except BaseException as error:
            self._failure = _refused(error)
            self._tell(step, self._failure)
            self._lines.backlog.stop(step, self._failure)
            self._forget_errors()
        try:
            orbax._finalize(manager, step, steps_to_remove)
        except Exception as error:
            if not self.keeps_refused or self._failure is not None or not is_refusal(error):
                raise
            self.is_stale = True
            _log.warning(
                "%s: earlier steps could not be deleted, and a later save tries again: %s. Until "
                "then one of them may be listed that does not restore.",
                *(manager.directory, error),
            )
        self._lines.backlog.end(step)
        if was_stale:
            with contextlib.suppress(OSError):
                manager.reload()
                self.is_stale = False

    def expect_written(self) -> None:
        """Raises the error of what was waited for before Orbax's own part of the end began."""
        if self._failure is not None:
            raise self._failure

    def _forget_errors(self) -> None:
        """Takes what else has failed with a save: Orbax raises it when the next one begins.

        That is in process 0 alone, and in the midst of what all do together.
        """
        while True:
            with contextlib.suppress(Exception):  # each is raised once
                self._manager._non_blocking_metadata_store.wait_until_finished()
                return

    def _tell(self, step: int, error: BaseException) -> None:
        """Tells the others, which wait for what process 0 alone makes: a directory and its name."""
        if jax.process_count() > 1 and not jax.process_index():
            self._lines.backlog.tell_others(step, error)
            self._together.fail(error)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barriers; the one behind a commit ends soon also where process 0 fails."""
        if _COMMITTED not in key:
            self._barrier(key=key, timeout_ms=timeout_ms)
            return
        backlog = self._lines.backlog
        answer = self._together.commit(timeout_ms / 1000, backlog.committed)
        if jax.process_index():
            backlog.learn(answer)


def _refused(error: BaseException) -> BaseException:
    """The error of a save; a refusal where Orbax has waited in vain for a directory to be made."""
    if not isinstance(error, jax.errors.JaxRuntimeError) or _MADE not in str(error):
        return error  # of a process alone it is a TimeoutError, which is one
    found = StorageError(f"expected a step's directory, found none in time ({first_line(error)})")
    found.__cause__ = error
    return found


def goes_on(manager: ocp.CheckpointManager, steps: Sequence[int] = ()) -> StorageError:
    """The error of a save, and of steps in memory behind it, that an error does not wait for."""
    step = manager._finalize_thread.get_not_none().step()
    kept = f", and steps in memory: {shown_steps(steps)}" if steps else ""
    return StorageError(
        f"{manager.directory}: expected the save of step {step} to end, found it goes on{kept}."
        " The manager is not closed: the end of the process waits for it, or close() does."
    )
