"""Loops over every byte of a state that numpy has no fast form of, compiled by numba.

They release the GIL, take no memory of their own, and read each byte once.
"""

from __future__ import annotations

from collections.abc import Callable
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


@_compiled
def _weighted_sum(words: Any, rows: Any, start: Any, within: Any, runs: Any) -> Any:
    row_count, length = words.shape
    quarter = row_count // 4
    total = np.uint64(0)
    first = 0
    while first < length:
        run = (start + first) // within.size
        offset = (start + first) % within.size
        count = min(within.size - offset, length - first)
        factors = within[offset : offset + count]
        part = np.uint64(0)
        # Four rows far apart at a time: that many streams keep the memory busy, and the sums are
        # independent of each other.
        for i in range(quarter):
            a = words[i, first : first + count]
            b = words[i + quarter, first : first + count]
            c = words[i + 2 * quarter, first : first + count]
            d = words[i + 3 * quarter, first : first + count]
            of_a = of_b = of_c = of_d = np.uint64(0)
            for k in range(count):
                factor = factors[k]
                of_a += factor * np.uint64(a[k])
                of_b += factor * np.uint64(b[k])
                of_c += factor * np.uint64(c[k])
                of_d += factor * np.uint64(d[k])
            part += rows[i] * of_a + rows[i + quarter] * of_b
            part += rows[i + 2 * quarter] * of_c + rows[i + 3 * quarter] * of_d
        for i in range(4 * quarter, row_count):
            a = words[i, first : first + count]
            of_a = np.uint64(0)
            for k in range(count):
                of_a += factors[k] * np.uint64(a[k])
            part += rows[i] * of_a
        total += runs[run] * part
        first += count
    return total


def weighted_sum(
    words: np.ndarray, rows: np.ndarray, start: int, within: np.ndarray, runs: np.ndarray
) -> int:
    """Sums words times the weights of their row and column, modulo 2**64.

    Args:
        words: uint8, uint16 or uint32 of shape (rows, columns), contiguous.
        rows: the rows' weights, uint64.
        start: position of the first column. A column's weight is the product of two factors: of its
            run, as long as ``within``, and of its place in that run.
        within: factors of the places, uint64.
        runs: factors of the runs, up to the last column's.
    """
    return int(_weighted_sum(_frozen(words), _frozen(rows), start, _frozen(within), _frozen(runs)))


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
