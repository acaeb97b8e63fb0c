"""Plan of reading once: stored parts that several processes need, each read by one of them.

Every process computes the same plan from shardings, shapes and cut points, with no exchange.
:mod:`~adacheck_jax.restore.shared_reads` carries it out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.format.boxes import Box, Cuts, cuts_of

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedBox:
    """A box of whole stored parts that devices of several processes need, all or some of it.

    Attributes:
        array: position of its array among those that are read together.
        box: the box.
        holders: processes whose devices need it, ascending, two at least.
        itemsize_bytes: bytes of an element.
        cuts: cut points of the array at which it is stored in parts: no stored byte is read twice
            if the box is read in parts between them.
    """

    array: int
    box: Box
    holders: tuple[int, ...]
    itemsize_bytes: int
    cuts: Cuts

    @property
    def nbytes(self) -> int:
        """Bytes of the box."""
        return self.box.size * self.itemsize_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a shared box, read by one process.

    Attributes:
        array: position of the array.
        whole: the shared box.
        box: the part of it that is read.
        reader: position of the reading process among the holders.
        start: first byte in the row of the reading process.
        nbytes: bytes of the part.
    """

    array: int
    whole: Box
    box: Box
    reader: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows of bytes that some processes give each other.

    Attributes:
        holders: the processes, ascending.
        pieces: all pieces of all rows.
        row_bytes: bytes of a row: those of the fullest one.
    """

    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    row_bytes: int


def zones(
    needed: Mapping[Box, Iterable[int]], shape: Sequence[int], stored: Cuts
) -> list[tuple[Box, tuple[int, ...]]]:
    """Boxes of whole stored parts, each as large as the same processes need all parts of it.

    Where the needed boxes consist of whole stored parts, these are the needed boxes.

    Args:
        needed: boxes of an array that tile it as a grid, with the processes that need each.
        shape: global shape.
        stored: cut points at which the array is stored in parts.

    Returns:
        Boxes that tile the array, sorted, with the processes that need elements of each, ascending.
    """
    targets = cuts_of(needed, shape)
    axes = [_runs(points, parts) for points, parts in zip(targets, stored, strict=True)]
    found = []
    for corner in itertools.product(*axes):
        box = Box(tuple(run.start for _, run in corner), tuple(run.stop for _, run in corner))
        touched = itertools.product(
            *(
                list(itertools.pairwise(points))[positions.start : positions.stop]
                for points, (positions, _) in zip(targets, corner, strict=True)
            )
        )
        every = [Box(tuple(a for a, _ in each), tuple(b for _, b in each)) for each in touched]
        found.append((box, tuple(sorted({p for each in every for p in needed[each]}))))
    return sorted(found)


def _runs(points: Sequence[int], parts: Sequence[int]) -> list[tuple[range, range]]:
    """Positions of the intervals between points that stored parts meet, and the parts' indices."""
    found: list[tuple[range, range]] = []
    for start, stop in itertools.pairwise(parts):
        met = range(bisect.bisect_right(points, start) - 1, bisect.bisect_left(points, stop))
        is_same = bool(found) and found[-1][0] == met
        found.append((met, range(found.pop()[1].start if is_same else start, stop)))
    return found


def plan(shared: Sequence[SharedBox]) -> tuple[Exchange, ...]:
    """Choose who reads what: near-equal bytes for each holder, in contiguous runs.

    Runs, since boxes that follow one another may lie in one stored chunk, which is read whole.

    Args:
        shared: the boxes, in the order in which they are stored.

    Returns:
        One exchange for each set of holders, in an order that is the same in every process.
    """
    groups: dict[tuple[int, ...], list[SharedBox]] = {}
    for each in shared:
        groups.setdefault(each.holders, []).append(each)
    return tuple(_exchange(holders, groups[holders]) for holders in sorted(groups))


def _exchange(holders: tuple[int, ...], boxes: Sequence[SharedBox]) -> Exchange:
    total_bytes, done_bytes = sum(each.nbytes for each in boxes), 0
    ends = [0] * len(holders)
    pieces = []
    for each in boxes:
        runs: list[tuple[int, Box]] = []
        for slab in _slabs(each.box, each.cuts):
            size_bytes = slab.size * each.itemsize_bytes
            middle_bytes = done_bytes + size_bytes // 2
            reader = min(middle_bytes * len(holders) // max(1, total_bytes), len(holders) - 1)
            done_bytes += size_bytes
            is_next = bool(runs) and runs[-1][0] == reader
            start = runs.pop()[1].start if is_next else slab.start
            runs.append((reader, Box(start, slab.stop)))
        for reader, box in runs:
            size_bytes = box.size * each.itemsize_bytes
            pieces.append(Piece(each.array, each.box, box, reader, ends[reader], size_bytes))
            ends[reader] += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return Exchange(holders, tuple(pieces), max(ends))


def _slabs(box: Box, cuts: Cuts) -> list[Box]:
    """Parts of a box between the cut points of the axis that has most of them."""
    inside = [
        [point for point in points if start < point < stop]
        for points, start, stop in zip(cuts, box.start, box.stop, strict=True)
    ]
    axis = max(range(len(inside)), key=lambda i: len(inside[i]), default=None)
    if axis is None or not inside[axis]:
        return [box]
    bounds = [box.start[axis], *inside[axis], box.stop[axis]]
    return [
        Box(_with(box.start, axis, a), _with(box.stop, axis, b))
        for a, b in itertools.pairwise(bounds)
    ]


def _with(point: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*point[:axis], value, *point[axis + 1 :])
