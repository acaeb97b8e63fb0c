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
from adacheck_jax.publish.records import PART_BYTES, Leaves

_T = TypeVar("_T")
_THREADS = 4
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Words that changed.

    Attributes:
        width: bytes of a word.
        positions: ascending positions among all words of that width.
        steps: difference of each word, modulo its size.
    """

    width: int
    positions: np.ndarray
    steps: np.ndarray


class Weights:
    """All leaves of one version, in memory of their own, whose elements are not set yet.

    Attributes:
        words: the bits of all leaves as flat words, by bytes of a word.
        arrays: the leaves' elements, as views of these words.
    """

    def __init__(self, leaves: Leaves) -> None:
        self.leaves = leaves
        self.words: dict[int, np.ndarray] = {}
        self._flat: dict[int, np.ndarray] = {}
        self._places: dict[int, tuple[list[int], np.ndarray]] = {}  # leaves, and their ends
        for width in differences.WIDTHS:
            indices = [i for i, leaf in enumerate(leaves.leaves) if leaf.word_bytes == width]
            ends = np.cumsum([0, *(leaves.leaves[i].nbytes // width for i in indices)])
            words = np.empty(ends[-1], f"u{width}")
            stretches = [words[a:b] for a, b in itertools.pairwise(ends)]
            self._flat |= zip(indices, stretches, strict=True)
            self.words[width], self._places[width] = words, (indices, ends)
        self.arrays = [
            self._flat[i].view(np.dtype(leaf.dtype)).reshape(leaf.shape)
            for i, leaf in enumerate(leaves.leaves)
        ]

    def words_of(self, leaf: int) -> np.ndarray:
        """The bits of a leaf, by its index, as flat words; a view."""
        return self._flat[leaf]

    def apply(self, changes: Sequence[WeightChange]) -> None:
        """Applies one delta, in place."""
        for each in changes:
            self.words[each.width][each.positions] += each.steps

    def changed(self, changes: Sequence[WeightChange]) -> dict[int, list[np.ndarray]]:
        """Positions of the words that changed in each leaf, by its index."""
        found: dict[int, list[np.ndarray]] = {}
        for each in changes:
            indices, ends = self._places[each.width]
            cuts = itertools.pairwise(np.searchsorted(each.positions, ends))
            for index, start, (a, b) in zip(indices, ends[:-1], cuts, strict=True):
                if a < b:
                    found.setdefault(index, []).append(each.positions[a:b] - start)
        return found

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
        for index, leaf in enumerate(self.leaves.leaves):
            inside = slice(max(first - at, 0), max(min(stop - at, leaf.nbytes), 0))
            if inside.start < inside.stop:
                yield self._flat[index].view(np.uint8)[inside]
            at += leaf.nbytes


def part_count(leaves: Leaves) -> int:
    """Number of the parts of a base."""
    return -(-leaves.nbytes // PART_BYTES)


def encode(before: Weights, after: Weights) -> tuple[bytes, int]:
    """Bytes of the delta between two versions of the same leaves, and the number of changed words.

    There are no bytes if no word changed.
    """

    def coded(segment: tuple[int, slice]) -> tuple[bytes, int]:
        width, place = segment
        old, new = before.words[width][place], after.words[width][place]
        positions = np.flatnonzero(old != new)
        if not positions.size:
            return b"", 0
        steps = new[positions] - old[positions]
        return differences.encode(positions, steps, old.size), positions.size

    parts = _each(coded, _segments(before.leaves))
    changed = sum(count for _, count in parts)
    lengths = np.array([len(each) for each, _ in parts], _LENGTH)
    data = b"".join([lengths.tobytes(), *(each for each, _ in parts)])
    return (data if changed else b""), changed


def decode(leaves: Leaves, data: bytes, where: object) -> list[WeightChange]:
    """Changes that a delta holds.

    Raises:
        IntegrityError: the bytes are no delta of such leaves.
    """
    segments = _segments(leaves)
    table_bytes = _LENGTH.itemsize * len(segments)

    def decoded(segment: tuple[int, slice], part: memoryview) -> WeightChange:
        width, place = segment
        positions, steps = differences.decode(part, place.stop - place.start, width)
        return WeightChange(width, positions + place.start, steps)

    try:
        lengths = np.frombuffer(data[:table_bytes], _LENGTH, len(segments)).tolist()
        if sum(lengths) != len(data) - table_bytes:
            raise ValueError(f"expected segments of {sum(lengths)} bytes, found {len(data)}")
        ends = np.cumsum([table_bytes, *lengths]).tolist()
        parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(ends)]
        changed = [(x, part) for x, part in zip(segments, parts, strict=True) if len(part)]
        return _each(decoded, *zip(*changed, strict=True)) if changed else []
    except (ValueError, IndexError, OverflowError) as error:
        raise IntegrityError(
            f"{where}: expected a delta of {len(leaves.leaves)} leaves, found other bytes "
            f"({error}). A later base heals followers."
        ) from error


def _segments(leaves: Leaves) -> list[tuple[int, slice]]:
    """Stretches of words that are coded together, each after the bytes of its words."""
    totals: dict[int, int] = dict.fromkeys(differences.WIDTHS, 0)
    for leaf in leaves.leaves:
        totals[leaf.word_bytes] += leaf.nbytes // leaf.word_bytes
    return [
        (width, slice(start, min(start + differences.SEGMENT, total)))
        for width, total in totals.items()
        for start in range(0, total, differences.SEGMENT)
    ]


def _each(function: Callable[..., _T], *items: Sequence[Any]) -> list[_T]:
    """Results of a function that is called in a few threads; numpy lets others run."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return [*threads.map(function, *items)]
