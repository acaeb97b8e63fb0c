"""The place of every stored box of a delta in its owner's *pack*: one byte string a process.

Writer and reader compute the same plan from the same leaves, with no exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Encoding, Leaf


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one box of one leaf lies.

    Attributes:
        leaf: index of the leaf in the base's manifest.
        box: in the leaf's global coordinates.
        process: the owner, in whose pack the box lies.
        encoding: how it is stored.
        planes: into how many planes of bytes it is split, the lowest first; 0 for ``RAW``.
        compressed: how many of these, the highest, lie in the pack's compressed array.
        raw_start, compressed_start: first byte in either array, of what lies there.
        size_bytes: number of bytes in both together.
    """

    leaf: int
    box: Box
    process: int
    encoding: Encoding
    planes: int
    compressed: int
    raw_start: int
    compressed_start: int
    size_bytes: int

    @property
    def raw_bytes(self) -> int:
        """How much of it lies in the pack's raw array."""
        return self.size_bytes - self.compressed_bytes

    @property
    def compressed_bytes(self) -> int:
        """How much of it lies in the pack's compressed array."""
        return self.size_bytes // self.planes * self.compressed if self.planes else 0


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The extents of one delta, and for each process the size of its two arrays."""

    extents: tuple[Extent, ...]
    raw_bytes: tuple[int, ...]
    compressed_bytes: tuple[int, ...]


Aliases = Sequence[tuple[int, int]]
"""Pairs of extents of one process, counted in the order of its plan; see ``manifest.Pack``."""


def plan_delta(
    leaves: Sequence[Leaf],
    stored: Sequence[int],
    encodings: Sequence[str],
    aliases: Sequence[Aliases],
) -> WritePlan:
    """Lays out the boxes of the stored leaves in their owners' packs.

    The plan is a function of the base's leaves and of how they are stored, so a reader computes it
    again instead of reading it. What one process's part of the plan looks like depends on its own
    encodings and aliases alone.

    Args:
        leaves: the base's leaves.
        stored: indices of the leaves that the delta holds, ascending.
        encodings: for each process one :class:`Encoding` letter a stored leaf.
        aliases: for each process which of its extents have the bytes of which others.

    Returns:
        The plan.

    Raises:
        ValueError: an alias of an extent that does not exist or has another size or encoding.
    """
    own: list[list[Extent]] = [[] for _ in encodings]
    order = []
    for position, index in enumerate(stored):
        leaf = leaves[index]
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            encoding = Encoding(encodings[process][position])
            if encoding is Encoding.SAME:
                continue
            planes = 0 if encoding is Encoding.RAW else leaf.word_bytes
            compressed = min(planes, 1) if encoding is Encoding.EXPONENTS else planes
            size_bytes = box.size * leaf.itemsize_bytes
            order.append((process, len(own[process])))
            own[process].append(
                Extent(index, box, process, encoding, planes, compressed, 0, 0, size_bytes)
            )
    ends = [_place(extents, dict(each), leaves) for extents, each in zip(own, aliases, strict=True)]
    extents = tuple(own[process][number] for process, number in order)
    return WritePlan(extents, tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _place(
    extents: list[Extent], sources: Mapping[int, int], leaves: Sequence[Leaf]
) -> tuple[int, int]:
    """Gives each extent of a process its place; returns the sizes of both arrays.

    The largest go first: their sizes are round numbers mostly, so that rows which are all zero fall
    into whole blocks of the pack, without padding.
    """
    if any(not source < number < len(extents) for number, source in sources.items()):
        raise ValueError(f"aliases that are not of earlier ones of {len(extents)} extents")
    raw_end = compressed_end = 0
    for number in sorted(range(len(extents)), key=lambda n: -extents[n].size_bytes):
        extent = extents[number]
        if number in sources:
            extents[number] = _at(extent, extents[sources[number]])
            continue
        raw = raw_end
        if not extent.planes:  # elements start where their type can be viewed in place
            raw += -raw_end % leaves[extent.leaf].itemsize_bytes
        extents[number] = dataclasses.replace(
            extent, raw_start=raw, compressed_start=compressed_end
        )
        if extent.raw_bytes:
            raw_end = raw + extent.raw_bytes
        compressed_end += extent.compressed_bytes
    return raw_end, compressed_end


def _at(extent: Extent, source: Extent) -> Extent:
    """An extent that lies where another one does."""
    alike = (extent.encoding, extent.planes, extent.size_bytes)
    if alike != (source.encoding, source.planes, source.size_bytes):
        raise ValueError(f"an alias of another kind: {extent} of {source}")
    return dataclasses.replace(
        extent, raw_start=source.raw_start, compressed_start=source.compressed_start
    )
