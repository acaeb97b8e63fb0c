"""Progress of a restore that takes long: lines in the log, and a bar on a terminal.

A level above INFO that is set for this module's log turns both off.
"""

from __future__ import annotations

import concurrent.futures
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self, TypeVar

_log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds until the first line and between two; what takes less has none."""

T = TypeVar("T")


class Progress:
    """Tells how far one part of a restore is; a context, at whose end the bar goes."""

    def __init__(self, doing: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._doing, self._clock = doing, clock
        self._printed_s = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, done_bytes: int, total_bytes: int, what: str = "") -> None:
        """Tell of bytes that were read and used, unless a line was written just before."""
        is_due = done_bytes < total_bytes and self._clock() - self._printed_s >= EVERY_S
        if is_due:
            amount = f"{done_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB"
            self._say(f"{what}{amount}")
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done_bytes, total=total_bytes)

    def compiled(self, future: Future[T]) -> T:
        """The result of a compilation; tells that it is waited for."""
        begin_s = self._clock()
        while not concurrent.futures.wait([future], timeout=EVERY_S).done:
            self._say(f"compiling the update, for {self._clock() - begin_s:.0f} s by now")
        return future.result()

    def _say(self, what: str) -> None:
        self._printed_s = self._clock()
        _log.info("%s: %s", self._doing, what)
        if self._bar is None and _wants_bar():
            import rich.progress  # only here: few restores take long
            from rich.console import Console

            self._bar = rich.progress.Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task("", total=None)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=f"{self._doing}: {what}")


def _wants_bar() -> bool:
    """True on a terminal that gets no lines and was not told to stay silent."""
    return (
        sys.stderr.isatty() and _log.level <= logging.INFO and not _log.isEnabledFor(logging.INFO)
    )
