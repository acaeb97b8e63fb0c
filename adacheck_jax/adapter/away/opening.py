"""A stock Orbax manager that begins saves on a thread of its own.

Orbax makes directories, an event loop and half a dozen threads for each, which takes as long as all
that a training loop has to be held up for: to take what is saved out of the state. A save is begun
here once that is done, and whatever else is asked of the manager waits until it has begun.
"""

# Threads: any may ask and wait; the training loop's alone has saves begun, one after another. Those
# that begin and end a save wait for no beginning.

from __future__ import annotations

import concurrent.futures
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter.reports import expect_outside_callback

_log = logging.getLogger(__name__)

_OPENER, _FINALIZER = "adacheck_open", "save_finalize"
_ASKING = (
    *("all_steps", "latest_step", "best_step", "reload", "should_save", "delete", "restore"),
    *("item_metadata", "metadata", "metrics", "is_saving_in_progress", "check_for_errors"),
)
"""What a caller may ask of a manager that knows the save begun last."""


class OpeningManager(ocp.CheckpointManager):
    """A manager that may begin saves on a thread of its own."""

    def __init__(self, root: epath.Path, **arguments: Any) -> None:
        self._opener = ThreadPoolExecutor(1, thread_name_prefix=_OPENER)
        self._opening: Future[object] | None = None
        self._told = set[int]()
        super().__init__(root, **arguments)
        _open_managers.add(self)

    def _open(self, begin: Callable[[], object]) -> None:
        """Begins a save on the manager's thread; an error is raised by who waits for it."""
        self._told.clear()
        self._opening = self._opener.submit(begin)

    def _await_opening(self) -> BaseException | None:
        """Waits until the save has begun; gives the error if it has not."""
        if (opening := self._opening) is None or is_own_thread():
            return None
        concurrent.futures.wait([opening])
        return opening.exception()

    def close(self) -> None:
        """As Orbax's."""
        _open_managers.discard(self)
        self._await_opening()
        try:
            super().close()
        finally:
            self._opener.shutdown()

    def wait_until_finished(self) -> None:
        """As Orbax's; of a save that could not be begun each thread is told once."""
        expect_outside_callback("wait_until_finished()")
        error, thread = self._await_opening(), threading.get_ident()
        if error is not None and thread not in self._told:
            self._told.add(thread)
            raise error
        super().wait_until_finished()


_open_managers = weakref.WeakSet[OpeningManager]()


def _finish() -> None:
    """Waits for saves when the process ends; later no thread of theirs could begin another one."""
    for each in [*_open_managers]:
        try:
            if jax.process_count() == 1:
                each.wait_until_finished()
            else:  # without what others would have to decide with it
                OpeningManager.wait_until_finished(each)
        except Exception as error:
            _log.error("%s: the process ends, and a step is not saved: %s", each.directory, error)


# Unlike those of atexit these are called before the executors of all modules refuse work.
threading._register_atexit(_finish)  # type: ignore[attr-defined]


def is_own_thread() -> bool:
    """True on a thread by which a manager begins or ends a save."""
    return threading.current_thread().name.startswith((_OPENER, _FINALIZER))


def _behind_opening(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Orbax's manager that waits until the last save has begun."""

    @functools.wraps(method)
    def waiting(self: OpeningManager, *args: Any, **kwargs: Any) -> Any:
        self._await_opening()
        return method(self, *args, **kwargs)

    return waiting


for _name in _ASKING:
    setattr(OpeningManager, _name, _behind_opening(getattr(ocp.CheckpointManager, _name)))
