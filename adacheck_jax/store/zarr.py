"""What zarr3 arrays are written as: databases that they lie in, metadata, and chains of codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Codec = Literal["lz4", "zstd"]
"""Of floating-point numbers some bits hardly ever change. LZ4 finds that once equal bits lie side
by side; zstd, where bytes are planes already, by its entropy coder."""
Compression = Literal["none", "fast", "small"]
"""The caller's choice: no codec, LZ4, or zstd."""

_CODECS: dict[Compression, Codec | None] = {"none": None, "fast": "lz4", "small": "zstd"}


_FILE_BYTES = 64 << 20
"""Larger packs become several files, which are written at the same time: one after the other the
page cache takes what one core copies."""


def codec_of(compression: Compression) -> Codec | None:
    """The codec that a caller chose; None for bytes as they are."""
    return _CODECS[compression]


def database_in(directory: Path) -> dict[str, Any]:
    """An OCDBT database in a directory of its own."""
    base = {"driver": "file", "path": f"{directory.resolve()}/"}
    return {"driver": "ocdbt", "base": base, "path": ""}


def database_at(start: Path) -> dict[str, Any]:
    """An OCDBT database that has no directory of its own: its files lie side by side.

    Args:
        start: what their paths begin with; then comes a dot.
    """
    files = {"driver": "file", "path": f"{start.parent.resolve() / start.name}."}
    # By itself OCDBT would take what it is given for a directory.
    return {
        "driver": "ocdbt",
        "base": {"driver": "kvstack", "layers": [{"base": files}]},
        "path": "",
        "value_data_prefix": "",
        "btree_node_data_prefix": "",
        "version_tree_node_data_prefix": "",
        "target_data_file_size": _FILE_BYTES,
    }


def array_in(database: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The zarr3 array of some name in a database; a chunk that is not there is an error."""
    return {
        "driver": "zarr3",
        "kvstore": {**database, "path": f"{name}/"},
        "fill_missing_data_reads": False,
    }


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
