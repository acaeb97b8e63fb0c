"""The one process that an object works in: the first that uses it.

A child that is forked has a copy of every object and none of the threads. There a wait for a thread
never ends, a lock that a thread held stays locked, and what is closed or removed is the parent's;
JAX hangs, and tensorstore ends the process. So each object that works with threads, locks or files
of its own has a :class:`OneProcess`: it works nowhere else, and elsewhere its end does nothing.
"""

from __future__ import annotations

import os

from adacheck_jax.errors import AdaCheckError


class OneProcess:
    """The process that used an object first; until then the object may be forked along.

    Args:
        what: name of the object, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._number: int | None = None

    @property
    def is_elsewhere(self) -> bool:
        """True in a child that was forked from the process."""
        return self._number not in (None, os.getpid())

    def enter(self) -> None:
        """Notes that this process uses the object.

        Raises:
            AdaCheckError: it is a child that was forked from the one that did.
        """
        if self.is_elsewhere:
            raise AdaCheckError(
                f"expected {self._what} in process {self._number}, which has used it, found "
                f"process {os.getpid()}, which was forked from it: a forked process has no "
                "threads, and JAX and tensorstore do not work in it. Nothing was read or written; "
                "start the process with multiprocessing's 'spawn' or 'forkserver', and make "
                "another one there."
            )
        self._number = os.getpid()
