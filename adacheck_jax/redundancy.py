"""What need not be written, and who writes the rest.

Declared replicas are dropped by :mod:`~adacheck_jax.sharding`; here each remaining box gets one
owner, and the boxes of a delta get their place in the owner's *pack*: one byte string a process.
Every process computes the same plan from the same leaves, with no exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.boxes import Box, grid
from adacheck_jax.manifest import Encoding, Leaf
from adacheck_jax.sharding import Layout

ALIGNMENT_BYTES = 16
"""Extents start at multiples of this, so that any element type can be viewed in place."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one box of one leaf lies.

    Attributes:
        leaf: index of the leaf in the base's manifest.
        box: in the leaf's global coordinates.
        process: the owner, in whose pack the box lies.
        encoding: ``RAW``: row-major elements among the pack's raw bytes; a difference: its planes
            among the pack's difference bytes.
        offset_bytes: first byte there.
        size_bytes: number of bytes.
    """

    leaf: int
    box: Box
    process: int
    encoding: Encoding
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The extents of one delta, and for each process the size of its raw and difference bytes."""

    extents: tuple[Extent, ...]
    raw_bytes: tuple[int, ...]
    difference_bytes: tuple[int, ...]


def assign_owners(
    layouts: Sequence[Layout], itemsizes_bytes: Sequence[int], first: frozenset[int]
) -> list[tuple[int, ...]]:
    """Chooses the process that writes each box, balancing bytes over processes.

    Boxes are dealt out largest first, each to the process that holds it and has least so far.

    Args:
        layouts: one a leaf.
        itemsizes_bytes: bytes of one element of each leaf.
        first: leaves that are balanced among themselves before the others are dealt out: those
            that every delta writes.

    Returns:
        For each leaf, the owner of each of its boxes, in grid order.
    """
    owners = [[0] * len(layout.replicas) for layout in layouts]
    pieces = [
        (index not in first, -box.size * itemsizes_bytes[index], index, position)
        for index, layout in enumerate(layouts)
        for position, box in enumerate(grid(layout.cuts))
    ]
    load_bytes: dict[int, int] = {}
    for _, negative_size_bytes, index, position in sorted(pieces):
        holders = layouts[index].replicas[position]
        owner = min(holders, key=lambda process: (load_bytes.get(process, 0), process))
        owners[index][position] = owner
        load_bytes[owner] = load_bytes.get(owner, 0) - negative_size_bytes
    return [tuple(each) for each in owners]


def plan_delta(
    leaves: Sequence[Leaf], stored: Sequence[int], encodings: Sequence[str]
) -> WritePlan:
    """Lays out the boxes of the stored leaves in their owners' packs.

    The plan is a function of the base's leaves and of how they are stored, so a reader computes it
    again instead of reading it. What one process's part of the plan looks like depends on its own
    encodings alone.

    Args:
        leaves: the base's leaves.
        stored: indices of the leaves that the delta holds, ascending.
        encodings: for each process one :class:`Encoding` letter a stored leaf.

    Returns:
        The plan; extents of one process and kind ascend by offset.
    """
    raw_bytes, difference_bytes = [0] * len(encodings), [0] * len(encodings)
    extents = []
    for position, index in enumerate(stored):
        leaf = leaves[index]
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            encoding = Encoding(encodings[process][position])
            if encoding is Encoding.SAME:
                continue
            ends = raw_bytes if encoding is Encoding.RAW else difference_bytes
            offset_bytes = -(-ends[process] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            size_bytes = box.size * leaf.itemsize_bytes
            extents.append(Extent(index, box, process, encoding, offset_bytes, size_bytes))
            ends[process] = offset_bytes + size_bytes
    return WritePlan(tuple(extents), tuple(raw_bytes), tuple(difference_bytes))
