"""The thread of a manager on which Orbax begins its saves.

Orbax makes directories, an event loop and half a dozen threads for each, which takes as long as all
that a training loop has to be held up for: to take what is saved out of the state. A save is begun
here once that is done, and whatever else is asked of the manager waits until it has begun.
"""

# Threads: any may wait; the training loop's alone has saves begun, one after another. Those that
# begin and end a save wait for no beginning.

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import orbax.checkpoint as ocp

_OPENER, _FINALIZER = "adacheck_open", "save_finalize"

_beginning = threading.RLock()
"""Held while Orbax begins a save of any manager: by one number of this process the parts of a save
find each other, so that two that begin at once would wait for directories that nobody makes."""
_LONGEST_S = 5.0
"""Time for which a save waits for those of other managers, whose storage may hang."""
_begun = list[Future[object]]()
"""The beginning that any manager was asked for last: all processes begin in the order of calls."""


class Opener:
    """The beginning of a manager's saves, and who waits for it."""

    def __init__(self, manager: ocp.CheckpointManager) -> None:
        self._manager = manager
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=_OPENER)
        self._opening: Future[object] | None = None
        self._raised_in = set[int]()

    def begin(self, save: Callable[[], object]) -> None:
        """Begins a save on the manager's thread; an error is raised by who waits for it."""
        self._raised_in.clear()
        earlier = [*_begun]

        def begun() -> object:
            concurrent.futures.wait(earlier, _LONGEST_S)
            return save()

        self._opening = self._thread.submit(begun)
        _begun[:] = [self._opening]

    def forget(self) -> None:
        """Forgets the save that was begun last, since another one begins."""
        self._opening = None

    def wait(self) -> BaseException | None:
        """Waits until the save has begun; gives the error if it has not."""
        if (opening := self._opening) is None or is_own_thread():
            return None
        concurrent.futures.wait([opening])
        return opening.exception()

    def wait_until_finished(self) -> None:
        """As Orbax's; of a save that could not be begun each thread is told once."""
        error, thread = self.wait(), threading.get_ident()
        if error is not None and thread not in self._raised_in:
            self._raised_in.add(thread)
            raise error
        ocp.CheckpointManager.wait_until_finished(self._manager)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


@contextlib.contextmanager
def beginning() -> Iterator[None]:
    """Has Orbax begin a save in the block, behind those that any manager was asked for before."""
    if not is_own_thread():
        concurrent.futures.wait([*_begun], _LONGEST_S)
    is_held = _beginning.acquire(timeout=_LONGEST_S)
    try:
        yield
    finally:
        if is_held:
            _beginning.release()


def is_own_thread() -> bool:
    """True on a thread by which a manager begins or ends a save."""
    return threading.current_thread().name.startswith((_OPENER, _FINALIZER))
