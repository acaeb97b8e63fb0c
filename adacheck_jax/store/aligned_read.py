"""Reads arrays into memory that XLA:CPU can use in place.

What tensorstore allocates itself does not start where XLA wants arrays to start, and is copied once
more when it goes to a CPU device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorstore as ts

ALIGNMENT_BYTES = 64
"""Where XLA:CPU wants arrays to start."""


def begin(store: Any) -> tuple[np.ndarray, Any]:
    """Begins to read all that a tensorstore (or a part of one) holds.

    Args:
        store: open, with as many elements as there is memory for.

    Returns:
        The elements, once the future has a result; and that future, which raises what reading does.
    """
    dtype = store.dtype.numpy_dtype
    size_bytes = math.prod(store.shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    elements = memory[start : start + size_bytes].view(dtype).reshape(store.shape)
    return elements, ts.array(elements).write(store)
