"""Half-open N-dimensional boxes in global coordinates, grids of boxes, and chunks of a base.

Every JAX sharding cuts an array along its axes, so the boxes of one leaf form a grid: the product
of one list of cut points an axis. The manifest stores those cut points instead of the boxes, which
keeps it small on wide meshes.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from adacheck_jax.errors import FormatError

if TYPE_CHECKING:  # ``adacheck ls`` starts without numpy
    import numpy as np

Cuts = tuple[tuple[int, ...], ...]
"""Ascending cut points of each axis, first 0 and last the axis' length."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements ``start <= index < stop`` of an array.

    Attributes:
        start: first index, one an axis.
        stop: index past the last, one an axis.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """The box that covers an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def from_slices(cls, index: Sequence[slice], shape: Sequence[int]) -> Box:
        """The box of a tuple of unit-step slices, as shardings give them."""
        bounds = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        return cls(tuple(b[0] for b in bounds), tuple(max(b[0], b[1]) for b in bounds))

    @property
    def shape(self) -> tuple[int, ...]:
        """Length along each axis."""
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements (1 for a scalar)."""
        return math.prod(map(operator.sub, self.stop, self.start))

    def intersect(self, other: Box) -> Box | None:
        """The common elements in the same coordinates; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        """True if every element of another box is an element of this one."""
        pairs = zip(self.start, other.start, self.stop, other.stop, strict=True)
        return all(a <= b and d <= c for a, b, c, d in pairs)

    def is_of_chunks(self, lengths: Sequence[int], shape: Sequence[int]) -> bool:
        """True if the box consists of whole chunks of an array, shorter ones at its edges."""
        ends = zip(self.start, self.stop, lengths, shape, strict=True)
        return all(a % n == 0 and (b % n == 0 or b == end) for a, b, n, end in ends)

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same box in coordinates whose zero is at ``origin``."""
        return Box(
            tuple(a - o for a, o in zip(self.start, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin, strict=True)),
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from an array in the same coordinates."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def cuts_of(boxes: Iterable[Box], shape: Sequence[int]) -> Cuts:
    """The cut points of a grid of boxes.

    Returns:
        The cuts for which :func:`grid` gives these boxes back, sorted.

    Raises:
        FormatError: the boxes do not cover the array exactly once, or are not a grid.
    """
    boxes = list(boxes)
    cuts = tuple(
        tuple(sorted({0, length} | {box.start[axis] for box in boxes}))
        for axis, length in enumerate(shape)
    )
    if grid(cuts) != sorted(boxes):
        raise FormatError(
            f"the {len(boxes)} shards of an array of shape {tuple(shape)} do not tile it as a "
            f"grid: expected every element in exactly one shard; found {boxes[:4]}. Give the "
            "array a sharding that covers it."
        )
    return cuts


def grid(cuts: Cuts) -> list[Box]:
    """The boxes between cut points, sorted; an axis of length 0 makes one empty box."""
    corners = itertools.product(*map(_intervals, cuts))
    return [Box(*zip(*corner, strict=True)) if corner else Box((), ()) for corner in corners]


def sizes(cuts: Cuts) -> Iterator[int]:
    """Numbers of elements of the boxes of a :func:`grid`."""
    lengths = ([stop - start for start, stop in _intervals(points)] for points in cuts)
    return map(math.prod, itertools.product(*lengths))


def _intervals(points: tuple[int, ...]) -> list[tuple[int, int]]:
    return [*itertools.pairwise(points)] if len(points) > 1 else [(0, 0)]


Blocks: TypeAlias = "dict[Box, np.ndarray]"
"""Host copies (or, on CPU devices, read-only views) of the owned boxes of one leaf."""


def batches(sizes_bytes: Sequence[int], most_bytes: int) -> Iterator[range]:
    """Positions of arrays in batches: each of at most so many bytes, or of a single array."""
    start = total_bytes = 0
    for number, size_bytes in enumerate(sizes_bytes):
        if number > start and total_bytes + size_bytes > most_bytes:
            yield range(start, number)
            start, total_bytes = number, 0
        total_bytes += size_bytes
    if start < len(sizes_bytes):
        yield range(start, len(sizes_bytes))


MAX_CHUNK_BYTES = 8 << 20


def chunk_shape(cuts: Cuts, itemsize_bytes: int, max_bytes: int | None = None) -> tuple[int, ...]:
    """Shape of the zarr chunks of a leaf in a base: every box consists of whole ones.

    Args:
        cuts: cut points of the boxes that are written.
        itemsize_bytes: bytes of one element.
        max_bytes: largest size of a chunk, unless the boxes cannot be cut so small; None for ours.
    """
    chunk, most_bytes = [*map(_common_length, cuts)], max_bytes or MAX_CHUNK_BYTES
    for axis, points in enumerate(cuts):
        excess = math.prod(chunk) * itemsize_bytes / most_bytes
        if excess <= 1:
            break
        most = max(1, int(chunk[axis] / excess))
        whole = len(points) <= 2  # one box along this axis: its last chunk may be shorter
        chunk[axis] = most if whole else largest_divisor(chunk[axis], most)
    return tuple(chunk)


def _common_length(points: Sequence[int]) -> int:
    """Longest length that divides all intervals between cut points; the last may be shorter."""
    lengths = [b - a for a, b in itertools.pairwise(points)]
    if not lengths:
        return 1
    inner = math.gcd(*lengths[:-1]) or lengths[0]
    return inner if lengths[-1] <= inner else math.gcd(inner, lengths[-1])


def largest_divisor(number: int, most: int) -> int:
    """Largest divisor of a number that is not above a bound."""
    return max(d for d in range(1, most + 1) if number % d == 0)
