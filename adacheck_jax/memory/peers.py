"""The other processes of a run, as a shadow that lies in a file reaches them.

Each step passes a *gate* before it is folded (:mod:`~adacheck_jax.processes.gate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.format.fingerprint import combine
from adacheck_jax.processes.gate import Gate
from adacheck_jax.processes.messages import Report


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
