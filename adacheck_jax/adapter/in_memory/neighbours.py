"""The processes of a job that were told to keep each other's state in memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from adacheck_jax.memory.files import step_file
from adacheck_jax.memory.peers import Peers
from adacheck_jax.plan.options import Shadow
from adacheck_jax.processes import run
from adacheck_jax.processes.gate import Gate
from adacheck_jax.processes.messages import Report
from adacheck_jax.store import claims


class Neighbours:
    """The processes, as they were told to keep each other's state; asked once.

    Args:
        shadow: the caller's choices.
    """

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._known: tuple[str, tuple[str, ...]] | None = None

    def meet(self) -> tuple[str, tuple[str, ...]]:
        """A name for this run, and the domains; the first call waits for all processes."""
        if self._known is None:
            own: Report = {"domain": self._shadow.domain or _domain(), "run": claims.new_token()}
            answer = run.exchange("the memory of all processes").agree("hello", own, _introduced)
            self._known = answer["run"], tuple(answer["domains"])
        return self._known

    def of(self, line: str) -> Peers:
        """The processes, for one line of steps; waits as :meth:`meet`."""
        name, domains = self.meet()
        copies = min(self._shadow.copies, len({*domains}) - 1)
        return Peers(name, domains, copies, Gate(line))


def _introduced(reports: Sequence[Report]) -> Report:
    """A name for this run, and the failure domain of each process."""
    return {"run": reports[0]["run"], "domains": [each["domain"] for each in reports]}


def _domain() -> str:
    """The slice of this process's devices, where there are several; else its machine."""
    slices = {getattr(each, "slice_index", None) for each in jax.devices()}
    if len(slices) > 1:
        return f"slice {getattr(jax.local_devices()[0], 'slice_index', None)}"
    return f"machine {step_file.boot()}"
