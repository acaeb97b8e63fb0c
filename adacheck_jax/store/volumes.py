"""Volumes: one process's arrays of a base, zarr3 in one OCDBT database; writing and linking.

The arrays have the names, and in the end lie in the database, that stock Orbax expects of a
checkpoint. Equal chunks are written once: the others refer to the first by OCDBT's copy by
reference, within a volume as it is written, to one in another volume by the merge. Arrays that have
not changed since an earlier base are not written again: the volume that holds them is hard-linked,
and referred to. Every chunk has a crc32c.
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

from adacheck_jax.format.boxes import Box, batches, grid
from adacheck_jax.store import equality, volume_reader, zarr
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.store.zarr import Codec

_TRANSACTION_BYTES = 1 << 28
"""A transaction holds what it writes in memory until it is committed."""
_MOST_FILES = 256
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


Place = tuple[str, str, str]
"""A stored chunk: path of its volume relative to the item directory, array, and key below it."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One zarr chunk.

    Attributes:
        piece: the piece of an array that it belongs to.
        key: its key below the array's name.
        box: its box.
        data: its elements.
        first: the first chunk of the volume with the same bytes, if that is another one. A chunk
            that referred to itself would hold the state's memory until Python looks for cycles.
        elsewhere: the chunk of another volume that is stored in place of the source; None if the
            source is written.
    """

    piece: ArrayPiece
    key: str
    box: Box
    data: np.ndarray
    first: Chunk | None = None
    elsewhere: Place | None = None

    @property
    def source(self) -> Chunk:
        """The chunk of the volume that is stored for it."""
        return self.first or self

    @property
    def is_written(self) -> bool:
        """True if the chunk is written and does not refer to another one."""
        return self.first is None and self.elsewhere is None

    @property
    def path(self) -> str:
        """Key in the database."""
        return f"{self.piece.name}/{self.key}"

    @property
    def kind(self) -> Any:
        """Everything besides the elements that decides the stored bytes."""
        if self.data.nbytes < _MIN_SHARED_BYTES:
            return (self.piece.name, self.key)
        stored_as = self.data.dtype.name, self.piece.codec
        if self.data.shape == self.piece.chunk_shape:
            return (stored_as, None)
        # At the edge a whole chunk is stored, filled up in a way that depends on both shapes.
        return (stored_as, (self.data.shape, self.piece.chunk_shape))


class Volume:
    """Arrays that are to be one volume, and those of their chunks that are equal.

    Args:
        pieces: one piece an array; no name twice, no piece without a block.

    Attributes:
        path: its path relative to the item directory.
        rank: 0 if it is there already, 1 if a later base will likely use it again, else 2: of equal
            chunks of several volumes that of the lowest rank is stored.
        names: names of its arrays.
    """

    def __init__(self, pieces: Sequence[ArrayPiece], path: str, rank: int) -> None:
        self.path, self.rank = path, rank
        self.names = [piece.name for piece in pieces]
        self._chunks = [[*_chunks(piece)] for piece in pieces]
        every = self._every
        firsts = equality.firsts([each.data for each in every], [each.kind for each in every])
        for chunk, first in zip(every, firsts, strict=True):
            chunk.first = every[first] if every[first] is not chunk else None

    @property
    def distinct(self) -> list[Chunk]:
        """The chunks of which none equals another."""
        return [chunk for chunk in self._every if chunk.first is None]

    @property
    def borrowed(self) -> list[tuple[str, Place]]:
        """Keys of the chunks that are stored in another volume, and of those stored for them."""
        pairs = ((chunk.path, chunk.source.elsewhere) for chunk in self._every)
        return [(path, place) for path, place in pairs if place is not None]

    @property
    def aliases(self) -> dict[str, str]:
        """Names of pieces of which all chunks are another array's, each with that one's name."""
        names, found = dict[Any, str](), dict[str, str]()
        for chunks in self._chunks:
            name = chunks[0].piece.name
            places = [(each.source.elsewhere or ("", "", ""))[1:] for each in chunks]
            other = places[0][0]
            if not other or places != [(other, each.key) for each in chunks]:
                own = tuple((each.key, id(each.source)) for each in chunks)
                other = names.setdefault(own, name)
            if other != name:
                found[name] = other
        return found

    def write(self, item_directory: AnyPath, file_bytes: int | None = None) -> None:
        """Writes the volume durably, but for what is stored in another one.

        Args:
            item_directory: directory of the base.
            file_bytes: size in bytes at which a data file is full, 0 for no limit, None for one at
                which several are written at the same time. A chunk is not cut.
        """
        sizes = [sum(x.data.nbytes for x in own if x.is_written) for own in self._chunks]
        if file_bytes is None:  # each step after it links them all
            file_bytes = max(zarr.FILE_BYTES, sum(sizes) // _MOST_FILES)
        database = zarr.database_in(item_directory / self.path, file_bytes)
        for batch in batches(sizes, _TRANSACTION_BYTES):
            with ts.Transaction(atomic=False) as transaction:
                for number in batch:
                    _write_piece(database, self._chunks[number], transaction)
        referring = [each for each in self._every if each.first is not None]
        if referring := [each for each in referring if each.source.is_written]:
            with ts.Transaction(atomic=True) as transaction:
                copies = [
                    _reference(database / each.source.path, database / each.path, transaction)
                    for each in referring
                ]
                for copy in copies:
                    copy.result()

    @property
    def _every(self) -> list[Chunk]:
        return [*itertools.chain.from_iterable(self._chunks)]


def _chunks(piece: ArrayPiece) -> Iterator[Chunk]:
    lengths = piece.chunk_shape
    for box, block in piece.blocks.items():
        bounds = zip(box.start, box.stop, lengths, strict=True)
        for chunk in grid(tuple((*range(start, stop, n), stop) for start, stop, n in bounds)):
            index = [str(a // n) for a, n in zip(chunk.start, lengths, strict=True)]
            data = block[(*chunk.relative_to(box.start).slices, ...)]
            yield Chunk(piece, "/".join(["c", *index]), chunk, data)


def _write_piece(
    database: ts.KvStore, chunks: Sequence[Chunk], transaction: ts.Transaction
) -> None:
    piece = chunks[0].piece
    metadata = piece.metadata
    # Not by ``create``, which first asks the storage, for each array again, if there is one.
    options = {"open": True, "assume_metadata": True, "transaction": transaction}
    store = zarr.array_in(database, piece.name, metadata, **options).result()
    key, data = zarr.key_of(piece.name), json.dumps(metadata).encode()
    database.with_transaction(transaction).write(key, data).result()
    blocks = [*piece.blocks.items()]
    if not all(chunk.is_written for chunk in chunks):
        blocks = [(chunk.box, chunk.data) for chunk in chunks if chunk.is_written]
    for box, block in blocks:
        # The data was staged for this write and outlives it, so tensorstore need not copy.
        store[(*box.slices, ...)].write(block, can_reference_source_data_indefinitely=True).result()


def _reference(source: ts.KvStore, target: ts.KvStore, transaction: ts.Transaction) -> Any:
    """Makes a key refer to the stored bytes of another one."""
    this_key = ts.KvStore.KeyRange("", "\0")  # of c/1, and not of c/10 too
    target = target.with_transaction(transaction)
    return source.experimental_copy_range_to(target, source_range=this_key)


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
            keys = _keys(source)
            names = [key.removesuffix("/zarr.json") for key in keys if key.endswith("/zarr.json")]
            # A merge takes all keys below an array's name, so an array below another is not kept.
            outer = {str(path) for each in names for path in PurePosixPath(each).parents}
            held = [left[each] for each in names if each in left and each not in outer]
            # Of a borrowed chunk the bytes lie in another volume.
            held = [piece for piece in held if keys.issuperset(x.path for x in _chunks(piece))]
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


def _keys(directory: AnyPath) -> frozenset[str]:
    """Keys of what a volume holds."""
    if not at(directory).is_folder:
        return frozenset()
    return frozenset(key.decode() for key in zarr.database_in(directory).list().result())


def _holds(directory: AnyPath, piece: ArrayPiece) -> bool:
    """True if a volume holds exactly a piece's elements, in the same chunks and codec."""
    database = zarr.database_in(directory)
    (found,) = volume_reader.stored_metadata(database, [piece.name])
    wanted = piece.metadata
    if any(found.get(key) != wanted[key] for key in ("data_type", "shape", "chunk_grid", "codecs")):
        return False
    (store,) = volume_reader.opened(database, [piece.name])
    return all(
        equality.same_bits(np.asarray(store[(*box.slices, ...)].read().result()), block)
        for box, block in piece.blocks.items()
    )


def merge(
    item_directory: AnyPath,
    contents: Mapping[str, Sequence[str] | None],
    borrowed: Sequence[tuple[str, Place]] = (),
) -> None:
    """Makes the arrays of some volumes part of the checkpoint's own database.

    Args:
        item_directory: the base's item directory; its database lies at its top, as stock Orbax
            writes it.
        contents: names of the arrays to take, by path of the volume relative to the item directory;
            None for all of them.
        borrowed: keys of chunks that no volume has, and of those whose bytes they have.
    """
    context = at(item_directory).context()  # one, for a copy by reference
    checkpoint = zarr.database_in(item_directory, context=context)
    copies = []
    with ts.Transaction(atomic=True) as transaction:
        opened = {}
        for path, names in contents.items():
            volume = opened[path] = zarr.database_in(item_directory / path, context=context)
            for prefix in [""] if names is None else [f"{name}/" for name in names]:
                target = (checkpoint / prefix).with_transaction(transaction)
                copies.append((volume / prefix).experimental_copy_range_to(target))
        for key, (path, name, chunk) in borrowed:
            source = opened[path] / f"{name}/{chunk}"
            copies.append(_reference(source, checkpoint / key, transaction))
        for copy in copies:
            copy.result()
