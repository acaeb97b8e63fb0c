"""Volumes: one process's arrays of a base, zarr3 in one OCDBT database; writing and linking.

The arrays have the names, and in the end lie in the database, that stock Orbax expects of a
checkpoint. Equal chunks are written once: the others refer to the first by OCDBT's copy by
reference. Arrays that have not changed since an earlier base are not written again: the volume that
holds them is hard-linked, and referred to. Every chunk has a crc32c.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import tensorstore as ts

from adacheck_jax.format.boxes import Box, grid
from adacheck_jax.store import equality, volume_reader, zarr
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.store.zarr import Codec

_TRANSACTION_BYTES = 1 << 28
"""A transaction holds what it writes in memory until it is committed."""
_MIN_SHARED_BYTES = 256
"""Smaller chunks are cheaper to write than to refer to."""
_MAX_LINKS = 30_000
"""A file with more links is written again: ext4 allows 65,000, and each delta makes one."""
_WORTHWHILE = 0.5
"""Smallest part of a volume's bytes that must still be in use for the volume to be kept."""


@dataclass(frozen=True, slots=True)
class ArrayPiece:
    """One process's boxes of one array of a base.

    Attributes:
        name: the array's name, as Orbax gives it.
        shape: global shape.
        chunk_shape: shape of the zarr chunks; each box of ``blocks`` consists of whole chunks.
        blocks: elements by box.
        codec: compressor of the chunks, None for none.
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
        zero: Any = dtype.type(0).item()
        fill = [zero.real, zero.imag] if dtype.kind == "c" else zero
        codecs = zarr.chain(self.codec, dtype.itemsize)
        return zarr.metadata(dtype.name, self.shape, self.chunk_shape, codecs, fill)


@dataclass(slots=True)
class _Chunk:
    """One zarr chunk; its source is the first one with the same bytes: another one, or itself."""

    piece: ArrayPiece
    key: str
    box: Box
    data: np.ndarray
    source: _Chunk | None = None

    @property
    def is_own(self) -> bool:
        """True if the chunk is written and does not refer to another one."""
        return self.source is self


def write(
    directory: AnyPath, pieces: Sequence[ArrayPiece], file_bytes: int | None = None
) -> dict[str, str]:
    """Writes one volume durably.

    Args:
        directory: directory of the OCDBT database; made if absent.
        pieces: one piece an array; no name twice, no piece without a block.
        file_bytes: size in bytes at which a data file is full, 0 for no limit, None for OCDBT's own
            limit. A chunk is not cut.

    Returns:
        Names of pieces that equal another piece and refer to its chunks, each with the name of that
        one.
    """
    chunks = [[*_chunks(piece)] for piece in pieces]
    every = [*itertools.chain.from_iterable(chunks)]
    firsts = equality.firsts([chunk.data for chunk in every], [*map(_kind, every)])
    for chunk, first in zip(every, firsts, strict=True):
        chunk.source = every[first]
    database = zarr.database_in(directory, file_bytes)
    for batch in _batches(chunks):
        with ts.Transaction(atomic=False) as transaction:
            for own in batch:
                _write_piece(database, own, transaction)
    if referring := [chunk for chunk in every if not chunk.is_own]:
        with ts.Transaction(atomic=True) as transaction:
            _refer(database, referring, transaction)
    names, aliases = dict[Any, str](), dict[str, str]()
    for own in chunks:
        name = own[0].piece.name
        other = names.setdefault(tuple((chunk.key, id(chunk.source)) for chunk in own), name)
        if other != name:
            aliases[name] = other
    return aliases


def _chunks(piece: ArrayPiece) -> Iterator[_Chunk]:
    lengths = piece.chunk_shape
    for box, block in piece.blocks.items():
        bounds = zip(box.start, box.stop, lengths, strict=True)
        for chunk in grid(tuple((*range(start, stop, n), stop) for start, stop, n in bounds)):
            index = [str(a // n) for a, n in zip(chunk.start, lengths, strict=True)]
            data = block[(*chunk.relative_to(box.start).slices, ...)]
            yield _Chunk(piece, "/".join(["c", *index]), chunk, data)


def _kind(chunk: _Chunk) -> Any:
    """Everything besides the elements that decides the stored bytes of a chunk."""
    if chunk.data.nbytes < _MIN_SHARED_BYTES:
        return (chunk.piece.name, chunk.key)
    stored_as = chunk.data.dtype.name, chunk.piece.codec
    if chunk.data.shape == chunk.piece.chunk_shape:
        return (stored_as, None)
    # At the array's edge a whole chunk is stored, filled up in a way that depends on both shapes.
    return (stored_as, (chunk.data.shape, chunk.piece.chunk_shape))


def _batches(chunks: Sequence[Sequence[_Chunk]]) -> Iterator[list[Sequence[_Chunk]]]:
    """Groups of pieces' chunks, of bounded size, but with one piece at least."""
    batch, size_bytes = list[Sequence[_Chunk]](), 0
    for each in chunks:
        own_bytes = sum(chunk.data.nbytes for chunk in each if chunk.is_own)
        if batch and size_bytes + own_bytes > _TRANSACTION_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(each)
        size_bytes += own_bytes
    if batch:
        yield batch


def _write_piece(
    database: ts.KvStore, chunks: Sequence[_Chunk], transaction: ts.Transaction
) -> None:
    piece = chunks[0].piece
    metadata = piece.metadata
    # Not by ``create``, which first asks the storage, for each array again, if there is one.
    options = {"open": True, "assume_metadata": True, "transaction": transaction}
    store = zarr.array_in(database, piece.name, metadata, **options).result()
    key, data = zarr.key_of(piece.name), json.dumps(metadata).encode()
    database.with_transaction(transaction).write(key, data).result()
    blocks = [*piece.blocks.items()]
    if not all(chunk.is_own for chunk in chunks):
        blocks = [(chunk.box, chunk.data) for chunk in chunks if chunk.is_own]
    for box, block in blocks:
        # The data was staged for this write and outlives it, so tensorstore need not copy.
        store[(*box.slices, ...)].write(block, can_reference_source_data_indefinitely=True).result()


def _refer(database: ts.KvStore, chunks: Sequence[_Chunk], transaction: ts.Transaction) -> None:
    """Makes chunks refer to the stored bytes of their sources."""
    copies = []
    this_key = ts.KvStore.KeyRange("", "\0")  # of c/1, and not of c/10 too
    for chunk in chunks:
        assert chunk.source is not None
        source = database / f"{chunk.source.piece.name}/{chunk.source.key}"
        target = database / f"{chunk.piece.name}/{chunk.key}"
        target = target.with_transaction(transaction)
        copies.append(source.experimental_copy_range_to(target, source_range=this_key))
    for copy in copies:
        copy.result()


def keep(
    earlier: Sequence[tuple[str, AnyPath]], pieces: Sequence[ArrayPiece], directory: AnyPath
) -> dict[str, str]:
    """Hard-links the volumes that hold unchanged arrays.

    Every bit is read and compared, so that no damaged volume is relied on.

    Returns:
        Names of the pieces that need not be written again, each with the name of its volume.
    """
    left = {piece.name: piece for piece in pieces}
    kept: dict[str, str] = {}
    for name, source in earlier:
        try:
            names = _names(source)
            # A merge takes all keys below an array's name, so an array below another is not kept.
            outer = {str(path) for each in names for path in PurePosixPath(each).parents}
            held = [left[each] for each in names if each in left and each not in outer]
            stats = [each.stat() for each in at(source).list()]
            total_bytes = sum(stat.size_bytes for stat in stats)
            if sum(piece.nbytes for piece in held) < _WORTHWHILE * total_bytes or not held:
                continue
            if max(stat.link_count for stat in stats) > _MAX_LINKS:
                continue
            files = {each.below(at(source)): each.key for each in at(source).list()}
            if not at(directory / name).adopt(files):
                raise OSError(f"{source}: cannot be linked")  # some of them may have been
            equal = [piece for piece in held if _holds(directory / name, piece)]
        except (OSError, ValueError):  # deleted meanwhile, or damaged: written again
            with contextlib.suppress(OSError):
                at(directory / name).delete()
            continue
        if sum(piece.nbytes for piece in equal) < _WORTHWHILE * total_bytes:
            at(directory / name).delete()
            continue
        kept |= {piece.name: name for piece in equal}
        left = {each: piece for each, piece in left.items() if each not in kept}
    return kept


def _names(directory: AnyPath) -> list[str]:
    """Names of the arrays that a volume holds."""
    if not at(directory).is_folder:
        return []
    keys = [key.decode() for key in zarr.database_in(directory).list().result()]
    return [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]


def _holds(directory: AnyPath, piece: ArrayPiece) -> bool:
    """True if a volume holds exactly a piece's elements, cut into the same chunks."""
    database = zarr.database_in(directory)
    (found,) = volume_reader.stored_metadata(database, [piece.name])
    wanted = piece.metadata
    if any(found.get(key) != wanted[key] for key in ("data_type", "shape", "chunk_grid")):
        return False
    store = zarr.array_in(database, piece.name, open=True, read=True).result()
    return all(
        equality.same_bits(np.asarray(store[(*box.slices, ...)].read().result()), block)
        for box, block in piece.blocks.items()
    )


def merge(item_directory: AnyPath, contents: Mapping[str, Sequence[str] | None]) -> None:
    """Makes the arrays of some volumes part of the checkpoint's own database.

    Args:
        item_directory: the base's item directory; its database lies at its top, as stock Orbax
            writes it.
        contents: names of the arrays to take, by path of the volume relative to the item directory;
            None for all of them.
    """
    context = at(item_directory).context()  # one, for a copy by reference
    checkpoint = zarr.database_in(item_directory, context=context)
    copies = []
    with ts.Transaction(atomic=True) as transaction:
        for path, names in contents.items():
            volume = zarr.database_in(item_directory / path, context=context)
            for prefix in [""] if names is None else [f"{name}/" for name in names]:
                target = (checkpoint / prefix).with_transaction(transaction)
                copies.append((volume / prefix).experimental_copy_range_to(target))
        for copy in copies:
            copy.result()
