"""Bytes that compress: planes of elements, and of differences from the parent step.

The bits of elements are taken as unsigned words of the element's width and turned into *planes*:
first the lowest byte of every word, then the next. The planes are compressed when they are stored
(:mod:`~adacheck_jax.store.packs`), as far as that pays.

*Elements by themselves*: the words are rotated by one bit first, so that a floating-point number's
sign comes last and its exponent fills the highest plane. Exponents of gradients are few; mantissas
and signs are noise, and are stored as they are (ZipNN: Hershcovitch et al., 2024).

*Bit-pattern differences*: a leaf as the integer difference from the parent step, whatever changed
it. ``XOR`` is zero where bits agree. ``SUBTRACT`` is the difference modulo the word's size, folded
so that small steps down look like small steps up (zigzag, as in Protocol Buffers' sint encoding):
floating-point numbers that move by an ulp or two then leave all but the lowest bits zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.format.encodings.form import BlockEncoding, Candidate, Choice, Encoding, Parts

SMALL_BYTES = 1024
"""Leaves of up to so many bytes are stored as they are."""
_BLOCK_WORDS = 1 << 14
"""Words that are split at a time: they stay in a core's cache."""
_SAMPLE_RUNS, _RUN_WORDS = 8, 2048
_WORTHWHILE = 0.95
"""Largest expected part of their bytes at which planes are compressed."""


def word_bytes(dtype: np.dtype) -> int:
    """Bytes of the words that elements consist of; a complex number consists of two."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def words_of(array: np.ndarray) -> np.ndarray:
    """Unsigned words of an array, one-dimensional; a view if it is contiguous."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{word_bytes(array.dtype)}"))


@dataclass(frozen=True, slots=True)
class _Planes(BlockEncoding):
    """Planes of the words of a block.

    Attributes:
        letter: its letter.
        compresses_all: True if all planes are compressed, False for the highest alone.
    """

    letter: Encoding
    compresses_all: bool = True
    needs_old: bool = False
    lasts: bool = False

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        compressed = word_bytes if self.compresses_all else 1
        compressed_bytes = whole_bytes // word_bytes * compressed
        return Parts(whole_bytes - compressed_bytes, compressed_bytes, word_bytes, compressed)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        words = words_of(new)
        before = words if old is None else words_of(old)
        width, signed = words.itemsize, np.dtype(f"i{words.itemsize}")
        rows = [row for each in (low, high) if words.size for row in each.reshape(-1, words.size)]
        for first in range(0, words.size, _BLOCK_WORDS):
            block = slice(first, first + _BLOCK_WORDS)
            stored = words[block]
            if self is XOR:
                stored = stored ^ before[block]
            elif self is SUBTRACT:
                step = stored - before[block]
                stored = (step << 1) ^ (step.view(signed) >> (8 * width - 1)).view(words.dtype)
            else:
                stored = (stored << 1) | (stored >> (8 * width - 1))
            table = stored.view(np.uint8).reshape(-1, width)
            for plane, into in enumerate(rows):
                into[block] = table[:, plane]

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        words = block.reshape(-1).view(np.dtype(f"u{word_bytes(block.dtype)}"))
        width = words.itemsize
        table = np.empty((_BLOCK_WORDS, width), np.uint8)
        for first in range(0, words.size, _BLOCK_WORDS):
            into = words[first : first + _BLOCK_WORDS]
            for plane, source in enumerate((*low, *high)):
                table[: into.size, plane] = source[first : first + into.size]
            stored = table[: into.size].reshape(-1).view(words.dtype)
            if self is XOR:
                into ^= stored
            elif self is SUBTRACT:
                into += (stored >> 1) ^ -(stored & 1)
            else:
                into[:] = (stored >> 1) | (stored << (8 * width - 1))


EXPONENTS = _Planes(Encoding.EXPONENTS, compresses_all=False, lasts=True)
PLANES = _Planes(Encoding.PLANES)  # it does not last: zeros may be those of one step alone
XOR = _Planes(Encoding.XOR, needs_old=True)
SUBTRACT = _Planes(Encoding.SUBTRACT, needs_old=True)
ENCODINGS = (EXPONENTS, PLANES, XOR, SUBTRACT)


def chosen(candidate: Candidate) -> Choice | None:
    """The encoding with the smallest estimate, from a sample of the largest block that is stored.

    None where planes do not pay. Differences are compressed always: they exist for nothing else.
    """
    if candidate.previous is not None:
        letter = _best_difference([(candidate.blocks[k], x) for k, x in candidate.previous.items()])
    elif not candidate.compresses:
        return None
    elif (last := candidate.last) is Encoding.RAW or last is Encoding.EXPONENTS:
        letter = last  # of another module's it would have no codes
    else:
        block = max(candidate.blocks.values(), key=lambda block: block.size)
        small = block.nbytes <= SMALL_BYTES
        letter = Encoding.RAW if small else _best_whole(_sample(words_of(block)))[0]
    return None if letter is Encoding.RAW else (letter, {})


def _best_difference(changed: Sequence[tuple[np.ndarray, np.ndarray]]) -> Encoding:
    if sum(new.nbytes for new, _ in changed) <= SMALL_BYTES:
        return Encoding.RAW
    largest = max(changed, key=lambda pair: pair[0].size)
    new, old = (_sample(words_of(each)) for each in largest)
    bits = {each: sum(_entropies(_planes(each, new, old))) for each in (XOR, SUBTRACT)}
    best = min(bits, key=lambda each: bits[each])
    whole, whole_bits = _best_whole(new)
    return best.letter if bits[best] < _WORTHWHILE * whole_bits else whole


def _best_whole(words: np.ndarray) -> tuple[Encoding, float]:
    """The best encoding without a difference, and its estimated bits a word."""
    *rest, highest = _entropies(_planes(PLANES, words))
    if rest and sum(rest) < 8 * _WORTHWHILE * len(rest):
        return Encoding.PLANES, sum(rest) + highest
    if highest < 8 * _WORTHWHILE:
        return Encoding.EXPONENTS, 8 * len(rest) + highest
    return Encoding.RAW, 8 * words.itemsize


def _planes(encoding: _Planes, new: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
    planes = np.empty((new.itemsize, new.size), np.uint8)
    encoding.encode(new, old, planes, planes[:0])
    return planes


def _sample(words: np.ndarray) -> np.ndarray:
    """Runs of words, evenly spread."""
    if words.size <= _SAMPLE_RUNS * _RUN_WORDS:
        return words
    starts = np.linspace(0, words.size - _RUN_WORDS, _SAMPLE_RUNS).astype(int)
    return np.concatenate([words[start : start + _RUN_WORDS] for start in starts])


def _entropies(planes: np.ndarray) -> list[float]:
    """Bits a byte that an order-0 coder would need, one figure a plane."""
    entropies = []
    for plane in planes:
        counts = np.bincount(plane, minlength=256)
        shares = counts[counts > 0] / plane.size
        entropies.append(-float((shares * np.log2(shares)).sum()))
    return entropies
