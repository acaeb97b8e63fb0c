"""Packs: what a process writes for a delta, as zarr3 byte arrays in one OCDBT database.

A delta writes the boxes that a process owns as one array, since tensorstore's cost (and stock
Orbax's) is per array, not per byte: one for raw elements, and one, compressed, for the planes of
bit-pattern differences. Every chunk has a crc32c. This is the only module that imports tensorstore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from adacheck_jax.errors import FormatError, IntegrityError

Blocks = Sequence[tuple[int, np.ndarray]]
"""Offsets in bytes, and the elements that go there, row-major. They do not overlap."""
Ranges = tuple[tuple[int, int], ...]
"""Ascending half-open ranges."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the arrays that a pack may have.

    Attributes:
        name: of the array in its database.
        max_chunk_bytes: size of its largest chunk.
        codecs: zarr3 codecs, crc32c last: the stored bytes are what is checked.
        elides: whether all-zero chunks are left out.
    """

    name: str
    max_chunk_bytes: int
    codecs: tuple[str, ...]
    elides: bool


RAW = Kind("pack", 1 << 20, ("bytes", "crc32c"), elides=False)
# Smaller chunks, so that compression spreads over threads and untouched rows cost nothing.
DIFFERENCE = Kind("difference", 1 << 18, ("bytes", "zstd", "crc32c"), elides=True)


def _spec(directory: Path, kind: Kind) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{directory.resolve()}/"},
            "path": f"{kind.name}/",
        },
        "fill_missing_data_reads": False,  # a chunk that is not there is an error
        "store_data_equal_to_fill_value": not kind.elides,
    }


def _chunk_bytes(size_bytes: int, kind: Kind) -> int:
    """Chunks are stored whole, so the last one must not stand out: equal ones waste nothing."""
    return math.ceil(size_bytes / math.ceil(size_bytes / kind.max_chunk_bytes))


def write_pack(directory: Path, contents: Sequence[tuple[Kind, int, Blocks]]) -> list[Ranges]:
    """Writes one pack durably, in one transaction.

    Args:
        directory: where the OCDBT database goes; made if absent.
        contents: for each array its kind, its length in bytes (0 writes nothing) and its blocks.

    Returns:
        For each array the chunks that were left out because they are all zero.
    """
    directory.mkdir(parents=True, exist_ok=True)
    elided: list[Ranges] = []
    with ts.Transaction(atomic=False) as transaction:
        for kind, size_bytes, blocks in contents:
            if not size_bytes:
                elided.append(())
                continue
            pack = np.zeros(size_bytes, np.uint8)
            for offset_bytes, block in blocks:
                target = pack[offset_bytes : offset_bytes + block.nbytes]
                np.copyto(target.view(block.dtype).reshape(block.shape), block)
            chunk_bytes = _chunk_bytes(size_bytes, kind)
            chunk_grid = {"name": "regular", "configuration": {"chunk_shape": [chunk_bytes]}}
            metadata = {
                "data_type": "uint8",
                "shape": [size_bytes],
                "chunk_grid": chunk_grid,
                "fill_value": 0,
                "codecs": [_codec(name) for name in kind.codecs],
            }
            spec = {**_spec(directory, kind), "metadata": metadata}
            store = ts.open(spec, create=True, transaction=transaction).result()
            # The pack is ours and never changes again, so tensorstore need not copy it.
            store.write(pack, can_reference_source_data_indefinitely=True).result()
            elided.append(_zero_chunks(pack, chunk_bytes) if kind.elides else ())
    return elided


def _codec(name: str) -> dict[str, Any]:
    return {"name": name, "configuration": {"level": 1}} if name == "zstd" else {"name": name}


def _zero_chunks(pack: np.ndarray, chunk_bytes: int) -> Ranges:
    starts = range(0, pack.size, chunk_bytes)
    ranges: list[tuple[int, int]] = []
    for chunk, start in enumerate(starts):
        if pack[start : start + chunk_bytes].any():
            continue
        first = ranges.pop()[0] if ranges and ranges[-1][1] == chunk else chunk
        ranges.append((first, chunk + 1))
    return tuple(ranges)


class PackReader:
    """Reads extents of one array of a process's pack.

    Args:
        directory: where the OCDBT database is.
        kind: of the array.
        size_bytes: length that the manifest gives for it.
        elided: the chunks that the manifest declares to be left out.

    Raises:
        FormatError: there is no such array, or one of another length.
    """

    def __init__(self, directory: Path, kind: Kind, size_bytes: int, elided: Ranges = ()) -> None:
        self._directory = directory
        self._chunk_bytes = _chunk_bytes(size_bytes, kind) if size_bytes else 1
        self._elided = elided
        try:
            self._store = ts.open(_spec(directory, kind), open=True, read=True).result()
        except Exception as error:
            raise FormatError(
                f"{directory}: expected a pack of {size_bytes} bytes, found none that can be "
                f"opened ({_first_line(error)}). The step is damaged; restore another one."
            ) from error
        found = (tuple(self._store.shape), self._store.dtype.name)
        if found != ((size_bytes,), "uint8"):
            raise FormatError(
                f"{directory}: expected a pack of {size_bytes} bytes, found an array of shape "
                f"{found[0]} and type {found[1]}. The step is damaged; restore another one."
            )
        if elided and (elided[-1][1] - 1) * self._chunk_bytes >= size_bytes:
            raise FormatError(
                f"{directory}: expected chunks of {size_bytes} bytes, found that number "
                f"{elided[-1][1] - 1} was left out. The step is damaged; restore another one."
            )

    def read(self, spans: Sequence[tuple[int, int]], *, what: str) -> list[np.ndarray]:
        """Reads byte ranges in parallel, checking every chunk's crc32c.

        Args:
            spans: half-open byte ranges of the array.
            what: leaf path, for error messages.

        Returns:
            One uint8 array a span.

        Raises:
            IntegrityError: a chunk is missing, truncated, or its checksum does not match.
        """
        pieces = [
            [(b - a, self._store[a:b].read() if written else None) for a, b, written in each]
            for each in (self._pieces(*span) for span in spans)
        ]
        try:
            return [_joined(each) for each in pieces]
        except Exception as error:
            raise IntegrityError(
                f"{self._directory}: the stored bytes of {what} are damaged "
                f"({_first_line(error)}). Restore another step."
            ) from error

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """A span cut where elided chunks begin and end; each piece with whether it was written."""
        pieces = []
        for first, last in self._elided:
            a, b = first * self._chunk_bytes, last * self._chunk_bytes
            if b <= start or a >= stop:
                continue
            if a > start:
                pieces.append((start, a, True))
            pieces.append((max(a, start), min(b, stop), False))
            start = min(b, stop)
        return [*pieces, (start, stop, True)] if start < stop else pieces


def _joined(pieces: Sequence[tuple[int, Any]]) -> np.ndarray:
    """The bytes of some pieces: their size, and what reads them or None where they are zero."""
    arrays = [
        np.zeros(size_bytes, np.uint8) if future is None else np.asarray(future.result())
        for size_bytes, future in pieces
    ]
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint8), *arrays])


def _first_line(error: Exception) -> str:
    return str(error).split("\n", maxsplit=1)[0][:300]
