"""Reads packs: an array of one, opened and distrusted, and the sections in it."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from adacheck_jax.errors import FormatError, IntegrityError, first_line, unreadable
from adacheck_jax.store import host_memory, volume_reader, zarr
from adacheck_jax.store.packs.arrays import ArrayKind, Ranges, Runs
from adacheck_jax.store.storage.location import AnyPath

_CHECKSUM_BYTES = 4
"""Length of a chunk's crc32c, which follows its bytes."""


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

    def __init__(self, start: AnyPath, kind: ArrayKind, stored_bytes: int) -> None:
        self.start = start
        self.kind = kind
        self.stored_bytes = stored_bytes
        if not stored_bytes:
            return
        pack = f"a pack of {stored_bytes} bytes"
        try:
            self._database = zarr.database_at(start)
            (metadata,) = volume_reader.stored_metadata(self._database, [kind.name])
            names = zarr.names(metadata["codecs"])
            self._store = zarr.array_in(self._database, kind.name, metadata).result()
        except Exception as error:
            why = f"none that can be opened ({first_line(error)})"
            raise unreadable(start, error) or _damaged(start, pack, why) from error
        shape, dtype = tuple(self._store.shape), self._store.dtype.name
        if (shape, dtype) != ((stored_bytes,), "uint8"):
            raise _damaged(start, pack, f"an array of shape {shape} and type {dtype}")
        # A chunk is read whole, and a crafted chain of codecs may make much out of little: only
        # sizes and codecs that are written are accepted.
        (self._chunk_bytes,) = volume_reader.chunk_shape_of(self._store)
        codecs = zarr.CODECS.values()
        known = [zarr.names(zarr.chain(c)) for c in codecs if kind.is_compressed == (c is not None)]
        if not 0 < self._chunk_bytes <= kind.max_chunk_bytes or names not in known:
            chunks = f"chunks of at most {kind.max_chunk_bytes} bytes in the codecs {known}"
            raise _damaged(start, chunks, f"{self._chunk_bytes} in {names}")

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
        whole = checked or self.kind.is_compressed
        read = [host_memory.empty(max(0, stop - start)) for start, stop in spans]
        try:
            reading = [
                host_memory.begin_read_into(part, data[at : at + part.size])
                for (start, stop), data in zip(spans, read, strict=True)
                for at, part in self._parts(start, stop, whole=whole)
            ]
            for each in reading:
                each.result()
            return read
        except Exception as error:
            raise unreadable(self.start, error) or IntegrityError(
                f"{self.start}: the stored bytes of {what} are damaged "
                f"({first_line(error)}). Restore another step."
            ) from error

    def _parts(self, start: int, stop: int, *, whole: bool) -> Iterator[tuple[int, Any]]:
        """Parts of a range, to be read at once, and the position of each: the range, or chunks."""
        if whole and start < stop:
            yield 0, self._store[start:stop]
        elif start < stop:
            for number in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
                first = number * self._chunk_bytes
                a, b = max(start, first), min(stop, first + self._chunk_bytes)
                skipped = number * _CHECKSUM_BYTES
                yield a - start, self._plain[a + skipped : b + skipped]

    @functools.cached_property
    def _plain(self) -> Any:
        """The array as if each chunk's checksum were the last of its elements."""
        count = -(-self.stored_bytes // self._chunk_bytes)
        chunk_bytes = self._chunk_bytes + _CHECKSUM_BYTES
        codecs = [{"name": "bytes"}]
        metadata = zarr.metadata("uint8", [count * chunk_bytes], [chunk_bytes], codecs)
        return zarr.array_in(self._database, self.kind.name, metadata).result()


def _damaged(start: AnyPath, expected: str, found: str) -> FormatError:
    return FormatError(
        f"{start}: expected {expected}, found {found}. The step is damaged; restore another one."
    )


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
        self._held: list[_Bytes] = []
        self._runs = Runs(size_bytes, zeros, array.kind)
        self.stored_bytes = self._runs.stored_bytes

    def hold(self, spans: Sequence[tuple[int, int]], *, what: str) -> None:
        """Reads byte ranges, and keeps them for :meth:`read`.

        Raises:
            IntegrityError, StorageError: as from :meth:`read`.
        """
        self._held = []
        self._held = self._read(spans, what, checked=True)

    def read(
        self, spans: Sequence[tuple[int, int]], *, what: str, checked: bool = True
    ) -> list[np.ndarray]:
        """Byte ranges, those side by side read as one, all in parallel; nothing if all are held.

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
        found = [_cut(self._held, span) for span in spans]
        if any(each is None for each in found):
            read = self._read(spans, what, checked=checked)
            found = [_cut(read, span) for span in spans]
        return [each for each in found if each is not None]

    def _read(self, spans: Sequence[tuple[int, int]], what: str, *, checked: bool) -> list[_Bytes]:
        """Reads byte ranges, those side by side as one."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(spans):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        places = [(self._runs.stored(a), self._runs.stored(b)) for a, b in merged]
        stored = [(self._start + a, self._start + b) for a, b in places]
        read = self._array.read(stored, what=what, checked=checked)
        pairs = zip(merged, read, strict=True)
        return [(*span, self._filled(*span, data)) for span, data in pairs]

    def _filled(self, start: int, stop: int, stored: np.ndarray) -> np.ndarray:
        """Bytes of a span, with the zeros that were left out."""
        if stored.size == stop - start:
            return stored
        result, position = np.zeros(stop - start, np.uint8), 0
        for a, b in self._runs.kept(start, stop):
            result[a - start : b - start] = stored[position : position + b - a]
            position += b - a
        return result


_Bytes = tuple[int, int, np.ndarray]
"""A byte range and what was read of it."""


def _cut(read: Sequence[_Bytes], span: tuple[int, int]) -> np.ndarray | None:
    """Bytes of a span, if one of the ranges that were read, in their order, has them all."""
    position = bisect.bisect_right(read, span[0], key=lambda each: each[0]) - 1
    if position < 0:
        return None
    start, stop, data = read[position]
    return data[span[0] - start : span[1] - start] if span[1] <= stop else None
