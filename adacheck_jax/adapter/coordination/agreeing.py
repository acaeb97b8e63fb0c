"""Agreement of all processes of one restore, before each collective, through the service of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    MismatchError,
    StepDeletedError,
)
from adacheck_jax.save.attempt import Exchange

_KINDS = (StepDeletedError, LineageError, IntegrityError, FormatError, MismatchError)
"""Errors after which a restore may be tried otherwise: all processes raise the same."""
_TOPIC = "agree"
LONGEST_S = 3600.0
"""Longest wait for a process that is alive: it may read all of a large state meanwhile."""


class RestoreAgreement:
    """Agreement of all processes of one restore, used by one thread.

    A restore may be several attempts: each of the outermost contexts is one. Whoever fails in it
    tells the others once, instead of what they wait for next. So all begin the next one alike.

    Args:
        exchange: exchange about this restore; None if there is no other process.
    """

    def __init__(self, exchange: Exchange | None) -> None:
        self._exchange = exchange
        self._past: Exchange | None = None
        self._attempt = self._number = self._depth = 0
        self._has_failed = False

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
                self._attempt, self._number, self._has_failed = self._attempt + 1, 0, False

    def leave(self, error: BaseException) -> None:
        """Tells whoever makes another attempt that this process makes none."""
        self._fail(error, ())

    def _meet(self) -> None:
        if (here := self._here()) is None:
            return
        try:
            here.agree(_TOPIC, {}, lambda _: {})
        except BaseException:
            self._has_failed = True  # the others know
            raise
        if self._past is not None:
            self._past.forget()  # all processes are here, so none waits at what was before
        self._past, self._number = here, self._number + 1

    def _fail(self, error: BaseException, kinds: tuple[type[AdaCheckError], ...]) -> None:
        if not self._has_failed and (here := self._here()) is not None:
            self._has_failed = True
            here.fail(_TOPIC, error, "restore", kinds)

    def _here(self) -> Exchange | None:
        exchange = self._exchange
        return exchange and exchange.beside(f"{self._attempt}.{self._number}")
