"""Processes of a manager that do alike, as process 0 decides.

A training loop calls ``save`` in all processes, and each call of :class:`Lockstep` is made by all
of them in the same order: so a number names it. All meet at it before process 0 decides, since a
collective of Orbax comes behind it (:mod:`~adacheck_jax.processes.calls`).
"""

# Threads: the training loop's; but any may call meet, and Orbax's call commit and fail, about the
# save in flight, whose exchange the loop's thread replaces once that save has ended.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from adacheck_jax.processes import run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.meetings import ALONE, Exchange, Judge
from adacheck_jax.processes.messages import Report


class Lockstep:
    """The processes that save into a directory together; a process alone needs no message.

    Each method raises a :class:`DifferingCallsError` where another process makes another call, and
    an :class:`AdaCheckError` where one has failed or is gone.

    Attributes:
        longest_s: longest wait for another process; None for the usual one.
        calls: the training loop's calls about these steps.
    """

    def __init__(self, directory: object) -> None:
        self._directory, self._number = directory, 0
        self._exchange: Exchange | None = None
        self._past = self._restored = ALONE
        self._thread = threading.get_ident()
        self.longest_s: float | None = None
        self.calls, self._are_alike = Calls(directory), True

    def introduce(self, described: str) -> None:
        """Tells the options that all processes must have alike, before their first calls."""
        self.calls.note(described)
        run.watch(self.calls)

    def open(self, make_root: Callable[[], None]) -> None:
        """Opens the directory in all processes alike; process 0 makes it."""

        def judge(_: Sequence[Report]) -> Report:
            make_root()
            return {}

        self._new("opened").watching(self.calls).agree("opened", {}, judge)

    def begin(self) -> None:
        """Begins a save: what was told before has been heard by all, once all have begun it."""
        self._replace("saves")
        self._thread = threading.get_ident()

    def begin_anew(self) -> None:
        """Begins what all do after their calls differed, whatever each has told before."""
        if self._are_alike:
            self._replace("the end")
            self._are_alike = False

    def decided(
        self,
        decide: Callable[[], Report],
        call: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> Report:
        """Process 0's decision, in all processes.

        Args:
            decide: makes it, in process 0, once all are here.
            call: the training loop's call that it is about; empty if it is about none.
            check: refuses what this process was given, by an error that is told to the others.
        """
        exchange = self._next()
        if call:
            self.calls.note(call)

        def judge(_: Sequence[Report]) -> Report:
            with exchange.telling("go on"):
                return decide()

        with exchange.telling(f"call {call}"):
            check()
        return self._agree(exchange, {}, judge)

    def meet(
        self,
        call: str,
        describe: Callable[[], Mapping[str, str]],
        expect_same: Callable[[Sequence[Mapping[str, str]]], None],
    ) -> None:
        """Waits until all processes make the same restore, before any begins what is collective.

        Beside the training loop calls come in any order, and those of one name alone are compared.

        Args:
            call: the call.
            describe: describes the state that this process asks for, by leaf path, or raises.
            expect_same: raises where the states of all differ.
        """
        calls, name = self.calls, "restores"
        if is_beside := threading.get_ident() != self._thread or not self._are_alike:
            calls, name = Calls(self._directory), call
        exchange = self._new(name).watching(calls)
        calls.note(call)
        with exchange.telling("restore"):
            own: Report = {"state": describe()}

        def judge(reports: Sequence[Report]) -> Report:
            expect_same([each["state"] for each in reports])
            return {}

        exchange.agree("restore", own, judge)
        if not is_beside:
            self._restored.forget()
            self._restored = exchange

    def agreed(
        self, own: Report, judge: Judge, wrong: Exception | None = None, what: str = ""
    ) -> Report:
        """The judge's answer to the reports of all processes.

        If this one could not do ``what`` it does, the error ``wrong`` is told and raised.
        """
        exchange = self._next()
        with exchange.telling(what if wrong else "wait any longer"):  # so no late one goes on alone
            if wrong is not None:
                raise wrong
            return self._agree(exchange, own, judge)

    def commit(self, longest_s: float, committed: Callable[[], Report]) -> Report:
        """Has the others wait until process 0 has committed the save in flight; what it tells.

        Raises:
            AdaCheckError: process 0 could not; it is a StorageError where storage refused it.
        """
        exchange = self._exchange or ALONE
        if exchange.index:
            return exchange.within(longest_s).hear("commit")
        report = committed()
        exchange.tell("commit", report)
        return report

    def fail(self, error: BaseException) -> None:
        """Tells the others that process 0 could not commit the save in flight."""
        exchange = self._exchange or ALONE
        if not exchange.index:
            exchange.fail(error, "commit the step")

    def _agree(self, exchange: Exchange, own: Report, judge: Judge) -> Report:
        answer = exchange.agree("all", own, judge)
        self._past.forget()  # all have begun the save after it
        self._past = ALONE
        return answer

    def _new(self, name: str) -> Exchange:
        return run.exchange(f"{self._directory}: {name}", is_save=False)

    def _replace(self, name: str) -> None:
        self._past, self._number = self._exchange or ALONE, 0
        self._exchange = self._new(name)

    def _next(self) -> Exchange:
        if self._exchange is None:
            self.begin()
        self._number += 1
        if self._are_alike:
            self.calls.check()
        here = (self._exchange or ALONE).part(f"{self._number}")
        return here.within(self.longest_s).watching(self.calls)
