"""Codes for records of compressed gradients: mostly zeros, or few distinct values.

A code is found in the bits alone, and gives back every one of them. It takes the bits of a block as
unsigned words, as :mod:`~adacheck_jax.format.encodings.planes` does, and begins with a byte for its
kind:

*sparse*: for words most of which are zero, the set of the places of the others
(:mod:`~adacheck_jax.format.encodings.sets`) and then a code of these words.

*palette*: for words of at most 256 distinct values, whatever their scale, a table of these values
and for each word its position in the table, in 0, 1, 2, 4 or 8 bits.

*plain*: planes of the rotated words.

Codes come from files: :func:`decode` refuses any that :func:`encode` cannot have made in such a way
that a read could go past its memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from adacheck_jax.format.encodings import planes, sets
from adacheck_jax.format.encodings.form import Candidate, Choice, Code, Encoding, OwnSize
from adacheck_jax.format.encodings.sets import Reader

_PLAIN, _SPARSE, _PALETTE = range(3)
_MAX_VALUES = 256
_RUNS, _RUN_WORDS = 64, 8
_BLOCK_WORDS = 1 << 15
"""Words that are looked up at once: they stay in a core's cache."""
_HASH_BITS = 16
_MAX_TRIES = 64
_GOLDEN = 0x9E3779B97F4A7C15
_SAMPLED = 8192
_MIN_ZEROS = 0.25
_WORTHWHILE = 0.9
"""Largest part of their bytes at which words are coded."""


class _Coded(OwnSize):
    """A code of mostly zero or few distinct elements."""

    letter = Encoding.CODED

    def code(self, block: np.ndarray) -> Code:
        return encode(block)

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        decode(np.concatenate([low.reshape(-1), high.reshape(-1)]), block)


ENCODINGS = (_Coded(),)


def chosen(candidate: Candidate) -> Choice | None:
    """Codes of all boxes, if no difference can be taken and they pay."""
    blocks = candidate.blocks
    largest = max(blocks.values(), key=lambda block: block.size)
    if candidate.previous is not None or not may_pay(largest):
        return None
    made = {box: encode(block) for box, block in blocks.items()}
    return (Encoding.CODED, made) if pay(made.values(), blocks.values()) else None


def may_pay(block: np.ndarray) -> bool:
    """True if a code may be shorter than a block, by a look at a few elements."""
    if block.nbytes <= planes.SMALL_BYTES:
        return False
    if block.flags.c_contiguous:
        words = _looked_at(planes.words_of(block))
    else:
        places = _looks(block.size) if block.size > _RUNS * _RUN_WORDS else np.arange(block.size)
        words = planes.words_of(block[np.unravel_index(places, block.shape)])
    return _has_zeros(words) or _has_few_values(words)


def encode(block: np.ndarray) -> Code:
    """The shortest code of a block, found in its bits."""
    words = planes.words_of(block)
    return _sparse(words) or _palette(words) or _plain(words)


def pay(codes: Iterable[Code], blocks: Iterable[np.ndarray]) -> bool:
    """True if codes are shorter than their blocks without rows of zeros, which take no bytes."""
    whole_bytes = sum(_bytes_without_zeros(planes.words_of(block)) for block in blocks)
    return sum(code.body.size + code.rest.size for code in codes) < _WORTHWHILE * whole_bytes


def decode(stream: np.ndarray, block: np.ndarray) -> None:
    """Fills a block with the elements that a code stands for.

    Raises:
        ValueError: the bytes are no code of as many elements.
    """
    reader = Reader(np.ascontiguousarray(stream))
    _decode(reader, block.reshape(-1).view(np.dtype(f"u{planes.word_bytes(block.dtype)}")))
    reader.end()


def _looked_at(words: np.ndarray) -> np.ndarray:
    """A few runs of words, spread evenly; each takes a look at memory that is far away."""
    return words if words.size <= _RUNS * _RUN_WORDS else words.take(_looks(words.size))


@functools.lru_cache(1024)  # a save looks at as many leaves, and the next one at the same
def _looks(size: int) -> np.ndarray:
    starts = np.linspace(0, size - _RUN_WORDS, _RUNS).astype(np.int64)
    return (starts[:, None] + np.arange(_RUN_WORDS)).reshape(-1)


def _has_few_values(words: np.ndarray) -> bool:
    ordered = np.sort(words)
    count = 1 + np.count_nonzero(ordered[1:] != ordered[:-1])
    return bool(count <= _most_values(words))


def _has_zeros(words: np.ndarray) -> bool:
    return bool(words.size - np.count_nonzero(words) >= _MIN_ZEROS * max(1, words.size))


def _most_values(words: np.ndarray) -> int:
    """Largest number of distinct words of which positions take fewer bits than the words."""
    return _MAX_VALUES if words.itemsize > 1 else 16


def _bytes_without_zeros(words: np.ndarray) -> int:
    row = planes.SMALL_BYTES // words.itemsize
    whole = words.size // row * row
    rows = int(np.count_nonzero(words[:whole].reshape(-1, row).any(axis=1)))
    return rows * planes.SMALL_BYTES + (words.size - whole) * words.itemsize


def _bytes(*parts: bytes | np.ndarray) -> np.ndarray:
    arrays = [np.frombuffer(x, np.uint8) if isinstance(x, bytes) else x for x in parts]
    return np.concatenate([x.reshape(-1).view(np.uint8) for x in arrays])


# Plain.


def _plain(words: np.ndarray) -> Code:
    low = np.empty((words.itemsize - 1, words.size), np.uint8)
    high = np.empty((1, words.size), np.uint8)
    planes.PLANES.encode(words, None, low, high)
    return Code(_bytes(bytes([_PLAIN]), low), high[0])


# Sparse.


def _sparse(words: np.ndarray) -> Code | None:
    if not _has_zeros(words):
        return None
    mask = words != 0
    values = words[mask]
    inner = _palette(values) or _plain(values)
    return Code(_bytes(bytes([_SPARSE]), sets.encode(mask), inner.body), inner.rest)


def _decode_sparse(reader: Reader, words: np.ndarray) -> None:
    places = sets.decode(reader, words.size)
    values = np.empty(places.size, words.dtype)
    _decode(reader, values, is_inner=True)
    words[:] = 0
    words[places] = values


# Palette.


def _palette(words: np.ndarray) -> Code | None:
    """A palette code; None if it would not be shorter than the words."""
    if not words.size or not _has_few_values(_looked_at(words)):
        return None
    found = _indexed(words, np.unique(words[:: words.size // _SAMPLED | 1]), _most_values(words))
    if found is None:
        return None
    table, indices = found
    packed = _packed(indices, _index_bits(table.size))
    if 2 + table.nbytes + packed.size >= _WORTHWHILE * words.nbytes:
        return None
    return Code(_bytes(bytes([_PALETTE, table.size - 1]), table), packed)


def _decode_palette(reader: Reader, words: np.ndarray) -> None:
    count = int(reader.take(1)[0]) + 1
    table = reader.take(count * words.itemsize).copy().view(words.dtype)
    bits = _index_bits(count)
    packed = reader.take(-(-words.size * bits // 8))
    if not bits:
        words[:] = table[0]
        return
    per_byte, shifts = 8 // bits, np.arange(0, 8, bits, dtype=np.uint8)
    for first in range(0, words.size, _BLOCK_WORDS):
        into = words[first : first + _BLOCK_WORDS]
        part = packed[first // per_byte :][: -(-into.size // per_byte)]
        indices = (part[:, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(-1)[: into.size]
        if int(indices.max()) >= count:
            raise ValueError(f"a position outside a table of {count} values")
        np.take(table, indices, out=into, mode="clip")


def _index_bits(count: int) -> int:
    """Bits of a position in a table: 0, 1, 2, 4 or 8."""
    least = (count - 1).bit_length()
    return 1 << math.ceil(math.log2(least)) if least else 0


def _indexed(
    words: np.ndarray, table: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """All values of some words, and the position of each; None if they are more than ``most``.

    The table has some of the values already.
    """
    indices = np.empty(words.size, np.uint8)
    lookup = _lookup(table)
    for first in range(0, words.size, _BLOCK_WORDS):
        part, into = words[first : first + _BLOCK_WORDS], indices[first : first + _BLOCK_WORDS]
        while True:
            if lookup is None or table.size > most:
                return None
            positions, factor = lookup
            np.take(positions, _hashes(part, factor), out=into, mode="clip")
            wrong = table[into] != part
            if not wrong.any():
                break
            table = np.concatenate([table, np.unique(part[wrong])])
            lookup = _lookup(table)
    return table, indices


def _lookup(table: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Position in a table for each hash, and the factor of a hash under which no values collide."""
    for attempt in range(_MAX_TRIES if table.size <= _MAX_VALUES else 0):
        factor = (_GOLDEN * (2 * attempt + 1)) % (1 << 8 * table.itemsize) | 1
        hashes = _hashes(table, factor)
        if len(set(hashes.tolist())) == table.size:
            positions = np.zeros(1 << _HASH_BITS, np.uint8)
            positions[hashes] = np.arange(table.size)
            return positions, factor
    return None


def _hashes(words: np.ndarray, factor: int) -> np.ndarray:
    unused = 8 * words.itemsize - _HASH_BITS
    if unused <= 0:
        return words
    return (words * words.dtype.type(factor)) >> words.dtype.type(unused)


def _packed(indices: np.ndarray, bits: int) -> np.ndarray:
    """Positions of some bits each, side by side in bytes, the first lowest."""
    if bits in (0, 8):
        return indices if bits else indices[:0]
    per_byte = 8 // bits
    rows = np.zeros((-(-indices.size // per_byte), per_byte), np.uint8)
    rows.reshape(-1)[: indices.size] = indices
    packed = np.zeros(len(rows), np.uint8)
    for column in range(per_byte):
        packed |= rows[:, column] << np.uint8(column * bits)
    return packed


def _decode(reader: Reader, words: np.ndarray, *, is_inner: bool = False) -> None:
    kind = int(reader.take(1)[0])
    if kind == _PLAIN:
        split = reader.take(words.itemsize * words.size).reshape(words.itemsize, words.size)
        planes.PLANES.decode(words, split[:-1], split[-1:])
    elif kind == _PALETTE:
        _decode_palette(reader, words)
    elif kind == _SPARSE and not is_inner:  # nested codes would take a stack
        _decode_sparse(reader, words)
    else:
        raise ValueError(f"a code of the unknown kind {kind}")
