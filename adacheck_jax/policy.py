"""Base or delta: a pure decision from what is known about the parent and the state to save."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from adacheck_jax.manifest import BaseManifest

Delta = Literal["auto", "replay", "bits"]
"""Which deltas may be written: replayed updates and, where these are not exact, bit-pattern
differences; replayed updates alone; differences alone."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write.

    Attributes:
        kind: ``base``: the full state; ``replay``: what ``update_count`` updates consumed;
            ``bits``: differences from the parent's bits.
        reason: why, in words for the log and the manifest.
        update_count: updates since the parent (0 or 1) that are replayed.
    """

    kind: Literal["base", "replay", "bits"]
    reason: str
    update_count: int = 0

    @property
    def is_base(self) -> bool:
        """Whether the full state is written."""
        return self.kind == "base"


@dataclass(frozen=True, slots=True)
class Tip:
    """The step that a delta would follow: a saved or a recorded one.

    Attributes:
        step: step number.
        count: the recorder's update counter; None without a recorder, and while it is not known.
        depth: number of deltas between the base and this step.
        where: under which what is known of it was remembered.
    """

    step: int
    count: int | None
    depth: int
    where: Hashable = None


def decide(
    base: BaseManifest | None,
    tip: Tip | None,
    *,
    problem: str,
    step: int,
    count: int | None,
    max_deltas: int,
    delta: Delta,
) -> Decision:
    """Decides between base and delta from step, counter and lineage length.

    Args:
        base: the base of the current lineage, None when it is missing.
        tip: the last saved, restored or recorded step of that lineage.
        problem: what speaks against replaying updates onto that lineage; empty if nothing does.
        step: the step to save.
        count: the recorder's update counter in the state to save, None without a recorder.
        max_deltas: longest lineage, in deltas.
        delta: which deltas may be written.

    Returns:
        The decision. A counter that skipped means that records were missed, so a base is due where
        updates are replayed.
    """
    if delta != "bits" and count is None:
        return Decision("base", "no recorder")
    if base is None or tip is None:
        return Decision("base", "no parent step to build on")
    if step <= tip.step:
        return Decision("base", f"step {step} does not follow step {tip.step}")
    if tip.depth >= max_deltas:
        return Decision("base", f"the lineage is full ({tip.depth} of max_deltas={max_deltas})")
    if delta == "bits":
        return Decision("bits", "as the handler was told")
    if base.update is None or tip.count is None or count is None:
        return Decision("base", "the base has no update program to replay")
    if problem:
        return Decision("bits" if delta == "auto" else "base", problem)
    advanced = count - tip.count
    if advanced not in (0, 1):
        return Decision(
            "base", f"the update counter went from {tip.count} to {count}: not one update"
        )
    return Decision("replay", "one update" if advanced else "no update", advanced)
