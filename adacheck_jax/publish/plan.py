"""Plans, made of records alone: which versions count, the way to the newest, and what is pruned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from adacheck_jax.publish.records import Base, Claim, Version


@dataclass(frozen=True, slots=True)
class Route:
    """The way to a version.

    Attributes:
        base: the base that it begins with; None if it goes on from weights in hand.
        start: version of the base, or of the weights in hand.
        deltas: versions whose deltas are applied, in their order.
    """

    base: Base | None
    start: Version
    deltas: tuple[Version, ...]

    @property
    def end(self) -> Version:
        """The version that it leads to."""
        return self.deltas[-1] if self.deltas else self.start


def counts(record: Version, claims: Iterable[Claim]) -> bool:
    """True if a version was written by the publisher that owned its sequence number."""
    governing = [each.epoch for each in claims if each.first <= record.sequence]
    return record.epoch >= max(governing, default=0)


def onwards(
    start: Version, versions: Iterable[Version], refused: Set[str] = frozenset()
) -> tuple[Version, ...]:
    """The versions that build on one, each on the one before, as far as they go."""
    # Of two that build on one version the later one goes on: the other was given up.
    ascending = sorted(versions, key=lambda each: each.sequence)
    children = {each.parent.checksum: each for each in ascending if each.parent}
    found, checksum = [], start.checksum
    while (child := children.get(checksum)) and child.checksum not in refused:
        found.append(child)
        checksum = child.checksum
    return tuple(found)


def from_base(
    bases: Sequence[Base], versions: Mapping[int, Version], refused: Set[str] = frozenset()
) -> Route | None:
    """The way from the newest base that belongs to a version."""
    for base in sorted(bases, key=lambda each: -each.sequence):
        start = versions.get(base.sequence)
        if start is not None and start.checksum == base.of:
            return Route(base, start, onwards(start, versions.values(), refused))
    return None


def oldest_kept(sequences: Sequence[int], bases: Sequence[int], keep: int) -> int:
    """The first sequence number that is not pruned: that of a base."""
    if len(sequences) <= keep:
        return 0
    return max((each for each in bases if each <= sequences[-keep]), default=0)


def base_is_due(count: int, delta_bytes: int, weight_bytes: int, every: int) -> bool:
    """True if late joiners would read as much in deltas as in a base, or too many of them.

    Args:
        count: number of versions since the last base.
        delta_bytes: bytes of their deltas.
        weight_bytes: bytes of a base.
        every: largest number of versions between bases.
    """
    return count >= every or delta_bytes >= max(weight_bytes, 1)
