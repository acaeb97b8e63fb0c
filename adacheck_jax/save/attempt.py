"""One attempt to save a step, and what the processes tell each other about it."""

# Threads: an attempt is made on the caller's thread, and written on Orbax's. ``turn`` is held by
# the save that writes, through all its file operations and the questions of a base in between; no
# other lock is taken before it.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.memory.peers import Report
from adacheck_jax.memory.sending.consent import Asking
from adacheck_jax.store.storage.interface import Stamp

BEGUN = "begun"
"""Topic of the exchange about the saves that all processes have begun."""
SHARES = "shares"
"""Topic of the exchange about what each process wrote."""


class Exchange(Asking, Protocol):
    """Reports of the processes of a run to each other about one attempt to save a step."""

    def agree(
        self,
        topic: str,
        own: Report,
        judge: Callable[[Sequence[Report]], Report],
        is_over: Callable[[], bool] = ...,
        before: str = "",
    ) -> Report:
        """Posts this process's report; gives what process 0 answers to those of all, in order.

        Args:
            topic: name of what is agreed on, once an attempt.
            own: report of this process.
            judge: gives that answer, or raises; called in process 0.
            is_over: true once nobody waits for this attempt any more.
            before: the topic that follows; who has come to that one will not report on this.

        Raises:
            AdaCheckError: a process failed, is gone or past this, or does not report in time; or
                ``judge`` raised it, and then all processes raise it.
        """
        ...

    def fail(
        self,
        topic: str,
        error: BaseException,
        what: str = ...,
        kinds: Sequence[type[AdaCheckError]] = ...,
    ) -> None:
        """Tells the other processes, instead of a report, that this one failed to do something.

        If the error is one of the ``kinds`` they raise the same.
        """

    def refusal(self, topic: str) -> AdaCheckError | None:
        """The error that process 0 has told the others; None if it has told none so far."""
        ...

    def reports(self, topic: str) -> Sequence[Report]:
        """The reports of all processes on a topic that they agreed on."""
        ...

    def beside(self, name: str) -> Exchange:
        """An exchange about something that begins with this attempt, and outlives it."""
        ...


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Attributes:
        turn: lock held by the save that writes, of all saves of a training run: one at a time.
        token: mark of all files that the training run writes.
        exchange: exchange with the other processes; None if there is none.
        earlier: exchanges of attempts before, which some process may still read.
        is_over: True once the same step is being saved again.
        claim: identity of this process's claim in a store; see :mod:`~adacheck_jax.store.claims`.
    """

    turn: threading.Lock
    token: str
    exchange: Exchange | None = None
    earlier: Sequence[Exchange] = ()
    is_over: bool = False
    claim: Stamp | None = None

    def next(self, exchange: Exchange | None, *, repeats: bool) -> Attempt:
        """The attempt that follows; this one is over if it ``repeats`` the same step."""
        self.is_over |= repeats
        earlier = [*self.earlier, *([self.exchange] if self.exchange else [])]
        return Attempt(self.turn, self.token, exchange, earlier)

    def agree(self, topic: str, own: Report, judge: Callable[[Sequence[Report]], Report]) -> Report:
        """As :meth:`Exchange.agree`, on topics of which the shares are the last one."""
        if self.exchange is None:
            return judge([own])
        before = "" if topic == SHARES else SHARES
        answer = self.exchange.agree(topic, own, judge, lambda: self.is_over, before)
        # All processes have begun this attempt, so none waits in an earlier one.
        for each in self.earlier:
            each.forget()
        self.earlier = ()
        return answer
