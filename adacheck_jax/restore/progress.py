"""Progress of a restore that takes long: a line in the log each few seconds."""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two lines; a restore that takes less has none."""

T = TypeVar("T")


class Progress:
    """Tells how far one part of a restore is."""

    def __init__(self, step: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._step, self._clock = step, clock
        self._told_s = clock()

    def tell(self, done: int, total: int) -> None:
        """Tells of deltas that were replayed, unless a line was written just before."""
        if done < total and (now_s := self._clock()) - self._told_s >= EVERY_S:
            self._told_s = now_s
            _log.info("restoring step %d: replayed %d of %d deltas", self._step, done, total)


def compiled(step: int, future: Future[T]) -> T:
    """The result of a compilation; tells that it is waited for."""
    waited_s = 0.0
    while not concurrent.futures.wait([future], timeout=EVERY_S).done:
        waited_s += EVERY_S
        _log.info("restoring step %d: compiling the update, for %.0f s by now", step, waited_s)
    return future.result()
