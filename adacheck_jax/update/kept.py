"""Values that cost much to make, kept in this process for the next one who needs them."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The values that were used last, by a key that says everything that they depend on.

    Args:
        count: largest number of values.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._values: dict[Hashable, T] = {}

    def get(self, key: Hashable) -> T | None:
        """The value of a key, if it is kept."""
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._values[key] = value  # now the youngest
            return value

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value, and let the oldest go if there are too many."""
        with self._lock:
            self._values.pop(key, None)
            self._values[key] = value
            while len(self._values) > self._count:
                self._values.pop(next(iter(self._values)))
