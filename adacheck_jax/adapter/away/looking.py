"""A look at a disk that may never return, by another thread than the training loop's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

from adacheck_jax.adapter import directories
from adacheck_jax.adapter.away import outage as outages
from adacheck_jax.adapter.away.outage import Outage
from adacheck_jax.errors import is_refusal
from adacheck_jax.store.storage.location import Location, located

_LOOK_S = 0.5
"""Longest wait for a look at storage while it is away."""


class Look:
    """Asks if storage answers; a look that hangs is asked for its answer by the next call."""

    def __init__(self, place: Location, outage: Outage) -> None:
        self._place, self._outage = place, outage
        self._look: Future[None] | None = None

    def answers(self, step: int) -> bool:
        """True if the disk answers: what the loop itself asks of it afterwards takes no time.

        The loop asks nothing of an object store.
        """
        outage, place = self._outage, self._place
        if not place.on_file_system:
            return True
        patience_s = 0.0
        if (look := self._look) is None:
            outage.begin()
            patience_s = _LOOK_S if outage.is_away else outages.PATIENCE_S
            look = self._look = _asked(lambda: _look_at(place / f"{step}"))
        if not wait([look], patience_s).done:
            outage.hang()
            return False
        self._look = None
        if (error := look.exception()) is None:
            return True
        if not (isinstance(error, Exception) and is_refusal(error)):
            raise error
        outage.refuse(error)
        return False


def _look_at(step: Location) -> None:
    """Looks if a step is there, and if it could be made: a disk may be mounted read-only."""
    _ = step.exists
    directories.check_writable(located(str(step)))


def _asked(look: Callable[[], None]) -> Future[None]:
    """Looks in a thread that the process does not wait for."""
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            answer.set_result(look())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="adacheck_look", daemon=True).start()
    return answer
