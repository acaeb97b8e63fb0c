"""The processes of a run: what they tell each other through the coordination service of JAX.

Each process of a save posts a report; process 0 gathers them, judges them, and posts its answer,
which is a value or an error, and the same for all. So a save costs each process one value written
and one read, however many processes there are. No collective is used: background threads wait here,
while the main thread trains.

A wait ends by what it waits for, by the error of a process that failed, or by the silence of one
that is gone: each process writes a *beat*, a number that goes up. A service that ends with its own
process makes JAX end all others at once. With ``jax_enable_recoverability`` it tells nobody of
another process's end, and its own question for live processes (``get_live_nodes``) waits until all
of them ask it; hence the beats.
"""

# Threads: every thread that saves may wait here; one daemon thread writes the beats. ``_lock``
# guards what all exchanges share (``_attempts``, ``_barriers``, ``_seen``, the thread's start); no
# call to the service is made while it is held. An exchange belongs to one save: its caller's thread
# begins it, and after that one thread at a time uses it.

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import orbax.checkpoint as ocp

from adacheck_jax import errors
from adacheck_jax.errors import AdaCheckError, ReplayError, StorageError, first_line
from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.save.attempt import Report
from adacheck_jax.save.one_save import is_refusal

_ROOM = "adacheck"
_REMEMBERED = 1000
"""Number of directories of which the number of saves is known."""
_KEPT_BARRIERS = 64
"""Number of barriers after which no process waits in an earlier one."""


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


class Processes:
    """All processes of a run, as one of them reaches the others.

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
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._barriers: deque[ServiceExchange] = deque()
        self._seen: dict[int, tuple[bytes, float]] = {}
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
        """Ends the beats."""
        if self._process.is_elsewhere:  # a forked child that ends has none
            return
        self._end.set()
        if self._beating is not None:
            self._beating.join(self.patience.beat_s)  # a call may hang where the service does

    def exchange(self, directory: object, *, is_save: bool = True) -> ServiceExchange:
        """An exchange about one attempt to save a step.

        Keys are written once, so a step that is saved again needs other ones. The processes number
        the attempts at a directory alike: each of them calls this once an attempt, and before
        anything that may fail in one of them alone.
        """
        key, where = self._new_key(directory), str(directory)
        return ServiceExchange(self, key, where, self.patience, is_save=is_save)

    def barrier(self, name: str, longest_s: float) -> None:
        """Waits until all processes are here."""
        patience = dataclasses.replace(self.patience, report_s=longest_s, answer_s=longest_s)
        key = self._new_key(name)
        here = ServiceExchange(self, key, f"barrier {name}", patience, is_save=False)
        here.agree("here", {}, lambda _: {})
        with self._lock:
            self._barriers.append(here)
            past = self._barriers.popleft() if len(self._barriers) > _KEPT_BARRIERS else None
        if past is not None:
            past.forget()

    def _new_key(self, name: object) -> str:
        self.beat()
        digest = hashlib.sha256(str(name).encode()).hexdigest()[:32]
        with self._lock:
            number = self._attempts.pop(digest, 0)
            self._attempts[digest] = number + 1
            if len(self._attempts) > _REMEMBERED:
                self._attempts.popitem(last=False)
        return f"{_ROOM}/{digest}/{number}"

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

    def _beat(self) -> None:
        number = 0
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service is gone, or shut down
            while not self._end.is_set():
                number += 1
                key, value = _beat_key(self.index), str(number).encode()
                self.client.key_value_set_bytes(key, value, allow_overwrite=True)
                self._end.wait(self.patience.beat_s)


class ServiceExchange:
    """Reports of the processes to each other about one attempt to save a step.

    Implements :class:`~adacheck_jax.save.attempt.Exchange`.

    Args:
        processes: the processes.
        key: key below which all values of this attempt lie.
        where: the step's item directory, for messages.
        patience: bounds of waiting.
        is_save: True if the step is lost where this fails.
    """

    def __init__(
        self,
        processes: Processes,
        key: str,
        where: str,
        patience: Patience,
        *,
        is_save: bool = True,
    ) -> None:
        self._processes, self._key, self._where = processes, key, where
        self._patience, self._loss = patience, " The step is not saved." if is_save else ""
        self._gathered: dict[str, Sequence[Report]] = {}

    def agree(
        self,
        topic: str,
        own: Report,
        judge: Callable[[Sequence[Report]], Report],
        is_over: Callable[[], bool] = lambda: False,
        before: str = "",
    ) -> Report:
        """Posts this process's report, and waits for the answer; see the protocol."""
        if self._processes.index:
            with self._service():
                self._post(self._report_key(topic, self._processes.index), _packed(own))
                return self._answer(topic, is_over, before)
        try:
            with self._service():
                reports = self._gathered[topic] = self._gather(topic, own, is_over, before)
            answer = judge(reports)
        except Exception as error:
            self._post_error(self._answer_key(topic), _refusal(error))
            raise
        with self._service():
            self._post(self._answer_key(topic), _packed(answer))
        return answer

    def fail(self, topic: str, error: BaseException, what: str = "write its share") -> None:
        """Posts an error in place of this process's report, or of the answer.

        What storage refused here is to the others what it refused them: it can be written again.
        """
        process = self._processes.index
        key = self._report_key(topic, process) if process else self._answer_key(topic)
        text = f"process {process} could not {what} ({type(error).__name__}: {error})."
        kind = ReplayError if isinstance(error, ReplayError) else AdaCheckError
        kind = StorageError if is_refusal(error) else kind
        self._post_error(key, {"error": text + self._loss, "kind": kind.__name__})

    def tell(self, topic: str, report: Report) -> None:
        """Posts this process's report, or as process 0 the answer, and waits for nobody."""
        process = self._processes.index
        with self._service():
            key = self._report_key(topic, process) if process else self._answer_key(topic)
            self._post(key, _packed(report))

    def hear(self, topic: str) -> Report:
        """Waits for what process 0 tells.

        Raises:
            AdaCheckError: process 0 posted an error, is gone, or tells nothing in time.
        """
        with self._service():
            return self._answer(topic, lambda: False, "")

    def refusal(self, topic: str) -> AdaCheckError | None:
        """The error that process 0 has posted; None if it has posted none so far."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if "error" in (answer := self._get(self._answer_key(topic)) or {}):
                return _error_of(answer)
        return None

    def within(self, longest_s: float) -> ServiceExchange:
        """The same exchange, which waits for others for some seconds at most."""
        patience = dataclasses.replace(self._patience, report_s=longest_s, answer_s=longest_s)
        is_save = bool(self._loss)
        return ServiceExchange(self._processes, self._key, self._where, patience, is_save=is_save)

    def reports(self, topic: str) -> Sequence[Report]:
        """The reports of all processes, after they agreed."""
        if topic not in self._gathered:
            with self._service():
                every = range(self._processes.count)
                found = [self._get(self._report_key(topic, each)) for each in every]
            self._gathered[topic] = [report for report in found if report is not None]
        return self._gathered[topic]

    def forget(self) -> None:
        """Deletes the values, once no process waits for one any more."""
        self._gathered = {}
        if not self._processes.index:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._processes.client.key_value_delete(self._key)

    def beside(self, name: str) -> ServiceExchange:
        """An exchange about something that begins with this attempt, and outlives it."""
        key = f"{self._key}.{name}"
        return ServiceExchange(self._processes, key, self._where, self._patience, is_save=False)

    def _gather(
        self, topic: str, own: Report, is_over: Callable[[], bool], before: str
    ) -> list[Report]:
        data = _packed(own)
        self._post(self._report_key(topic, 0), data)
        found, waiting = {0: _unpacked(data)}, [*range(1, self._processes.count)]
        until_s = time.monotonic() + self._patience.report_s
        while waiting:
            for n, process in enumerate([*waiting]):
                look_s = 0.0 if n else self._patience.look_s
                if (report := self._get(self._report_key(topic, process), look_s)) is None:
                    continue
                if "error" in report:
                    raise _error_of(report)
                found[process] = report
                waiting.remove(process)
            if waiting:
                self._check(waiting, until_s, is_over)
                self._check_not_past(topic, before, waiting)
        return [found[process] for process in sorted(found)]

    def _answer(self, topic: str, is_over: Callable[[], bool], before: str) -> Report:
        until_s = time.monotonic() + self._patience.answer_s
        while (answer := self._get(self._answer_key(topic), self._patience.look_s)) is None:
            self._check([0], until_s, is_over)
            self._check_not_past(topic, before, [0])
        if "error" in answer:
            raise _error_of(answer)
        return answer

    def _check(self, waiting: Sequence[int], until_s: float, is_over: Callable[[], bool]) -> None:
        """Raises where waiting on is in vain."""
        if is_over():
            raise AdaCheckError(f"{self._where}: given up, this step is being saved again")
        if silent := self._processes.silent(waiting):
            raise AdaCheckError(
                f"{self._where}: expected to hear of {_named(silent)}, found no sign of life for "
                f"{self._patience.silence_s:.0f} s: killed, or stopped?{self._loss} Start all "
                "processes again, and go on from the last step that is saved."
            )
        if time.monotonic() > until_s:
            raise AdaCheckError(
                f"{self._where}: expected to hear of {_named(waiting)}, found nothing in time."
                f"{self._loss} Check that all processes save the same steps to the same path, and "
                "that the storage answers."
            )

    def _check_not_past(self, topic: str, before: str, waiting: Sequence[int]) -> None:
        """Raises if a process failed, or went on, to what comes after this topic."""
        for process in waiting if before else ():
            told = self._get(self._report_key(before, process))
            if told is None and not process:
                told = self._get(self._answer_key(before))
            if told is None or (not process and self._get(self._answer_key(topic)) is not None):
                continue
            if "error" in told:
                raise _error_of(told)
            raise AdaCheckError(
                f"{self._where}: the {self._processes.count} processes did not decide alike: "
                f"process {process} writes no base, and others do.{self._loss} Check that all of "
                "them see the same root, and that their handlers have the same options."
            )

    @contextlib.contextmanager
    def _service(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise AdaCheckError(
                f"{self._where}: expected the coordination service of jax.distributed to answer, "
                f"found: {first_line(error)}.{self._loss} The process that holds the service has "
                "ended, or cannot be reached."
            ) from error

    def _post(self, key: str, data: bytes) -> None:
        self._processes.client.key_value_set_bytes(key, data, allow_overwrite=True)

    def _post_error(self, key: str, described: Report) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # then nobody can be told
            self._post(key, _packed(described))

    def _get(self, key: str, wait_s: float = 0.0) -> Report | None:
        data = self._processes.get(key, wait_s)
        return None if data is None else _unpacked(data)

    def _report_key(self, topic: str, process: int) -> str:
        return f"{self._key}/{topic}/{process}"

    def _answer_key(self, topic: str) -> str:
        return f"{self._key}/{topic}/answer"


def exchange(directory: object, *, is_save: bool = True) -> ServiceExchange | None:
    """This process's exchange about one attempt to save a step; None if there is no other process.

    Raises:
        AdaCheckError: there are several processes, and no coordination service.
    """
    return None if jax.process_count() == 1 else _all().exchange(directory, is_save=is_save)


def wait_for_processes(*, key: str, timeout_ms: int) -> None:
    """Barrier that ends by an error soon after a process did, for Orbax's ``AsyncOptions``.

    Where JAX lets a job go on without some of its processes (``jax_enable_recoverability``),
    Orbax's own barriers at the end of a save wait 20 minutes for those that are gone::

        options = ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(barrier_sync_fn=adacheck.wait_for_processes)
        )

    Args:
        key: name of the barrier, the same in all processes.
        timeout_ms: longest wait for a process that is alive, in milliseconds.

    Raises:
        AdaCheckError: a process is gone, or did not come in time.
    """
    if jax.process_count() > 1:
        _all().barrier(key, timeout_ms / 1000)


def _all() -> Processes:
    try:
        client = ocp.multihost.get_jax_distributed_client()
    except ValueError as error:
        raise AdaCheckError(
            f"expected the coordination service by which {jax.process_count()} processes save "
            "together, found none. Nothing was saved; call jax.distributed.initialize() at the "
            "start of the program."
        ) from error
    return _reached_by(client)


@functools.cache
def _reached_by(client: Client) -> Processes:
    return Processes(jax.process_index(), jax.process_count(), client)


def _packed(report: Report) -> bytes:
    return zlib.compress(json.dumps(report).encode(), 1)


def _unpacked(data: bytes) -> Report:
    return json.loads(zlib.decompress(data))


def _beat_key(process: int) -> str:
    return f"{_ROOM}/beat/{process}"


def _refusal(error: BaseException) -> Report:
    """An error that all processes raise alike."""
    kind = type(error).__name__
    text = str(error) if isinstance(error, AdaCheckError) else f"{kind}: {error}"
    return {"error": text, "kind": kind}


def _error_of(report: Report) -> AdaCheckError:
    kind = getattr(errors, report["kind"], AdaCheckError)
    is_ours = isinstance(kind, type) and issubclass(kind, AdaCheckError)
    return (kind if is_ours else AdaCheckError)(report["error"])


def _named(processes: Sequence[int]) -> str:
    shown = ", ".join(map(str, processes[:10])) + (" ..." if len(processes) > 10 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
