"""Reads the arrays of a checkpoint's database, checking every chunk's crc32c."""

from __future__ import annotations

import errno
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy bfloat16 and its kin
import numpy as np
import tensorstore as ts

from adacheck_jax.errors import first_line
from adacheck_jax.format import fingerprint
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.store import zarr
from adacheck_jax.store.storage.location import AnyPath, at

_PIECE_BYTES = 32 << 20
"""Bytes of an array that are read at a time, unless its chunks are larger."""
_READ_AHEAD = 2
_AT_ONCE = 256
"""Chunks that are looked for at a time: each holds a file open."""

_CHAINS = {
    zarr.names(zarr.chain(codec, word_bytes))
    for codec in (None, *zarr.CODECS)
    for word_bytes in (1, 4)
}
"""Names of the codecs that arrays may be stored in."""


def stored_metadata(
    database: Mapping[str, Any], names: Sequence[str], context: ts.Context
) -> list[Any]:
    """Stored metadata of arrays: JSON, which anybody may have written.

    An open tensorstore has them too; but what its ``to_json`` returns is never freed, and a process
    that restores again and again would grow without end.

    Raises:
        ValueError: the database cannot be read, or has no metadata of an array.
    """
    store = ts.KvStore.open(dict(database), context=context).result()
    reads = [store.read(zarr.key_of(name)) for name in names]
    found = []
    for name, reading in zip(names, reads, strict=True):
        result = reading.result()
        if result.state != "value":
            missing = FileNotFoundError(errno.ENOENT, "no metadata", name)
            raise ValueError(f"there is no array {name}") from missing
        found.append(json.loads(result.value))
    return found


class ArrayReader:
    """Reads one array of a checkpoint's database, piece by piece, checking every chunk's crc32c.

    Attributes:
        shape: global shape.
        dtype: name of the elements' type.

    Raises:
        ValueError: there is no such array, or it cannot be opened.
    """

    def __init__(
        self, database: Mapping[str, Any], name: str, context: ts.Context | None = None
    ) -> None:
        spec = zarr.array_in(database, name)
        context = context or ts.Context()
        self._store = ts.open(spec, open=True, read=True, context=context).result()
        self.shape = tuple(self._store.shape)
        self.dtype = self._store.dtype.name
        chunk: Any = self._store.chunk_layout.read_chunk.shape or ()
        self._chunk_shape: tuple[int, ...] = tuple(chunk)

    def chunk_keys(self) -> list[str]:
        """Keys of all chunks of the array, below its name."""
        counts = [-(-n // m) for n, m in zip(self.shape, self._chunk_shape, strict=True)]
        return ["/".join(["c", *map(str, index)]) for index in np.ndindex(*counts)]

    def pieces(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Yields every element once, in boxes of whole chunks; a few boxes are read ahead.

        Raises:
            ValueError: a chunk is missing, truncated, or its checksum does not match.
        """
        step = [*self._chunk_shape]
        wanted_bytes, itemsize_bytes = _PIECE_BYTES, self._store.dtype.numpy_dtype.itemsize
        for axis in reversed(range(len(step))):  # small chunks are read many at a time
            room = wanted_bytes // max(1, math.prod(step) * itemsize_bytes)
            count = -(-self.shape[axis] // step[axis])
            step[axis] *= max(1, min(room, count))
        corners = itertools.product(
            *(range(0, length, by) for length, by in zip(self.shape, step, strict=True))
        )
        waiting: list[tuple[Box, Any]] = []
        for corner in corners:
            stop = tuple(min(n, a + m) for n, a, m in zip(self.shape, corner, step, strict=True))
            box = Box(corner, stop)
            waiting.append((box, self._store[(*box.slices, ...)].read()))
            if len(waiting) > _READ_AHEAD:
                first, data = waiting.pop(0)
                yield first, np.asarray(data.result())
        for first, data in waiting:
            yield first, np.asarray(data.result())


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


def descriptions(directory: AnyPath, names: Sequence[str]) -> list[Description]:
    """Descriptions of arrays, without opening each.

    Raises:
        ValueError: the database cannot be read, or does not describe one of them.
    """
    database = zarr.database_in(directory)
    found, bodies = [], stored_metadata(database, names, at(directory).context())
    for name, body in zip(names, bodies, strict=True):
        try:
            chunks = tuple(body["chunk_grid"]["configuration"]["chunk_shape"])
            codecs = zarr.names(body["codecs"])
            found.append(Description(tuple(body["shape"]), body["data_type"], chunks, codecs))
        except (LookupError, TypeError) as error:
            raise ValueError(f"{directory}: no description of array {name} ({error!r})") from error
    return found


def opened(directory: AnyPath, names: Sequence[str]) -> list[Any]:
    """Opens arrays to be read, all at once.

    Returns:
        One tensorstore an array; reads check every chunk's crc32c.

    Raises:
        ValueError: an array is missing, or not in the codecs that arrays are written in.
    """
    context, database = at(directory).context(), zarr.database_in(directory)
    opening = []
    for name, body in zip(names, stored_metadata(database, names, context), strict=True):
        codecs = zarr.names(body["codecs"])
        if codecs not in _CHAINS:
            raise ValueError(f"expected array {name} in one of {sorted(_CHAINS)}, found {codecs}")
        spec = {**zarr.array_in(database, name), "metadata": body}
        opening.append(ts.open(spec, open=True, read=True, assume_metadata=True, context=context))
    return [each.result() for each in opening]


def fingerprint_of_array(directory: AnyPath, name: str, dtype: str) -> int:
    """Fingerprint of an array's stored elements, as those of the type that was saved.

    Raises:
        ValueError: a chunk is missing, truncated, or its checksum does not match.
    """
    reader = ArrayReader(zarr.database_in(directory), name, at(directory).context())
    sums = [
        fingerprint_of(block.astype(np.dtype(dtype), copy=False), box.start)
        for box, block in reader.pieces()
    ]
    return fingerprint.combine(sums)


def whole_array(directory: AnyPath, name: str, dtype: str) -> tuple[np.ndarray, int]:
    """Elements of an array, and their fingerprint, of which little more is held than the array.

    Arguments and errors are those of :func:`fingerprint_of_array`.
    """
    reader = ArrayReader(zarr.database_in(directory), name, at(directory).context())
    array, sums = np.empty(reader.shape, np.dtype(dtype)), []
    for box, block in reader.pieces():
        part = block.astype(array.dtype, copy=False)
        array[box.slices] = part
        sums.append(fingerprint_of(part, box.start))
    return array, fingerprint.combine(sums)


def lost_chunks(
    database: Mapping[str, Any], names: Sequence[str], context: ts.Context | None = None
) -> dict[str, str]:
    """Looks for every chunk of arrays, reading one byte of each.

    Returns:
        Names of the arrays that cannot be whole, each with the reason.

    Raises:
        ValueError: the database cannot be opened or listed.
    """
    context = context or ts.Context()
    store = ts.KvStore.open(dict(database), context=context).result()
    known = frozenset(store.list().result())
    found: dict[str, str] = {}
    for name in names:
        try:
            keys = [f"{name}/{key}" for key in ArrayReader(database, name, context).chunk_keys()]
        except (ValueError, OSError) as error:
            found[name] = first_line(error)
            continue
        missing = [key for key in keys if key.encode() not in known]
        if missing:
            found[name] = f"{len(missing)} of {len(keys)} chunks are missing, such as {missing[0]}"
            continue
        for some in range(0, len(keys), _AT_ONCE):
            ends = [
                store.read(key, byte_range=slice(-1, None)) for key in keys[some : some + _AT_ONCE]
            ]
            try:
                for each in ends:
                    each.result()
            except (ValueError, OSError) as error:
                found[name] = first_line(error)
                break
    return found
