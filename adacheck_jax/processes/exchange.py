"""Meetings of all processes about one matter, such as an attempt to save a step.

A message lies under the matter's key, a topic, and who posts it: a process its report, process 0
also the answer. Keys are written once; only an error takes a message's place.
"""

# Threads: an exchange is of one matter: its caller's thread begins it, and after that one thread at
# a time uses it.

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import jax

from adacheck_jax.errors import AdaCheckError, DifferingCallsError, ReplayError, first_line
from adacheck_jax.processes import messages
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.messages import Message, Report
from adacheck_jax.processes.service import Patience, Service
from adacheck_jax.processes.waiting import WaitFacts, reason_to_end

_log = logging.getLogger(__name__)

Judge = Callable[[Sequence[Report]], Report]
"""Gives the answer to the reports of all processes, in their order, or raises; in process 0."""

_ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class _Wait:
    """A wait for messages; see :meth:`Exchange.agree`."""

    topic: str
    longest_s: float
    is_over: Callable[[], bool]
    before: str
    begin_s: float


class Exchange:
    """Messages of the processes to each other about one matter; in a process alone, none.

    Args:
        service: the processes.
        key: key below which all messages lie.
        where: the matter, such as a step's item directory, for error messages.
        is_save: True if the step is lost where this fails.
    """

    def __init__(self, service: Service, key: str, where: str, *, is_save: bool = True) -> None:
        self._service, self._key, self._where = service, key, where
        self._patience, self._loss = service.patience, " The step is not saved." if is_save else ""
        self._gathered: dict[str, Sequence[Report]] = {}
        self._calls: Calls | None = None
        self._has_told = False

    @property
    def is_alone(self) -> bool:
        """True if there is no other process."""
        return self._service.count == 1

    @property
    def index(self) -> int:
        """Index of this process."""
        return self._service.index

    @property
    def patience(self) -> Patience:
        """Bounds of waiting."""
        return self._patience

    def within(self, longest_s: float | None) -> Exchange:
        """The same exchange, which waits for others for some seconds at most, if given."""
        found = copy.copy(self)
        if longest_s is not None:
            found._patience = replace(self._patience, report_s=longest_s, answer_s=longest_s)
        return found

    def watching(self, calls: Calls) -> Exchange:
        """The same exchange about a call that all make alike: what it hears of others is compared.

        Once calls have differed the rest is told as it is.
        """
        found = copy.copy(self)
        found._calls = None if calls.error else calls
        return found

    def beside(self, name: str) -> Exchange:
        """An exchange about something that begins with this one, and outlives it."""
        found = copy.copy(self)
        found._key, found._loss, found._gathered = f"{self._key}.{name}", "", {}
        return found

    def agree(
        self,
        topic: str,
        own: Report,
        judge: Judge,
        is_over: Callable[[], bool] = lambda: False,
        before: str = "",
        what: str = "",
    ) -> Report:
        """Posts this process's report; gives what process 0 answers to those of all.

        Args:
            topic: name of what is agreed on, once an exchange.
            own: report of this process.
            judge: gives that answer, or raises; called in process 0.
            is_over: true once nobody waits for this any more.
            before: the topic that follows; who has come to that one will not report on this.
            what: name of the judge's act, if its errors are those of process 0 alone.

        Raises:
            AdaCheckError: a process failed, is gone or past this, or does not report in time; or
                ``judge`` raised it, and then all processes raise it.
            DifferingCallsError: a process makes another call, of those that are compared.
        """
        if self.is_alone:
            return judge([own])
        if self.index:
            with self._service_named():
                self._post(topic, Message(own))
                return self._answer(topic, is_over, before)
        has_gathered = False
        try:
            with self._service_named():
                reports = self._gathered[topic] = self._gather(topic, own, is_over, before)
            has_gathered = True
            answer = judge(reports)
        except BaseException as error:
            if what and has_gathered:
                self.fail(topic, error, what)
            else:
                self._post_error(topic, messages.refusal(error))
            raise
        with self._service_named():
            self._post(topic, Message(answer))
        return answer

    def tell(self, topic: str, report: Report) -> None:
        """Posts this process's report, or as process 0 the answer, and waits for nobody."""
        with self._service_named():
            self._post(topic, Message(report))

    def hear(self, topic: str) -> Report:
        """Waits for what process 0 tells; in another process.

        Raises:
            AdaCheckError: process 0 posted an error, is gone, or tells nothing in time.
        """
        with self._service_named():
            return self._answer(topic, lambda: False, "")

    def fail(
        self,
        topic: str,
        error: BaseException,
        what: str = "write its share",
        kinds: Sequence[type[AdaCheckError]] = (ReplayError,),
    ) -> None:
        """Posts an error in place of this process's report, or as process 0 of the answer.

        Where it is one of the ``kinds`` the others raise that too. Of calls that differ they know,
        and say it themselves.
        """
        if not isinstance(error, DifferingCallsError):
            self._post_error(topic, messages.failure(error, self.index, what, kinds, self._loss))

    @contextlib.contextmanager
    def telling(self, topic: str, what: str) -> Iterator[None]:
        """Tells the others of an error in here, an interrupt too, as :meth:`fail`."""
        try:
            yield
        except BaseException as error:
            self.fail(topic, error, what)
            raise

    def refusal(self, topic: str) -> AdaCheckError | None:
        """The error that process 0 has posted; None if it has posted none so far."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found = None if self.is_alone else self._service.get(self._key_of(topic, _ANSWER))
            return found.raised() if found is not None and found.error else None
        return None

    def reports(self, topic: str) -> Sequence[Report]:
        """The reports of all processes, after they agreed; of several."""
        if topic not in self._gathered:
            with self._service_named():
                keys = [self._key_of(topic, each) for each in range(self._service.count)]
                found = [self._service.get(key) for key in keys]
            self._gathered[topic] = [each.report for each in found if each is not None]
        return self._gathered[topic]

    def forget(self, topic: str = "") -> None:
        """Deletes what was told, on one topic or all, once no process waits for it any more."""
        self._gathered = {}
        if not self.index and not self.is_alone:
            self._service.delete(f"{self._key}/{topic}" if topic else self._key)

    def _gather(
        self, topic: str, own: Report, is_over: Callable[[], bool], before: str
    ) -> list[Report]:
        data = Message(own).packed()  # as the others' reports come
        self._service.post(self._key_of(topic, 0), messages.unpacked(data))
        awaited = {self._key_of(topic, each): each for each in range(1, self._service.count)}
        wait = _Wait(topic, self._patience.report_s, is_over, before, time.monotonic())
        others = self._heard(wait, awaited)
        return [messages.unpacked(data).report, *(others[each] for each in sorted(others))]

    def _answer(self, topic: str, is_over: Callable[[], bool], before: str) -> Report:
        wait = _Wait(topic, self._patience.answer_s, is_over, before, time.monotonic())
        return self._heard(wait, {self._key_of(topic, _ANSWER): 0})[0]

    def _heard(self, wait: _Wait, awaited: Mapping[str, int]) -> dict[int, Report]:
        """The reports at some keys of processes, once they are all there."""
        waiting, found = dict(awaited), dict[int, Report]()
        while waiting:
            told: dict[str, Message | None] = {}
            if len(waiting) > 1:
                told |= self._service.below(f"{self._key}/{wait.topic}")
            if not waiting.keys() & told.keys():
                first = next(iter(waiting))
                told = {first: self._service.get(first, self._patience.look_s)}
            new = {key: each for key in waiting if (each := told.get(key)) is not None}
            for key, message in new.items():
                found[waiting[key]] = self._report_of(waiting[key], message)
                del waiting[key]
            if not new:
                self._check(wait, waiting)
        return found

    def _report_of(self, process: int, message: Message) -> Report:
        """A message's report; raises its error, or that its sender makes other calls."""
        calls = self._calls
        if calls is not None and message.calls is not None:
            why = calls.difference(self.index, process, message.calls)
            if why:
                self._service.refuse(calls, why)
        if not message.error:
            return message.report
        error = message.raised()
        if calls is not None and isinstance(error, DifferingCallsError):
            calls.error = calls.error or message.error
        raise error

    def _check(self, wait: _Wait, waiting: Mapping[str, int]) -> None:
        """Raises where waiting on for these keys of processes is in vain."""
        awaited, service = [*waiting.values()], self._service
        waited_s, is_over = time.monotonic() - wait.begin_s, wait.is_over()
        if (calls := self._calls) is not None and not is_over:
            calls.check()
            why = service.difference(calls, awaited)
            if why and not any(service.get(key) for key in waiting):  # told meanwhile
                service.refuse(calls, why)
            if not self._has_told and waited_s >= self._patience.told_s:
                self._has_told = True
                _log.warning(
                    "%s: has waited for the same call of %s for %.0f s. All processes have to call "
                    "alike: open the same roots; save, record, restore and recover the same steps.",
                    *(self._where, messages.named(awaited), self._patience.told_s),
                )
        facts = WaitFacts(
            where=self._where,
            loss=self._loss,
            count=service.count,
            awaited=awaited,
            silent=service.silent(awaited),
            past=self._past(wait, awaited),
            is_over=is_over,
            is_late=waited_s > wait.longest_s,
            silence_s=self._patience.silence_s,
        )
        if why := reason_to_end(facts):
            raise AdaCheckError(why)

    def _past(self, wait: _Wait, awaited: Sequence[int]) -> int | None:
        """A process that went on to what comes after this topic; raises its error if it failed."""
        for process in awaited if wait.before else ():
            told = self._service.get(self._key_of(wait.before, process))
            if told is None and not process:
                told = self._service.get(self._key_of(wait.before, _ANSWER))
            if told is None:
                continue
            if not process and self._service.get(self._key_of(wait.topic, _ANSWER)) is not None:
                continue  # it had answered before
            self._report_of(process, told)
            return process
        return None

    @contextlib.contextmanager
    def _service_named(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            raise AdaCheckError(
                f"{self._where}: expected the coordination service of jax.distributed to answer, "
                f"found: {first_line(error)}.{self._loss} The process that holds the service has "
                "ended, or cannot be reached."
            ) from error

    def _post(self, topic: str, message: Message) -> None:
        """Posts what the others wait for: a report, or as process 0 the answer."""
        if self.is_alone:
            return
        if (calls := self._calls) is not None and calls.key:
            message = replace(message, calls=calls.told())
        self._service.post(self._key_of(topic, self.index or _ANSWER), message)

    def _post_error(self, topic: str, message: Message) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # then nobody can be told
            self._post(topic, message)

    def _key_of(self, topic: str, who: int | str) -> str:
        return f"{self._key}/{topic}/{who}"


ALONE = Exchange(Service(0, 1, None), "", "")
"""The exchange of a process alone."""
