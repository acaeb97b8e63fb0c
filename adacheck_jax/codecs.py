"""Bit-pattern differences: a leaf as the integer difference from the step before it.

Works for any leaf with no knowledge of what changed it. The bits of both values are taken as
unsigned words of the element's width; the difference is turned into *planes*, first the lowest byte
of every word, then the next, so that the bytes that rarely change lie together. The planes are
compressed when they are stored (zstd, :mod:`~adacheck_jax.arrays`).

Two differences are known. ``XOR`` is zero where bits agree. ``SUBTRACT`` is the difference modulo
the word's size, folded so that small steps down look like small steps up (zigzag, as in Protocol
Buffers' sint encoding): floating-point numbers that move by an ulp or two then leave everything but
the lowest bits zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from adacheck_jax.manifest import Encoding

_SMALL_BYTES = 1024
"""Below this a difference costs more to describe than it saves."""
_SAMPLE_RUNS, _RUN_WORDS = 8, 2048
_WORTHWHILE = 0.95
"""A difference is chosen where it is expected to take less than this part of the bytes."""


def word_bytes(dtype: np.dtype) -> int:
    """Width of the words that elements of a type are differenced in: complex numbers have two."""
    return dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize


def _words(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"u{word_bytes(array.dtype)}"))


def choose(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Encoding:
    """Chooses how to store some blocks of one leaf: as the smallest of what a sample promises.

    Args:
        pairs: new and old elements of each block; equal shapes and one data type.

    Returns:
        ``SAME`` if no bit changed in any block.
    """
    changed = [(a, b) for new, old in pairs if not _equal(a := _words(new), b := _words(old))]
    if not changed:
        return Encoding.SAME
    new, old = max(changed, key=lambda pair: pair[0].size)
    if sum(a.nbytes for a, _ in changed) <= _SMALL_BYTES:
        return Encoding.RAW
    new, old = _sample(new), _sample(old)
    bits = {each: _entropy(_difference(each, new, old)) for each in _DIFFERENCES}
    best = min(bits, key=lambda each: bits[each])
    return best if bits[best] < 8 * _WORTHWHILE else Encoding.RAW


_DIFFERENCES = (Encoding.XOR, Encoding.SUBTRACT)


def encode(encoding: Encoding, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """The planes of a difference: uint8 of shape (word bytes, words)."""
    return _planes(_difference(encoding, _words(new), _words(old)))


def apply(encoding: Encoding, block: np.ndarray, planes: np.ndarray) -> None:
    """Turns old elements into new ones, in place.

    Args:
        encoding: how the difference was taken.
        block: a contiguous array that can be written.
        planes: of the same elements, as :func:`encode` gave them.
    """
    words = block.reshape(-1).view(np.dtype(f"u{word_bytes(block.dtype)}"))
    difference = np.ascontiguousarray(planes.T).reshape(-1).view(words.dtype)
    if encoding is Encoding.XOR:
        words ^= difference
    else:
        words += (difference >> 1) ^ -(difference & 1)


def _difference(encoding: Encoding, new: np.ndarray, old: np.ndarray) -> np.ndarray:
    if encoding is Encoding.XOR:
        return new ^ old
    step = (new - old).view(np.dtype(f"i{new.itemsize}"))
    return ((step << 1) ^ (step >> (8 * step.itemsize - 1))).view(new.dtype)


def _planes(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, words.itemsize).T)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(a, b))


def _sample(words: np.ndarray) -> np.ndarray:
    """Some runs of words, evenly spread."""
    if words.size <= _SAMPLE_RUNS * _RUN_WORDS:
        return words
    starts = np.linspace(0, words.size - _RUN_WORDS, _SAMPLE_RUNS).astype(int)
    return np.concatenate([words[start : start + _RUN_WORDS] for start in starts])


def _entropy(words: np.ndarray) -> float:
    """Bits a byte that an order-0 coder would need for the planes."""
    bits = 0.0
    for plane in _planes(words):
        counts = np.bincount(plane, minlength=256)
        shares = counts[counts > 0] / plane.size
        bits -= float((shares * np.log2(shares)).sum())
    return bits / words.itemsize
