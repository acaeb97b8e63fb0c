"""Which codec bytes get, if any.

Compressed bytes take a core's time and spare the storage's. Which codec, if any, has them stored
soonest depends on the bytes, the core and the storage; all three are measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from adacheck_jax.store import packs, zarr
from adacheck_jax.store.zarr import Codec

Compression = Literal["auto", "none", "fast", "small"]
"""What is stored soonest, nothing compressed, LZ4, or zstd."""

_CODECS: tuple[Codec, ...] = ("lz4", "zstd")
_NAMED: dict[Compression, Codec] = {"fast": "lz4", "small": "zstd"}

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


def named(compression: Compression) -> Codec | None:
    """The codec of every choice but ``"auto"``."""
    return _NAMED.get(compression)


def choose(storage_bytes_s: float, speeds: Mapping[Codec, Speed]) -> Codec | None:
    """The codec with which bytes are compressed and stored soonest.

    Args:
        storage_bytes_s: what the storage takes in a second.
        speeds: of the codecs on bytes like these.

    Returns:
        The codec; None if the bytes are stored soonest as they are.
    """
    needed_s: dict[Codec, float] = {
        codec: 1 / speed.bytes_s + 1 / (speed.ratio * storage_bytes_s)
        for codec, speed in speeds.items()
    }
    best = min(needed_s, key=lambda codec: needed_s[codec])
    return best if needed_s[best] <= 1 / storage_bytes_s else None


def measured(sample: np.ndarray) -> dict[Codec, Speed]:
    """Tries the codecs on some elements, at least one."""
    data = np.ascontiguousarray(sample).reshape(-1).view(np.uint8)
    speeds = {}
    for codec in _CODECS:
        codecs = zarr.chain(codec, sample.itemsize)
        start_s = time.perf_counter()
        stored_bytes = packs.stored_bytes(data, codecs)
        elapsed_s = time.perf_counter() - start_s
        speeds[codec] = Speed(data.size / stored_bytes, data.size / elapsed_s)
    return speeds
