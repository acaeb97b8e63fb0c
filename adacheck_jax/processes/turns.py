"""Meetings of all processes one after another, as in a restore or a recovery."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StepDeletedError,
)
from adacheck_jax.processes.exchange import Exchange, Judge
from adacheck_jax.processes.messages import Report

_KINDS = (StepDeletedError, LineageError, IntegrityError, FormatError, MismatchError)
"""Errors after which a restore may be tried otherwise: all processes raise the same."""


class Turns:
    """Meetings to which all processes come in the same order, so that a number names each.

    Once all are at one, what was told at the one before is forgotten.

    Args:
        exchange: exchange about all of them.
        what: name of what all do, for error messages.
    """

    def __init__(self, exchange: Exchange, what: str) -> None:
        self._exchange, self._what = exchange, what
        self._attempt, self._number, self._past = 0, 0, ""

    def agree(self, own: Report, judge: Judge) -> Report:
        """The judge's answer to the reports of all; an error of one is raised by all.

        All call it equally often, about the same in turn.
        """
        topic = self._topic
        self._number += 1
        answer = self._exchange.agree(topic, own, judge)
        if self._past:
            self._exchange.forget(self._past)
        self._past = topic
        return answer

    def fail(self, error: BaseException, kinds: Sequence[type[AdaCheckError]] = ()) -> None:
        """Tells the others, who wait for this process at what comes next, that it failed."""
        self._exchange.fail(self._topic, error, self._what, kinds)

    def begin_anew(self) -> None:
        """Begins another attempt, after which all count from 0."""
        self._attempt, self._number = self._attempt + 1, 0

    @property
    def _topic(self) -> str:
        return f"{self._attempt}.{self._number}"


class RestoreAgreement:
    """Agreement of all processes of one restore, before each collective, used by one thread.

    A restore may be several attempts: each of the outermost contexts is one. Whoever fails in it
    tells the others once, instead of what they wait for next. So all begin the next one alike.

    Args:
        exchange: exchange about this restore.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._turns = Turns(exchange.within(exchange.patience.restore_s), "restore")
        self._depth, self._has_failed = 0, False

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A context of all processes; see :data:`~adacheck_jax.restore.agreed.Agreed`.

        Raises:
            AdaCheckError: another process failed; it names that process, and its reason.
        """
        self._depth += 1
        try:
            yield
            self._meet()
        except BaseException as error:
            self._fail(error, _KINDS)
            raise
        finally:
            self._depth -= 1
            if not self._depth:
                self._turns.begin_anew()
                self._has_failed = False

    def leave(self, error: BaseException) -> None:
        """Tells whoever makes another attempt that this process makes none."""
        self._fail(error, ())

    def _meet(self) -> None:
        try:
            self._turns.agree({}, lambda _: {})
        except BaseException:
            self._has_failed = True  # the others know
            raise

    def _fail(self, error: BaseException, kinds: Sequence[type[AdaCheckError]]) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._turns.fail(error, kinds)
