"""The processes of a run: what they tell each other through the coordination service of JAX.

Each process of a save posts a report; process 0 gathers them, judges them, and posts its answer,
which is a value or an error, and the same for all. So a save costs each process one value written
and one read, however many processes there are. No collective is used: background threads wait here,
while the main thread trains.

A wait ends by what it waits for, by the error of a process that failed, by the silence of one that
is gone (:mod:`~adacheck_jax.adapter.coordination.service`), or, in a call of all, by another call
of one that is awaited (:mod:`~adacheck_jax.adapter.coordination.calls`).
"""

# Threads: every thread that saves may wait here. ``_lock`` guards what all exchanges share
# (``_attempts``, ``_barriers``); no call to the service is made while it is held. An exchange is of
# one save: its caller's thread begins it, and after that one thread at a time uses it.

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import orbax.checkpoint as ocp

from adacheck_jax import errors
from adacheck_jax.adapter.coordination.calls import Calls, Told
from adacheck_jax.adapter.coordination.service import (
    ROOM,
    Client,
    Patience,
    Service,
    packed,
    unpacked,
)
from adacheck_jax.errors import (
    AdaCheckError,
    DifferingCallsError,
    ReplayError,
    StorageError,
    first_line,
)
from adacheck_jax.save.attempt import Report
from adacheck_jax.save.one_save import is_refusal

_log = logging.getLogger(__name__)

_TOLD_AFTER_S = 30.0
"""Wait in a call of all processes after which it is told."""
_REMEMBERED = 1000
"""Number of directories of which the number of saves is known."""
_KEPT_BARRIERS = 64
"""Number of barriers after which no process waits in an earlier one."""


class Processes(Service):
    """All processes of a run, as one of them reaches the others; arguments are those of Service."""

    def __init__(
        self, index: int, count: int, client: Client, patience: Patience | None = None
    ) -> None:
        super().__init__(index, count, client, patience)
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._barriers: deque[ServiceExchange] = deque()

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
        patience, key = _patience_of(self.patience, longest_s), self._new_key(name)
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
        return f"{ROOM}/{digest}/{number}"

    def watch(self, calls: Calls) -> None:
        """Tells the calls about a line of steps from now on, and hears of those that differ."""
        if not calls.key:
            calls.key = self._new_key(f"{calls.where}: calls")
            self.tell(calls)


class ServiceExchange:
    """Reports of the processes to each other about one attempt to save a step.

    Implements :class:`~adacheck_jax.save.attempt.Exchange`.

    Args:
        processes: the processes.
        key: key below which all values of this attempt lie.
        where: the step's item directory, for messages.
        patience: bounds of waiting.
        is_save: True if the step is lost where this fails.

    Attributes:
        calls: calls that all processes have to make alike until they come here; None if others may
            be made meanwhile.
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
        self.calls: Calls | None = None
        self._has_told = False

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
                self._post(self._report_key(topic, self._processes.index), packed(own))
                return self._answer(topic, is_over, before)
        try:
            with self._service():
                reports = self._gathered[topic] = self._gather(topic, own, is_over, before)
            answer = judge(reports)
        except Exception as error:
            self._post_error(self._answer_key(topic), _refusal(error))
            raise
        with self._service():
            self._post(self._answer_key(topic), packed(answer))
        return answer

    def fail(
        self,
        topic: str,
        error: BaseException,
        what: str = "write its share",
        kinds: Sequence[type[AdaCheckError]] = (ReplayError,),
    ) -> None:
        """Posts an error in place of this process's report, or of the answer.

        Where it is one of the ``kinds`` the others raise that too. What storage refused here is to
        the others what it refused them: it can be written again. Of calls that differ they know,
        and say it themselves.
        """
        if isinstance(error, DifferingCallsError):
            return
        process = self._processes.index
        key = self._report_key(topic, process) if process else self._answer_key(topic)
        text = f"process {process} could not {what} ({type(error).__name__}: {error})."
        kind = next((each for each in kinds if isinstance(error, each)), AdaCheckError)
        kind = StorageError if is_refusal(error) else kind
        self._post_error(key, {"error": text + self._loss, "kind": kind.__name__})

    def tell(self, topic: str, report: Report) -> None:
        """Posts this process's report, or as process 0 the answer, and waits for nobody."""
        process = self._processes.index
        with self._service():
            key = self._report_key(topic, process) if process else self._answer_key(topic)
            self._post(key, packed(report))

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

    def within(self, longest_s: float | None) -> ServiceExchange:
        """The same exchange, which waits for others for some seconds at most, if given."""
        found = copy.copy(self)
        if longest_s is not None:
            found._patience = _patience_of(self._patience, longest_s)
        return found

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

    def watching(self, calls: Calls) -> ServiceExchange:
        """The same exchange, in which all processes are awaited by a call that all make alike."""
        found = copy.copy(self)
        found.calls = calls
        return found

    def beside(self, name: str) -> ServiceExchange:
        """An exchange about something that begins with this attempt, and outlives it."""
        found = copy.copy(self)
        found._key, found._loss, found._gathered = f"{self._key}.{name}", "", {}
        return found

    def meet(self, topic: str, own: Told | None, among: Iterable[int]) -> None:
        """Waits until other processes make the call that this one makes.

        Args:
            topic: name of the call.
            own: calls of this process, to be told first; None if process 0 tells its own otherwise.
            among: the processes that are waited for.

        Raises:
            DifferingCallsError: one of them makes another call.
            AdaCheckError: one is gone, or comes to nothing in time.
        """
        with self._service():
            if own is not None:
                self._post(self._report_key(topic, self._processes.index), packed({"calls": own}))
            for process, report in self._heard(topic, among).items():
                self.compare(process, report["calls"])

    def compare(self, process: int, told: Told) -> None:
        """Compares the calls that a process told with those of this one.

        Raises:
            DifferingCallsError: they differ.
        """
        assert self.calls is not None
        if why := self.calls.difference(self._processes.index, process, told):
            self._processes.refuse(self.calls, why)

    def _gather(
        self, topic: str, own: Report, is_over: Callable[[], bool], before: str
    ) -> list[Report]:
        data = packed(own)
        self._post(self._report_key(topic, 0), data)
        others = self._heard(topic, range(1, self._processes.count), is_over, before)
        return [unpacked(data), *(others[process] for process in sorted(others))]

    def _heard(
        self,
        topic: str,
        among: Iterable[int],
        is_over: Callable[[], bool] = lambda: False,
        before: str = "",
    ) -> dict[int, Report]:
        """The reports of some processes, once they are all there."""
        waiting, found = {self._report_key(topic, each): each for each in among}, {}
        until_s = time.monotonic() + self._patience.report_s
        while waiting:
            told: dict[str, bytes | None] = {}
            if len(waiting) > 1:
                told |= self._processes.below(f"{self._key}/{topic}")
            if not waiting.keys() & told.keys():
                first = next(iter(waiting))
                told = {first: self._processes.get(first, self._patience.look_s)}
            is_in_vain = True
            self._tell_waiting([*waiting.values()], until_s - self._patience.report_s)
            for key in [*waiting]:
                if (data := told.get(key)) is not None:
                    is_in_vain, report = False, unpacked(data)
                    if "error" in report:
                        raise _error_of(report)
                    found[waiting.pop(key)] = report
            if is_in_vain:
                self._check(waiting, until_s, is_over)
                self._check_not_past(topic, before, [*waiting.values()])
        return found

    def _answer(self, topic: str, is_over: Callable[[], bool], before: str) -> Report:
        key, until_s = self._answer_key(topic), time.monotonic() + self._patience.answer_s
        while (answer := self._get(key, self._patience.look_s)) is None:
            self._tell_waiting([0], until_s - self._patience.answer_s)
            self._check({key: 0}, until_s, is_over)
            self._check_not_past(topic, before, [0])
        if "error" in answer:
            raise _error_of(answer)
        return answer

    def _check(
        self, awaited: Mapping[str, int], until_s: float, is_over: Callable[[], bool]
    ) -> None:
        """Raises where waiting on for these keys of processes is in vain."""
        waiting = [*awaited.values()]
        if is_over():
            raise AdaCheckError(f"{self._where}: given up, this step is being saved again")
        if (calls := self.calls) is not None:
            calls.check()
            why = self._processes.difference(calls, waiting)
            if why and not any(self._processes.get(key) for key in awaited):  # told meanwhile
                self._processes.refuse(calls, why)
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

    def _tell_waiting(self, waiting: Sequence[int], begin_s: float) -> None:
        """Warns once where a call of all processes waits for some of them for long."""
        if self.calls is None or self._has_told or time.monotonic() - begin_s < _TOLD_AFTER_S:
            return
        self._has_told = True
        _log.warning(
            "%s: has waited for the same call of %s for %.0f s. All processes have to call alike: "
            "open the same roots; save, record, restore and recover the same steps.",
            *(self._where, _named(waiting), _TOLD_AFTER_S),
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
            self._post(key, packed(described))

    def _get(self, key: str, wait_s: float = 0.0) -> Report | None:
        data = self._processes.get(key, wait_s)
        return None if data is None else unpacked(data)

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


def watch(calls: Calls) -> None:
    """Tells this process's calls about a line of steps to the other ones, from now on."""
    if jax.process_count() > 1:
        _all().watch(calls)


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


def _patience_of(usual: Patience, longest_s: float) -> Patience:
    return dataclasses.replace(usual, report_s=longest_s, answer_s=longest_s)


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
