"""Equal blocks of bytes: found by hash, then proved.

A hash collision costs a comparison and never data: two blocks are called equal only after all of
their bits were compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import xxhash

_HEAD_BYTES = 64


def firsts(blocks: Sequence[np.ndarray], kinds: Sequence[Hashable]) -> list[int]:
    """Position of the first block of the same kind, size and bits, for each: often its own."""
    groups: dict[Hashable, list[int]] = {}
    for i, (block, kind) in enumerate(zip(blocks, kinds, strict=True)):
        head = block.flat[: _HEAD_BYTES // block.itemsize].tobytes()  # most differ there
        groups.setdefault((kind, block.nbytes, head), []).append(i)
    result = list(range(len(blocks)))
    for group in groups.values():
        seen: dict[bytes, list[int]] = {}
        for i in group if len(group) > 1 else ():  # most are alone, and nothing is hashed
            data = flat_bytes(blocks[i])
            alike = seen.setdefault(xxhash.xxh3_128_digest(data.data), [])
            result[i] = next((j for j in alike if same_bits(blocks[j], data)), i)
            if result[i] == i:
                alike.append(i)
    return result


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True if two arrays hold the same bytes in row-major order, whatever their types."""
    if a.nbytes != b.nbytes:
        return False
    a, b = flat_bytes(a), flat_bytes(b)
    words = a.size // 8 * 8  # wide words are compared several times as fast as bytes
    return np.array_equal(a[words:], b[words:]) and np.array_equal(
        a[:words].view(np.uint64), b[:words].view(np.uint64)
    )


def flat_bytes(block: np.ndarray) -> np.ndarray:
    """A block's bytes in row-major order; a view if it is contiguous."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)
