"""The two arrays of a pack, and the places of sections in them once runs of zeros are left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.errors import FormatError
from adacheck_jax.store.storage.location import AnyPath

Ranges = tuple[tuple[int, int], ...]
"""Ascending half-open ranges."""


@dataclass(frozen=True, slots=True)
class ArrayKind:
    """One of the two arrays of a pack.

    Attributes:
        name: name of the array in its database.
        max_chunk_bytes: largest size of a chunk.
        block_bytes: unit in which runs of zeros are left out.
        is_compressed: True if its chunks are in one of the codecs.
    """

    name: str
    max_chunk_bytes: int
    block_bytes: int
    is_compressed: bool


RAW = ArrayKind("pack", 1 << 20, 1 << 10, False)
# Smaller chunks, so that compression spreads over threads. Only long runs are left out: shorter
# ones compress to less than their declaration takes.
COMPRESSED = ArrayKind("compressed", 1 << 18, 1 << 16, True)


def laid_out(
    start: AnyPath, kind: ArrayKind, sections: Sequence[tuple[int, Ranges]]
) -> tuple[list[int], int]:
    """Positions of the sections in the stored bytes of an array, and the number of these bytes.

    Raises:
        FormatError: a section does not have the blocks that were left out.
    """
    for size_bytes, zeros in sections:
        if zeros and zeros[-1][1] * kind.block_bytes > size_bytes:
            raise FormatError(
                f"{start}: expected blocks of {size_bytes} bytes, found that number "
                f"{zeros[-1][1] - 1} was left out. The step is damaged; restore another one."
            )
    sizes = [Runs(size_bytes, zeros, kind).stored_bytes for size_bytes, zeros in sections]
    ends = list(itertools.accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def zero_blocks(pack: np.ndarray, block_bytes: int) -> Ranges:
    """Runs of whole blocks that are all zero."""
    count = pack.size // block_bytes
    words = pack[: count * block_bytes].view(np.uint64).reshape(count, block_bytes // 8)
    found = np.flatnonzero(words[:, 0] == 0)  # few blocks of other data are looked at again
    found = found[~words[found].any(axis=1)]
    if not found.size:
        return ()
    borders = np.flatnonzero(np.diff(found) > 1)
    starts = found[np.concatenate([[0], borders + 1])]
    stops = found[np.concatenate([borders, [found.size - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


class Runs:
    """Positions of a section's bytes once its runs of zeros are left out.

    Args:
        size_bytes: length of the section with its zeros.
        zeros: ranges of blocks that are left out.
        kind: kind of the array.

    Attributes:
        stored_bytes: length of the section without its zeros.
    """

    def __init__(self, size_bytes: int, zeros: Ranges, kind: ArrayKind) -> None:
        self._size_bytes = size_bytes
        bounds = np.array(zeros, np.int64).reshape(-1, 2) * kind.block_bytes
        self._starts, self._stops = bounds[:, 0], bounds[:, 1]
        self._left_out = np.concatenate([[0], np.cumsum(self._stops - self._starts)])
        self.stored_bytes = size_bytes - int(self._left_out[-1])

    def kept(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the stored ranges of a span; without a span, of the whole section."""
        stop = self._size_bytes if stop is None else stop
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._starts, stop))
        runs = zip(self._starts[first:last].tolist(), self._stops[first:last].tolist(), strict=True)
        for a, b in runs:
            if a > start:
                yield start, a
            start = min(b, stop)
        if start < stop:
            yield start, stop

    def stored(self, position: int) -> int:
        """Position of a byte, or of the next one that was not left out, among the stored bytes."""
        run = int(np.searchsorted(self._starts, position, side="right"))
        inside = 0
        if run and position < self._stops[run - 1]:
            inside = int(self._stops[run - 1]) - position
        return position + inside - int(self._left_out[run])
