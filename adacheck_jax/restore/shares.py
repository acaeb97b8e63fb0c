"""Plan of reading once: stored parts that several processes need, each read by one of them.

Every process computes the same plan from shardings, shapes and cut points, with no exchange.
:mod:`~adacheck_jax.restore.shared_reads` carries it out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.format.boxes import Box, Cuts, grid

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A stored part of an array of which devices of several processes need elements.

    Attributes:
        array: position of its array among those that are read together.
        box: the part: a chunk of a base, or a stored box of a delta.
        holders: processes whose devices need some of it, ascending, two at least.
        nbytes: bytes of the part.
    """

    array: int
    box: Box
    holders: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharePiece:
    """A shared part in the row of the process that reads it.

    Attributes:
        part: the part.
        reader: position of the reading process among the holders.
        start: first byte in the row.
    """

    part: SharedPart
    reader: int
    start: int


@dataclass(frozen=True, slots=True)
class ShareExchange:
    """Rows of bytes that some processes give each other.

    Attributes:
        holders: the processes, ascending.
        pieces: all pieces of all rows.
        row_bytes: bytes of a row: those of the fullest one.
    """

    holders: tuple[int, ...]
    pieces: tuple[SharePiece, ...]
    row_bytes: int


def users_of(
    needed: Mapping[Box, Iterable[int]], shape: Sequence[int], stored: Cuts
) -> dict[Box, tuple[int, ...]]:
    """The processes that need elements of each stored part of an array, ascending.

    Args:
        needed: boxes of an array, with the processes that need each.
        shape: global shape, of an array that has elements.
        stored: cut points at which the array is stored in parts.
    """
    users = [frozenset(each) for each in needed.values()]
    starts = np.array([box.start for box in needed], int).reshape(len(needed), len(shape))
    stops = np.array([box.stop for box in needed], int).reshape(len(needed), len(shape))
    known: dict[bytes, tuple[int, ...]] = {}
    found = {}
    for part in grid(stored):
        is_met = np.all((starts < part.stop) & (stops > part.start), axis=1)
        key = is_met.tobytes()
        if key not in known:
            met = frozenset().union(*(users[i] for i in np.flatnonzero(is_met)))
            known[key] = tuple(sorted(met))
        found[part] = known[key]
    return found


def own_boxes(boxes: list[Box], stored: Cuts, shared: Collection[SharedPart]) -> list[Box]:
    """The boxes that a process reads of an array by itself, without the shared parts."""
    if not shared:
        return boxes
    taken = {part.box for part in shared}
    return [
        common
        for part in grid(stored)
        if part not in taken
        for box in boxes
        if (common := part.intersect(box)) is not None
    ]


def plan(shared: Iterable[SharedPart]) -> tuple[ShareExchange, ...]:
    """Choose who reads what: near-equal bytes for each holder, in contiguous runs.

    Runs, since parts that follow one another may lie in one stored chunk, which is read whole.

    Args:
        shared: the parts, in the order in which they are stored.

    Returns:
        One exchange for each set of holders, in an order that is the same in every process.
    """
    groups: dict[tuple[int, ...], list[SharedPart]] = {}
    for each in shared:
        groups.setdefault(each.holders, []).append(each)
    return tuple(_exchange(holders, groups[holders]) for holders in sorted(groups))


def _exchange(holders: tuple[int, ...], parts: Sequence[SharedPart]) -> ShareExchange:
    total_bytes, done_bytes = sum(part.nbytes for part in parts), 0
    ends = [0] * len(holders)
    pieces = []
    for part in parts:
        middle_bytes = done_bytes + part.nbytes // 2
        reader = min(middle_bytes * len(holders) // max(1, total_bytes), len(holders) - 1)
        done_bytes += part.nbytes
        pieces.append(SharePiece(part, reader, ends[reader]))
        ends[reader] += -(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return ShareExchange(holders, tuple(pieces), max(ends))
