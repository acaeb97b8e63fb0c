"""Base or delta: a pure decision from what is known about the parent and the state to save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from adacheck_jax.format.manifest import BaseManifest

Delta = Literal["auto", "replay", "bits"]
"""Which deltas may be written: replayed updates and, where these are not exact, bit-pattern
differences; replayed updates alone; differences alone."""

Counts = tuple[int, ...]
"""The update counter of each recorder in a state; none without a recorder."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write.

    Attributes:
        kind: ``base``: the full state; ``replay``: what the updates since the parent consumed;
            ``bits``: differences from the parent's bits.
        reason: why, in words for the log and the manifest.
        updates: positions of the recorders whose update, one since the parent, is replayed.
        is_planned: whether a user who knows the handler's options expects it.
    """

    kind: Literal["base", "replay", "bits"]
    reason: str
    updates: tuple[int, ...] = ()
    is_planned: bool = True

    @property
    def is_base(self) -> bool:
        """Whether the full state is written."""
        return self.kind == "base"


def unplanned(reason: str) -> Decision:
    """A base that is written because no delta can be."""
    return Decision("base", reason, is_planned=False)


@dataclass(frozen=True, slots=True)
class Tip:
    """The step that a delta would follow: a saved or a recorded one.

    Attributes:
        step: step number.
        counts: each recorder's update counter; None while they are not known.
        depth: number of deltas between the base and this step.
    """

    step: int
    counts: Counts | None
    depth: int


def advanced(before: Counts, after: Counts) -> tuple[int, ...] | None:
    """The recorders that made one update between two states; None if one made another number."""
    steps = [b - a for a, b in zip(before, after, strict=True)]
    if not {0, 1}.issuperset(steps):
        return None
    return tuple(k for k, step in enumerate(steps) if step)


def shown(counts: Counts) -> str:
    """Counters for a message."""
    return " and ".join(map(str, counts))


def described(updates: tuple[int, ...]) -> str:
    """The reason of a delta that replays updates."""
    return {0: "no update", 1: "one update"}.get(len(updates), f"{len(updates)} updates")


def decide(
    base: BaseManifest | None,
    tip: Tip | None,
    *,
    problem: str,
    step: int,
    counts: Counts,
    max_deltas: int,
    delta: Delta,
    is_first: bool,
) -> Decision:
    """Decides between base and delta from step, counters and lineage length.

    Args:
        base: the base of the current lineage, None when it is missing.
        tip: the last saved, restored or recorded step of that lineage.
        problem: what speaks against replaying updates onto that lineage; empty if nothing does.
        step: the step to save.
        counts: each recorder's update counter in the state to save, none without a recorder.
        max_deltas: longest lineage, in deltas.
        delta: which deltas may be written.
        is_first: whether nothing was saved or restored before.

    Returns:
        The decision. A counter that skipped means that records were missed, so a base is due where
        updates are replayed.
    """
    if delta != "bits" and not counts:
        return Decision("base", "no recorder")
    if base is None or tip is None:
        return Decision("base", "no parent step to build on", is_planned=is_first)
    if step <= tip.step:
        return unplanned(f"step {step} does not follow step {tip.step}")
    if tip.depth >= max_deltas:
        return Decision("base", f"the lineage is full ({tip.depth} of max_deltas={max_deltas})")
    if delta == "bits":
        return Decision("bits", "as the handler was told")
    if base.update is None or not tip.counts or len(tip.counts) != len(counts):
        return unplanned("the base has no update program to replay")
    if problem:
        return Decision("bits" if delta == "auto" else "base", problem)
    updates = advanced(tip.counts, counts)
    if updates is None:
        return unplanned(
            f"the update counter went from {shown(tip.counts)} to {shown(counts)}: not one update"
        )
    return Decision("replay", described(updates), updates)
