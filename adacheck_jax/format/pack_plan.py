"""The place of every stored box of a delta in its owner's *pack*: one byte string a process.

Writer and reader compute the same plan from the same leaves, with no exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings.form import BlockEncoding, Encoding, Parts
from adacheck_jax.format.encodings.table import ENCODINGS
from adacheck_jax.format.manifest import Delta, Leaf

Spans = list[tuple[int, int]]
"""Half-open byte ranges."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Place of one box of one leaf in a pack.

    Attributes:
        leaf: index of the leaf in the base's manifest.
        box: the box in the leaf's global coordinates.
        process: the owner, in whose pack the box lies.
        encoding: the box's encoding.
        parts: its bytes in the pack's two arrays.
        raw_start, compressed_start: first byte in either array.
    """

    leaf: int
    box: Box
    process: int
    encoding: Encoding
    parts: Parts
    raw_start: int = 0
    compressed_start: int = 0

    @property
    def how(self) -> BlockEncoding:
        """The box's encoding, as the table has it."""
        return ENCODINGS[self.encoding]

    @property
    def raw_bytes(self) -> int:
        """Number of bytes in the raw array."""
        return self.parts.raw_bytes

    @property
    def compressed_bytes(self) -> int:
        """Number of bytes in the compressed array."""
        return self.parts.compressed_bytes

    @property
    def size_bytes(self) -> int:
        """Number of bytes in both arrays together."""
        return self.raw_bytes + self.compressed_bytes

    def rows(self, part: Box) -> Box:
        """The box narrowed, along its first axis, to the rows that meet a part of it."""
        if not self.box.start:
            return self.box
        start, stop = self.box.start[1:], self.box.stop[1:]
        return Box((part.start[0], *start), (part.stop[0], *stop))

    def spans(self, rows: Box) -> tuple[Spans, Spans]:
        """Bytes of some rows of the box in the raw and the compressed array.

        Returns:
            One range a plane; of what has its own size all bytes, one range in each array.
        """
        if self.how.has_own_size:
            low, high = self.raw_start, self.compressed_start
            return [(low, low + self.raw_bytes)], [(high, high + self.compressed_bytes)]
        plane_count, compressed = self.parts.planes, self.parts.compressed
        plane_bytes = self.size_bytes // plane_count
        first, last = 0, plane_bytes
        if self.box.start:
            row_bytes = plane_bytes // self.box.shape[0]
            first = (rows.start[0] - self.box.start[0]) * row_bytes
            last = (rows.stop[0] - self.box.start[0]) * row_bytes

        def spans(start: int, count: int) -> Spans:
            starts = [start + plane * plane_bytes for plane in range(count)]
            return [(each + first, each + last) for each in starts]

        return (
            spans(self.raw_start, plane_count - compressed),
            spans(self.compressed_start, compressed),
        )


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Layout of one delta's packs.

    Attributes:
        extents: every stored box, by leaf and in grid order.
        raw_bytes, compressed_bytes: sizes of each process's two arrays.
    """

    extents: tuple[Extent, ...]
    raw_bytes: tuple[int, ...]
    compressed_bytes: tuple[int, ...]


Pairs = Sequence[tuple[int, int]]
"""Aliases or sizes of one process's extents; see ``manifest.Pack``."""


def plan_of(leaves: Sequence[Leaf], delta: Delta) -> WritePlan:
    """The plan of a delta, as its manifest tells it; raises as :func:`plan_delta`."""
    packs = delta.packs
    told = [[getattr(pack, name) for pack in packs] for name in ("encodings", "aliases", "coded")]
    return plan_delta(leaves, delta.stored, *told)


def plan_delta(
    leaves: Sequence[Leaf],
    stored: Sequence[int],
    encodings: Sequence[str],
    aliases: Sequence[Pairs],
    coded: Sequence[Pairs] = (),
) -> WritePlan:
    """Lays out the boxes of the stored leaves in their owners' packs.

    The plan is a function of the base's leaves and their encodings, so a reader computes it again
    instead of reading it. Each process's pack depends on its own encodings and aliases alone.

    Args:
        leaves: the base's leaves.
        stored: indices of the leaves that the delta holds, ascending.
        encodings: one text a process, with one :class:`Encoding` letter a stored leaf.
        aliases: the aliases of each process's extents.
        coded: sizes of each process's coded extents; may be left out where there are none.

    Returns:
        The plan.

    Raises:
        ValueError: an alias of an extent that does not exist or has another size or encoding; or
            sizes that no codes of these boxes have.
    """
    own: list[list[Extent]] = [[] for _ in encodings]
    sizes = [iter(each) for each in coded or [()] * len(encodings)]
    order = []
    for position, index in enumerate(stored):
        leaf = leaves[index]
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            encoding = Encoding(encodings[process][position])
            if encoding is Encoding.SAME:
                continue
            order.append((process, len(own[process])))
            how, whole_bytes = ENCODINGS[encoding], box.size * leaf.itemsize_bytes
            size = next(sizes[process], None) if how.has_own_size else None
            parts = how.parts(whole_bytes, leaf.word_bytes, size)
            own[process].append(Extent(index, box, process, encoding, parts))
    if any(next(each, None) is not None for each in sizes):
        raise ValueError("more sizes than coded extents")
    ends = [_place(extents, dict(each), leaves) for extents, each in zip(own, aliases, strict=True)]
    extents = tuple(own[process][number] for process, number in order)
    return WritePlan(extents, tuple(a for a, _ in ends), tuple(b for _, b in ends))


def _place(
    extents: list[Extent], sources: Mapping[int, int], leaves: Sequence[Leaf]
) -> tuple[int, int]:
    """Gives each extent of a process its place; returns the sizes of both arrays.

    The largest extents come first: their sizes are mostly round numbers, so that rows of zeros fall
    into whole blocks of the pack, without padding. Codes and their kin, whose sizes are not, come
    last.
    """
    if any(not source < number < len(extents) for number, source in sources.items()):
        raise ValueError(f"aliases that are not of earlier ones of {len(extents)} extents")
    raw_end = compressed_end = 0

    def rank(number: int) -> tuple[bool, int]:
        extent = extents[number]
        return extent.how.has_own_size, -extent.size_bytes

    for number in sorted(range(len(extents)), key=rank):
        extent = extents[number]
        if number in sources:
            source = extents[sources[number]]
            if (extent.encoding, extent.parts) != (source.encoding, source.parts):
                raise ValueError(f"an alias of another kind: {extent} of {source}")
            raw, compressed = source.raw_start, source.compressed_start
        else:
            raw, compressed = raw_end, compressed_end
            if extent.how.is_viewed:  # elements start where they can be viewed
                raw += -raw_end % leaves[extent.leaf].itemsize_bytes
            raw_end = raw + extent.raw_bytes if extent.raw_bytes else raw_end
            compressed_end += extent.compressed_bytes
        extents[number] = dataclasses.replace(extent, raw_start=raw, compressed_start=compressed)
    return raw_end, compressed_end
