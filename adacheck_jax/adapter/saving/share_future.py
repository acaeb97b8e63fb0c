"""The future of a share, which begins to write when nobody is in its way."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

import orbax.checkpoint as ocp
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from adacheck_jax.device import jax_settings
from adacheck_jax.errors import StorageError
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.save import share
from adacheck_jax.save.one_save import Save
from adacheck_jax.store.base_writer import ArrayLayout
from adacheck_jax.store.storage.location import AnyPath

MOMENT_S = 0.02
"""Longest time that the caller's thread has to itself, before a share is written."""
_LOOK_S = 1.0
"""Time after which one of several processes looks why there is no directory to write into."""


class ShareFuture(ocp.Future):
    """A thread that writes a share, once the caller has left the save or a moment has passed.

    A thread that is at work earlier takes turns with the caller's, of up to 5 ms each. A manager of
    this library says by ``left`` when the caller leaves. Of others it is known that Orbax waits for
    the share in the background when the caller is nearly done; of several items it waits for one
    after another, and for none once one has failed.
    """

    def __init__(
        self, save: Save, directory: AnyPath, layout: ArrayLayout, left: threading.Event
    ) -> None:
        self._go, self._is_writing, self._save = threading.Event(), threading.Event(), save
        written = self._write(directory, layout, (self._go, left))
        self._begun = CommitFutureAwaitingContractedSignals(written, name="adacheck_write")

    def result(self, timeout: float | None = None) -> Any:
        """Wait until the share is durable."""
        self._go.set()
        begin_s, longest_s = time.monotonic(), math.inf if timeout is None else timeout
        if not (exchange := self._save.attempt.exchange).is_alone:
            self._wait_for_directories(exchange, begin_s + longest_s)
        left_s = begin_s + longest_s - time.monotonic()
        return self._begun.result(None if timeout is None else max(left_s, 0.0))

    def _wait_for_directories(self, exchange: Exchange, until_s: float) -> None:
        """Waits until process 0 has made the directories, or has told that it could not.

        Raises:
            AdaCheckError: it could not; or they are not there in the time that Orbax allows.
        """
        while not self._is_writing.wait(_LOOK_S) and time.monotonic() < until_s:
            if (error := exchange.error()) is not None:
                raise error
            try:
                self._begun.result(0.0)
            except TimeoutError:
                continue
            except Exception as late:
                where = self._save.directory
                error = StorageError(f"{where}: expected its directory, found none in time")
                exchange.fail(error)
                raise error from late

    def cancel(self) -> None:
        """Give up waiting."""
        self._begun.cancel()

    async def _write(
        self, directory: AnyPath, layout: ArrayLayout, signs: Sequence[threading.Event]
    ) -> None:
        """Write the share, once all signs are given or a moment has passed."""
        self._is_writing.set()
        until_s = time.monotonic() + MOMENT_S
        for each in signs:
            each.wait(max(until_s - time.monotonic(), 0.0))
        with jax_settings.own():  # set for this thread, so nothing may be awaited inside
            share.write(self._save, directory, layout)
