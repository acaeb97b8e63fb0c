"""Fingerprints of host memory: by numpy at first, compiled as soon as a compiler is done.

A compiler takes seconds where its results are not yet on disk, and no save waits for it. The first
128 MiB are numpy's, since importing the compiler takes longer than those; then it compiles in a
background thread. Until that is done numpy computes the same bits, several times slower. Nothing
here imports numba in the caller's thread.

Any thread may call: the compiled loop is set once, by the thread that compiled it, and two threads
that call first at the same time at worst both compile it. There is no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from adacheck_jax.format import fingerprint

_log = logging.getLogger(__name__)

_FIRST_BYTES = 1 << 27
_NICENESS = 5
"""Not the lowest priority: the compiler often holds Python's lock, and other threads would wait
for its turn on a core."""


class _Compiler:
    """The compiled loop, made in the background once it is worth it."""

    def __init__(self) -> None:
        self._asked_bytes = 0
        self._loop: Callable[..., Any] | None = None
        self._thread: threading.Thread | None = None

    def loop(self, work_bytes: int) -> Callable[..., Any] | None:
        """The compiled loop for so many bytes; None until there is one."""
        self._asked_bytes += work_bytes
        if self._asked_bytes >= _FIRST_BYTES:
            self.begin()
        return self._loop

    def begin(self) -> None:
        """Begins to compile, unless that was begun."""
        # A forked child has a copy of the thread, which does not run, and thus what was compiled
        # before: a lock of the compiler may be held for ever.
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile, name="adacheck_compile")
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                self._thread.start()
                hold_up_forks(self.wait)

    def wait(self) -> None:
        """Waits for what was begun."""
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _compile(self) -> None:
        lower_priority()
        try:
            from adacheck_jax.format import compiled_loops  # imports numba

            self._loop = compiled_loops.sums()
        except Exception as error:
            _log.info("Fingerprints of host memory are not compiled here: %s", error)


def hold_up_forks(wait: Callable[[], object]) -> None:
    """Has each fork of this process wait, where it forks at all.

    A child has a copy of the compiler's locks, and of those of its imports, but no thread that
    would ever let go of them.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=wait)


def lower_priority() -> None:
    """Lets other threads go before the calling one, where the system has priorities of threads."""
    if sys.platform == "linux":  # elsewhere the number may be that of another process
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def processors() -> int:
    """Number of this machine's processors."""
    return os.cpu_count() or 1


_compiler = _Compiler()


def expect(work_bytes: int) -> None:
    """Begins to compile for work that comes soon, if there is enough of it."""
    if work_bytes >= _FIRST_BYTES:
        _compiler.begin()


def wait_until_compiled() -> None:
    """Waits until the loops are compiled, to measure or to test them."""
    _compiler.begin()
    _compiler.wait()


def fingerprint_of(block: np.ndarray, start: Sequence[int] = ()) -> int:
    """Contribution of one block to the fingerprint of its leaf.

    Returns:
        A partial sum modulo 2**64; :func:`~adacheck_jax.format.fingerprint.combine` adds up those
        of boxes that tile the leaf.
    """
    return fingerprints_of([(block, start)])[0]


def fingerprints_of(blocks: Iterable[tuple[np.ndarray, Sequence[int]]]) -> list[int]:
    """Contributions of many blocks, each with its first index in its leaf.

    One call lets go of Python's lock once. Calls of one block each would wait for that lock as
    often as there are blocks, 5 ms each where another thread traces or compiles.
    """
    return Fingerprints([(np.ascontiguousarray(x).reshape(x.shape), at) for x, at in blocks]).sums()


class Fingerprints:
    """Contributions of many blocks to the fingerprints of their leaves, summed up in one call.

    Args:
        blocks: contiguous blocks, and the first index of each in its leaf. They may change between
            two calls of :meth:`sums`, in place, unless their elements are narrower than a byte.
    """

    def __init__(self, blocks: Sequence[tuple[np.ndarray, Sequence[int]]]) -> None:
        self._words = [fingerprint.words_of(block) for block, _ in blocks]
        axes = max((each.ndim for each in self._words), default=0)
        self._table = np.zeros((len(blocks), 3 + 2 * axes), np.int64)
        for row, each, (_, start) in zip(self._table, self._words, blocks, strict=True):
            row[:3] = each.ctypes.data, each.itemsize, each.ndim
            row[3 : 3 + each.ndim] = each.shape
            row[3 + axes : 3 + axes + len(start)] = start
        self._bytes = sum(each.nbytes for each in self._words)
        self._starts = self._table[:, 3 + axes :]
        self._is_aligned = all(each.flags.aligned for each in self._words)

    def sums(self) -> list[int]:
        """Partial sums modulo 2**64, one a block."""
        compiled = _compiler.loop(self._bytes) if self._is_aligned else None
        if compiled is None:
            pairs = zip(self._words, self._starts.tolist(), strict=True)
            return [fingerprint.multilinear(words, starts) for words, starts in pairs]
        sums = np.empty(len(self._table), np.uint64)
        compiled(self._table, sums)
        return sums.tolist()
