"""Tables that XLA programs hand to the compiled loops: what of each shard is summed up or taken."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from adacheck_jax.format.boxes import Box

MAX_RANK = 16
"""Axes of an array in memory that the loops take, with that of the words of wide elements."""
_MIN_ROWS = 32

WIDTH, STRIDE, COUNT, TO, COLUMN, FIRST, SHAPE = 0, 1, 2, 3, 4, 5, 5 + MAX_RANK
"""Columns of a table of samples; the last two are the first of one for each axis."""


def of_sums(starts: Sequence[Sequence[int]], element_bytes: Sequence[int]) -> np.ndarray:
    """Table of the shards that are summed up.

    Returns:
        uint32 of shape (rows, columns, 2), one row a shard and perhaps some more: 64-bit numbers,
        in a type that JAX always has. A row is the width, and the first index along each axis and
        along that of the words of wide elements.
    """
    axes = max([MAX_RANK, *(len(start) + 1 for start in starts)])
    table = np.zeros((max(len(starts), _MIN_ROWS), axes + 1), np.int64)
    for row, start, width in zip(table, starts, element_bytes, strict=False):
        row[: 1 + len(start)] = width, *start
    return _as_words(table)


def of_samples(
    boxes: Sequence[Box],
    element_bytes: Sequence[int],
    strides: Sequence[int],
    counts: Sequence[int],
    columns: Sequence[int],
) -> tuple[np.ndarray, int]:
    """Table of the shards of which elements are taken, a stride apart.

    Args:
        boxes: box of each shard whose elements are numbered row by row, within the shard.
        element_bytes: width of each shard's elements.
        strides: distance of the elements.
        counts: number of the elements; past the end of a box its last one is taken again.
        columns: position of each shard's first element among those that the program is given.

    Returns:
        The table as of :func:`of_sums`, and the bytes of all elements.
    """
    table = np.zeros((max(len(boxes), _MIN_ROWS), SHAPE + MAX_RANK), np.int64)
    to = 0
    rows = zip(table, boxes, element_bytes, strides, counts, columns, strict=False)
    for row, box, width, stride, count, column in rows:
        row[[WIDTH, STRIDE, COUNT, TO, COLUMN]] = width, stride, count, to, column
        row[FIRST : FIRST + len(box.start)] = box.start
        row[SHAPE : SHAPE + len(box.shape)] = box.shape
        to += count * width
    return _as_words(table), to


def _as_words(table: np.ndarray) -> np.ndarray:
    return table.view(np.uint32).reshape(*table.shape, 2)
