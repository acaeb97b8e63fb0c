"""JAX's coordination service, as one process reaches it, and the signs of life of all.

Each process writes a *beat*, a number that goes up, and with it the calls that it made
(:mod:`~adacheck_jax.processes.calls`). A service that ends with its own process makes JAX end all
others at once. With ``jax_enable_recoverability`` it tells nobody of another process's end, and its
own question for live processes (``get_live_nodes``) waits until all ask it; hence the beats.
"""

# Threads: any may ask; one daemon thread writes the beats. ``_lock`` guards ``_seen`` and the start
# of that thread; no call to the service is made while it is held.

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.messages import Message, unpacked

_log = logging.getLogger(__name__)

ROOM = "adacheck"
"""Beginning of all keys."""
_WATCHED = 8
"""Number of lines of steps whose calls are told."""


@dataclass(frozen=True, slots=True)
class Patience:
    """All bounds of waiting for other processes, in seconds.

    Attributes:
        report_s: longest wait for a process that is alive, as far as is known.
        answer_s: longest wait for process 0, which may be waiting itself.
        restore_s: both in a restore, where a process may read all of a large state meanwhile.
        closing_s: longest wait for a step in memory once a run is closed.
        silence_s: longest time between two beats of a process that is not taken for dead.
        beat_s: time from one beat to the next.
        look_s: time after which a wait looks for beats and errors.
        warned_s: time after which a wait in a call of all processes is logged.
    """

    report_s: float = 600.0
    answer_s: float = 630.0
    restore_s: float = 3600.0
    closing_s: float = 5.0
    silence_s: float = 12.0
    beat_s: float = 2.0
    look_s: float = 1.0
    warned_s: float = 30.0


class Service:
    """The service, and the beats of all processes.

    Args:
        index: index of this process.
        count: number of processes.
        client: JAX's client of the service, which has no types; a run has one service from begin to
            end. Its methods raise ``jax.errors.JaxRuntimeError``, whose text begins with a status.
        patience: bounds of waiting.
    """

    def __init__(
        self, index: int, count: int, client: Any, patience: Patience | None = None
    ) -> None:
        self.index, self.count, self._client = index, count, client
        self.patience = patience or Patience()
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[Message, float]] = {}
        self._calls: deque[Calls] = deque(maxlen=_WATCHED)
        self._end = threading.Event()
        self._beating: threading.Thread | None = None
        self._process = OneProcess("the beats of a process")

    def post(self, key: str, message: Message, *, is_first: bool = False) -> None:
        """Writes a value; one that ``is_first`` may not be there yet."""
        self._client.key_value_set_bytes(key, message.packed(), allow_overwrite=not is_first)

    def get(self, key: str, wait_s: float = 0.0) -> Message | None:
        """A value, None if it is not there within some seconds."""
        try:
            if wait_s <= 0.0:
                return unpacked(self._client.key_value_try_get_bytes(key))
            found = self._client.blocking_key_value_get_bytes(key, int(wait_s * 1000))
            return unpacked(found)
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("NOT_FOUND", "DEADLINE_EXCEEDED")):
                return None
            raise

    def below(self, key: str) -> dict[str, Message]:
        """All values below a key, by their keys."""
        found = self._client.key_value_dir_get_bytes(f"{key}/")
        return {each: unpacked(data) for each, data in found}

    def delete(self, key: str) -> None:
        """Deletes a value and all below it, if the service is there."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(key)

    def beat(self) -> None:
        """Beats from now on until the process ends, on a thread of its own."""
        self._process.enter()
        with self._lock:
            if self._beating is None:
                self._beating = threading.Thread(
                    target=self._beat, name="adacheck_beat", daemon=True
                )
                self._beating.start()
                atexit.register(self.close)  # before JAX's own shutdown, which it registers first

    def close(self) -> None:
        """Ends the beats; the last one tells all calls."""
        if self._process.is_elsewhere:  # a forked child that ends has none
            return
        self._end.set()
        if self._beating is not None:
            self._beating.join(self.patience.beat_s)  # a call may hang where the service does

    def silent(self, among: Sequence[int]) -> list[int]:
        """The processes that have not beaten for too long; not those that never began to.

        What was seen in an earlier wait counts: who was silent then, and is now, is gone.
        """
        found = []
        for process in among:
            if (beat := self.get(_beat_key(process))) is None:
                continue
            now_s = time.monotonic()
            with self._lock:
                seen, since_s = self._seen.setdefault(process, (beat, now_s))
                if seen != beat:
                    self._seen[process] = (beat, now_s)
                elif now_s - since_s > self.patience.silence_s:
                    found.append(process)
        return found

    def tell(self, calls: Calls) -> None:
        """Tells calls with each beat from now on; those of a few lines, the last ones."""
        self._calls.append(calls)

    def difference(self, calls: Calls, among: Iterable[int]) -> str:
        """A difference between calls and what some processes told of theirs, in words, or ""."""
        for process in among:
            beat = self.get(_beat_key(process))
            theirs = beat and beat.report["calls"].get(calls.key)
            if theirs and (why := calls.difference(self.index, process, theirs, is_waiting=True)):
                return why
        return ""

    def refuse(self, calls: Calls, why: str) -> None:
        """Tells all processes that calls differ, and raises what the first one told of them.

        Raises:
            DifferingCallsError: always, now and at the next call.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told already; or nobody can be
            self.post(_error_key(calls), Message(error=why), is_first=True)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if (first := self.get(_error_key(calls))) is not None:
                why = first.error
        calls.error = calls.error or why
        calls.check()

    def _beat(self) -> None:
        number, is_last = 0, False
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone, or shut down
            while not is_last:
                is_last = self._end.wait(self.patience.beat_s if number else 0.0)
                number, lines = number + 1, [*self._calls]
                recent = {each.key: each.recent() for each in lines}
                self.post(_beat_key(self.index), Message({"number": number, "calls": recent}))
                for each in lines:
                    if not each.error and (found := self.get(_error_key(each))) is not None:
                        _log.error("%s", found.error)  # the loop may wait in a collective
                        each.error = found.error


def _beat_key(process: int) -> str:
    return f"{ROOM}/beat/{process}"


def _error_key(calls: Calls) -> str:
    return f"{calls.key}/differ"
