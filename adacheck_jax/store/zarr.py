"""Zarr3 arrays: the databases that they lie in, their metadata, and chains of codecs.

To add a codec: its name in :data:`Codec`, the caller's choice in :data:`Compression`, both in
``CODECS``, and its chain in :func:`chain` (a compressor that blosc has needs no more than its
name). What reads a root, compacts a base or checks options asks :data:`CHAINS` and these types. An
older release refuses arrays in a codec that it does not know, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorstore as ts

from adacheck_jax.store.storage.location import AnyPath, at

Codec = Literal["lz4", "zstd"]
"""Compressors of floating-point numbers, of which some bits hardly ever change. LZ4 finds them once
equal bits lie side by side; zstd, where bytes are planes already, by its entropy coder."""
Compression = Literal["none", "fast", "small"]
"""The caller's choice: no codec, LZ4, or zstd."""

CODECS: Mapping[Compression, Codec | None] = {"none": None, "fast": "lz4", "small": "zstd"}
"""The codec of each choice, None for bytes as they are; readers of a root accept no others."""
FILE_BYTES = 64 << 20
"""Larger packs and volumes become several files, which are written at the same time: a single file
would be written as fast as one core copies."""
_GAP_BYTES = 1 << 16
"""Unwanted bytes between two ranges that are read with them: a request takes as long."""


def database_in(
    directory: AnyPath, file_bytes: int | None = None, context: ts.Context | None = None
) -> ts.KvStore:
    """Opens an OCDBT database in a directory of its own.

    Args:
        directory: the directory.
        file_bytes: size in bytes at which a data file that is written is full, 0 for no limit, None
            for OCDBT's own limit.
        context: tensorstore's context; None for a new one.
    """
    limit = {} if file_bytes is None else {"target_data_file_size": file_bytes}
    return _database(directory, {"base": at(directory).spec(), **limit}, context)


def database_at(start: AnyPath, context: ts.Context | None = None) -> ts.KvStore:
    """Opens an OCDBT database whose files lie side by side, among others."""
    # By itself OCDBT would take the path for a directory.
    base = {"driver": "kvstack", "layers": [{"base": at(start).spec(".")}]}
    names = ("value_data_prefix", "btree_node_data_prefix", "version_tree_node_data_prefix")
    spec = {"base": base, **dict.fromkeys(names, ""), "target_data_file_size": FILE_BYTES}
    return _database(start, spec, context)


def _database(path: AnyPath, spec: Mapping[str, Any], context: ts.Context | None) -> ts.KvStore:
    few_requests = {}
    if not at(path).on_file_system:  # ranges close to each other are read with one request
        few_requests = {
            "experimental_read_coalescing_threshold_bytes": _GAP_BYTES,
            "experimental_read_coalescing_merged_bytes": FILE_BYTES,
            "experimental_read_coalescing_interval": "1ms",
        }
    spec = {"driver": "ocdbt", "path": "", **spec, **few_requests}
    return ts.KvStore.open(spec, context=context or at(path).context()).result()


def array_in(
    database: ts.KvStore, name: str, metadata: Any, **options: Any
) -> ts.Future[ts.TensorStore]:
    """Opens a zarr3 array in a database; a missing chunk is an error.

    Args:
        database: the database.
        name: the array's name.
        metadata: the array's metadata.
        options: options of ``tensorstore.open`` to write it; none to read it as the metadata tell,
            whatever is stored of them.
    """
    spec = {
        "driver": "zarr3",
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,  # stock Orbax takes absence for loss
        "metadata": metadata,
    }
    options = options or {"open": True, "read": True, "assume_metadata": True}
    return ts.open(spec, kvstore=database / f"{name}/", **options)


def key_of(name: str) -> str:
    """Key of an array's metadata in its database."""
    return f"{name}/zarr.json"


def chain(codec: Codec | None, word_bytes: int = 1) -> list[dict[str, Any]]:
    """Codecs of an array's chunks; crc32c comes last, so that the stored bytes are checked."""
    codecs: list[dict[str, Any]] = []
    if codec == "zstd" and word_bytes == 1:
        codecs = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    elif codec is not None:
        shuffled = {"shuffle": "bitshuffle", "typesize": word_bytes, "blocksize": 0}
        codecs = [{"name": "blosc", "configuration": {"cname": codec, "clevel": 1, **shuffled}}]
    ordered = {} if word_bytes == 1 else {"configuration": {"endian": "little"}}
    return [{"name": "bytes", **ordered}, *codecs, {"name": "crc32c"}]


def names(codecs: list[dict[str, Any]]) -> tuple[str, ...]:
    """The names in a chain of codecs, as metadata tells it; blosc's with that of its compressor."""
    return tuple(
        f"blosc {each['configuration']['cname']}" if each["name"] == "blosc" else each["name"]
        for each in codecs
    )


CHAINS: Mapping[tuple[str, ...], Compression] = {
    names(chain(codec, word_bytes)): compression
    for compression, codec in CODECS.items()
    for word_bytes in (1, 4)
}
"""The caller's choice by the names of the codecs that it makes: all that arrays may have."""


def metadata(
    dtype: str,
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    codecs: list[dict[str, Any]],
    fill_value: Any = 0,
) -> dict[str, Any]:
    """An array's zarr3 metadata, as they are stored."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": dtype,
        "shape": [*shape],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk_shape]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": fill_value,
        "codecs": codecs,
    }
