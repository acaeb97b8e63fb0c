"""Which codec the compressible bytes of deltas get, if any.

Compressed bytes take a core's time and spare the storage's. Which codec, if any, has them stored
soonest depends on the bytes, the core and the storage; all three are measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adacheck_jax import arrays
from adacheck_jax.arrays import FAST, SMALL, Kind

Compression = Literal["auto", "none", "fast", "small"]
"""What is stored soonest, nothing compressed, LZ4 over shuffled bits, or zstd."""

_MIN_STORED_BYTES = 1 << 22
"""Writing less tells more of the storage's delays than of its speed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How one codec did on some bytes.

    Attributes:
        ratio: bytes to compressed bytes.
        bytes_s: bytes that one core compresses in a second.
    """

    ratio: float
    bytes_s: float


class Storage:
    """How fast the storage took what was written to it without compression.

    Attributes:
        bytes_s: bytes that were made durable in a second; None where that is not known.
    """

    def __init__(self) -> None:
        self.bytes_s: float | None = None

    def note(self, written_bytes: int, elapsed_s: float) -> None:
        """Learns from one write, unless it was too small to tell."""
        if written_bytes >= _MIN_STORED_BYTES and elapsed_s > 0:
            self.bytes_s = written_bytes / elapsed_s


def choose(storage_bytes_s: float | None, speeds: Mapping[Kind, Speed]) -> Kind | None:
    """The codec with which bytes are compressed and stored soonest.

    Args:
        storage_bytes_s: what the storage takes in a second; None where that is not known.
        speeds: of the codecs on bytes like these.

    Returns:
        The codec, the smaller one where nothing is known; None if the bytes are stored soonest as
        they are.
    """
    if storage_bytes_s is None:
        return SMALL
    needed_s = {
        kind: 1 / speed.bytes_s + 1 / (speed.ratio * storage_bytes_s)
        for kind, speed in speeds.items()
    }
    best = min(needed_s, key=lambda kind: needed_s[kind])
    return best if needed_s[best] <= 1 / storage_bytes_s else None


def measured(sample: np.ndarray) -> dict[Kind, Speed]:
    """Tries the codecs on some bytes.

    Args:
        sample: uint8, at least one.
    """
    speeds = {}
    for kind in (FAST, SMALL):
        start_s = time.perf_counter()
        stored_bytes = arrays.compressed_bytes(kind, sample)
        elapsed_s = time.perf_counter() - start_s
        speeds[kind] = Speed(sample.size / stored_bytes, sample.size / elapsed_s)
    return speeds
