"""The other processes of a run, as a shadow that lies in a file reaches them.

Each step passes a *gate* before it is folded: all processes have stored what it brings. So whoever
is killed when, all files hold one step in common, the last that passed or the one before it: no
file is further than the gate, and none has folded away what another one still stands at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from adacheck_jax.format.fingerprint import combine

Report = dict[str, Any]
"""Report of one process to the others, as JSON."""


class Gate(Protocol):
    """Reports of all processes on one step after another; called by one thread."""

    def begin(self, step: int) -> None:
        """Begins a line of steps, with one that is taken as a whole."""
        ...

    def agree(
        self, step: int, own: Report, judge: Callable[[Sequence[Report]], Report]
    ) -> Report | str:
        """Tells that a step is stored, and waits until all processes have told it.

        Returns:
            The judge's answer, the same in all processes; or the reason why a process does not
            follow this line of steps.

        Raises:
            AdaCheckError: a process is gone.
        """
        ...

    def refuse(self, step: int, reason: str) -> None:
        """Tells, in place of a report, that this process does not follow a step."""
        ...

    def end(self) -> None:
        """Has a wait end in a moment, until the next line begins."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes of a run.

    Attributes:
        run: name of this run of theirs, the same in all.
        domains: failure domain of each process.
        copies: number of copies of each box that other domains keep.
        gate: the gate.
    """

    run: str
    domains: tuple[str, ...]
    copies: int
    gate: Gate


def judged(reports: Sequence[Report]) -> Report:
    """The answer to all: fingerprints of the step, and pairs of owner and holder of bad copies.

    Args:
        reports: what each process tells of a step that it has stored: ``sums``, contributions to
            the fingerprints of the leaves; ``own``, digests of its boxes, as they were folded last,
            by the holder of their copies; ``copies``, digests of the copies that it holds, by the
            owner; ``folded``, number of the step that the digests are of, None for none.
    """
    columns = zip(*(each["sums"] for each in reports), strict=True)
    bad = [
        (owner, int(holder))
        for owner, each in enumerate(reports)
        for holder, digest in each["own"].items()
        if (other := reports[int(holder)])["folded"] == each["folded"]
        and other["copies"].get(str(owner), digest) != digest
    ]
    return {"sums": [*map(combine, columns)], "bad": bad}
