"""JAX's coordination service, as one process reaches it, and the signs of life of all.

Each process writes a *beat*, a number that goes up, and with it the calls that it made
(:mod:`~adacheck_jax.adapter.coordination.calls`). A service that ends with its own process makes
JAX end all others at once. With ``jax_enable_recoverability`` it tells nobody of another process's
end, and its own question for live processes (``get_live_nodes``) waits until all ask it; hence the
beats.
"""

# Threads: any may ask; one daemon thread writes the beats. ``_lock`` guards ``_seen`` and the start
# of that thread; no call to the service is made while it is held.

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax

from adacheck_jax.adapter.coordination.calls import Calls
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.save.attempt import Report

_log = logging.getLogger(__name__)

ROOM = "adacheck"
"""Beginning of all keys."""
_WATCHED = 8
"""Number of lines of steps whose calls are told."""


class Client(Protocol):
    """The part of JAX's client of the coordination service that is used here.

    Each method raises ``jax.errors.JaxRuntimeError``, whose text begins with a status.
    """

    def key_value_set_bytes(self, key: str, value: bytes, allow_overwrite: bool = False) -> None:
        """Sets a value, which without ``allow_overwrite`` may not be there yet."""

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for a value."""
        ...

    def key_value_try_get_bytes(self, key: str) -> bytes:
        """Gets a value that is there."""
        ...

    def key_value_dir_get_bytes(self, key: str) -> Sequence[tuple[str, bytes]]:
        """Gets all values below a key."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Deletes a key and all below it."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds of waiting for other processes, in seconds.

    Attributes:
        report_s: longest wait for a process that is alive, as far as is known.
        answer_s: longest wait for process 0, which may be waiting itself.
        silence_s: longest time between two beats of a process that is not taken for dead.
        beat_s: time from one beat to the next.
        look_s: time after which a wait looks for beats and errors.
    """

    report_s: float = 600.0
    answer_s: float = 630.0
    silence_s: float = 12.0
    beat_s: float = 2.0
    look_s: float = 1.0


class Service:
    """The service, and the beats of all processes.

    Args:
        index: index of this process.
        count: number of processes.
        client: client of the coordination service; a run has one service from begin to end.
        patience: bounds of waiting.
    """

    def __init__(
        self, index: int, count: int, client: Client, patience: Patience | None = None
    ) -> None:
        self.index, self.count, self.client = index, count, client
        self.patience = patience or Patience()
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._calls: deque[Calls] = deque(maxlen=_WATCHED)
        self._end = threading.Event()
        self._beating: threading.Thread | None = None
        self._process = OneProcess("the beats of a process")

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

    def get(self, key: str, wait_s: float = 0.0) -> bytes | None:
        """A value, None if it is not there within some seconds."""
        try:
            if wait_s <= 0.0:
                return self.client.key_value_try_get_bytes(key)
            return self.client.blocking_key_value_get_bytes(key, int(wait_s * 1000))
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(("NOT_FOUND", "DEADLINE_EXCEEDED")):
                return None
            raise

    def below(self, key: str) -> dict[str, bytes]:
        """All values below a key, by their keys."""
        return dict(self.client.key_value_dir_get_bytes(f"{key}/"))

    def tell(self, calls: Calls) -> None:
        """Tells calls with each beat from now on; those of a few lines, the last ones."""
        self._calls.append(calls)

    def difference(self, calls: Calls, among: Iterable[int]) -> str:
        """A difference between calls and what some processes told of theirs, in words, or ""."""
        for process in among:
            _, _, told = (self.get(_beat_key(process)) or b"").partition(b" ")
            theirs = json.loads(told or "{}").get(calls.key)
            if theirs and (why := calls.difference(self.index, process, theirs)):
                return why
        return ""

    def refuse(self, calls: Calls, why: str) -> None:
        """Tells all processes that calls differ, and raises what the first one told of them.

        Raises:
            DifferingCallsError: always, now and at the next call.
        """
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # told already; or nobody can be
            self.client.key_value_set_bytes(_error_key(calls), why.encode())
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            why = (self.get(_error_key(calls)) or why.encode()).decode()
        calls.error = calls.error or why
        calls.check()

    def _beat(self) -> None:
        number, is_last = 0, False
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone, or shut down
            while not is_last:
                is_last = self._end.wait(self.patience.beat_s if number else 0.0)
                number, lines = number + 1, [*self._calls]
                told = json.dumps({each.key: each.told() for each in lines})
                key, value = _beat_key(self.index), f"{number} {told}".encode()
                self.client.key_value_set_bytes(key, value, allow_overwrite=True)
                for each in lines:
                    if not each.error and (why := self.get(_error_key(each))):
                        _log.error("%s", why.decode())  # the loop may wait in a collective
                        each.error = why.decode()


def packed(report: Report) -> bytes:
    """A report as a value of the service."""
    return zlib.compress(json.dumps(report).encode(), 1)


def unpacked(data: bytes) -> Report:
    """A report that was a value of the service."""
    return json.loads(zlib.decompress(data))


def _beat_key(process: int) -> str:
    return f"{ROOM}/beat/{process}"


def _error_key(calls: Calls) -> str:
    return f"{calls.key}/differ"
