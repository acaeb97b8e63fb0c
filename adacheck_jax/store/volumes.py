"""Volumes: what a process writes of a base, as zarr3 arrays in one OCDBT database.

The arrays have the names, and in the end lie in the database, that stock Orbax expects of a
checkpoint. Equal chunks are written once: the others refer to the first, as OCDBT's copy by
reference makes them. Arrays that have not changed since an earlier base are not written again:
the volume that holds them is hard-linked, and referred to. Every chunk has a crc32c.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import tensorstore as ts

from adacheck_jax.errors import first_line
from adacheck_jax.format.boxes import Box
from adacheck_jax.store import equality, zarr
from adacheck_jax.store.zarr import Codec

_TRANSACTION_BYTES = 1 << 28
"""A transaction holds what it writes in memory until it is committed."""
_MIN_SHARED_BYTES = 256
"""Smaller chunks are cheaper to write than to refer to."""
_MAX_LINKS = 30_000
"""A file with more links is written again: ext4 allows 65,000, and each delta makes one."""
_WORTHWHILE = 0.5
"""A volume is kept for the sake of at least this part of its bytes; what else it holds is dead."""
_PIECE_BYTES = 32 << 20
"""What is read of an array at a time, unless its chunks are larger."""
_READ_AHEAD = 2
_AT_ONCE = 256
"""How many chunks are looked for at a time: each holds a file open."""


_CHAINS = [
    [codec["name"] for codec in chain]
    for chain in (zarr.chain(None), zarr.chain("zstd"), zarr.chain("zstd", word_bytes=4))
]
"""Names of the codecs that arrays may be stored in."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one process holds of one array of a base.

    Attributes:
        name: of the array, as Orbax names it.
        shape: global.
        chunk_shape: of its zarr chunks; each box of ``blocks`` consists of whole ones.
        blocks: elements by box.
        codec: that its chunks are compressed with.
    """

    name: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    blocks: Mapping[Box, np.ndarray]
    codec: Codec | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks.values())

    @property
    def metadata(self) -> dict[str, Any]:
        """The array's zarr3 metadata."""
        dtype = next(iter(self.blocks.values())).dtype
        zero: Any = {"b": False, "c": [0, 0]}.get(dtype.kind, 0)
        codecs = zarr.chain(self.codec, dtype.itemsize)
        return zarr.metadata(dtype.name, self.shape, self.chunk_shape, codecs, zero)


@dataclass(slots=True)
class _Chunk:
    """One zarr chunk.

    Attributes:
        part: the array that it belongs to.
        key: of the chunk, below the array's name.
        box: in the array's coordinates.
        data: its elements.
        source: the first chunk with the same bytes: another one, or itself.
    """

    part: Part
    key: str
    box: Box
    data: np.ndarray
    source: _Chunk | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is written, and does not refer to another one."""
        return self.source is self


def write(directory: Path, parts: Sequence[Part]) -> dict[str, str]:
    """Writes one volume durably.

    Args:
        directory: where the OCDBT database goes; made if absent.
        parts: the arrays; no name twice, no part without a block.

    Returns:
        For each array that equals another one, as far as both are written here, and refers to its
        chunks, the name of that one.
    """
    directory.mkdir(parents=True, exist_ok=True)
    chunks = [[*_chunks(part)] for part in parts]
    every = [*itertools.chain.from_iterable(chunks)]
    for chunk, first in zip(
        every, equality.firsts([c.data for c in every], [*map(_kind, every)]), strict=True
    ):
        chunk.source = every[first]
    context = ts.Context()
    for batch in _batches(chunks):
        with ts.Transaction(atomic=False) as transaction:
            for own in batch:
                _write_part(directory, own, context, transaction)
    referring = [chunk for chunk in every if not chunk.is_own]
    if referring:
        with ts.Transaction(atomic=True) as transaction:
            _refer(directory, referring, context, transaction)
    found = {}
    by_name = {each[0].part.name: each for each in chunks}
    for name, each in by_name.items():
        others = {chunk.source.part.name for chunk in each if chunk.source}
        if len(others) == 1 and others != {name}:
            other = by_name[others.pop()]
            keys = [(chunk.key, id(chunk.source)) for chunk in each]
            if keys == [(chunk.key, id(chunk.source)) for chunk in other]:
                found[name] = other[0].part.name
    return found


def _chunks(part: Part) -> Iterator[_Chunk]:
    for box, block in part.blocks.items():
        steps = [
            range(start, stop, length)
            for start, stop, length in zip(box.start, box.stop, part.chunk_shape, strict=True)
        ]
        for corner in itertools.product(*steps):
            stop = tuple(map(min, box.stop, map(sum, zip(corner, part.chunk_shape, strict=True))))
            chunk = Box(corner, stop)
            index = [str(a // n) for a, n in zip(corner, part.chunk_shape, strict=True)]
            data = block[(*chunk.relative_to(box.start).slices, ...)]
            yield _Chunk(part, "/".join(["c", *index]), chunk, data)


def _kind(chunk: _Chunk) -> Any:
    """What chunks must have in common besides their elements to be stored as the same bytes."""
    if chunk.data.nbytes < _MIN_SHARED_BYTES:
        return (chunk.part.name, chunk.key)
    stored_as = chunk.data.dtype.name, chunk.part.codec
    if chunk.data.shape == chunk.part.chunk_shape:
        return (stored_as, None)
    # At the array's edge; what is stored is a whole chunk, filled up in a way that depends on both.
    return (stored_as, (chunk.data.shape, chunk.part.chunk_shape))


def _batches(chunks: Sequence[Sequence[_Chunk]]) -> Iterator[list[Sequence[_Chunk]]]:
    """The chunks of some parts at a time, of bounded size, but at least of one part."""
    batch: list[Sequence[_Chunk]] = []
    size_bytes = 0
    for each in chunks:
        own_bytes = sum(chunk.data.nbytes for chunk in each if chunk.is_own)
        if batch and size_bytes + own_bytes > _TRANSACTION_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(each)
        size_bytes += own_bytes
    if batch:
        yield batch


def _write_part(
    directory: Path, chunks: Sequence[_Chunk], context: ts.Context, transaction: ts.Transaction
) -> None:
    part = chunks[0].part
    spec = {
        **zarr.array_in(zarr.database_in(directory), part.name),
        "metadata": part.metadata,
        "store_data_equal_to_fill_value": True,  # stock Orbax takes absence for loss
    }
    store = ts.open(spec, create=True, context=context, transaction=transaction).result()
    if all(chunk.is_own for chunk in chunks):
        pieces = [*part.blocks.items()]
    else:
        pieces = [(chunk.box, chunk.data) for chunk in chunks if chunk.is_own]
    for box, data in pieces:
        # What is written was staged for this, and is let go of only afterwards.
        store[(*box.slices, ...)].write(data, can_reference_source_data_indefinitely=True).result()


def _refer(
    directory: Path, chunks: Sequence[_Chunk], context: ts.Context, transaction: ts.Transaction
) -> None:
    """Lets chunks refer to what their sources have written."""
    database = ts.KvStore.open(zarr.database_in(directory), context=context).result()
    copies = []
    this_key = ts.KvStore.KeyRange("", "\0")  # of c/1, and not of c/10 too
    for chunk in chunks:
        assert chunk.source is not None
        source = database / f"{chunk.source.part.name}/{chunk.source.key}"
        target = database / f"{chunk.part.name}/{chunk.key}"
        target = target.with_transaction(transaction)
        copies.append(source.experimental_copy_range_to(target, source_range=this_key))
    for copy in copies:
        copy.result()


def keep(
    earlier: Sequence[tuple[str, Path]], parts: Sequence[Part], directory: Path
) -> dict[str, str]:
    """Hard-links the volumes that hold some arrays as they still are.

    Every bit is read and compared, so that nothing damaged is relied on either.

    Args:
        earlier: names and directories of volumes, the latest first.
        parts: the arrays that may not have changed.
        directory: where the links go, each volume's in a folder of its name.

    Returns:
        For each array that need not be written again the name of the volume that holds it.
    """
    left = {part.name: part for part in parts}
    kept: dict[str, str] = {}
    for name, source in earlier:
        try:
            names = _names(source)
            # A merge takes what lies below an array's name, and so would take these arrays too.
            outer = {str(path) for each in names for path in PurePosixPath(each).parents}
            held = [left[each] for each in names if each in left and each not in outer]
            stats = [path.stat() for path in source.rglob("*") if path.is_file()]
            total_bytes = sum(stat.st_size for stat in stats)
            if sum(part.nbytes for part in held) < _WORTHWHILE * total_bytes or not held:
                continue
            if max(stat.st_nlink for stat in stats) > _MAX_LINKS:
                continue
            _link(source, directory / name)
            equal = [part for part in held if _holds(directory / name, part)]
        except (OSError, ValueError):  # deleted meanwhile, or damaged: written again
            shutil.rmtree(directory / name, ignore_errors=True)
            continue
        if sum(part.nbytes for part in equal) < _WORTHWHILE * total_bytes:
            shutil.rmtree(directory / name)
            continue
        kept |= {part.name: name for part in equal}
        left = {each: part for each, part in left.items() if each not in kept}
    return kept


def _names(directory: Path) -> list[str]:
    """Names of the arrays that a volume holds."""
    if not directory.is_dir():
        return []
    database = ts.KvStore.open(zarr.database_in(directory)).result()
    keys = [key.decode() for key in database.list().result()]
    return [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]


def _link(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in source.rglob("*"):
        if path.is_dir():
            (target / path.relative_to(source)).mkdir(parents=True, exist_ok=True)
        else:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target / path.relative_to(source), follow_symlinks=False)


def _holds(directory: Path, part: Part) -> bool:
    """Whether a volume holds exactly what a part holds, cut into the same chunks."""
    spec = zarr.array_in(zarr.database_in(directory), part.name)
    store = ts.open(spec, open=True, read=True).result()
    found = store.spec().to_json()["metadata"]
    if any(found.get(key) != value for key, value in _comparable(part.metadata).items()):
        return False
    return all(
        equality.same_bits(np.asarray(store[(*box.slices, ...)].read().result()), block)
        for box, block in part.blocks.items()
    )


def _comparable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {key: metadata[key] for key in ("data_type", "shape", "chunk_grid")}


def merge(item_directory: Path, contents: Mapping[str, Sequence[str] | None]) -> None:
    """Makes the arrays of some volumes part of the checkpoint's own database.

    Args:
        item_directory: of the checkpoint; its database lies at its top, as stock Orbax writes it.
        contents: by path of the volume, relative to the item's directory, the names of the arrays
            to take from it; None for all of them.
    """
    context = ts.Context()
    checkpoint = ts.KvStore.open(zarr.database_in(item_directory), context=context).result()
    copies = []
    with ts.Transaction(atomic=True) as transaction:
        for path, names in contents.items():
            database = zarr.database_in(item_directory / path)
            volume = ts.KvStore.open(database, context=context).result()
            for prefix in [""] if names is None else [f"{name}/" for name in names]:
                target = (checkpoint / prefix).with_transaction(transaction)
                copies.append((volume / prefix).experimental_copy_range_to(target))
        for copy in copies:
            copy.result()


class ArrayReader:
    """Reads one array of a checkpoint's database, piece by piece, checking every chunk's crc32c.

    Args:
        database: that it is in, as :mod:`~adacheck_jax.store.zarr` tells it.
        name: of the array.

    Attributes:
        shape: global.
        dtype: name of its elements' type.

    Raises:
        ValueError: there is none, or it cannot be opened.
    """

    def __init__(self, database: Mapping[str, Any], name: str) -> None:
        spec = zarr.array_in(database, name)
        self._store = ts.open(spec, open=True, read=True, context=ts.Context()).result()
        self.shape = tuple(self._store.shape)
        self.dtype = self._store.dtype.name
        chunk: Any = self._store.chunk_layout.read_chunk.shape or ()
        self._chunk_shape: tuple[int, ...] = tuple(chunk)

    def chunk_keys(self) -> list[str]:
        """Keys of the chunks that the whole array consists of, below its name."""
        counts = [-(-n // m) for n, m in zip(self.shape, self._chunk_shape, strict=True)]
        return ["/".join(["c", *map(str, index)]) for index in np.ndindex(*counts)]

    def pieces(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Every element once, in boxes of whole chunks; a few of them are read ahead.

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


def described(directory: Path, names: Sequence[str]) -> list[tuple[tuple[int, ...], str, Any]]:
    """What the database says of some arrays, without opening each.

    Args:
        directory: where the database lies.
        names: of arrays.

    Returns:
        Of each its shape, the name of its elements' type, and the shape of its chunks.

    Raises:
        ValueError: the database cannot be read, or does not describe one of them.
    """
    found = []
    for name, body in zip(names, _descriptions(directory, names, ts.Context()), strict=True):
        try:
            chunks = body["chunk_grid"]["configuration"]["chunk_shape"]
            found.append((tuple(body["shape"]), body["data_type"], tuple(chunks)))
        except (LookupError, TypeError) as error:
            raise ValueError(f"{directory}: no description of array {name} ({error!r})") from error
    return found


def opened(directory: Path, names: Sequence[str]) -> list[Any]:
    """Opens some arrays to be read, at once.

    Args:
        directory: where the database lies.
        names: of arrays.

    Returns:
        A tensorstore for each. What is read of it is checked against every chunk's crc32c.

    Raises:
        ValueError: one is not there, or not in the codecs that arrays are written in.
    """
    context = ts.Context()
    opening = []
    for name, body in zip(names, _descriptions(directory, names, context), strict=True):
        codecs = [codec["name"] for codec in body["codecs"]]
        if codecs not in _CHAINS:
            raise ValueError(f"expected array {name} in one of {_CHAINS}, found {codecs}")
        spec = {**zarr.array_in(zarr.database_in(directory), name), "metadata": body}
        opening.append(ts.open(spec, open=True, read=True, assume_metadata=True, context=context))
    return [each.result() for each in opening]


def _descriptions(directory: Path, names: Sequence[str], context: Any) -> list[Any]:
    """The zarr3 metadata of some arrays, as it is stored."""
    database = ts.KvStore.open(zarr.database_in(directory), context=context).result()
    reads = [database.read(f"{name}/zarr.json") for name in names]
    return [json.loads(each.result().value) for each in reads]


def lost_chunks(database: Mapping[str, Any], names: Sequence[str]) -> dict[str, str]:
    """Looks whether every chunk of some arrays is where the database says; reads one byte of each.

    Args:
        database: as :mod:`~adacheck_jax.store.zarr` tells it.
        names: of arrays.

    Returns:
        For each array that cannot be whole, why.

    Raises:
        ValueError: the database cannot be opened or listed.
    """
    store = ts.KvStore.open(dict(database), context=ts.Context()).result()
    known = frozenset(store.list().result())
    found: dict[str, str] = {}
    for name in names:
        try:
            keys = [f"{name}/{key}" for key in ArrayReader(database, name).chunk_keys()]
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
