"""Positions of words in a table of their few distinct values, found and packed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK_WORDS = 1 << 15
"""Words that are looked up at once: they stay in a core's cache."""
_HASH_BITS = 16
_MAX_TRIES = 64
_GOLDEN = 0x9E3779B97F4A7C15


def index_bits(count: int) -> int:
    """Bits of a position in a table: 0, 1, 2, 4 or 8."""
    least = (count - 1).bit_length()
    return 1 << math.ceil(math.log2(least)) if least else 0


def indexed(
    words: np.ndarray, table: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """All values of some words, and the position of each; None if they are more than ``most``.

    Args:
        words: the words.
        table: some of the values.
        most: largest number of values.
    """
    lookup = _Lookup.of(table, most)
    indices = np.empty(words.size, np.uint8)
    for first in range(0, words.size, BLOCK_WORDS):
        part, into = words[first : first + BLOCK_WORDS], indices[first : first + BLOCK_WORDS]
        while lookup is not None:
            lookup.find(part, into)
            wrong = lookup.table[into] != part
            if not wrong.any():
                break
            more = np.unique(part[wrong])
            lookup = _Lookup.of(np.concatenate([lookup.table, more]), most)
        if lookup is None:
            return None
    return (lookup.table, indices) if lookup else None


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Positions of values in a table, by a hash under which no two of them collide.

    Attributes:
        table: the values.
        positions: position for each hash.
        factor: the hash's factor.
    """

    table: np.ndarray
    positions: np.ndarray
    factor: int

    @classmethod
    def of(cls, table: np.ndarray, most: int) -> _Lookup | None:
        """The lookup of a table; None for too many values."""
        if table.size > most:
            return None
        for attempt in range(_MAX_TRIES):
            factor = (_GOLDEN * (2 * attempt + 1)) % (1 << 8 * table.itemsize) | 1
            made = cls(table, np.zeros(1 << _HASH_BITS, np.uint8), factor)
            hashes = made._hashes(table)
            if len(set(hashes.tolist())) == table.size:
                made.positions[hashes] = np.arange(table.size)
                return made
        return None

    def find(self, words: np.ndarray, into: np.ndarray) -> None:
        """Gives each word a position; of one that is not in the table any."""
        np.take(self.positions, self._hashes(words), out=into, mode="clip")

    def _hashes(self, words: np.ndarray) -> np.ndarray:
        unused = 8 * words.itemsize - _HASH_BITS
        if unused <= 0:
            return words
        return (words * words.dtype.type(self.factor)) >> words.dtype.type(unused)


def packed(indices: np.ndarray, bits: int) -> np.ndarray:
    """Positions of some bits each, side by side in bytes, the first lowest."""
    if bits == 8:
        return indices
    if not bits:
        return indices[:0]
    per_byte = 8 // bits
    rows = np.zeros(-(-indices.size // per_byte) * per_byte, np.uint8)
    rows[: indices.size] = indices
    rows = rows.reshape(-1, per_byte)
    packed = np.zeros(len(rows), np.uint8)
    for column in range(per_byte):
        packed |= rows[:, column] << np.uint8(column * bits)
    return packed


def unpacked(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Undoes :func:`packed`: that many positions."""
    if bits == 8:
        return data
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    indices = data[:, None] >> shifts & np.uint8((1 << bits) - 1)
    return indices.reshape(-1)[:count]
