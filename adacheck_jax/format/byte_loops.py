"""Loops over every byte of a state that numpy has no fast form of, compiled by numba.

They release the GIL, take no memory of their own, and read each byte once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np


def _compiled(function: Callable[..., Any]) -> Any:
    """Compiles a function when it is first called with some types; once a machine."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no directory where the compiled code could be kept
        return numba.njit(**options)(function)


RUN = 1024
"""Positions along an axis whose weights share a factor."""
MAX_RANK = 16
_MIN_COLUMNS = 64
_STREAMS = 4


@_compiled
def factor(position: Any, axis: Any, level: Any) -> Any:
    """An odd 64-bit factor of a position along an axis: SplitMix64."""
    seed = np.uint64(2) * np.uint64(axis) + np.uint64(level) + np.uint64(1)
    z = np.uint64(position) * np.uint64(0x9E3779B97F4A7C15)
    z = z + seed * np.uint64(0xD1342543DE82EF95)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@_compiled
def _weight(position: Any, axis: Any) -> Any:
    return factor(position % RUN, axis, 0) * factor(position // RUN, axis, 1)


@_compiled
def _weight_of(number: Any, first: Any, stop: Any, shape: Any, starts: Any) -> Any:
    """The product of the weights along some axes, of one of the places that these make."""
    weight = np.uint64(1)
    for axis in range(stop - 1, first - 1, -1):
        weight *= _weight(starts[axis] + number % shape[axis], axis)
        number //= shape[axis]
    return weight


@_compiled
def _sum_of_four(words: Any, a: Any, b: Any, c: Any, d: Any, factors: Any, weights: Any) -> Any:
    """Sums four stretches of words, each with its weight. Far apart, they keep the memory busy."""
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


@_compiled
def _sum_of_one(words: Any, start: Any, factors: Any) -> Any:
    total = np.uint64(0)
    stretch = words[start : start + factors.size]
    for k in range(factors.size):
        total += factors[k] * np.uint64(stretch[k])
    return total


@_compiled
def multilinear_of(words: Any, shape: Any, starts: Any, rank: Any) -> Any:  # noqa: PLR0912
    """As :func:`multilinear`, for compiled code: of flat words, the first ``rank`` axes of them."""
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
    places = range(0, RUN)
    if start % run_length + length <= run_length:  # of a short axis not all are met
        places = range(start % run_length // width, (start % run_length + length) // width)
    within = np.empty(run_length, np.uint64)
    for place in places:
        for rest in range(width):
            of_rest = _weight_of(rest, axis + 1, rank, shape, starts)
            within[place * width + rest] = factor(place, axis, 0) * of_rest
    rows = np.empty(row_count, np.uint64)
    if axis == 1:
        for row in range(row_count):
            rows[row] = _weight(starts[0] + row, 0)
    else:
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
                        weights[stream] = factor(run + i + stream * step, axis, 1)
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
        total += factor(run, axis, 1) * part
        first += count
    return total


def multilinear(words: np.ndarray, starts: Sequence[int]) -> int:
    """The multilinear hash modulo 2**64 of words (see :mod:`~adacheck_jax.device.fingerprint`).

    Args:
        words: uint8, uint16 or uint32, contiguous, of one axis at least.
        starts: position of the first word along each axis.
    """
    shape = np.array(words.shape, np.int64)
    flat = _frozen(words.reshape(-1))
    return int(multilinear_of(flat, shape, np.array(starts, np.int64), words.ndim))


@_compiled
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


ROTATE, XOR, SUBTRACT = 0, 1, 2
"""Ways to turn words into others before they are split."""


def split(
    words: np.ndarray, old: np.ndarray | None, way: int, low: np.ndarray, high: np.ndarray
) -> None:
    """Splits words into planes of bytes, the lowest byte of every word first.

    Args:
        words: unsigned, of any width, one-dimensional.
        old: as many words of the parent step, where ``way`` takes a difference.
        way: ``ROTATE`` turns the words left by one bit, ``XOR`` takes what differs from the old
            ones, ``SUBTRACT`` the zigzag-folded difference.
        low: where the first planes go, uint8 of shape (planes, words).
        high: where the others go.
    """
    before = words if old is None else old
    _split(_frozen(words), _frozen(before), way, low, high)


@_compiled
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


def join(words: np.ndarray, way: int, low: np.ndarray, high: np.ndarray) -> None:
    """Undoes :func:`split`, in place: for a difference ``words`` holds the old ones before."""
    _join(words, way, low, high)


def _frozen(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written: one type of array to compile for, and not two."""
    view = array.view()
    view.flags.writeable = False
    return view
