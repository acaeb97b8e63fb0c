"""Reads arrays into memory that XLA:CPU can use in place.

Memory that tensorstore allocates is not aligned as XLA wants it, and would be copied once more on
its way to a CPU device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorstore as ts

ALIGNMENT_BYTES = 64
"""Alignment of arrays that XLA:CPU uses in place."""


def begin(store: Any) -> tuple[np.ndarray, Any]:
    """Begins to read a whole tensorstore, or a part of one.

    Args:
        store: an open tensorstore, or an indexed part of one, that fits into memory.

    Returns:
        The elements, valid once the future has a result; and that future, which raises the errors
        of the read.
    """
    dtype = store.dtype.numpy_dtype
    elements = empty(math.prod(store.shape) * dtype.itemsize).view(dtype).reshape(store.shape)
    return elements, begin_into(store, elements)


def begin_into(store: Any, elements: np.ndarray) -> Any:
    """Begins to read into memory of the caller's; returns the future, as :func:`begin` does."""
    return ts.array(elements).write(store)


def empty(nbytes: int) -> np.ndarray:
    """Aligned memory for some bytes, which hold anything."""
    memory = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + nbytes]
