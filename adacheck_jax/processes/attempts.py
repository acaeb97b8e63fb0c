"""Agreement of all processes of a restore, before each collective, that none of them has failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adacheck_jax.errors import (
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StepDeletedError,
)
from adacheck_jax.processes.meetings import ALONE, Exchange

_KINDS = (StepDeletedError, LineageError, IntegrityError, FormatError, MismatchError)
"""Errors after which a restore may be tried otherwise: all processes raise the same."""


class RestoreAgreement:
    """Agreement of all processes of one restore, used by one thread.

    A restore may be several attempts: each of the outermost contexts is one. The first error in it
    is that of all, so that all begin the next one alike.

    Args:
        exchange: exchange about this restore.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange.within(exchange.patience.restore_s)
        self._attempt = self._depth = 0
        self._here, self._past = self._exchange.part("0"), ALONE

    @contextlib.contextmanager
    def agreed(self) -> Iterator[None]:
        """A context of all processes; see :data:`~adacheck_jax.restore.agreed.Agreed`.

        Raises:
            AdaCheckError: another process failed; it names that process, and its reason.
        """
        self._depth += 1
        try:
            with self._here.telling("restore", _KINDS):
                yield
                self._here.turn({}, lambda _: {})
            self._past.forget()  # all processes are here
            self._past = ALONE
        finally:
            self._depth -= 1
            if not self._depth:
                self._attempt += 1
                self._past, self._here = self._here, self._exchange.part(f"{self._attempt}")

    def leave(self, error: BaseException) -> None:
        """Tells whoever makes another attempt that this process makes none."""
        self._here.fail(error, "restore", ())
