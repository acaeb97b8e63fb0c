"""The gate of each step in memory, over JAX's coordination service."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax

from adacheck_jax.adapter import processes
from adacheck_jax.adapter.processes import ServiceExchange
from adacheck_jax.memory.files import step_file
from adacheck_jax.memory.peers import Peers
from adacheck_jax.plan.options import Shadow
from adacheck_jax.save.attempt import Report
from adacheck_jax.store import claims

_TOPIC = "stored"
_CLOSING_S = 5.0
"""Time for which a step that is being stored is waited for when a run is closed."""


class ServiceGate:
    """Implements :class:`~adacheck_jax.memory.peers.Gate`, for one line of steps.

    All processes begin the same lines in the same order, so each number of a step means one line;
    within it each step is stored once.

    Args:
        name: name of the line.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: ServiceExchange | None = None
        self._last: ServiceExchange | None = None
        self._closing_s: float | None = None

    def begin(self, step: int) -> None:
        """Begins a line of steps; see the protocol."""
        self._closing_s = None
        self._line = processes.exchange(f"{self._name}, step {step} in memory")

    def agree(
        self, step: int, own: Report, judge: Callable[[Sequence[Report]], Report]
    ) -> Report | str:
        """Waits until all processes have stored a step; see the protocol."""

        def judged(reports: Sequence[Report]) -> Report:
            for process, each in enumerate(reports):
                if "refused" in each:
                    return {"refused": f"process {process}: {each['refused']}"}
            return judge(reports)

        here = self._of(step)
        answer = here.agree(_TOPIC, own, judged, self._is_closed)
        if self._last is not None:
            self._last.forget()  # all processes are here, so none waits at an earlier step
        self._last = here
        return answer.get("refused", answer)

    def refuse(self, step: int, reason: str) -> None:
        """Tells that this process does not follow a step; see the protocol."""
        if self._line is not None:
            told = f"process 0: {reason}" if jax.process_index() == 0 else reason
            self._of(step).tell(_TOPIC, {"refused": told})

    def end(self) -> None:
        """Has a wait end in a moment; see the protocol."""
        self._closing_s = time.monotonic()

    def _of(self, step: int) -> ServiceExchange:
        assert self._line is not None
        return self._line.beside(str(step))

    def _is_closed(self) -> bool:
        return self._closing_s is not None and time.monotonic() - self._closing_s > _CLOSING_S


class Neighbours:
    """The processes of a job, as they were told to keep each other's state; asked once.

    Args:
        shadow: the caller's choices.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._known: tuple[str, tuple[str, ...]] | None = None

    def meet(self) -> tuple[str, tuple[str, ...]]:
        """A name for this run, and the domains; the first call waits for all processes."""
        if self._known is None:
            self._known = _hello(self._shadow.domain or _domain())
        return self._known

    def of(self, line: str) -> Peers:
        """The processes, for one line of steps; waits as :meth:`meet`."""
        run, domains = self.meet()
        copies = min(self._shadow.copies, len({*domains}) - 1)
        return Peers(run, domains, copies, ServiceGate(line))


def _hello(domain: str) -> tuple[str, tuple[str, ...]]:
    """A name for this run, and the failure domain of each process."""
    here = processes.exchange("the memory of all processes")
    assert here is not None
    own: Report = {"domain": domain, "run": claims.new_token()}

    def judge(reports: Sequence[Report]) -> Report:
        return {"run": reports[0]["run"], "domains": [each["domain"] for each in reports]}

    answer = here.agree("hello", own, judge)
    return answer["run"], tuple(answer["domains"])


def _domain() -> str:
    """The slice of this process's devices, where there are several; else its machine."""
    slices = {getattr(each, "slice_index", None) for each in jax.devices()}
    if len(slices) > 1:
        return f"slice {getattr(jax.local_devices()[0], 'slice_index', None)}"
    return f"machine {step_file.boot()}"
