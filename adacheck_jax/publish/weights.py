"""Weights in host memory: their words, the delta between two versions, and the parts of a base.

The words of all leaves of one width lie one after another, in the order of the leaves' paths, and
are cut into segments that are coded on their own. What lies where follows from the leaves alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.publish import differences
from adacheck_jax.publish.records import PART_BYTES, Leaves, PublishedLeaf

_T = TypeVar("_T")
_THREADS = 4
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """Words of one leaf.

    Attributes:
        leaf: index of the leaf.
        start: position of the first word in the leaf.
        stop: position after the last.
    """

    leaf: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Words that are coded together.

    Attributes:
        width: bytes of a word.
        pieces: the words, one piece after another.
    """

    width: int
    pieces: tuple[WeightPiece, ...]

    @property
    def size(self) -> int:
        """Number of words."""
        return sum(each.stop - each.start for each in self.pieces)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Words of one leaf that changed.

    Attributes:
        leaf: index of the leaf.
        positions: ascending positions in the leaf.
        steps: difference of each word, modulo its size.
    """

    leaf: int
    positions: np.ndarray
    steps: np.ndarray


def segments_of(leaves: Leaves, most: int = differences.SEGMENT) -> list[Segment]:
    """The segments of all leaves.

    Args:
        leaves: the leaves.
        most: largest number of words in a segment.
    """
    found: list[Segment] = []
    for width in differences.WIDTHS:
        pieces: list[WeightPiece] = []
        room = most
        for index, leaf in enumerate(leaves.leaves):
            count = leaf.nbytes // width if leaf.word_bytes == width else 0
            start = 0
            while start < count:
                stop = min(count, start + room)
                pieces.append(WeightPiece(index, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    found.append(Segment(width, tuple(pieces)))
                    pieces, room = [], most
        if pieces:
            found.append(Segment(width, tuple(pieces)))
    return found


class Weights:
    """All leaves of one version, in memory of their own.

    Args:
        leaves: the leaves.
        arrays: the leaves' elements, contiguous.
    """

    def __init__(self, leaves: Leaves, arrays: Sequence[np.ndarray]) -> None:
        self.leaves = leaves
        self.arrays = [*arrays]
        self._words = [words_of(x, e) for x, e in zip(arrays, leaves.leaves, strict=True)]

    @classmethod
    def empty(cls, leaves: Leaves) -> Weights:
        """Weights to be read into."""
        return cls(leaves, [np.empty(x.shape, np.dtype(x.dtype)) for x in leaves.leaves])

    def words(self, leaf: int) -> np.ndarray:
        """The bits of a leaf, by its index, as flat words; a view."""
        return self._words[leaf]

    def apply(self, changes: Sequence[WeightChange]) -> None:
        """Applies one delta, in place."""
        for each in changes:
            self._words[each.leaf][each.positions] += each.steps

    def changes_to(self, arrays: Sequence[np.ndarray]) -> list[list[WeightChange]]:
        """Changes of each segment that lead to other elements.

        Args:
            arrays: elements of each leaf, contiguous.
        """
        new = [words_of(x, e) for x, e in zip(arrays, self.leaves.leaves, strict=True)]

        def of_segment(segment: Segment) -> list[WeightChange]:
            found = []
            for each in segment.pieces:
                after = new[each.leaf][each.start : each.stop]
                before = self._words[each.leaf][each.start : each.stop]
                places = np.flatnonzero(after != before)
                if places.size:
                    steps = after[places] - before[places]
                    found.append(WeightChange(each.leaf, places + each.start, steps))
            return found

        return _each(of_segment, segments_of(self.leaves))

    def fingerprints(self) -> list[int]:
        """Fingerprint of each leaf."""
        return _each(fingerprint_of, self.arrays)

    def part(self, number: int) -> bytes:
        """Bytes of one part of a base."""
        return b"".join(bytes(each.data) for each in self._views(number))

    def set_part(self, number: int, data: bytes) -> None:
        """Takes the bytes of one part of a base.

        Raises:
            IntegrityError: there are more or fewer.
        """
        views = [*self._views(number)]
        if sum(each.size for each in views) != len(data):
            raise IntegrityError(f"expected a part of the size of the leaves, found {len(data)}.")
        start = 0
        for each in views:
            each[:] = np.frombuffer(data, np.uint8, each.size, start)
            start += each.size

    def _views(self, number: int) -> Iterator[np.ndarray]:
        """Stretches of the leaves' bytes that make up a part."""
        first, stop, at = number * PART_BYTES, (number + 1) * PART_BYTES, 0
        for leaf, words in zip(self.leaves.leaves, self._words, strict=True):
            inside = slice(max(first - at, 0), max(min(stop - at, leaf.nbytes), 0))
            if inside.start < inside.stop:
                yield words.view(np.uint8)[inside]
            at += leaf.nbytes


def part_count(leaves: Leaves) -> int:
    """Number of the parts of a base."""
    return -(-leaves.nbytes // PART_BYTES)


def words_of(array: np.ndarray, leaf: PublishedLeaf) -> np.ndarray:
    """The bits of a leaf's elements as flat words; a view."""
    return array.reshape(-1).view(np.dtype(f"u{leaf.word_bytes}"))


def encode(leaves: Leaves, changes: Sequence[Sequence[WeightChange]]) -> bytes:
    """Bytes of a delta.

    Args:
        leaves: the leaves.
        changes: changes of each segment.
    """

    def coded(segment: Segment, found: Sequence[WeightChange]) -> bytes:
        if not found:
            return b""
        by_leaf = {each.leaf: each for each in found}
        places, offset = [], 0
        for each in segment.pieces:
            if each.leaf in by_leaf:
                places.append(by_leaf[each.leaf].positions - each.start + offset)
            offset += each.stop - each.start
        steps = np.concatenate([each.steps for each in found])
        return differences.encode(np.concatenate(places), steps, segment.size)

    parts = _each(coded, segments_of(leaves), changes)
    lengths = np.array([len(each) for each in parts], _LENGTH)
    return b"".join([lengths.tobytes(), *parts])


def decode(leaves: Leaves, data: bytes, where: object) -> list[WeightChange]:
    """Changes that a delta holds.

    Args:
        leaves: the leaves.
        data: bytes of the delta.
        where: the delta, for messages.

    Raises:
        IntegrityError: the bytes are no delta of such leaves.
    """
    segments = segments_of(leaves)
    table_bytes = _LENGTH.itemsize * len(segments)
    try:
        lengths = np.frombuffer(data[:table_bytes], _LENGTH, len(segments)).tolist()
        if sum(lengths) != len(data) - table_bytes:
            raise ValueError(f"expected segments of {sum(lengths)} bytes, found {len(data)}")
        ends = np.cumsum([table_bytes, *lengths]).tolist()
        rest = memoryview(data)
        parts = [rest[a:b] for a, b in itertools.pairwise(ends)]
        found = _each(_decoded, segments, parts)
    except (ValueError, IndexError, OverflowError) as error:
        raise IntegrityError(
            f"{where}: expected a delta of {len(leaves.leaves)} leaves, found other bytes "
            f"({error}). A later base heals followers."
        ) from error
    return [change for each in found for change in each]


def _decoded(segment: Segment, data: memoryview) -> list[WeightChange]:
    if not len(data):
        return []
    positions, steps = differences.decode(data, segment.size, segment.width)
    changes, offset, first = [], 0, 0
    for each in segment.pieces:
        offset += each.stop - each.start
        last = int(np.searchsorted(positions, offset))
        if last > first:
            inside = positions[first:last] + (each.stop - offset)
            changes.append(WeightChange(each.leaf, inside, steps[first:last]))
        first = last
    return changes


def _each(function: Callable[..., _T], *items: Sequence[Any]) -> list[_T]:
    """Results of a function that is called in a few threads; numpy lets others run."""
    if len(items[0]) <= 1:
        return [*map(function, *items)]
    with ThreadPoolExecutor(_THREADS) as threads:
        return [*threads.map(function, *items)]


def changed_count(changes: Sequence[Sequence[WeightChange]]) -> int:
    """Number of words that changed."""
    return sum(each.positions.size for of_segment in changes for each in of_segment)
