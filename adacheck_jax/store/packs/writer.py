"""Writes packs: all arrays of one in one transaction, durable once it returns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorstore as ts

from adacheck_jax.store import zarr
from adacheck_jax.store.packs.arrays import ArrayKind, Ranges, Runs, zero_blocks
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import AnyPath, Location, Storage, at
from adacheck_jax.store.zarr import Codec

_UPLOADS = 4
"""Files that are written at once: each is held in memory twice meanwhile."""


def write_pack(
    start: AnyPath,
    contents: Sequence[tuple[ArrayKind, Sequence[np.ndarray]]],
    codec: Codec = "zstd",
) -> list[list[Ranges]]:
    """Writes one pack durably, in one transaction.

    Returns:
        Ranges of blocks of zeros that were left out, by array and section.
    """
    place = at(start)
    if place.on_file_system:
        context = place.context(file_io_sync=False)  # else each file by itself waits for the disk
        zeros = _write(zarr.database_at(place, context), contents, codec)
        beginning = f"{place.name}."
        files = [e for e in place.parent.list(deep=False) if e.name.startswith(beginning)]
        if files:
            place.parent.sync(*files)
        return zeros
    # Tensorstore would ask and write five times in turn. Files made in memory are written at once.
    memory = Location(KvStore("memory://pack"), place.name)
    zeros = _write(zarr.database_at(memory), contents, codec)
    _move(memory.storage, place.parent)
    return zeros


def _write(
    database: ts.KvStore,
    contents: Sequence[tuple[ArrayKind, Sequence[np.ndarray]]],
    codec: Codec,
) -> list[list[Ranges]]:
    """Writes the arrays of a pack; returns the ranges that were left out."""
    zeros: list[list[Ranges]] = []
    # Atomic: one generation of the database, so that every file is referred to.
    with ts.Transaction(atomic=True) as transaction:
        for kind, sections in contents:
            zeros.append([zero_blocks(each, kind.block_bytes) for each in sections])
            pack = _joined(sections, zeros[-1], kind)
            if not pack.size:
                continue
            codecs = zarr.chain(codec if kind.is_compressed else None)
            metadata = zarr.metadata("uint8", pack.shape, [_chunk_bytes(pack.size, kind)], codecs)
            options = {"create": True, "transaction": transaction}
            store = zarr.array_in(database, kind.name, metadata, **options).result()
            # The bytes do not change before the commit, so tensorstore need not copy.
            store.write(pack, can_reference_source_data_indefinitely=True).result()
    return zeros


def _move(source: Storage, folder: Location) -> None:
    """Writes all values of a store in memory into a folder, several at once, where none may be."""

    def move(key: str) -> None:
        (folder / key).write(source.read(key), if_absent=True)
        source.delete(key)

    with ThreadPoolExecutor(_UPLOADS) as threads:
        for _ in threads.map(move, [*source.list("")]):
            pass


def _joined(sections: Sequence[np.ndarray], zeros: Sequence[Ranges], kind: ArrayKind) -> np.ndarray:
    """Stored bytes of an array: all sections without zeros; one whole section is not copied."""
    kept = [
        section[a:b]
        for section, left_out in zip(sections, zeros, strict=True)
        for a, b in Runs(section.size, left_out, kind).kept()
    ]
    return kept[0] if len(kept) == 1 else np.concatenate([np.empty(0, np.uint8), *kept])


def _chunk_bytes(size_bytes: int, kind: ArrayKind) -> int:
    """Size of the chunks: as equal as possible, since the last chunk is stored whole."""
    return math.ceil(size_bytes / math.ceil(size_bytes / kind.max_chunk_bytes))
