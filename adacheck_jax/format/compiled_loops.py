"""Loops over every byte of host memory, compiled by numba.

They release Python's lock, take no memory to speak of, and read each byte once. Importing this
module imports numba, which takes most of a second: :mod:`~adacheck_jax.format.byte_loops` does so
in a background thread, and tells what each loop computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from adacheck_jax.format.fingerprint import RUN

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
_MIN_COLUMNS = 64
_STREAMS = 4

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
def _weight(position: Any, axis: Any) -> Any:
    return _factor(position % RUN, axis, 0) * _factor(position // RUN, axis, 1)


@_inlined
def _weight_of(number: Any, first: Any, stop: Any, shape: Any, starts: Any) -> Any:
    """Product of the weights along some axes, for a place numbered in row-major order."""
    weight = np.uint64(1)
    for axis in range(stop - 1, first - 1, -1):
        weight *= _weight(starts[axis] + number % shape[axis], axis)
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
def _sum_of_four(words: Any, a: Any, b: Any, c: Any, d: Any, factors: Any, weights: Any) -> Any:
    """Weighted sum of four stretches of words; far apart, they keep the memory busy."""
    count = factors.size
    of_a = of_b = of_c = of_d = np.uint64(0)
    first, second, third, fourth = (
        words[a : a + count],
        words[b : b + count],
        words[c : c + count],
        words[d : d + count],
    )
    for k in range(count):
        factor = factors[k]
        of_a += factor * np.uint64(first[k])
        of_b += factor * np.uint64(second[k])
        of_c += factor * np.uint64(third[k])
        of_d += factor * np.uint64(fourth[k])
    return weights[0] * of_a + weights[1] * of_b + weights[2] * of_c + weights[3] * of_d


@_inlined
def _sum_of_one(words: Any, start: Any, factors: Any) -> Any:
    total = np.uint64(0)
    stretch = words[start : start + factors.size]
    for k in range(factors.size):
        total += factors[k] * np.uint64(stretch[k])
    return total


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
    row_count = np.int64(1)
    for each in range(axis):
        row_count *= shape[each]
    run_length = RUN * width
    length, start = shape[axis] * width, starts[axis] * width
    within = _factors_within_run(axis, width, shape, starts, rank)
    rows = np.empty(row_count, np.uint64)
    for row in range(row_count):
        rows[row] = _weight_of(row, 0, axis, shape, starts)
    total = np.uint64(0)
    weights = np.empty(_STREAMS, np.uint64)
    # Of few long rows four runs at a time, of many rows the same run of four rows.
    first = np.int64(0)
    while first < length:
        run, offset = (start + first) // run_length, (start + first) % run_length
        count = min(run_length - offset, length - first)
        factors = within[offset : offset + count]
        runs_left = (length - first) // run_length
        if row_count < _STREAMS and offset == 0 and runs_left >= _STREAMS:
            step = runs_left // _STREAMS
            for row in range(row_count):
                part = np.uint64(0)
                at = row * length + first
                for i in range(step):
                    for stream in range(_STREAMS):
                        weights[stream] = _factor(run + i + stream * step, axis, 1)
                    a = at + i * run_length
                    far = step * run_length
                    part += _sum_of_four(
                        words, a, a + far, a + 2 * far, a + 3 * far, within, weights
                    )
                total += part * rows[row]
            first += _STREAMS * step * run_length
            continue
        part = np.uint64(0)
        quarter = row_count // _STREAMS
        far = quarter * length
        for i in range(quarter):
            for stream in range(_STREAMS):
                weights[stream] = rows[i + stream * quarter]
            a = i * length + first
            part += _sum_of_four(words, a, a + far, a + 2 * far, a + 3 * far, factors, weights)
        for i in range(_STREAMS * quarter, row_count):
            part += rows[i] * _sum_of_one(words, i * length + first, factors)
        total += _factor(run, axis, 1) * part
        first += count
    return total


@_inlined
def _size(shape: Any, rank: Any) -> Any:
    size = np.int64(1)
    for axis in range(rank):
        size *= shape[axis]
    return size


@_kept
def multilinear_1(address: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Partial sum of words of one byte at an address; 0 if there are no words.

    Args:
        address: address of the first word.
        shape: lengths of the axes, int64 of length ``rank`` or more.
        starts: position of the first word along each axis, int64 of length ``rank`` or more.
        rank: number of axes.
    """
    size = _size(shape, rank)
    if size == 0:
        return np.uint64(0)
    return _multilinear(carray(at(address), (size,), np.uint8), shape, starts, rank)


@_kept
def multilinear_2(address: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Partial sum of words of two bytes, as :func:`multilinear_1`."""
    size = _size(shape, rank)
    if size == 0:
        return np.uint64(0)
    return _multilinear(carray(at(address), (size,), np.uint16), shape, starts, rank)


@_kept
def multilinear_4(address: Any, shape: Any, starts: Any, rank: Any) -> Any:
    """Partial sum of words of four bytes, as :func:`multilinear_1`."""
    size = _size(shape, rank)
    if size == 0:
        return np.uint64(0)
    return _multilinear(carray(at(address), (size,), np.uint32), shape, starts, rank)


@_kept
def _each(table: Any, sums: Any) -> None:
    axes = (table.shape[1] - 3) // 2
    for i in range(table.shape[0]):
        address, word_bytes, rank = np.uintp(table[i, 0]), table[i, 1], table[i, 2]
        shape, starts = table[i, 3 : 3 + axes], table[i, 3 + axes :]
        if word_bytes == 4:
            sums[i] = multilinear_4(address, shape, starts, rank)
        elif word_bytes == 2:
            sums[i] = multilinear_2(address, shape, starts, rank)
        else:
            sums[i] = multilinear_1(address, shape, starts, rank)


def each() -> Callable[[np.ndarray, np.ndarray], None]:
    """Compiles the sums of many blocks of words, or loads them from disk.

    The function takes a table, int64 of shape (blocks, 3 + 2 * axes), and memory for the sums,
    uint64. A row holds the address of a block's first word, the bytes of a word, the number of axes
    in use, their lengths, and the position of the first word along each.
    """
    _each.compile((types.int64[:, ::1], types.uint64[::1]))
    return _each


@_kept
def _split(words: Any, old: Any, way: int, low: Any, high: Any) -> None:
    bits = np.uint64(8 * words.itemsize)
    one = np.uint64(1)
    block = 4096
    for first in range(0, words.size, block):
        count = min(block, words.size - first)
        new = words[first : first + count]
        for plane in range(words.itemsize):
            if plane < low.shape[0]:
                into = low[plane, first : first + count]
            else:
                into = high[plane - low.shape[0], first : first + count]
            shift = np.uint64(8 * plane)
            if way == 0:
                for k in range(count):
                    word = np.uint64(new[k])
                    into[k] = np.uint8(((word << one) | (word >> (bits - one))) >> shift)
            elif way == 1:
                before = old[first : first + count]
                for k in range(count):
                    into[k] = np.uint8(np.uint64(new[k] ^ before[k]) >> shift)
            else:
                before = old[first : first + count]
                for k in range(count):
                    step = (np.uint64(new[k]) - np.uint64(before[k])) << (np.uint64(64) - bits)
                    sign = np.uint64(np.int64(step) >> np.int64(63))
                    step = step >> (np.uint64(64) - bits)
                    into[k] = np.uint8(((step << one) ^ sign) >> shift)


@_kept
def _join(words: Any, way: int, low: Any, high: Any) -> None:
    bits = np.uint64(8 * words.itemsize)
    one = np.uint64(1)
    block = 4096
    stored = np.empty(block, np.uint64)
    for first in range(0, words.size, block):
        count = min(block, words.size - first)
        into = words[first : first + count]
        stored[:] = np.uint64(0)
        for plane in range(words.itemsize):
            if plane < low.shape[0]:
                source = low[plane, first : first + count]
            else:
                source = high[plane - low.shape[0], first : first + count]
            shift = np.uint64(8 * plane)
            for k in range(count):
                stored[k] |= np.uint64(source[k]) << shift
        if way == 0:
            for k in range(count):
                into[k] = (stored[k] >> one) | (stored[k] << (bits - one))
        elif way == 1:
            for k in range(count):
                into[k] = np.uint64(into[k]) ^ stored[k]
        else:
            for k in range(count):
                step = (stored[k] >> one) ^ (np.uint64(0) - (stored[k] & one))
                into[k] = np.uint64(into[k]) + step


_SUMS = {1: multilinear_1, 2: multilinear_2, 4: multilinear_4}


def multilinear(word_bytes: int) -> Callable[[np.ndarray, Sequence[int]], int]:
    """Compiles the sum of words of one width, or loads it from disk."""
    compiled, numbers = _SUMS[word_bytes], types.int64[::1]
    compiled.compile((types.uintp, numbers, numbers, types.int64))

    def multilinear_of(words: np.ndarray, starts: Sequence[int]) -> int:
        shape, first = np.array(words.shape, np.int64), np.array(starts, np.int64)
        # Exactly the types that were compiled for: others would be compiled here and now.
        return int(compiled(np.uintp(words.ctypes.data), shape, first, words.ndim))

    return multilinear_of


def split(word_bytes: int) -> Callable[..., None]:
    """Compiles the splitting of words of one width into planes, or loads it from disk."""
    words, planes = _array(word_bytes, 1), types.Array(types.uint8, 2, "C")
    _split.compile((words, words, types.int64, planes, planes))

    def split_of(
        words: np.ndarray, old: np.ndarray, way: int, low: np.ndarray, high: np.ndarray
    ) -> None:
        _split(_frozen(words), _frozen(old), way, low, high)

    return split_of


def join(word_bytes: int) -> Callable[..., None]:
    """Compiles the joining of planes to words of one width, or loads it from disk."""
    planes = types.Array(types.uint8, 2, "C", readonly=True)
    _join.compile((_array(word_bytes, 1, readonly=False), types.int64, planes, planes))

    def join_of(words: np.ndarray, way: int, low: np.ndarray, high: np.ndarray) -> None:
        _join(words, way, _frozen(low), _frozen(high))

    return join_of


def _array(word_bytes: int, rank: int, *, readonly: bool = True) -> Any:
    word = numba.from_dtype(np.dtype(f"u{word_bytes}"))
    return types.Array(word, rank, "C", readonly=readonly)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: one type of array to compile for, and not two."""
    view = array.view()
    view.flags.writeable = False
    return view
