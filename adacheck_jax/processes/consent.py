"""The consent of all processes to one collective, before any of them enters it."""

# Threads: made and refused by who saves, records or restores; asked on the thread that is given.

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor, Future

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report

_TOPIC = "send"


class Consent:
    """The question to all processes whether each of them takes part, at one call of all of them.

    Args:
        exchange: reports about this call, begun before anything can fail in one process alone.

    Attributes:
        is_used: True once this process has asked, or refused.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.is_used = exchange, False

    def ask(self, what: str) -> bool:
        """True if all processes take part, and in the same; waits for all.

        ``what`` names it; it is empty if this process cannot.
        """
        self.is_used = True

        def judge(reports: Sequence[Report]) -> Report:
            answers = {each.get("what", "") for each in reports}
            return {"what": answers.pop() if len(answers) == 1 else ""}

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
