"""Processes of a manager that do alike, as process 0 decides.

A training loop calls ``save`` in all processes, and each call of :class:`Lockstep` is made by all
of them in the same order: so a number names it. Process 0 decides and tells, and the others wait
for that, 630 s at most (``processes.Patience``). What is told goes through the coordination
service, as reports of shares do: one value written by process 0 and read by each of the others.

Behind a call of the training loop comes a collective of Orbax, so none enters it before all have
made the same call (:mod:`~adacheck_jax.adapter.coordination.calls`). Each tells its own and reads
those of all others; of many processes the first one reads them for all, and then tells.
"""

# Threads: the training loop's; but any may call meet, and Orbax's call commit and fail, about the
# save in flight, whose exchange the loop's thread replaces once that save has ended.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import jax

from adacheck_jax.adapter import processes
from adacheck_jax.adapter.coordination.calls import Calls
from adacheck_jax.adapter.inputs import expect_same
from adacheck_jax.adapter.processes import ServiceExchange
from adacheck_jax.errors import AdaCheckError, DifferingCallsError
from adacheck_jax.save.attempt import Report

_COMMIT, _RESTORE = "commit", "restore"
_FEW = 64
"""Number of processes up to which each reads the calls of all."""


class Lockstep:
    """The processes that save into a directory together; a process alone needs no message.

    Attributes:
        longest_s: longest wait for another process; None for the usual one.
        calls: the training loop's calls about these steps.
    """

    def __init__(self, directory: object) -> None:
        self._directory, self._number = directory, 0
        self._exchange: ServiceExchange | None = None
        self._past: ServiceExchange | None = None
        self._restored: ServiceExchange | None = None
        self._thread = threading.get_ident()
        self.longest_s: float | None = None
        self.calls, self._are_alike = Calls(directory), True

    def introduce(self, described: str) -> None:
        """Tells the options that all processes must have alike, before their first calls."""
        self.calls.note(described)
        processes.watch(self.calls)

    def open(self, make_root: Callable[[], None]) -> None:
        """Opens the directory in all processes alike; process 0 makes it.

        Raises:
            AdaCheckError: process 0 could not; it raises its own error. Or one is gone.
            DifferingCallsError: another process opens it with other options.
        """
        exchange = processes.exchange(f"{self._directory}: opened", is_save=False)
        if exchange is None:
            return
        exchange = exchange.watching(self.calls)

        def judge(reports: Sequence[Report]) -> Report:
            for process, report in enumerate(reports):
                exchange.compare(process, report["calls"])
            make_root()
            return {}

        exchange.agree("opened", {"calls": self.calls.told()}, judge)

    def begin(self) -> None:
        """Begins a save: what was told before has been heard by all, once all have begun it."""
        self._past, self._number, self._thread = self._exchange, 0, threading.get_ident()
        self._exchange = processes.exchange(f"{self._directory}: saves", is_save=False)

    def begin_anew(self) -> None:
        """Begins what all do after their calls differed, whatever each has told before."""
        if self._are_alike:
            self._past, self._number, self._are_alike = self._exchange, 0, False
            self._exchange = processes.exchange(f"{self._directory}: the end", is_save=False)

    def forget(self) -> None:
        """Deletes what was told before the save that all have begun."""
        if self._past is not None:
            self._past.forget()
            self._past = None

    def decided(
        self,
        decide: Callable[[], Report],
        call: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> Report:
        """Process 0's decision, in all processes.

        Args:
            decide: makes it, in process 0.
            call: the training loop's call that it is about; empty if it is about none.
            check: refuses what this process was given, by an error that is told to the others.

        Raises:
            DifferingCallsError: another process makes another call; nothing was begun.
            AdaCheckError: process 0 is gone, or raised it; it raises its own error. Or another
                process refused what it was given.
        """
        topic, exchange = self._next()
        if exchange is None:
            check()
            return decide()
        process, count = jax.process_index(), jax.process_count()
        others = [each for each in range(count) if each != process] if call else []
        if call:
            self.calls.note(call)
        try:
            check()
        except Exception as error:
            exchange.fail(topic, error, f"call {call}")
            raise
        own, are_few = self.calls.told(), count <= _FEW
        if process:
            if call:
                exchange.meet(topic, own, ())
            decision = exchange.hear(topic)
            if call:
                self._compare(exchange, decision)
                exchange.meet(topic, None, others[1:] if are_few else ())
            return decision
        try:
            decision = decide() | {"calls": own}
            if are_few:
                exchange.tell(topic, decision)
            exchange.meet(topic, None, others)
            if not are_few:
                exchange.tell(topic, decision)
        except BaseException as error:
            exchange.fail(topic, error, "go on")
            raise
        return decision

    def meet(self, call: str, describe: Callable[[], Mapping[str, str]]) -> None:
        """Waits until all processes make the same restore, before any begins what is collective.

        Beside the training loop calls come in any order, and those of one name alone are compared.

        Args:
            call: the call.
            describe: describes the state that this process asks for, by leaf path, or raises.

        Raises:
            DifferingCallsError: another process makes another call.
            MismatchError: another process asks for another state.
            AdaCheckError: another process's own call failed, or it is gone.
        """
        calls, where = self.calls, f"{self._directory}: restores"
        if is_beside := threading.get_ident() != self._thread or not self._are_alike:
            calls, where = Calls(self._directory), f"{self._directory}: {call}"
        exchange = processes.exchange(where, is_save=False)
        if exchange is None:
            describe()
            return
        exchange = exchange.watching(calls)
        calls.note(call)
        try:
            own: Report = {"calls": calls.told(), "state": describe()}
        except BaseException as error:
            exchange.fail(_RESTORE, error, "restore")
            raise

        def judge(reports: Sequence[Report]) -> Report:
            told = [(n, each["calls"]) for n, each in enumerate(reports)]
            if other := next((x for x in told if calls.difference(0, *x)), None):
                return {"differing": [told[0], other]}
            expect_same([each["state"] for each in reports], str(self._directory))
            return {"differing": []}

        for process, told in exchange.agree(_RESTORE, own, judge)["differing"]:
            exchange.compare(process, told)
        if not is_beside:
            if self._restored is not None:
                self._restored.forget()
            self._restored = exchange

    def agreed(
        self,
        own: Report,
        judge: Callable[[Sequence[Report]], Report],
        wrong: Exception | None = None,
        what: str = "",
    ) -> Report:
        """The answer to the reports of all processes.

        Args:
            own: report of this process.
            judge: gives the answer.
            wrong: error of this process, to be raised in its place, and told to the others.
            what: name of what it could not do then.

        Raises:
            DifferingCallsError: another process makes another call.
            AdaCheckError: a process is gone, reports nothing in time, or has failed.
        """
        topic, exchange = self._next()
        if wrong is not None:
            if exchange is not None:
                exchange.fail(topic, wrong, what)
            raise wrong
        if exchange is None:
            return judge([own])

        def judged(reports: Sequence[Report]) -> Report:
            for process, report in enumerate(reports):
                self._compare(exchange, report, process)
            return judge(reports) | {"calls": self.calls.told()}

        try:
            answer = exchange.agree(topic, own | {"calls": self.calls.told()}, judged)
            self._compare(exchange, answer)
            return answer
        except DifferingCallsError:
            raise  # who comes later finds that too
        except AdaCheckError as error:
            exchange.fail(topic, error, "wait any longer")  # who comes later does not go on alone
            raise

    def _compare(self, exchange: ServiceExchange, told: Report, process: int = 0) -> None:
        """Compares the calls that a process told with those of this one, if they have to be alike.

        Raises:
            DifferingCallsError: they differ.
        """
        if self._are_alike:
            exchange.compare(process, told["calls"])

    def commit(self, longest_s: float, committed: Callable[[], Report]) -> Report:
        """Has the others wait until process 0 has committed the save in flight; what it tells.

        Raises:
            AdaCheckError: process 0 could not; it is a StorageError where storage refused it.
        """
        exchange = self._exchange
        if exchange is not None and jax.process_index():
            return exchange.within(longest_s).hear(_COMMIT)
        told = committed()
        if exchange is not None:
            exchange.tell(_COMMIT, told)
        return told

    def fail(self, error: BaseException) -> None:
        """Tells the others that process 0 could not commit the save in flight."""
        if self._exchange is not None and not jax.process_index():
            self._exchange.fail(_COMMIT, error, "commit the step")

    def _next(self) -> tuple[str, ServiceExchange | None]:
        if self._exchange is None:
            self.begin()
        self._number += 1
        if (exchange := self._exchange) is not None:
            exchange = exchange.within(self.longest_s)
            if self._are_alike:
                self.calls.check()
                exchange = exchange.watching(self.calls)
        return f"{self._number}", exchange
