"""The gate of steps in memory: no process folds a step before all have stored what it brings.

So whoever is killed when, all files hold one step in common, the last that passed the gate or the
one before it: no file is further than the gate, and none has folded away what another one still
stands at.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from adacheck_jax.processes import run
from adacheck_jax.processes.meetings import ALONE, Exchange, Judge
from adacheck_jax.processes.messages import Report


class Gate:
    """Reports of all processes on one step after another of a line; called by one thread.

    All processes begin the same lines in the same order, so each number of a step means one line;
    within it each step is stored once.

    Args:
        name: name of the line.
    """

    def __init__(self, name: str) -> None:
        self._name, self._line = name, ALONE
        self._past: tuple[Exchange, str] = ALONE, ""
        self._closing_s: float | None = None

    def begin(self, step: int) -> None:
        """Begins a line of steps, with one that is taken as a whole."""
        self._closing_s = None
        self._line = run.exchange(f"{self._name}, step {step} in memory", is_save=False)

    def agree(self, step: int, own: Report, judge: Judge) -> Report | str:
        """Tells that a step is stored, and waits until all processes have told it.

        Returns:
            The judge's answer, the same in all processes; or the reason why a process does not
            follow this line of steps.

        Raises:
            AdaCheckError: a process is gone.
        """

        def judged(reports: Sequence[Report]) -> Report:
            for process, each in enumerate(reports):
                if "refused" in each:
                    return {"refused": f"process {process}: {each['refused']}"}
            return judge(reports)

        answer = self._line.agree(f"{step}", own, judged, self._is_closed)
        line, past = self._past
        line.forget(past)  # all processes are here, so none waits at an earlier step
        self._past = self._line, f"{step}"
        return answer.get("refused", answer)

    def refuse(self, step: int, reason: str) -> None:
        """Tells, in place of a report, that this process does not follow a step."""
        message = reason if self._line.index else f"process 0: {reason}"
        self._line.tell(f"{step}", {"refused": message})

    def end(self) -> None:
        """Has a wait end in a moment, until the next line begins."""
        self._closing_s = time.monotonic()

    def _is_closed(self) -> bool:
        closing_s, longest_s = self._closing_s, self._line.patience.closing_s
        return closing_s is not None and time.monotonic() - closing_s > longest_s
