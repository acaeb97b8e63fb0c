"""The processes of this run, which number the matters that they talk about alike."""

# Threads: every thread that saves may wait here. ``_lock`` guards what all exchanges share
# (``_attempts``, ``_barriers``); no call to the service is made while it is held.

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict, deque
from typing import Any

import jax

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.processes.calls import Calls
from adacheck_jax.processes.meetings import ALONE, Exchange
from adacheck_jax.processes.service import ROOM, Patience, Service

_REMEMBERED = 1000
"""Number of directories whose number of saves is known."""
_KEPT_BARRIERS = 64
"""Number of barriers after which no process waits in an earlier one."""


class Processes(Service):
    """All processes of a run, as one of them reaches the others; arguments are those of Service."""

    def __init__(
        self, index: int, count: int, client: Any, patience: Patience | None = None
    ) -> None:
        super().__init__(index, count, client, patience)
        self._attempts: OrderedDict[str, int] = OrderedDict()
        self._barriers: deque[Exchange] = deque()

    def exchange(self, directory: object, *, is_save: bool = True) -> Exchange:
        """An exchange about one attempt to save a step, or another call of all.

        Keys are written once, so a step that is saved again needs other ones. The processes number
        the attempts at a directory alike: each of them calls this once an attempt, and before
        anything that may fail in one of them alone.
        """
        return Exchange(self, self._new_key(directory), str(directory), is_save=is_save)

    def barrier(self, name: str, longest_s: float) -> None:
        """Waits until all processes are here."""
        here = Exchange(self, self._new_key(name), f"barrier {name}", is_save=False)
        here.within(longest_s).agree("here", {}, lambda _: {})
        with self._lock:
            self._barriers.append(here)
            past = self._barriers.popleft() if len(self._barriers) > _KEPT_BARRIERS else None
        if past is not None:
            past.forget()

    def watch(self, calls: Calls) -> None:
        """Tells the calls about a line of steps from now on, and hears of those that differ."""
        if not calls.key:
            calls.key = self._new_key(f"{calls.where}: calls")
            self.tell(calls)

    def _new_key(self, name: object) -> str:
        self.beat()
        digest = hashlib.sha256(str(name).encode()).hexdigest()[:32]
        with self._lock:
            number = self._attempts.pop(digest, 0)
            self._attempts[digest] = number + 1
            if len(self._attempts) > _REMEMBERED:
                self._attempts.popitem(last=False)
        return f"{ROOM}/{digest}/{number}"


def exchange(directory: object, *, is_save: bool = True) -> Exchange:
    """This process's exchange about one attempt to save a step, or another call of all.

    Raises:
        AdaCheckError: there are several processes, and no coordination service.
    """
    return ALONE if jax.process_count() == 1 else _all().exchange(directory, is_save=is_save)


def watch(calls: Calls) -> None:
    """Tells this process's calls about a line of steps to the other ones, from now on."""
    if jax.process_count() > 1:
        _all().watch(calls)


def wait_for_processes(*, key: str, timeout_ms: int) -> None:
    """Barrier that ends by an error soon after a process did, for Orbax's ``AsyncOptions``.

    Where JAX lets a job go on without some of its processes (``jax_enable_recoverability``),
    Orbax's own barriers at the end of a save wait 20 minutes for those that are gone::

        options = ocp.CheckpointManagerOptions(
            async_options=ocp.AsyncOptions(barrier_sync_fn=adacheck.wait_for_processes)
        )

    Args:
        key: name of the barrier, the same in all processes.
        timeout_ms: longest wait for a process that is alive, in milliseconds.

    Raises:
        AdaCheckError: a process is gone, or did not come in time.
    """
    if jax.process_count() > 1:
        _all().barrier(key, timeout_ms / 1000)


def _all() -> Processes:
    import orbax.checkpoint as ocp  # which has it from inside JAX

    try:
        client = ocp.multihost.get_jax_distributed_client()
    except ValueError as error:
        raise AdaCheckError(
            f"expected the coordination service by which {jax.process_count()} processes save "
            "together, found none. Nothing was saved; call jax.distributed.initialize() at the "
            "start of the program."
        ) from error
    return _reached_by(client)


@functools.cache
def _reached_by(client: Any) -> Processes:
    return Processes(jax.process_index(), jax.process_count(), client)
