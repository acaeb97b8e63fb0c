"""Meetings of all processes about one matter, such as an attempt to save a step.

A report lies under the matter's key, a topic and its process; process 0 judges those of all, and
posts the answer beside them. The first error of a process is the error of the matter: whoever waits
in any topic of it raises that, in a second or less.
"""

# Threads: an exchange is of one matter: its caller's thread begins it, and after that one thread at
# a time uses it.

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from adacheck_jax.errors import AdaCheckError, DifferingCallsError, ReplayError, first_line
from adacheck_jax.processes import messages
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.messages import Message, Report
from adacheck_jax.processes.service import Service
from adacheck_jax.processes.waiting import WaitFacts, reason_to_end

_log = logging.getLogger(__name__)

Judge = Callable[[Sequence[Report]], Report]
"""Gives the answer to the reports of all processes, in their order, or raises; in process 0."""

_ANSWER, _ERROR = "answer", "error"


class Exchange:
    """Messages of the processes to each other about one matter; in a process alone, none.

    Args:
        service: the processes.
        key: key below which all messages lie.
        where: the matter, such as a step's item directory, for error messages.
        is_save: True if the step is lost where this fails.

    Attributes:
        index: index of this process.
        is_alone: True if there is no other process.
        patience: bounds of waiting.
    """

    def __init__(self, service: Service, key: str, where: str, *, is_save: bool = True) -> None:
        self._service, self._key, self._where = service, key, where
        self.index, self.is_alone = service.index, service.count == 1
        self.patience, self._loss = service.patience, " The step is not saved." if is_save else ""
        self._gathered: dict[str, Sequence[Report]] = {}
        self._calls: Calls | None = None
        self._turn, self._has_warned = 0, False

    def within(self, longest_s: float | None) -> Exchange:
        """The same exchange, which waits for others for some seconds at most, if given."""
        found = copy.copy(self)
        if longest_s is not None:
            found.patience = replace(self.patience, report_s=longest_s, answer_s=longest_s)
        return found

    def watching(self, calls: Calls) -> Exchange:
        """The same exchange about a call that all make alike: what it hears of others is compared.

        Once calls have differed the rest is told as it is.
        """
        found = copy.copy(self)
        found._calls = None if calls.error else calls
        return found

    def part(self, name: str) -> Exchange:
        """An exchange about a part of this one, with errors of its own; forgotten with it."""
        return self._other(f"{self._key}/{name}", self._loss)

    def beside(self, name: str) -> Exchange:
        """An exchange about something that begins with this one, and outlives it."""
        return self._other(f"{self._key}.{name}", "")

    def _other(self, key: str, loss: str) -> Exchange:
        found = copy.copy(self)
        found._key, found._loss, found._gathered, found._turn = key, loss, {}, 0
        return found

    def agree(
        self,
        topic: str,
        own: Report,
        judge: Judge,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Report:
        """Posts this process's report; gives what process 0 answers to those of all.

        Args:
            topic: name of what is agreed on, once an exchange.
            own: report of this process.
            judge: gives that answer, or raises, and then all processes raise it.
            is_over: true once nobody waits for this any more.

        Raises:
            AdaCheckError: a process failed, is gone, or does not report in time.
            DifferingCallsError: a process makes another call, of those that are compared.
        """
        if self.is_alone:
            return judge([own])
        if self.index:
            self.tell(topic, own)
            return self.hear(topic, is_over)
        try:
            with self._service_named():
                data = Message(own).packed()  # as the others' reports come
                self._service.post(f"{self._key}/{topic}/0", messages.unpacked(data))
                keys = {f"{self._key}/{topic}/{n}": n for n in range(1, self._service.count)}
                others = self._heard(topic, keys, self.patience.report_s, is_over)
            if (wrong := self.error()) is not None:  # of one that did not wait for an answer
                raise wrong
            reports = [messages.unpacked(data).report, *(others[n] for n in sorted(others))]
            self._gathered[topic] = reports
            answer = judge(reports)
        except BaseException as error:
            self._post_error(messages.refusal(error))
            raise
        self.tell(topic, answer)
        return answer

    def turn(self, own: Report, judge: Judge) -> Report:
        """As :meth:`agree`, on what all processes come to in the same order: a number names it.

        Once all are there, what was told at the one before is forgotten.
        """
        self._turn += 1
        answer = self.agree(f"{self._turn}", own, judge)
        self.forget(f"{self._turn - 1}")
        return answer

    def tell(self, topic: str, report: Report) -> None:
        """Posts this process's report, or as process 0 the answer, and waits for nobody."""
        if not self.is_alone:
            with self._service_named():
                calls = self._calls.recent() if self._calls and self._calls.key else None
                key = f"{self._key}/{topic}/{self.index or _ANSWER}"
                self._service.post(key, Message(report, calls))

    def hear(self, topic: str, is_over: Callable[[], bool] = lambda: False) -> Report:
        """Waits for what process 0 tells; raises as :meth:`agree`."""
        key, longest_s = f"{self._key}/{topic}/{_ANSWER}", self.patience.answer_s
        with self._service_named():
            return self._heard(topic, {key: 0}, longest_s, is_over)[0]

    def fail(
        self,
        error: BaseException,
        what: str = "write its share",
        kinds: Sequence[type[AdaCheckError]] = (ReplayError,),
    ) -> None:
        """Posts an error as that of all processes, unless one has posted another.

        Where it is one of the ``kinds`` they raise that too. Of calls that differ they know, and
        say it themselves.
        """
        if not isinstance(error, DifferingCallsError):
            self._post_error(messages.failure(error, self.index, what, kinds, self._loss))

    @contextlib.contextmanager
    def telling(
        self, what: str, kinds: Sequence[type[AdaCheckError]] = (ReplayError,)
    ) -> Iterator[None]:
        """Posts an error in here, an interrupt too, as :meth:`fail`."""
        try:
            yield
        except BaseException as error:
            self.fail(error, what, kinds)
            raise

    def error(self) -> AdaCheckError | None:
        """The error that a process has posted; None if there is none so far."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self.is_alone and (found := self._service.get(f"{self._key}/{_ERROR}")):
                return found.raised()
        return None

    def reports(self, topic: str) -> Sequence[Report]:
        """The reports of several processes, after they agreed."""
        if topic not in self._gathered:
            with self._service_named():
                keys = [f"{self._key}/{topic}/{each}" for each in range(self._service.count)]
                found = [self._service.get(key) for key in keys]
            self._gathered[topic] = [each.report for each in found if each is not None]
        return self._gathered[topic]

    def forget(self, topic: str = "") -> None:
        """Deletes what was told, on one topic or all, once no process waits for it any more."""
        self._gathered = {}
        if not self.index and not self.is_alone:
            self._service.delete(f"{self._key}/{topic}" if topic else self._key)

    def _heard(
        self,
        topic: str,
        awaited: Mapping[str, int],
        longest_s: float,
        is_over: Callable[[], bool],
    ) -> dict[int, Report]:
        """The reports at some keys of processes, once they are all there."""
        waiting, found, begin_s = dict(awaited), dict[int, Report](), time.monotonic()
        while waiting:
            messages: dict[str, Message | None] = {}
            if len(waiting) > 1:
                messages |= self._service.below(f"{self._key}/{topic}")
            if not waiting.keys() & messages.keys():
                first = next(iter(waiting))
                messages = {first: self._service.get(first, self.patience.look_s)}
            new = {key: each for key in waiting if (each := messages.get(key)) is not None}
            for key, message in new.items():
                process = waiting.pop(key)
                self._compare(process, message)
                found[process] = message.report
            if not new:
                self._check(waiting, time.monotonic() - begin_s, longest_s, is_over())
        return found

    def _compare(self, process: int, message: Message) -> None:
        """Compares the calls that a message tells with those of this process."""
        if self._calls is not None and message.calls is not None:
            why = self._calls.difference(self.index, process, message.calls)
            if why:
                self._service.refuse(self._calls, why)

    def _check(
        self, waiting: Mapping[str, int], waited_s: float, longest_s: float, is_over: bool
    ) -> None:
        """Raises where waiting on for these keys of processes is in vain."""
        awaited, service, calls = [*waiting.values()], self._service, self._calls
        if (failure := service.get(f"{self._key}/{_ERROR}")) is not None:
            if any(service.get(key) for key in waiting):
                return  # told meanwhile
            if calls is not None and failure.kind == DifferingCallsError.__name__:
                calls.error = calls.error or failure.error
            raise failure.raised()
        if calls is not None and not is_over:
            calls.check()
            why = service.difference(calls, awaited)
            if why and not any(service.get(key) for key in waiting):
                service.refuse(calls, why)
            if not self._has_warned and waited_s >= self.patience.warned_s:
                self._has_warned = True
                _log.warning(
                    "%s: has waited for the same call of %s for %.0f s. All processes have to call "
                    "alike: open the same roots; save, record, restore and recover the same steps.",
                    *(self._where, messages.named(awaited), self.patience.warned_s),
                )
        facts = WaitFacts(
            where=self._where,
            loss=self._loss,
            awaited=awaited,
            silent=service.silent(awaited),
            silence_s=self.patience.silence_s,
            is_over=is_over,
            is_late=waited_s > longest_s,
        )
        if why := reason_to_end(facts):
            raise AdaCheckError(why)

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

    def _post_error(self, message: Message) -> None:
        # Told already; or the service is gone, and nobody can be told.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not self.is_alone:
                self._service.post(f"{self._key}/{_ERROR}", message, is_first=True)


ALONE = Exchange(Service(0, 1, None), "", "")
"""The exchange of a process alone."""
