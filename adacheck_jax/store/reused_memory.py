"""Host memory that the next save uses again.

Fresh memory costs a page fault for every 4 KiB that is first touched, which takes longer than the
copy into it.

The training loop's thread takes buffers, and threads that write give them back. The lock guards
the list of free ones; nothing else is called while it is held.
"""

from __future__ import annotations

import threading

import numpy as np

_GRAIN_BYTES = 1 << 20


class ReusedMemory:
    """Buffers that were given back, up to a limit.

    Args:
        kept_bytes: largest sum of the buffers that wait to be used again; those in use do not
            count.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: list[np.ndarray] = []

    def take(self, size_bytes: int) -> np.ndarray:
        """A buffer to write into: uint8 of that size, with any content."""
        with self._lock:
            fitting = [each for each in self._free if each.nbytes >= size_bytes]
            if fitting:
                found = min(fitting, key=lambda each: each.nbytes)
                self._free = [each for each in self._free if each is not found]
                return found[:size_bytes]
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
