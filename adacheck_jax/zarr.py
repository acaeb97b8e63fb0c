"""What zarr3 arrays are written as: their metadata, and the chains of codecs of their chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

Codec = Literal["lz4", "zstd"]
"""Of floating-point numbers some bits hardly ever change. LZ4 finds that once equal bits lie side
by side; zstd, where bytes are planes already, by its entropy coder."""


def chain(codec: Codec | None, word_bytes: int = 1) -> list[dict[str, Any]]:
    """The codecs of an array's chunks; crc32c last: the stored bytes are what is checked.

    Args:
        codec: that compresses, None for none.
        word_bytes: width of the elements whose bits are shuffled.
    """
    codecs: list[dict[str, Any]] = []
    if codec == "zstd" and word_bytes == 1:
        codecs = [{"name": "zstd", "configuration": {"level": 1}}]
    elif codec is not None:
        shuffled = {"shuffle": "bitshuffle", "typesize": word_bytes, "blocksize": 0}
        codecs = [{"name": "blosc", "configuration": {"cname": codec, "clevel": 1, **shuffled}}]
    return [{"name": "bytes"}, *codecs, {"name": "crc32c"}]


def metadata(
    dtype: str,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    codecs: list[dict[str, Any]],
    fill_value: Any = 0,
) -> dict[str, Any]:
    """An array's zarr3 metadata."""
    return {
        "data_type": dtype,
        "shape": [*shape],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk_shape]}},
        "fill_value": fill_value,
        "codecs": codecs,
    }
