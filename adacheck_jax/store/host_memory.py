"""Host memory that arrays are read into, and that the next save uses again.

Memory that tensorstore allocates is not aligned as XLA:CPU wants it, and would be copied once more
on its way to a CPU device. And fresh memory costs a page fault for every 4 KiB that is first
touched, which takes longer than the copy into it. At gigabytes memory that is free again goes back
to the system, since the C library keeps what each of many threads has freed.

The training loop's thread takes buffers to be used again, and threads that write give them back.
The lock guards the list of free ones; nothing else is called while it is held.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from typing import Any

import numpy as np
import tensorstore as ts

ALIGNMENT_BYTES = 64
"""Alignment of arrays that XLA:CPU uses in place."""
_GRAIN_BYTES = 1 << 20
_KEPT_BYTES = 1 << 28
"""What is freed of a smaller state the C library may keep."""


def begin_read(store: Any) -> tuple[np.ndarray, Any]:
    """Begins to read an open tensorstore, or a part of one.

    Returns:
        The elements, valid once the future has a result; and that future, which raises the errors
        of the read.
    """
    dtype = store.dtype.numpy_dtype
    elements = empty(math.prod(store.shape) * dtype.itemsize).view(dtype).reshape(store.shape)
    return elements, begin_read_into(store, elements)


def begin_read_into(store: Any, elements: np.ndarray) -> Any:
    """Begins to read into memory of the caller's; returns the future."""
    return ts.array(elements).write(store)


def empty(nbytes: int) -> np.ndarray:
    """Aligned memory for some bytes, which hold anything."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]


def return_freed(size_bytes: int) -> None:
    """Gives freed memory back to the system, if the state that was copied is of such a size.

    glibc keeps what a thread has freed for that thread. XLA allocates in all of its threads, so a
    run whose steps free hundreds of megabytes came to hold several times of that. It takes about
    50 ms a gigabyte; other C libraries have no such call.
    """
    if size_bytes >= _KEPT_BYTES:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)


class ReusedMemory:
    """Buffers that were given back, up to a limit.

    Args:
        kept_bytes: largest sum of the buffers that wait to be used again; those in use do not
            count.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []  # the largest first

    def take(self, size_bytes: int) -> np.ndarray:
        """A buffer to write into: uint8 of that size, with any content."""
        with self._lock:
            fitting = [n for n, each in enumerate(self._free) if each.nbytes >= size_bytes]
            if fitting:  # the smallest
                return self._free.pop(fitting[-1])[:size_bytes]
        rounded_bytes = -(-size_bytes // _GRAIN_BYTES) * _GRAIN_BYTES
        return np.empty(rounded_bytes, np.uint8)[:size_bytes]

    def give_back(self, buffer: np.ndarray) -> None:
        """Returns a buffer that nobody reads any more."""
        whole = buffer.base if isinstance(buffer.base, np.ndarray) else buffer
        with self._lock:
            self._free.append(whole)
            self._free.sort(key=lambda each: -each.nbytes)
            while sum(each.nbytes for each in self._free) > self._kept_bytes:
                self._free.pop()
