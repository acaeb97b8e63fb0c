"""Base or delta: a pure decision from what is known about the parent and the state to save."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck_jax.manifest import BaseManifest, Manifest


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write: a base, or a delta that replays ``update_count`` updates.

    Attributes:
        is_base: write the full state.
        reason: why, in words for the log and the manifest.
        update_count: updates since the parent (0 or 1) when a delta is written.
    """

    is_base: bool
    reason: str
    update_count: int = 0


def decide(
    base: BaseManifest | None, parent: Manifest | None, *, step: int, count: int, max_deltas: int
) -> Decision:
    """Decides between base and delta from step, counter and lineage length.

    Args:
        base: the base of the current lineage, None when it is missing.
        parent: the last saved or restored step of that lineage.
        step: the step to save.
        count: the recorder's update counter in the state to save.
        max_deltas: longest lineage, in deltas.

    Returns:
        The decision. A counter that skipped means that records were missed, so a base is due.
    """
    if base is None or parent is None:
        return Decision(True, "no parent step to build on")
    if base.update is None or parent.count is None:
        return Decision(True, "the base has no update program to replay")
    if step <= parent.step:
        return Decision(True, f"step {step} does not follow step {parent.step}")
    depth = 0 if isinstance(parent, BaseManifest) else parent.depth
    if depth >= max_deltas:
        return Decision(True, f"the lineage is full ({depth} of max_deltas={max_deltas})")
    advanced = count - parent.count
    if advanced not in (0, 1):
        return Decision(
            True, f"the update counter went from {parent.count} to {count}: not one update"
        )
    return Decision(False, "one update" if advanced else "no update", advanced)
