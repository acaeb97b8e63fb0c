"""Fingerprints: the definition, in plain numpy.

The fingerprint of an array is a multilinear hash modulo 2**64 of its elements' bit patterns:

    F = sum over all indices (i, j, ...) of  W0[i] * W1[j] * ... * bits[i, j, ...]

with odd 64-bit weights, one vector an axis. A sum does not depend on how the array is cut into
shards: fingerprints taken on different meshes can be compared, and partial sums of shards add up.
Elements wider than 32 bits count as several 32-bit words along a further axis. A weight is the
product of a factor for the position within a run of 1024 and a factor for the run, so that long
axes need short tables. Because a word has 32 bits and the modulus 64, changed low bits are missed
with a probability of about 2**-64 and the worst pattern, a box of flipped sign bits, with about
2**-20; a modulus of 2**32 would miss every even number of flipped sign bits. The weights are fixed
by the format: fingerprints guard against accidents, not against an adversary.

Faster sums with the same values: :mod:`~adacheck_jax.format.byte_loops` for host memory,
:mod:`~adacheck_jax.device.fingerprint` for arrays on devices.

Reference: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014 (multilinear
hashing); the weights come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

RUN = 1024
"""Positions along an axis whose weights share the factor of their run."""
_MASK = 2**64 - 1
_BLOCK_WORDS = 1 << 16
"""Words that are widened to 64 bits at a time: a block stays in a core's cache."""


def factor(positions: Any, axis: int, level: int) -> Any:
    """Odd 64-bit factors of positions along an axis: SplitMix64.

    Args:
        positions: uint64 array, of numpy or of JAX.
        axis: index of the axis.
        level: 0 for a position within a run, 1 for the number of a run.
    """
    u64 = np.uint64
    z = positions * u64(0x9E3779B97F4A7C15)
    z = z + u64((2 * axis + level + 1) * 0xD1342543DE82EF95 & _MASK)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return (z ^ (z >> u64(31))) | u64(1)


def weights(positions: Any, axis: int) -> Any:
    """Weights of positions along an axis."""
    run = np.uint64(RUN)
    return factor(positions % run, axis, 0) * factor(positions // run, axis, 1)


def _weights_along(start: int, length: int, axis: int) -> np.ndarray:
    """The weights of adjoining positions, from one table of a run."""
    first, last = start // RUN, (start + length - 1) // RUN
    runs = factor(np.arange(first, last + 1, dtype=np.uint64), axis, 1)
    table = (runs[:, None] * factor(np.arange(RUN, dtype=np.uint64), axis, 0)).reshape(-1)
    return table[start - first * RUN :][:length]


_remembered_weights = functools.lru_cache(maxsize=32)(_weights_along)
"""The same for short axes, which many arrays share."""


def words_of(array: np.ndarray) -> np.ndarray:
    """View of an array's bits as unsigned words of at most 32 bits.

    Args:
        array: elements of any type that JAX has.

    Returns:
        An array of uint8, uint16 or uint32; one axis longer where elements are wider than 32 bits.
    """
    dtype = array.dtype
    if dtype == np.bool_:
        return array.view(np.uint8)
    if dtype.kind == "V" and "int" in dtype.name:  # int4, uint4, ...: one sign-extended byte each
        return array.astype(np.int8 if dtype.name.startswith("int") else np.uint8).view(np.uint8)
    if dtype.itemsize <= 4:
        return array.view(np.dtype(f"u{dtype.itemsize}"))
    words = np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint32)
    return words.reshape(*array.shape, dtype.itemsize // 4)


def multilinear(words: np.ndarray, starts: Sequence[int]) -> int:
    """Partial sum modulo 2**64 of a block of words.

    Args:
        words: uint8, uint16 or uint32, contiguous.
        starts: position of the first word along each axis; what follows them is not looked at.
    """
    if words.ndim == 0 or words.size == 0:
        return int(words.sum())
    *outer, last = (
        (_remembered_weights if length <= _BLOCK_WORDS else _weights_along)(start, length, axis)
        for axis, (start, length) in enumerate(zip(starts, words.shape, strict=False))
    )
    rows = words.reshape(-1, last.size)
    sums = np.zeros(len(rows), np.uint64)
    width = min(last.size, _BLOCK_WORDS)
    height = _BLOCK_WORDS // width
    for row in range(0, len(rows), height):
        for column in range(0, last.size, width):
            block = rows[row : row + height, column : column + width].astype(np.uint64)
            sums[row : row + height] += block @ last[column : column + width]
    for of_axis in reversed(outer):
        sums = sums.reshape(-1, of_axis.size) @ of_axis
    return int(sums.item())


def combine(sums: Sequence[int]) -> int:
    """Sum modulo 2**64 of partial sums: of boxes that tile a leaf, the leaf's fingerprint."""
    return sum(sums) & _MASK


def from_words(words: Any) -> list[int]:
    """Sums as Python integers.

    Args:
        words: uint32 of shape (sums, 2): the low and the high half of each sum.
    """
    return np.ascontiguousarray(words, "<u4").view("<u8").reshape(-1).tolist()


def to_words(sums: Sequence[int]) -> np.ndarray:
    """Halves of sums: uint32 of shape (sums, 2), the low half first."""
    return np.array(sums, "<u8").reshape(-1, 1).view("<u4")
