"""Loops over every byte of host memory: by numpy at first, compiled as soon as a compiler is done.

A compiler takes seconds where its results are not yet on disk, and no save waits for it. The first
call of a loop for words of one width begins to compile it in a background thread; until that is
done numpy computes the same bits, several times slower. Nothing here imports numba in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from adacheck_jax.format import fingerprint
from adacheck_jax.format.one_process import OneProcess

_log = logging.getLogger(__name__)

ROTATE, XOR, SUBTRACT = 0, 1, 2
"""Ways to turn words into others before they are split."""
_BLOCK_WORDS = 1 << 14
_NICENESS = 5
"""Not the lowest priority: the compiler often holds Python's lock, and other threads would wait
for its turn on a core."""


class _Compiler:
    """Loops that are compiled in the background, each from its first use on."""

    def __init__(self) -> None:
        self._loops: dict[tuple[str, int], Callable[..., Any] | None] = {}
        self._threads: list[threading.Thread] = []
        self._process = OneProcess("a compiler")

    def loop(
        self, name: Literal["multilinear", "each", "split", "join"], word_bytes: int
    ) -> Callable[..., Any] | None:
        """The compiled loop for words of one width, or of any; None until there is one."""
        key = (name, word_bytes)
        # A forked child has what was compiled before: a lock of the compiler may be held for ever.
        if key not in self._loops and not self._process.is_elsewhere:
            self._process.enter()
            self._loops[key] = None
            thread = threading.Thread(target=self._compile, args=key, name="adacheck_compile")
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                thread.start()
                self._threads.append(thread)
        return self._loops.get(key)

    def wait(self) -> None:
        """Waits for all that was begun."""
        for thread in [*self._threads]:
            thread.join()

    def _compile(self, name: str, word_bytes: int) -> None:
        lower_priority()
        try:
            from adacheck_jax.format import compiled_loops  # imports numba

            make = getattr(compiled_loops, name)
            self._loops[name, word_bytes] = make(word_bytes) if word_bytes else make()
        except Exception as error:
            _log.info("Loops over bytes are not compiled here: %s", error)


def lower_priority() -> None:
    """Lets other threads go before the calling one, where the system has priorities of threads."""
    if sys.platform == "linux":  # elsewhere the number may be that of another process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


_compiler = _Compiler()


def wait_until_compiled() -> None:
    """Waits until the loops that were called once are compiled, to measure or to test them."""
    _compiler.wait()


def fingerprint_of(block: np.ndarray, start: Sequence[int] | None = None) -> int:
    """Contribution of one block to the fingerprint of its leaf.

    Args:
        block: elements of one box.
        start: first index of the box in the leaf; None for a whole leaf.

    Returns:
        A partial sum modulo 2**64; :func:`~adacheck_jax.format.fingerprint.combine` adds up those
        of boxes that tile the leaf.
    """
    words = fingerprint.words_of(block)
    if words.size == 0:
        return 0
    if words.ndim == 0:
        return int(words)
    starts = (*(start or (0,) * block.ndim), *(0,) * (words.ndim - block.ndim))
    words = np.ascontiguousarray(words)
    compiled = _compiler.loop("multilinear", words.itemsize) if words.flags.aligned else None
    return (compiled or fingerprint.multilinear)(words, starts)


class Fingerprints:
    """Contributions of many blocks to the fingerprints of their leaves, summed up in one call.

    Args:
        blocks: contiguous blocks, and the first index of each in its leaf. They may change between
            two calls of :meth:`sums`, in place.
    """

    def __init__(self, blocks: Sequence[tuple[np.ndarray, Sequence[int]]]) -> None:
        self._blocks = [*blocks]
        words = [fingerprint.words_of(block) for block, _ in blocks]
        axes = max((each.ndim for each in words), default=0)
        self._table = np.zeros((len(words), 3 + 2 * axes), np.int64)
        for row, each, (_, start) in zip(self._table, words, blocks, strict=True):
            row[:3] = each.ctypes.data, each.itemsize, each.ndim
            row[3 : 3 + each.ndim] = each.shape
            row[3 + axes : 3 + axes + len(start)] = start
        self._is_plain = _are_plain(*words)

    def sums(self) -> list[int]:
        """Partial sums modulo 2**64, one a block."""
        compiled = _compiler.loop("each", 0) if self._is_plain else None
        if compiled is None:
            return [fingerprint_of(block, start) for block, start in self._blocks]
        sums = np.empty(len(self._table), np.uint64)
        compiled(self._table, sums)
        return sums.tolist()


def split(
    words: np.ndarray, old: np.ndarray | None, way: int, low: np.ndarray, high: np.ndarray
) -> None:
    """Splits words into planes of bytes, the lowest byte of every word first.

    Args:
        words: unsigned words of any width, one-dimensional.
        old: words of the parent step, as many; None for ``ROTATE``.
        way: ``ROTATE`` turns the words left by one bit, ``XOR`` takes the bits that differ from the
            old words, ``SUBTRACT`` the zigzag-folded difference.
        low: memory for the first planes, uint8 of shape (planes, words).
        high: memory for the other planes.
    """
    before = words if old is None else old
    compiled = None
    if _are_plain(words, before, low, high):
        compiled = _compiler.loop("split", words.itemsize)
    (compiled or split_by_numpy)(words, before, way, low, high)


def join(words: np.ndarray, way: int, low: np.ndarray, high: np.ndarray) -> None:
    """Undoes :func:`split` in place.

    Args:
        words: memory for the words; for a difference it holds the old ones.
        way: one of ``ROTATE``, ``XOR``, ``SUBTRACT``.
        low: the first planes, uint8 of shape (planes, words).
        high: the other planes.
    """
    compiled = None
    if _are_plain(words, low, high):
        compiled = _compiler.loop("join", words.itemsize)
    (compiled or join_by_numpy)(words, way, low, high)


def _are_plain(*arrays: np.ndarray) -> bool:
    """True if the compiled loops take the arrays: contiguous and aligned."""
    return all(each.flags.c_contiguous and each.flags.aligned for each in arrays)


def split_by_numpy(
    words: np.ndarray, old: np.ndarray, way: int, low: np.ndarray, high: np.ndarray
) -> None:
    """Splits words as :func:`split` does, by numpy; ``old`` is not read for ``ROTATE``."""
    bits = 8 * words.itemsize
    signed = np.dtype(f"i{words.itemsize}")
    for first in range(0, words.size, _BLOCK_WORDS):
        block = slice(first, first + _BLOCK_WORDS)
        new = words[block]
        if way == ROTATE:
            stored = (new << 1) | (new >> (bits - 1))
        elif way == XOR:
            stored = new ^ old[block]
        else:
            step = new - old[block]
            stored = (step << 1) ^ (step.view(signed) >> (bits - 1)).view(words.dtype)
        for plane, into in enumerate((*low, *high)):
            into[block] = (stored >> (8 * plane)).astype(np.uint8)


def join_by_numpy(words: np.ndarray, way: int, low: np.ndarray, high: np.ndarray) -> None:
    """Joins planes as :func:`join` does, by numpy."""
    bits = 8 * words.itemsize
    for first in range(0, words.size, _BLOCK_WORDS):
        block = slice(first, first + _BLOCK_WORDS)
        into = words[block]
        stored = np.zeros_like(into)
        for plane, source in enumerate((*low, *high)):
            stored |= source[block].astype(words.dtype) << (8 * plane)
        if way == ROTATE:
            into[:] = (stored >> 1) | (stored << (bits - 1))
        elif way == XOR:
            into ^= stored
        else:
            into += (stored >> 1) ^ -(stored & 1)
