"""Shapes of the zarr chunks of a base: every box consists of whole chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from adacheck_jax.format.boxes import Cuts

MAX_CHUNK_BYTES = 8 << 20


def chunk_shape(
    cuts: Cuts, itemsize_bytes: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, ...]:
    """Shape of the zarr chunks of a leaf in a base: every box consists of whole ones.

    Args:
        cuts: of the boxes that are written.
        itemsize_bytes: bytes of one element.
        max_bytes: of a chunk, where the boxes can be cut so.
    """
    chunk = [_common_length(points) for points in cuts]
    for axis, points in enumerate(cuts):
        excess = math.prod(chunk) * itemsize_bytes / max_bytes
        if excess <= 1:
            break
        most = max(1, int(chunk[axis] / excess))
        whole = len(points) <= 2  # one box along this axis: its last chunk may be a shorter one
        chunk[axis] = most if whole else largest_divisor(chunk[axis], most)
    return tuple(chunk)


def _common_length(points: Sequence[int]) -> int:
    """The longest interval of which all between some cut points consist, but for a shorter last."""
    lengths = [b - a for a, b in itertools.pairwise(points)]
    if not lengths:
        return 1
    inner = math.gcd(*lengths[:-1]) or lengths[0]
    return inner if lengths[-1] <= inner else math.gcd(inner, lengths[-1])


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is not above a bound."""
    return max(d for d in range(1, most + 1) if number % d == 0)
