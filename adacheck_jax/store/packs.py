"""Packs: one process's boxes of a delta, as zarr3 byte arrays in one OCDBT database.

All boxes go into two arrays, since tensorstore's cost (and stock Orbax's) is per array, not per
byte: one of bytes as they are, and one that is compressed. The deltas of deferred steps, which are
saved at once, lie one after another in them, each in a *section* of its own. Runs of zeros (experts
that got no token, rows of an embedding that saw no gradient) are left out, and declared in the
manifest. Every chunk has a crc32c.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from adacheck_jax.errors import FormatError, IntegrityError, first_line, unreadable
from adacheck_jax.store import aligned_read, zarr
from adacheck_jax.store.storage.interface import Storage
from adacheck_jax.store.storage.kvstore import KvStore
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.store.zarr import Codec

_CHECKSUM_BYTES = 4
"""Length of a chunk's crc32c, which follows its bytes."""
_UPLOADS = 4
"""Files that are written at once: each is held in memory twice meanwhile."""

Ranges = tuple[tuple[int, int], ...]
"""Ascending half-open ranges."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two arrays of a pack.

    Attributes:
        name: name of the array in its database.
        max_chunk_bytes: largest size of a chunk.
        block_bytes: unit in which runs of zeros are left out.
        is_compressed: True if its chunks are in one of the codecs.
    """

    name: str
    max_chunk_bytes: int
    block_bytes: int
    is_compressed: bool


RAW = Kind("pack", 1 << 20, 1 << 10, False)
# Smaller chunks, so that compression spreads over threads. Only long runs are left out: shorter
# ones compress to less than their declaration takes.
COMPRESSED = Kind("compressed", 1 << 18, 1 << 16, True)


def _chunk_bytes(size_bytes: int, kind: Kind) -> int:
    """Size of the chunks: as equal as possible, since the last chunk is stored whole."""
    return math.ceil(size_bytes / math.ceil(size_bytes / kind.max_chunk_bytes))


def write_pack(
    start: AnyPath,
    contents: Sequence[tuple[Kind, Sequence[np.ndarray]]],
    codec: Codec = "zstd",
) -> list[list[Ranges]]:
    """Writes one pack durably, in one transaction.

    Args:
        start: beginning of the paths of its files; their directory is made if absent.
        contents: kind and sections of each array. An array without bytes is not written; the
            sections may be changed again after the call.
        codec: codec of the compressed array.

    Returns:
        Ranges of blocks of zeros that were left out, by array and section.
    """
    place = at(start)
    if place.on_file_system:
        context = place.context(file_io_sync=False)  # else each file by itself waits for the disk
        zeros = _write(zarr.database_at(place), context, contents, codec)
        beginning = f"{place.name}."
        files = [e for e in place.parent.list(deep=False) if e.name.startswith(beginning)]
        if files:
            place.parent.sync(*files)
        return zeros
    # Tensorstore would ask and write five times in turn. Files made in memory are written at once.
    memory = Location(KvStore("memory://pack"), place.name)
    zeros = _write(zarr.database_at(memory), memory.context(), contents, codec)
    _move(memory.storage, place.parent)
    return zeros


def _write(
    database: dict[str, Any],
    context: ts.Context,
    contents: Sequence[tuple[Kind, Sequence[np.ndarray]]],
    codec: Codec,
) -> list[list[Ranges]]:
    """Writes the arrays of a pack; returns the ranges that were left out."""
    zeros: list[list[Ranges]] = []
    # Atomic: one generation of the database, so that every file is referred to.
    with ts.Transaction(atomic=True) as transaction:
        for kind, sections in contents:
            zeros.append([_zero_blocks(each, kind.block_bytes) for each in sections])
            pack = _joined(sections, zeros[-1], kind)
            if not pack.size:
                continue
            codecs = zarr.chain(codec if kind.is_compressed else None)
            chunk_shape = [_chunk_bytes(pack.size, kind)]
            metadata = zarr.metadata("uint8", pack.shape, chunk_shape, codecs)
            spec = {
                **zarr.array_in(database, kind.name),
                "metadata": metadata,
                "store_data_equal_to_fill_value": True,
            }
            store = ts.open(spec, create=True, transaction=transaction, context=context).result()
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


def _joined(sections: Sequence[np.ndarray], zeros: Sequence[Ranges], kind: Kind) -> np.ndarray:
    """Stored bytes of an array: all sections without zeros; one whole section is not copied."""
    kept = [
        section[a:b]
        for section, left_out in zip(sections, zeros, strict=True)
        for a, b in _Runs(section.size, left_out, kind).kept()
    ]
    return kept[0] if len(kept) == 1 else np.concatenate([np.empty(0, np.uint8), *kept])


def laid_out(
    start: AnyPath, kind: Kind, sections: Sequence[tuple[int, Ranges]]
) -> tuple[list[int], int]:
    """Positions of the sections in the stored bytes of an array, and the number of these bytes.

    Args:
        start: beginning of the paths of the pack's files, for error messages.
        kind: kind of the array.
        sections: each section's length in bytes, zeros included, and the blocks that were left out.

    Raises:
        FormatError: a section does not have the blocks that were left out.
    """
    for size_bytes, zeros in sections:
        if zeros and zeros[-1][1] * kind.block_bytes > size_bytes:
            raise FormatError(
                f"{start}: expected blocks of {size_bytes} bytes, found that number "
                f"{zeros[-1][1] - 1} was left out. The step is damaged; restore another one."
            )
    sizes = [_Runs(size_bytes, zeros, kind).stored_bytes for size_bytes, zeros in sections]
    ends = list(itertools.accumulate(sizes, initial=0))
    return ends[:-1], ends[-1]


def _zero_blocks(pack: np.ndarray, block_bytes: int) -> Ranges:
    """Runs of whole blocks that are all zero."""
    count = pack.size // block_bytes
    words = pack[: count * block_bytes].view(np.uint64).reshape(count, block_bytes // 8)
    found = np.flatnonzero(words[:, 0] == 0)  # few blocks of other data are looked at again
    found = found[~words[found].any(axis=1)]
    if not found.size:
        return ()
    borders = np.flatnonzero(np.diff(found) > 1)
    starts = found[np.concatenate([[0], borders + 1])]
    stops = found[np.concatenate([borders, [found.size - 1]])] + 1
    return tuple(zip(starts.tolist(), stops.tolist(), strict=True))


class _Runs:
    """Positions of a section's bytes once its runs of zeros are left out.

    Args:
        size_bytes: length of the section with its zeros.
        zeros: ranges of blocks that are left out.
        kind: kind of the array.

    Attributes:
        stored_bytes: length of the section without its zeros.
    """

    def __init__(self, size_bytes: int, zeros: Ranges, kind: Kind) -> None:
        self._size_bytes = size_bytes
        bounds = np.array(zeros, np.int64).reshape(-1, 2) * kind.block_bytes
        self._starts, self._stops = bounds[:, 0], bounds[:, 1]
        self._left_out = np.concatenate([[0], np.cumsum(self._stops - self._starts)])
        self.stored_bytes = size_bytes - int(self._left_out[-1])

    def kept(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int]]:
        """Yields the stored ranges of a span; without a span, of the whole section."""
        stop = self._size_bytes if stop is None else stop
        first = int(np.searchsorted(self._stops, start, side="right"))
        last = int(np.searchsorted(self._starts, stop))
        runs = zip(self._starts[first:last].tolist(), self._stops[first:last].tolist(), strict=True)
        for a, b in runs:
            if a > start:
                yield start, a
            start = min(b, stop)
        if start < stop:
            yield start, stop

    def stored(self, position: int) -> int:
        """Position of a byte, or of the next one that was not left out, among the stored bytes."""
        run = int(np.searchsorted(self._starts, position, side="right"))
        inside = 0
        if run and position < self._stops[run - 1]:
            inside = int(self._stops[run - 1]) - position
        return position + inside - int(self._left_out[run])


class PackArray:
    """One array of a process's pack, opened.

    Args:
        start: beginning of the paths of the pack's files.
        kind: kind of the array.
        stored_bytes: length of the array by the manifest; an empty array does not exist on disk.

    Raises:
        FormatError: there is no such array, or one of another length.
        StorageError: the array cannot be read now.
    """

    def __init__(self, start: AnyPath, kind: Kind, stored_bytes: int) -> None:
        self.start = start
        self.kind = kind
        self.stored_bytes = expected_bytes = stored_bytes
        if not expected_bytes:
            return
        spec = zarr.array_in(zarr.database_at(start), kind.name)
        try:
            self._store = ts.open(spec, open=True, read=True, context=at(start).context()).result()
        except Exception as error:
            if refused := unreadable(start, error):
                raise refused from error
            raise FormatError(
                f"{start}: expected a pack of {expected_bytes} bytes, found none that can be "
                f"opened ({first_line(error)}). The step is damaged; restore another one."
            ) from error
        found = (tuple(self._store.shape), self._store.dtype.name)
        if found != ((expected_bytes,), "uint8"):
            raise FormatError(
                f"{start}: expected a pack of {expected_bytes} bytes, found an array of shape "
                f"{found[0]} and type {found[1]}. The step is damaged; restore another one."
            )
        # A chunk is read whole, and a crafted chain of codecs may make much out of little: only
        # sizes and codecs that are written are accepted.
        metadata = self._store.spec().to_json()["metadata"]
        (chunk_bytes,) = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        names = zarr.names(metadata["codecs"])
        known = [zarr.names(zarr.chain(c)) for c in (zarr.CODECS if kind.is_compressed else [None])]
        if chunk_bytes > kind.max_chunk_bytes or names not in known:
            raise FormatError(
                f"{start}: expected chunks of at most {kind.max_chunk_bytes} bytes in the "
                f"codecs {known}, found {chunk_bytes} in {names}. The step is "
                "damaged; restore another one."
            )
        self._chunk_bytes: int = chunk_bytes

    def read(
        self, spans: Sequence[tuple[int, int]], *, what: str, checked: bool = True
    ) -> list[np.ndarray]:
        """Reads ranges of stored bytes in parallel, checking every chunk's crc32c.

        Args:
            spans: half-open ranges.
            what: leaf path, for error messages.
            checked: False to leave the crc32c of uncompressed chunks unread, which takes half of
                the time: the caller verifies what it makes of the bytes.

        Raises:
            IntegrityError: a chunk is missing, truncated, or its checksum does not match.
            StorageError: the array cannot be read now.
        """
        begin = self._begin if checked or self.kind.is_compressed else self._begin_unchecked
        try:
            begun = [begin(a, b) for a, b in spans]
            for _, futures in begun:
                for each in futures:
                    each.result()
            return [data for data, _ in begun]
        except Exception as error:
            if refused := unreadable(self.start, error):
                raise refused from error
            raise IntegrityError(
                f"{self.start}: the stored bytes of {what} are damaged "
                f"({first_line(error)}). Restore another step."
            ) from error

    def _begin(self, start: int, stop: int) -> tuple[np.ndarray, list[Any]]:
        if start >= stop:
            return np.empty(0, np.uint8), []
        data, future = aligned_read.begin(self._store[start:stop])
        return data, [future]

    def _begin_unchecked(self, start: int, stop: int) -> tuple[np.ndarray, list[Any]]:
        if start >= stop:
            return np.empty(0, np.uint8), []
        data, futures = aligned_read.empty(stop - start), []
        for number in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            first = number * self._chunk_bytes
            a, b = max(start, first), min(stop, first + self._chunk_bytes)
            skipped = number * _CHECKSUM_BYTES
            part = self._plain[a + skipped : b + skipped]
            futures.append(aligned_read.begin_into(part, data[a - start : b - start]))
        return data, futures

    @functools.cached_property
    def _plain(self) -> Any:
        """The array as if each chunk's checksum were the last of its elements."""
        count = -(-self.stored_bytes // self._chunk_bytes)
        chunk_bytes = self._chunk_bytes + _CHECKSUM_BYTES
        codecs = [{"name": "bytes"}]
        metadata = zarr.metadata("uint8", [count * chunk_bytes], [chunk_bytes], codecs)
        spec = zarr.array_in(zarr.database_at(self.start), self.kind.name)
        options: dict[str, Any] = {"open": True, "read": True, "assume_metadata": True}
        context = at(self.start).context()
        return ts.open({**spec, "metadata": metadata}, context=context, **options).result()


class PackReader:
    """Reads one section of an array, with the zeros that were left out.

    Args:
        array: the array that the section is in.
        size_bytes: length of the section by the manifest.
        zeros: ranges of blocks that the manifest declares to be zero and left out.
        start: position of the section in the stored bytes of the array.

    Attributes:
        stored_bytes: length of the section without its zeros.
    """

    def __init__(
        self, array: PackArray, size_bytes: int, zeros: Ranges = (), start: int = 0
    ) -> None:
        self._array = array
        self._start = start
        self._held: list[tuple[int, int, np.ndarray]] = []
        self._runs = _Runs(size_bytes, zeros, array.kind)
        self.stored_bytes = self._runs.stored_bytes

    def hold(self, spans: Sequence[tuple[int, int]], *, what: str) -> None:
        """Reads byte ranges, those side by side as one, and keeps them for :meth:`read`.

        Args:
            spans: half-open byte ranges of the section; an empty list frees the kept bytes.
            what: leaf path or other name, for error messages.

        Raises:
            IntegrityError, StorageError: as from :meth:`read`.
        """
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        self._held = []
        read = self.read(merged, what=what)
        self._held = [(*span, data) for span, data in zip(merged, read, strict=True)]

    def read(
        self, spans: Sequence[tuple[int, int]], *, what: str, checked: bool = True
    ) -> list[np.ndarray]:
        """Byte ranges; those not held are read in parallel, checking every chunk's crc32c.

        Args:
            spans: half-open byte ranges of the section.
            what: leaf path, for error messages.
            checked: as for :meth:`PackArray.read`.

        Returns:
            One uint8 array a span.

        Raises:
            IntegrityError: a chunk is missing, truncated, or its checksum does not match.
            StorageError: the array cannot be read now.
        """
        held = [data for data in map(self._of_held, spans) if data is not None]
        if len(held) == len(spans):
            return held
        places = [(self._runs.stored(a), self._runs.stored(b)) for a, b in spans]
        stored = [(self._start + a, self._start + b) for a, b in places]
        read = self._array.read(stored, what=what, checked=checked)
        return [self._filled(*span, data) for span, data in zip(spans, read, strict=True)]

    def _of_held(self, span: tuple[int, int]) -> np.ndarray | None:
        """Bytes of a span, if they are held."""
        position = bisect.bisect_right(self._held, span[0], key=lambda each: each[0]) - 1
        if position < 0:
            return None
        start, stop, data = self._held[position]
        return data[span[0] - start : span[1] - start] if span[1] <= stop else None

    def _filled(self, start: int, stop: int, stored: np.ndarray) -> np.ndarray:
        """Bytes of a span, with the zeros that were left out."""
        if stored.size == stop - start:
            return stored
        result, position = np.zeros(stop - start, np.uint8), 0
        for a, b in self._runs.kept(start, stop):
            result[a - start : b - start] = stored[position : position + b - a]
            position += b - a
        return result
