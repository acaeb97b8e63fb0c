"""Weights in host memory: their words, the delta between two versions, and the parts of a base.

The words of a share of one width lie one after another, in the order of the leaves' paths, and are
cut into segments that are coded on their own. Where each lies follows from the leaves alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.byte_loops import fingerprints_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.publish import differences
from adacheck_jax.publish.records import PART_BYTES, Leaves

_T = TypeVar("_T")
_THREADS = 4
_LENGTH = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class WeightChange:
    """Words of a share that changed.

    Attributes:
        share: number of the share.
        width: bytes of a word.
        positions: ascending positions among all words of that width.
        steps: difference of each word, modulo its size.
    """

    share: int
    width: int
    positions: np.ndarray
    steps: np.ndarray


class Weights:
    """Some shares of one version, in memory of their own, whose elements are not set yet.

    Args:
        leaves: the leaves.
        shares: numbers of the shares.

    Attributes:
        words: the bits of a share as flat words, by its number and the bytes of a word.
        blocks: the boxes of each leaf, as views of these words.
    """

    def __init__(self, leaves: Leaves, shares: Iterable[int]) -> None:
        self.leaves, self.shares = leaves, tuple(shares)
        self.words: dict[tuple[int, int], np.ndarray] = {}
        self.blocks: list[Blocks] = [{} for _ in leaves.leaves]
        self._places: dict[tuple[int, int], tuple[list[tuple[int, Box]], np.ndarray]] = {}
        for share in self.shares:
            every = leaves.boxes[share]
            for width in differences.WIDTHS:
                own = [(i, box) for i, box in every if leaves.leaves[i].word_bytes == width]
                sizes = (box.size * leaves.leaves[i].itemsize_bytes // width for i, box in own)
                ends = np.cumsum([0, *sizes])
                words = np.empty(ends[-1], f"u{width}")
                for (i, box), (a, b) in zip(own, itertools.pairwise(ends), strict=True):
                    dtype = np.dtype(leaves.leaves[i].dtype)
                    self.blocks[i][box] = words[a:b].view(dtype).reshape(box.shape)
                self.words[share, width], self._places[share, width] = words, (own, ends)

    def put(self, leaf: int, box: Box, elements: np.ndarray) -> None:
        """Sets the elements of a box, which lies in one of these."""
        for own, block in self.blocks[leaf].items():
            if own.contains(box):
                block[(*box.relative_to(own.start).slices, ...)] = elements

    def block(self, leaf: int, box: Box) -> np.ndarray:
        """The elements of a box, of which all shares are here; a view where it is one of theirs."""
        blocks = self.blocks[leaf]
        if box in blocks:
            return blocks[box]
        made = np.empty(box.shape, np.dtype(self.leaves.leaves[leaf].dtype))
        for own, block in blocks.items():
            if (both := own.intersect(box)) is not None:
                made[both.relative_to(box.start).slices] = block[both.relative_to(own.start).slices]
        return made

    def apply(self, changes: Sequence[WeightChange]) -> None:
        """Applies one delta, in place."""
        for each in changes:
            self.words[each.share, each.width][each.positions] += each.steps

    def changed(self, changes: Sequence[WeightChange]) -> dict[int, list[np.ndarray]]:
        """Positions of the words that changed in each leaf, by its index."""
        found: dict[int, list[np.ndarray]] = {}
        for each in changes:
            boxes, ends = self._places[each.share, each.width]
            cuts = itertools.pairwise(np.searchsorted(each.positions, ends))
            for (index, box), start, (a, b) in zip(boxes, ends[:-1], cuts, strict=True):
                if a < b:
                    places = _in_leaf(each.positions[a:b] - start, box, self.leaves.leaves[index])
                    found.setdefault(index, []).append(places)
        return found

    def fingerprints(self) -> list[int]:
        """Contribution of these shares to the fingerprint of each leaf; of all shares all of it."""
        every = [(i, *x) for i, own in enumerate(self.blocks) for x in own.items()]
        values = fingerprints_of((block, box.start) for _, box, block in every)
        found = [0] * len(self.blocks)
        for (index, *_), value in zip(every, values, strict=True):
            found[index] = combine([found[index], value])
        return found

    def part(self, share: int, number: int) -> bytes:
        """Bytes of one part of a share in a base."""
        return b"".join(bytes(each.data) for each in self._views(share, number))

    def set_part(self, share: int, number: int, data: bytes) -> None:
        """Takes the bytes of one part of a share in a base.

        Raises:
            IntegrityError: there are more or fewer.
        """
        views = [*self._views(share, number)]
        if sum(each.size for each in views) != len(data):
            raise IntegrityError(f"expected a part of the size of the leaves, found {len(data)}.")
        start = 0
        for each in views:
            each[:] = np.frombuffer(data, np.uint8, each.size, start)
            start += each.size

    def _views(self, share: int, number: int) -> Iterator[np.ndarray]:
        """Stretches of a share's bytes that make up a part."""
        first, stop, at = number * PART_BYTES, (number + 1) * PART_BYTES, 0
        for index, box in self.leaves.boxes[share]:
            block = self.blocks[index][box]
            inside = slice(max(first - at, 0), max(min(stop - at, block.nbytes), 0))
            if inside.start < inside.stop:
                yield block.reshape(-1).view(np.uint8)[inside]
            at += block.nbytes


def _in_leaf(positions: np.ndarray, box: Box, leaf: Leaf) -> np.ndarray:
    """Positions of a leaf's words, of their positions in a box."""
    if box.shape == leaf.shape:
        return positions
    words = leaf.itemsize_bytes // leaf.word_bytes
    elements, rest = np.divmod(positions, words)
    at = np.unravel_index(elements, box.shape)
    moved = tuple(each + start for each, start in zip(at, box.start, strict=True))
    return np.ravel_multi_index(moved, leaf.shape) * words + rest


def part_count(leaves: Leaves, share: int) -> int:
    """Number of the parts of a share in a base."""
    return -(-leaves.share_bytes(share) // PART_BYTES)


def encode(before: Weights, after: Weights, share: int) -> tuple[bytes, int]:
    """Bytes of the delta of a share between two versions of the same leaves, and of words changed.

    There are no bytes if no word changed.
    """

    def coded(segment: tuple[int, slice]) -> tuple[bytes, int]:
        width, place = segment
        old, new = before.words[share, width][place], after.words[share, width][place]
        positions = np.flatnonzero(old != new)
        if not positions.size:
            return b"", 0
        steps = new[positions] - old[positions]
        return differences.encode(positions, steps, old.size), positions.size

    parts = _each(coded, _segments(before.leaves, share))
    changed = sum(count for _, count in parts)
    lengths = np.array([len(each) for each, _ in parts], _LENGTH)
    data = b"".join([lengths.tobytes(), *(each for each, _ in parts)])
    return (data if changed else b""), changed


def decode(leaves: Leaves, share: int, data: bytes, where: object) -> list[WeightChange]:
    """Changes that the delta of a share holds.

    Raises:
        IntegrityError: the bytes are no delta of such leaves.
    """
    segments = _segments(leaves, share)
    table_bytes = _LENGTH.itemsize * len(segments)

    def decoded(segment: tuple[int, slice], part: memoryview) -> WeightChange:
        width, place = segment
        positions, steps = differences.decode(part, place.stop - place.start, width)
        return WeightChange(share, width, positions + place.start, steps)

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


def _segments(leaves: Leaves, share: int) -> list[tuple[int, slice]]:
    """Stretches of words that are coded together, each after the bytes of its words."""
    totals: dict[int, int] = dict.fromkeys(differences.WIDTHS, 0)
    for index, box in leaves.boxes[share]:
        leaf = leaves.leaves[index]
        totals[leaf.word_bytes] += box.size * leaf.itemsize_bytes // leaf.word_bytes
    return [
        (width, slice(start, min(start + differences.SEGMENT, total)))
        for width, total in totals.items()
        for start in range(0, total, differences.SEGMENT)
    ]


def _each(function: Callable[..., _T], *items: Sequence[Any]) -> list[_T]:
    """Results of a function that is called in a few threads; numpy lets others run."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return [*threads.map(function, *items)]
