"""Bytes that compress: planes of elements, and of differences from the parent step.

The bits of elements are taken as unsigned words of the element's width and turned into *planes*:
first the lowest byte of every word, then the next. The planes are compressed when they are stored
(:mod:`~adacheck_jax.store.packs`), as far as that pays.

*Elements by themselves*: the words are rotated by one bit first, so that a floating-point number's
sign comes last and its exponent fills the highest plane. Exponents of gradients are few; mantissas
and signs are noise, and are stored as they are (ZipNN: Hershcovitch et al., 2024).

*Bit-pattern differences*: a leaf as the integer difference from the parent step, whatever changed
it. ``XOR`` is zero where bits agree. ``SUBTRACT`` is the difference
modulo the word's size, folded so that small steps down look like small steps up (zigzag, as in
Protocol Buffers' sint encoding): floating-point numbers that move by an ulp or two then leave
everything but the lowest bits zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adacheck_jax.format.manifest import Encoding

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


def choose_whole(blocks: Iterable[np.ndarray]) -> Encoding:
    """Chooses an encoding without a difference for blocks of one leaf, from a sample."""
    block = max(blocks, key=lambda block: block.size)
    if block.nbytes <= SMALL_BYTES:
        return Encoding.RAW
    return _best_whole(_sample(words_of(block)))[0]


def choose_difference(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Encoding:
    """Chooses an encoding for blocks of one leaf whose old elements are known, from a sample.

    Returns:
        ``SAME`` if no bit changed in any block, else the encoding with the smallest estimate.
    """
    words = [(words_of(new), words_of(old)) for new, old in pairs if new is not old]
    changed = [(new, old) for new, old in words if not np.array_equal(new, old)]
    if not changed:
        return Encoding.SAME
    new, old = max(changed, key=lambda pair: pair[0].size)
    if sum(each.nbytes for each, _ in changed) <= SMALL_BYTES:
        return Encoding.RAW
    new, old = _sample(new), _sample(old)
    bits = {each: sum(_entropies(_planes(each, new, old))) for each in _DIFFERENCES}
    best = min(bits, key=lambda each: bits[each])
    whole, whole_bits = _best_whole(new)
    return best if bits[best] < _WORTHWHILE * whole_bits else whole


_DIFFERENCES = (Encoding.XOR, Encoding.SUBTRACT)


def _best_whole(words: np.ndarray) -> tuple[Encoding, float]:
    """The best encoding without a difference, and its estimated bits a word."""
    *rest, highest = _entropies(_planes(Encoding.PLANES, words))
    if rest and sum(rest) < 8 * _WORTHWHILE * len(rest):
        return Encoding.PLANES, sum(rest) + highest
    if highest < 8 * _WORTHWHILE:
        return Encoding.EXPONENTS, 8 * len(rest) + highest
    return Encoding.RAW, 8 * words.itemsize


def encode(
    encoding: Encoding,
    new: np.ndarray,
    old: np.ndarray | None,
    low: np.ndarray,
    high: np.ndarray,
) -> None:
    """Turns elements into planes.

    Args:
        encoding: any but ``RAW``, ``CODED`` and ``SAME``.
        new: the elements.
        old: elements of the parent step, for a difference; else None.
        low: memory for the first planes, uint8 of shape (planes, words).
        high: memory for the other planes.
    """
    words = words_of(new)
    before = words if old is None else words_of(old)
    width, signed = words.itemsize, np.dtype(f"i{words.itemsize}")
    for first in range(0, words.size, _BLOCK_WORDS):
        block = slice(first, first + _BLOCK_WORDS)
        stored = words[block]
        if encoding is Encoding.XOR:
            stored = stored ^ before[block]
        elif encoding is Encoding.SUBTRACT:
            step = stored - before[block]
            stored = (step << 1) ^ (step.view(signed) >> (8 * width - 1)).view(words.dtype)
        else:
            stored = (stored << 1) | (stored >> (8 * width - 1))
        table = stored.view(np.uint8).reshape(-1, width)
        for plane, into in enumerate((*low, *high)):
            into[block] = table[:, plane]


def decode(encoding: Encoding, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    """Turns old elements into new ones, in place.

    Args:
        encoding: any but ``RAW``, ``CODED`` and ``SAME``.
        block: contiguous, writable elements; a difference needs the old ones in it.
        low: the first planes, as :func:`encode` gave them.
        high: the other planes.
    """
    words = block.reshape(-1).view(np.dtype(f"u{word_bytes(block.dtype)}"))
    width = words.itemsize
    table = np.empty((_BLOCK_WORDS, width), np.uint8)
    for first in range(0, words.size, _BLOCK_WORDS):
        into = words[first : first + _BLOCK_WORDS]
        for plane, source in enumerate((*low, *high)):
            table[: into.size, plane] = source[first : first + into.size]
        stored = table[: into.size].reshape(-1).view(words.dtype)
        if encoding is Encoding.XOR:
            into ^= stored
        elif encoding is Encoding.SUBTRACT:
            into += (stored >> 1) ^ -(stored & 1)
        else:
            into[:] = (stored >> 1) | (stored << (8 * width - 1))


def _planes(encoding: Encoding, new: np.ndarray, old: np.ndarray | None = None) -> np.ndarray:
    planes = np.empty((new.itemsize, new.size), np.uint8)
    encode(encoding, new, old, planes, planes[:0])
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
