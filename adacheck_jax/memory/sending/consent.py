"""The consent of all processes to one collective, before any of them enters it."""

# Threads: made and refused by who saves, records or restores; asked on the thread that is given.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.memory.peers import Report

_TOPIC = "send"


class Asking(Protocol):
    """Reports of all processes to each other about one call of all of them."""

    def agree(self, topic: str, own: Report, judge: Callable[[Sequence[Report]], Report]) -> Report:
        """The judge's answer to the reports of all; waits for them.

        Raises:
            AdaCheckError: a process is gone, or makes another call.
        """
        ...

    def tell(self, topic: str, report: Report) -> None:
        """Posts this process's report, or as process 0 the answer, and waits for nobody."""

    def forget(self) -> None:
        """Lets go of what was told, once all processes are past this call."""


class Consent:
    """The question to all processes whether each of them takes part, at one call of all of them.

    Args:
        exchange: reports about this call, begun before anything can fail in one process alone.

    Attributes:
        is_used: True once this process has asked, or refused.
    """

    def __init__(self, exchange: Asking) -> None:
        self.exchange, self.is_used = exchange, False

    def ask(self, what: str) -> bool:
        """True if all processes take part, and in the same; waits for all.

        ``what`` names it; it is empty if this process cannot.
        """
        self.is_used = True

        def judge(reports: Sequence[Report]) -> Report:
            told = {each.get("what", "") for each in reports}
            return {"what": told.pop() if len(told) == 1 else ""}

        answer = self.exchange.agree(_TOPIC, {"what": what}, judge)
        return bool(answer.get("what"))

    def begin(self, what: str, thread: Executor) -> Future[bool]:
        """Asks on a thread, once."""
        self.is_used = True  # before that thread has the question
        return thread.submit(self.ask, what)

    def refuse(self) -> None:
        """Tells the others that this process takes no part, if it has not told them anything."""
        if not self.is_used:
            self.is_used = True
            with contextlib.suppress(AdaCheckError):  # the service has ended, and with it the job
                self.exchange.tell(_TOPIC, {})
