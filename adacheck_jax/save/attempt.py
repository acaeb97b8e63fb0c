"""One attempt to save a step, and the exchange of all processes about it."""

# Threads: an attempt is made on the caller's thread, and written on Orbax's. ``turn`` is held by
# the save that writes, through all its file operations and the questions of a base in between; no
# other lock is taken before it.

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.processes.meetings import ALONE, Exchange, Judge
from adacheck_jax.processes.messages import Report
from adacheck_jax.store.storage.interface import Stamp

BEGUN = "begun"
"""Topic of the exchange about the saves that all processes have begun."""
SHARES = "shares"
"""Topic of the exchange about what each process wrote."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Attributes:
        turn: lock held by the save that writes, of all saves of a training run: one at a time.
        token: mark of all files that the training run writes.
        exchange: exchange with the other processes.
        earlier: exchanges of attempts before, which some process may still read.
        is_over: True once nothing more of it is written: it has failed, or is made again.
        claim: identity of this process's claim in a store; see :mod:`~adacheck_jax.store.claims`.
    """

    turn: threading.Lock
    token: str
    exchange: Exchange = ALONE
    earlier: Sequence[Exchange] = ()
    is_over: bool = False
    claim: Stamp | None = None

    def next(self, exchange: Exchange, *, repeats: bool) -> Attempt:
        """The attempt that follows; this one is over if it ``repeats`` the same step."""
        self.is_over |= repeats
        return Attempt(self.turn, self.token, exchange, [*self.earlier, self.exchange])

    def stop(self) -> None:
        """Waits until nothing of it is written any more; of a process alone nothing more begins.

        Several processes hear of its share, or that it failed, in any case.
        """
        self.is_over |= self.exchange.is_alone
        with self.turn:
            pass

    def agree(self, topic: str, own: Report, judge: Judge) -> Report:
        """As :meth:`Exchange.agree`."""
        answer = self.exchange.agree(topic, own, judge, lambda: self.is_over)
        # All processes have begun this attempt, so none waits in an earlier one.
        for each in self.earlier:
            each.forget()
        self.earlier = ()
        return answer
