"""Packs: one zarr3 byte array a process in an OCDBT database, with crc32c on every chunk.

A delta writes the boxes that a process owns as one array, since tensorstore's cost (and stock
Orbax's) is per array, not per byte. This is the only module that imports tensorstore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from adacheck_jax.errors import FormatError, IntegrityError

MAX_CHUNK_BYTES = 1 << 20
_ARRAY = "pack/"


def _spec(directory: Path) -> dict[str, Any]:
    return {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{directory.resolve()}/"},
            "path": _ARRAY,
        },
    }


def write_pack(directory: Path, size_bytes: int, blocks: Sequence[tuple[int, np.ndarray]]) -> None:
    """Writes one pack durably, in one transaction.

    Args:
        directory: where the OCDBT database goes; made if absent.
        size_bytes: length of the pack; 0 writes nothing.
        blocks: offsets in bytes, and the elements that go there, row-major. They do not overlap.
    """
    if not size_bytes:
        return
    pack = np.zeros(size_bytes, np.uint8)
    for offset_bytes, block in blocks:
        target = pack[offset_bytes : offset_bytes + block.nbytes]
        np.copyto(target.view(block.dtype).reshape(block.shape), block)
    directory.mkdir(parents=True, exist_ok=True)
    # Chunks are stored whole, so the last one must not stand out: equal chunks waste nothing.
    chunk_bytes = math.ceil(size_bytes / math.ceil(size_bytes / MAX_CHUNK_BYTES))
    chunk_grid = {"name": "regular", "configuration": {"chunk_shape": [chunk_bytes]}}
    metadata = {
        "data_type": "uint8",
        "shape": [size_bytes],
        "chunk_grid": chunk_grid,
        "fill_value": 0,
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
    }
    with ts.Transaction(atomic=False) as transaction:
        store = ts.open(
            {**_spec(directory), "metadata": metadata, "store_data_equal_to_fill_value": True},
            create=True,
            transaction=transaction,
        ).result()
        # The pack is ours and never changes again, so tensorstore need not copy it.
        store.write(pack, can_reference_source_data_indefinitely=True).result()


class PackReader:
    """Reads extents of one process's pack.

    Args:
        directory: where the OCDBT database is.
        size_bytes: length that the manifest gives for the pack.

    Raises:
        FormatError: there is no pack, or one of another length.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self._directory = directory
        try:
            self._store = ts.open(_spec(directory), open=True, read=True).result()
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

    def read(self, spans: Sequence[tuple[int, int]], *, what: str) -> list[np.ndarray]:
        """Reads byte ranges in parallel, checking every chunk's crc32c.

        Args:
            spans: half-open byte ranges of the pack.
            what: leaf path, for error messages.

        Returns:
            One uint8 array a span.

        Raises:
            IntegrityError: a chunk is missing, truncated, or its checksum does not match.
        """
        futures = [self._store[start:stop].read() for start, stop in spans]
        try:
            return [np.asarray(future.result()) for future in futures]
        except Exception as error:
            raise IntegrityError(
                f"{self._directory}: the stored bytes of {what} are damaged "
                f"({_first_line(error)}). Restore another step."
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).split("\n", maxsplit=1)[0][:300]
