"""Reads the arrays of a checkpoint's database, checking every chunk's crc32c."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy bfloat16 and its kin
import numpy as np
import tensorstore as ts

from adacheck_jax.errors import first_line
from adacheck_jax.format import fingerprint
from adacheck_jax.format.boxes import Box, Cuts, grid
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.store import zarr
from adacheck_jax.store.storage.location import AnyPath

_PIECE_BYTES = 32 << 20
"""Bytes of an array that are read at a time, unless its chunks are larger."""
_READ_AHEAD = 2
_AT_ONCE = 256
"""Chunks that are looked for at a time: each holds a file open."""


def stored_metadata(database: ts.KvStore, names: Sequence[str]) -> list[Any]:
    """Stored metadata of arrays: JSON, which anybody may have written.

    An open tensorstore has them too; but what its ``to_json`` returns is never freed, and a process
    that restores again and again would grow without end.

    Raises:
        ValueError: the database cannot be read, or has no metadata of an array.
    """
    reads = [database.read(zarr.key_of(name)) for name in names]
    found = []
    for name, reading in zip(names, reads, strict=True):
        result = reading.result()
        if result.state != "value" or not result.value:  # empty where a data file is gone
            lost = "there is no" if result.state != "value" else "a file in d or base/*/d is gone:"
            missing = FileNotFoundError(errno.ENOENT, "no metadata", name)
            raise ValueError(f"{lost} array {name}") from missing
        found.append(json.loads(result.value))
    return found


@dataclass(frozen=True, slots=True)
class Description:
    """An array as its metadata describe it.

    Attributes:
        shape: global shape.
        dtype: name of the elements' type.
        chunk_shape: shape of the chunks.
        codecs: names of the chunks' codecs.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    codecs: tuple[str, ...]


def descriptions(database: ts.KvStore, names: Sequence[str]) -> list[Description]:
    """Descriptions of arrays, without opening each.

    Raises:
        ValueError: the database cannot be read, or does not describe one of them.
    """
    return [*map(_described, names, stored_metadata(database, names))]


def _described(name: str, body: Any) -> Description:
    try:
        chunks = tuple(body["chunk_grid"]["configuration"]["chunk_shape"])
        codecs = zarr.names(body["codecs"])
        return Description(tuple(body["shape"]), body["data_type"], chunks, codecs)
    except (LookupError, TypeError) as error:
        raise ValueError(f"there is no description of array {name} ({error!r})") from error


def opened(database: ts.KvStore, names: Sequence[str]) -> list[ts.TensorStore]:
    """Opens arrays to be read, all at once; reads check every chunk's crc32c.

    Raises:
        ValueError: an array is missing, or not in the codecs that arrays are written in.
    """
    opening = []
    for name, body in zip(names, stored_metadata(database, names), strict=True):
        codecs = (described := _described(name, body)).codecs
        if codecs not in zarr.CHAINS and described.shape:  # numbers of older bases were Orbax's
            known = sorted(zarr.CHAINS)
            raise ValueError(f"expected array {name} in one of {known}, found {codecs}")
        opening.append(zarr.array_in(database, name, body))
    return [each.result() for each in opening]


def chunk_shape_of(store: ts.TensorStore) -> list[int]:
    """Shape of the chunks of an array, which are read whole."""
    shape: Any = store.chunk_layout.read_chunk.shape or ()
    return [*shape]


def chunk_cuts(shape: Sequence[int], chunk_shape: Sequence[int]) -> Cuts:
    """Cut points between the chunks of an array."""
    chunks = zip(shape, chunk_shape, strict=True)
    return tuple((*range(0, length, step or 1), length) for length, step in chunks)


def pieces(database: ts.KvStore, name: str) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields every element of an array once, in boxes of whole chunks; a few are read ahead.

    Raises:
        ValueError: there is no such array, or a chunk is missing, truncated, or its checksum does
            not match.
    """
    (store,) = opened(database, [name])
    step = chunk_shape_of(store)
    itemsize_bytes = store.dtype.numpy_dtype.itemsize
    for axis in reversed(range(len(step))):  # small chunks are read many at a time
        room = _PIECE_BYTES // max(1, math.prod(step) * itemsize_bytes)
        count = -(-store.shape[axis] // step[axis])
        step[axis] *= max(1, min(room, count))
    waiting: list[tuple[Box, Any]] = []
    for box in grid(chunk_cuts(store.shape, step)):
        waiting.append((box, store[(*box.slices, ...)].read()))
        if len(waiting) > _READ_AHEAD:
            first, data = waiting.pop(0)
            yield first, np.asarray(data.result())
    for first, data in waiting:
        yield first, np.asarray(data.result())


def fingerprint_of_array(directory: AnyPath, name: str, dtype: str) -> int:
    """Fingerprint of an array's stored elements, as those of the type that was saved.

    Raises:
        ValueError: a chunk is missing, truncated, or its checksum does not match.
    """
    found = pieces(zarr.database_in(directory), name)
    sums = [fingerprint_of(x.astype(np.dtype(dtype), copy=False), box.start) for box, x in found]
    return fingerprint.combine(sums)


def lost_chunks(database: ts.KvStore, names: Sequence[str]) -> dict[str, str]:
    """Looks for every chunk of arrays, reading one byte of each.

    Returns:
        Names of the arrays that cannot be whole, each with the reason.

    Raises:
        ValueError: the database cannot be listed.
    """
    there = frozenset(database.list().result())
    lost: dict[str, str] = {}
    for name in names:
        try:
            (array,) = opened(database, [name])
            pairs = zip(array.shape, chunk_shape_of(array), strict=True)
            counts = [-(-n // m) for n, m in pairs]
            keys = ["/".join([name, "c", *map(str, index)]) for index in np.ndindex(*counts)]
            missing = [key for key in keys if key.encode() not in there]
            if missing:
                some = f"{len(missing)} of {len(keys)} chunks are missing, such as {missing[0]}"
                lost[name] = some
                continue
            for first in range(0, len(keys), _AT_ONCE):
                some_keys = keys[first : first + _AT_ONCE]
                ends = [database.read(key, byte_range=slice(-1, None)) for key in some_keys]
                for each in ends:
                    each.result()
        except (ValueError, OSError) as error:
            lost[name] = first_line(error)
    return lost
