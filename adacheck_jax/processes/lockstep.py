"""Processes of a manager that do alike, as process 0 decides.

A training loop calls ``save`` in all processes, and each call of :class:`Lockstep` is made by all
of them in the same order: so a number names it. Process 0 decides and tells, and the others wait
for that. Where a call of the training loop is decided, it hears first that all make the same one:
behind it comes a collective of Orbax (:mod:`~adacheck_jax.processes.calls`).
"""

# Threads: the training loop's; but any may call meet, and Orbax's call commit and fail, about the
# save in flight, whose exchange the loop's thread replaces once that save has ended.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.processes import run
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.exchange import ALONE, Exchange, Judge
from adacheck_jax.processes.messages import Report

_COMMIT, _RESTORE = "commit", "restore"


class Lockstep:
    """The processes that save into a directory together; a process alone needs no message.

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
        """Opens the directory in all processes alike; process 0 makes it.

        Raises:
            AdaCheckError: process 0 could not; it raises its own error. Or one is gone.
            DifferingCallsError: another process opens it with other options.
        """

        def judge(_: Sequence[Report]) -> Report:
            make_root()
            return {}

        self._new("opened").watching(self.calls).agree("opened", {}, judge)

    def begin(self) -> None:
        """Begins a save: what was told before has been heard by all, once all have begun it."""
        self._replace(self._new("saves"))
        self._thread = threading.get_ident()

    def begin_anew(self) -> None:
        """Begins what all do after their calls differed, whatever each has told before."""
        if self._are_alike:
            self._replace(self._new("the end"))
            self._are_alike = False

    def forget(self) -> None:
        """Deletes what was told before the save that all have begun."""
        self._past.forget()
        self._past = ALONE

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
        if call:
            self.calls.note(call)
        with exchange.telling(topic, f"call {call}"):
            check()
        if call:
            return exchange.agree(topic, {}, lambda _: decide(), what="go on")
        if exchange.index:
            return exchange.hear(topic)
        with exchange.telling(topic, "go on"):
            decision = decide()
        exchange.tell(topic, decision)
        return decision

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

        Raises:
            DifferingCallsError: another process makes another call.
            MismatchError: another process asks for another state.
            AdaCheckError: another process's own call failed, or it is gone.
        """
        calls, name = self.calls, "restores"
        if is_beside := threading.get_ident() != self._thread or not self._are_alike:
            calls, name = Calls(self._directory), call
        exchange = self._new(name).watching(calls)
        calls.note(call)
        with exchange.telling(_RESTORE, "restore"):
            own: Report = {"state": describe()}

        def judge(reports: Sequence[Report]) -> Report:
            expect_same([each["state"] for each in reports])
            return {}

        exchange.agree(_RESTORE, own, judge)
        if not is_beside:
            self._restored.forget()
            self._restored = exchange

    def agreed(
        self,
        own: Report,
        judge: Judge,
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
            exchange.fail(topic, wrong, what)
            raise wrong
        try:
            return exchange.agree(topic, own, judge)
        except AdaCheckError as error:
            exchange.fail(topic, error, "wait any longer")  # who comes later does not go on alone
            raise

    def commit(self, longest_s: float, committed: Callable[[], Report]) -> Report:
        """Has the others wait until process 0 has committed the save in flight; what it tells.

        Raises:
            AdaCheckError: process 0 could not; it is a StorageError where storage refused it.
        """
        exchange = self._exchange or ALONE
        if exchange.index:
            return exchange.within(longest_s).hear(_COMMIT)
        told = committed()
        exchange.tell(_COMMIT, told)
        return told

    def fail(self, error: BaseException) -> None:
        """Tells the others that process 0 could not commit the save in flight."""
        exchange = self._exchange or ALONE
        if not exchange.index:
            exchange.fail(_COMMIT, error, "commit the step")

    def _new(self, name: str) -> Exchange:
        return run.exchange(f"{self._directory}: {name}", is_save=False)

    def _replace(self, exchange: Exchange) -> None:
        self._past, self._exchange, self._number = self._exchange or ALONE, exchange, 0

    def _next(self) -> tuple[str, Exchange]:
        if self._exchange is None:
            self.begin()
        self._number += 1
        exchange = (self._exchange or ALONE).within(self.longest_s)
        if self._are_alike:
            self.calls.check()
        return f"{self._number}", exchange.watching(self.calls)
