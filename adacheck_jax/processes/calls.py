"""Calls of the processes about one line of steps, which all of them have to make alike.

Where one records a step that the others save, each would wait in what the others never come to. So
each process tells its calls, with its beats and with each message about such a call; and who hears
or waits compares them. After such a call comes a collective of Orbax, which no process could leave.
"""

# Threads: a training loop's notes; those of the beats and of consents read, and set ``error``.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from adacheck_jax.errors import DifferingCallsError
from adacheck_jax.processes.messages import RecentCalls

_RECENT = 32
"""Number of the last calls that are told and compared."""


class Calls:
    """Calls of this process about one line of steps, in their order.

    A step counts as recorded if it was: who is refused one may go on as if it had not asked.

    Args:
        where: root of the steps, for messages.

    Attributes:
        key: key below which they are told; empty as long as they are not told.
        error: the difference from those of another process, in words; empty as long as none is
            known.
    """

    def __init__(self, where: object) -> None:
        self.where, self.key, self.error = where, "", ""
        self._made: RecentCalls = 0, ()
        self._pending: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises a :class:`DifferingCallsError` once calls have differed."""
        if self.error:
            raise DifferingCallsError(self.error)

    def note(self, call: str) -> None:
        """Notes a call; raises as :meth:`check`."""
        self.check()
        count, last = self._made
        self._made = count + 1, (*last, call)[-_RECENT:]

    @contextlib.contextmanager
    def pending(self, call: str, *, is_own: bool) -> Iterator[Callable[[bool], None]]:
        """A call that may wait for the others, and counts only if it does something.

        Yields what is told if it has done something. It is part of another call if not ``is_own``.
        """
        if not is_own:
            yield lambda has_done: None
            return
        self.check()
        self._pending = (call,)
        try:
            yield lambda has_done: self.note(call) if has_done else None
        finally:
            self._pending = ()

    def recent(self) -> RecentCalls:
        """The calls, for other processes."""
        return self._made

    def difference(
        self, here: int, process: int, recent: RecentCalls, *, is_waiting: bool = False
    ) -> str:
        """The first difference between the calls of a process and those here, in words, or "".

        One that has made fewer calls may yet make the same.

        Args:
            here: index of this process.
            process: index of the other one.
            recent: its calls.
            is_waiting: True if this process waits for it in vain, maybe in a call that counts only
                if it does something.
        """
        count, last = self._made
        pending = self._pending if is_waiting else ()
        own = _numbered((count + len(pending), (*last, *pending)))
        others = _numbered(recent)
        n = next((n for n in own if others.get(n, own[n]) != own[n]), None)
        if n is None:
            return ""
        (first, one), (second, other) = sorted([(here, own[n]), (process, others[n])])
        return (
            f"{self.where}: expected the same calls in all processes, found {one} in process "
            f"{first} where process {second} called {other}. Neither was done; the steps that were "
            "saved before are whole. Choose each call by what all processes know alike, as the "
            "number of the step, and not by a clock or by what one of them measured; start all "
            "processes again, and go on from the last step that is saved."
        )


def _numbered(recent: RecentCalls) -> dict[int, str]:
    count, last = recent
    return dict(enumerate(last, count - len(last)))
