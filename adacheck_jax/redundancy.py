"""What need not be written, and who writes the rest.

Declared replicas are dropped by :mod:`~adacheck_jax.sharding`; here each remaining box gets one
owner, and the boxes of a delta get their place in the owner's *pack*: one byte string a process.
Every process computes the same plan from the same leaves, with no exchange.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.boxes import Box, Cuts, grid
from adacheck_jax.manifest import Encoding, Leaf
from adacheck_jax.sharding import Layout


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


@dataclass(frozen=True, slots=True)
class Share:
    """How the writing of one leaf is shared.

    Attributes:
        cuts: of the boxes that are written: those of its layout, or finer ones.
        owners: the process that writes each box, in grid order.
    """

    cuts: Cuts
    owners: tuple[int, ...]


def share_out(
    layouts: Sequence[Layout], itemsizes_bytes: Sequence[int], first: frozenset[int]
) -> list[Share]:
    """Chooses who writes what, balancing bytes over processes.

    A large box that several processes hold is cut into equal pieces, if possible one for each of
    them; small ones are not split. What is left to choose is dealt out largest first, each piece to
    the process that holds it and has least so far.

    Args:
        layouts: one a leaf.
        itemsizes_bytes: bytes of one element of each leaf.
        first: leaves that are balanced among themselves before the others are dealt out: those
            that every delta writes.

    Returns:
        One share a leaf.
    """
    drafts = [_cut(layout, size) for layout, size in zip(layouts, itemsizes_bytes, strict=True)]
    owners = [[0] * len(draft.replicas) for draft in drafts]
    last = max((held[-1] for draft in drafts for held in draft.replicas), default=0)
    load_bytes = np.zeros(last + 1, np.int64)
    # Equal holders are one object mostly; it is looked up among the loads as an array.
    arrays: dict[tuple[int, ...], np.ndarray] = {}
    for group in (first, frozenset(range(len(drafts))) - first):
        pieces = []
        for i in group:
            for place, (box, holders) in enumerate(
                zip(grid(drafts[i].cuts), drafts[i].replicas, strict=True)
            ):
                size_bytes = box.size * itemsizes_bytes[i]
                owner, *others = holders
                if others:
                    pieces.append((-size_bytes, i, place))
                else:
                    owners[i][place] = owner
                    load_bytes[owner] += size_bytes
        for negative_size_bytes, i, place in sorted(pieces):
            holders = drafts[i].replicas[place]
            among = arrays.setdefault(holders, np.array(holders))
            owner = int(among[np.argmin(load_bytes[among])])
            owners[i][place] = owner
            load_bytes[owner] -= negative_size_bytes
    return [Share(d.cuts, tuple(each)) for d, each in zip(drafts, owners, strict=True)]


_MIN_CUT_BYTES = 4 << 20
"""A box of fewer bytes is written by one process, though others hold it too."""
_MIN_PIECE_BYTES = 1 << 20


def _cut(layout: Layout, itemsize_bytes: int) -> Layout:
    """Cuts large boxes that several processes hold.

    Returns:
        A layout with finer cuts. Where there is a piece for each process that holds a box, each
        piece is left to one of them: leaves of one shape and sharding are then shared out alike,
        and whether two are equal is seen by every process for itself.
    """
    boxes = grid(layout.cuts)
    size_bytes = boxes[0].size * itemsize_bytes
    fewest = min(map(len, layout.replicas))
    if fewest < 2 or size_bytes < _MIN_CUT_BYTES or len({box.shape for box in boxes}) > 1:
        return layout
    most = min(fewest, size_bytes // _MIN_PIECE_BYTES)
    divisors = [_largest_divisor(length, most) for length in boxes[0].shape]
    count = max(divisors)
    axis = divisors.index(count)  # of several the first, so that pieces are contiguous
    length = boxes[0].shape[axis]
    cuts = list(layout.cuts)
    cuts[axis] = tuple(range(0, layout.cuts[axis][-1] + 1, length // count))
    holders_at = {box.start: each for box, each in zip(boxes, layout.replicas, strict=True)}
    replicas = []
    for piece in grid(tuple(cuts)):
        inside = piece.start[axis] % length
        at = (*piece.start[:axis], piece.start[axis] - inside, *piece.start[axis + 1 :])
        holders = holders_at[at]
        own = inside * count // length
        replicas.append((holders[own],) if count == len(holders) else holders)
    return Layout(tuple(cuts), tuple(replicas))


def _largest_divisor(number: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if number % d == 0)


MAX_CHUNK_BYTES = 8 << 20


def chunk_shape(
    cuts: Cuts, itemsize_bytes: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, ...]:
    """Shape of the zarr chunks of a leaf in a base: every box consists of whole ones.

    Args:
        cuts: of the boxes that are written.
        itemsize_bytes: bytes of one element.
        max_bytes: of a chunk, where the boxes can be cut so.
    """
    chunk = [_common_length(points) for points in cuts]
    for axis, points in enumerate(cuts):
        excess = math.prod(chunk) * itemsize_bytes / max_bytes
        if excess <= 1:
            break
        most = max(1, int(chunk[axis] / excess))
        whole = len(points) <= 2  # one box along this axis: its last chunk may be a shorter one
        chunk[axis] = most if whole else _largest_divisor(chunk[axis], most)
    return tuple(chunk)


def _common_length(points: Sequence[int]) -> int:
    """The longest interval of which all between some cut points consist, but for a shorter last."""
    lengths = [b - a for a, b in itertools.pairwise(points)]
    if not lengths:
        return 1
    inner = math.gcd(*lengths[:-1]) or lengths[0]
    return inner if lengths[-1] <= inner else math.gcd(inner, lengths[-1])


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
