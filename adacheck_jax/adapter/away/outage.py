"""Storage that is away: it refuses, or does not answer, as the saves of a manager find it.

Decided by a clock and by what saves have told. A look at a disk, which may never return, is another
thread's than the training loop's.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from adacheck_jax.adapter import directories
from adacheck_jax.errors import AdaCheckError, first_line, is_refusal
from adacheck_jax.save.line.backlog import Lag
from adacheck_jax.schedule.stopwatch import Clock
from adacheck_jax.store.steps.lineage import shown_steps
from adacheck_jax.store.storage.location import Location, located

_log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds for which a save may take, before the next one does not wait for it any more."""
_SLOWER = 4.0
"""The same in times of what the longest save took."""
_SLOWEST_BYTES_S = 100e6
"""The same by what it writes: bytes a second of a slow disk."""
_MOST_BY_BYTES_S = 60.0
"""Most seconds that this gives."""
RETRY_S = 5.0
"""Seconds between two tries while storage refuses, and the next one is kept in memory."""
_WORTH = 10.0
"""The same in times of what the last try took from the training loop, which may be 5 s."""
_LONGEST_PAUSE_S = 15.0
"""Longest pause between two tries: what is in memory ends with its process."""
_LOOK_S = 0.5
"""Longest wait for a look at storage while it is away."""
_WARNED_S = 60.0
CLOSING_S = 60.0
"""Seconds for which a manager that is closed tries to write what is in memory."""


class Outage:
    """A time in which storage is away, if it is.

    Attributes:
        error: refusal that was met last; None if storage has only not answered.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self._begun_s, self._longest_s, self._waited_s = 0.0, 0.0, 0.0
        self._next_try_s, self._warned_s = -math.inf, -math.inf
        self.error: Exception | None = None

    @property
    def is_away(self) -> bool:
        """True from a refusal, or a save that took too long, until a save has ended well."""
        return self._since_s is not None

    @property
    def is_due(self) -> bool:
        """True if storage is to be tried."""
        return self._clock() >= self._next_try_s

    def patience_s(self, saved_bytes: int) -> float:
        """Seconds for which the save in flight, of so many bytes, is still waited for."""
        return 0.0 if self.is_away else self.haste_s(saved_bytes)

    def haste_s(self, saved_bytes: int) -> float:
        """The same, also while storage is away, for a manager that an error closes."""
        writing_s = min(saved_bytes / _SLOWEST_BYTES_S, _MOST_BY_BYTES_S)
        self._waited_s = max(PATIENCE_S, _SLOWER * self._longest_s, writing_s)
        return max(self._begun_s + self._waited_s - self._clock(), 0.0)

    def begin(self) -> None:
        """Notes that storage is tried now."""
        self._begun_s = self._clock()

    def hang(self) -> None:
        """Notes that storage has not answered in time."""
        if self._since_s is None:
            self._since_s, self.error = self._begun_s, None

    def refuse(self, error: Exception) -> None:
        """Notes that storage refused something."""
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        self._next_try_s, self.error = now_s + RETRY_S, error

    def return_to_loop(self) -> None:
        """Notes that a try which failed returns to the training loop now."""
        now_s = self._clock()
        pause_s = min(max(RETRY_S, _WORTH * (now_s - self._begun_s)), _LONGEST_PAUSE_S)
        self._next_try_s = max(self._next_try_s, now_s + pause_s)

    def end(self, took_s: float | None) -> None:
        """Notes that a save has ended well, and the seconds that it took if they are known.

        One that took longer than it was waited for counts as that long: storage may have hung.
        """
        if self.error is None:
            took_s = min(took_s or 0.0, self._waited_s if self.is_away else math.inf)
            self._longest_s = max(self._longest_s, took_s)
        if self._since_s is not None and self._warned_s > -math.inf:
            what = "The save has ended" if self.error is None else "Storage answers again"
            _log.warning("%s: steps that are in memory are written now.", what)
        self._since_s, self.error = None, None
        self._next_try_s = self._warned_s = -math.inf

    def tell(self, lag: Lag) -> None:
        """Warns, once a minute, that steps are kept in memory."""
        now_s = self._clock()
        if self._since_s is None or now_s < self._warned_s + _WARNED_S:
            return
        self._warned_s = now_s
        what, why = "A save has not ended", "storage is slow, or does not answer"
        if lag.is_computing:
            why = "its check has not ended; programs for it are compiled at first"
        if self.error is not None:
            what, why = "Storage has refused steps", refusal(self.error)
        seconds = f" for {lasted_s:.0f} s" if (lasted_s := now_s - self._since_s) >= 1.0 else ""
        _log.warning(
            "%s%s (%s). Training goes on; steps that are kept in memory meanwhile: %s. Those "
            "behind the first save take %d of the %d MiB that they may take.",
            *(what, seconds, why, shown_steps(lag.steps)),
            *(lag.taken_bytes >> 20, lag.most_bytes >> 20),
        )


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
            patience_s = _LOOK_S if outage.is_away else PATIENCE_S
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


def refusal(error: Exception) -> str:
    """An error of storage, and what to do about it."""
    is_told = isinstance(error, AdaCheckError)
    return first_line(error) + ("" if is_told else ". Make room or mend the disk")
