"""Fingerprints of host memory, compiled by numba.

The loops release Python's lock, take no memory to speak of, and read each byte once. Importing this
module imports numba, which takes most of a second: :mod:`~adacheck_jax.format.byte_loops` does so
in a background thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

# Numba colours its error messages where colorama is installed. For each, also for those that it
# only keeps, colorama swaps sys.stdout and sys.stderr: here in a background thread, while the
# program may have put streams of its own there, which would be closed.
os.environ.setdefault("NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING", "1")

import numba
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from adacheck_jax.format.fingerprint import RUN

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_MIN_COLUMNS = 64

carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]
_inlined: Any = numba.njit(**_OPTIONS)


def _kept(function: Callable[..., Any]) -> Any:
    """A function whose compiled code is kept on disk, where there is a directory for it."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:  # no such directory
        return _inlined(function)


@intrinsic
def _address(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


at: Any = _address  # called from compiled code, which passes no typing context


@_inlined
def _factor(position: Any, axis: Any, level: Any) -> Any:
    seed = np.uint64(2) * np.uint64(axis) + np.uint64(level) + np.uint64(1)
    z = np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    z = z + seed * np.uint64(0xD1342543DE82EF95)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@_inlined
def _weight_of(number: Any, first: Any, stop: Any, shape: Any, starts: Any) -> Any:
    """Product of the weights along some axes, for a place numbered in row-major order."""
    weight = np.uint64(1)
    for axis in range(stop - 1, first - 1, -1):
        place = starts[axis] + number % shape[axis]
        weight *= _factor(place % RUN, axis, 0) * _factor(place // RUN, axis, 1)
        number //= shape[axis]
    return weight


@_inlined
def _factors_within_run(axis: Any, width: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Factors of the places of one run along an axis, times the weights of the axes after it."""
    first, length = starts[axis] % RUN, shape[axis]
    places = range(0, RUN)
    if first + length <= RUN:  # a short axis does not meet all of them
        places = range(first, first + length)
    factors = np.empty(RUN * width, np.uint64)
    for place in places:
        for rest in range(width):
            of_rest = _weight_of(rest, axis + 1, rank, shape, starts)
            factors[place * width + rest] = _factor(place, axis, 0) * of_rest
    return factors


@_inlined
def _multilinear(words: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Partial sum of flat words that have ``rank`` axes."""
    if rank == 0:
        return np.uint64(words[0])
    # Rows of at least some length: short last axes are taken together with the one before.
    axis, width = rank - 1, np.int64(1)
    while axis > 0 and shape[axis] * width < _MIN_COLUMNS:
        width *= shape[axis]
        axis -= 1
    run_length = RUN * width
    length, start = shape[axis] * width, starts[axis] * width
    within = _factors_within_run(axis, width, shape, starts, rank)
    total = np.uint64(0)
    for row in range(words.size // length):
        of_row = np.uint64(0)
        first = np.int64(0)
        while first < length:
            run, offset = (start + first) // run_length, (start + first) % run_length
            count = min(run_length - offset, length - first)
            stretch = words[row * length + first : row * length + first + count]
            factors = within[offset : offset + count]
            of_run = np.uint64(0)
            for k in range(count):
                of_run += factors[k] * np.uint64(stretch[k])
            of_row += _factor(run, axis, 1) * of_run
            first += count
        total += _weight_of(row, 0, axis, shape, starts) * of_row
    return total


@_kept
def sum_at(address: Any, word_bytes: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Partial sum of the words at an address; 0 if there are none.

    Args:
        address: address of the first word.
        word_bytes: 1, 2 or 4.
        shape: lengths of the axes, int64 of length ``rank`` or more.
        starts: position of the first word along each axis, int64 of length ``rank`` or more.
        rank: number of axes.
    """
    size = np.int64(1)
    for axis in range(rank):
        size *= shape[axis]
    if size == 0:
        return np.uint64(0)
    if word_bytes == 4:
        return _multilinear(carray(at(address), (size,), np.uint32), shape, starts, rank)
    if word_bytes == 2:
        return _multilinear(carray(at(address), (size,), np.uint16), shape, starts, rank)
    return _multilinear(carray(at(address), (size,), np.uint8), shape, starts, rank)


@_kept
def _sums(table: Any, sums: Any) -> None:
    axes = (table.shape[1] - 3) // 2
    for i in range(table.shape[0]):
        shape, starts = table[i, 3 : 3 + axes], table[i, 3 + axes :]
        sums[i] = sum_at(np.uintp(table[i, 0]), table[i, 1], shape, starts, table[i, 2])


def sums() -> Callable[[np.ndarray, np.ndarray], None]:
    """Compiles the sums of many blocks of words, or loads them from disk.

    The function takes a table, int64 of shape (blocks, 3 + 2 * axes), and memory for the sums,
    uint64. A row holds the address of a block's first word, the bytes of a word, the number of axes
    in use, their lengths, and the position of the first word along each.
    """
    # Calls have exactly these types: others would be compiled then and there.
    _sums.compile((types.int64[:, ::1], types.uint64[::1]))
    return _sums
