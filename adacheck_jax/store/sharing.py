"""Equal chunks of the volumes of a base, of all processes: written into one volume alone.

Samples of the chunks tell which may be equal, as in one volume the hash does. Of these alone
SHA-256 is computed, and chunks of one digest are equal. All of that is done anew at every base. The
process that writes a chunk for others reads it back, and compares its digest once more.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from adacheck_jax.errors import IntegrityError, first_line
from adacheck_jax.store import equality, volume_reader, zarr
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.store.volumes import Chunk, Place, Volume

Report = dict[str, Any]
"""Account that one process gives the others, as JSON."""
Agree = Callable[[str, Report, Callable[[Sequence[Report]], Report]], Report]
"""Posts this process's report on a topic, and waits for the answer of process 0, which a function
makes of the reports of all. The answer is the same in all; what that function raises, all raise."""

SAMPLES, DIGESTS = "samples", "digests"
"""Topics: which chunks may be equal; which are, and where they are stored."""

_MIN_BYTES = 1 << 14
"""Smaller chunks are not looked for in other volumes."""
_SAMPLE = 64
"""Number of elements that are looked at."""


def share(volumes: Sequence[Volume], agree: Agree) -> dict[Place, tuple[Chunk, str]]:
    """Finds chunks that equal one of another volume, and notes where they are stored.

    All processes call this, each with its volumes.

    Returns:
        The chunks that this process is to write for other volumes, with their digests.
    """
    chunks = [[x for x in each.distinct if x.data.nbytes >= _MIN_BYTES] for each in volumes]
    samples = [[_sample(chunk) for chunk in each] for each in chunks]
    alike = frozenset(agree(SAMPLES, {"samples": samples}, _alike)["alike"])
    if not alike:
        return {}
    held = [
        {_digest(x.kind, x.data): x for x, sample in zip(*each, strict=True) if sample in alike}
        for each in zip(chunks, samples, strict=True)
    ]
    reported = [
        (volume.rank, digest, (volume.path, chunk.piece.name, chunk.key))
        for volume, each in zip(volumes, held, strict=True)
        for digest, chunk in each.items()
    ]
    stored = agree(DIGESTS, {"held": reported}, _stored)["stored"]
    lent: dict[Place, tuple[Chunk, str]] = {}
    for volume, each in zip(volumes, held, strict=True):
        for digest in each.keys() & stored.keys():
            place, chunk = _place(stored[digest]), each[digest]
            if place[0] == volume.path:
                lent[place] = chunk, digest
            elif volume.rank:
                chunk.elsewhere = place
    return lent


def check(directory: AnyPath, lent: Mapping[Place, tuple[Chunk, str]]) -> None:
    """Reads back what was written for other volumes.

    Raises:
        IntegrityError: it has not the bytes that it was told to have.
    """
    for (path, name, _), (chunk, digest) in lent.items():
        why = "others"
        try:
            (store,) = volume_reader.opened(zarr.database_in(directory / path), [name])
            data = store[(*chunk.box.slices, ...)].read().result()
            if _digest(chunk.kind, np.asarray(data)) == digest:
                continue
        except ValueError as error:
            why = first_line(error)
        raise IntegrityError(
            f"{directory / path}: expected the bytes of chunk {chunk.path} to be those that other "
            f"chunks of the step have too, found, read back, {why}. The step is not saved; look "
            "after this machine's memory and the disk."
        )


def borrowed(reports: Sequence[Report]) -> list[tuple[str, Place]]:
    """Keys of all chunks that are stored elsewhere, and their places.

    Raises:
        IntegrityError: a process relies on a chunk that no other one has written for it.
    """
    lent = {_place(each) for report in reports for each in report["lent"]}
    found = [(key, _place(place)) for report in reports for key, place in report["borrowed"]]
    if missing := [(key, place) for key, place in found if place not in lent]:
        key, place = missing[0]
        raise IntegrityError(
            f"chunk {key}: expected its bytes in {'/'.join(place)}, found that no process has "
            "written them for it. The step is not saved; save it again."
        )
    return found


def _sample(chunk: Chunk) -> str:
    """A text that is the same for equal chunks, and seldom for others."""
    taken = chunk.data.flat[_places(chunk.data.size)]
    return _digest(chunk.kind, taken)[:16]


@functools.lru_cache(maxsize=1024)
def _places(size: int) -> list[int]:
    """Places of sampled elements: multiples of the golden ratio, which no stride falls upon."""
    return [(n * 0x9E3779B97F4A7C15 % (1 << 64)) * size >> 64 for n in range(_SAMPLE)]


def _digest(kind: Any, data: np.ndarray) -> str:
    found = hashlib.sha256(repr(kind).encode())
    found.update(equality.flat_bytes(data).data)
    return found.hexdigest()


def _alike(reports: Sequence[Report]) -> Report:
    """The samples that several volumes have."""
    volumes = [frozenset(each) for report in reports for each in report["samples"]]
    counts = Counter(sample for each in volumes for sample in each)
    return {"alike": [sample for sample, count in counts.items() if count > 1]}


def _stored(reports: Sequence[Report]) -> Report:
    """The place of each chunk that several volumes have, by digest.

    Chunks that the same arrays have are all stored in one of these: it is whole, so that a later
    base can use it again. Over several such groups the work is spread.
    """
    found: dict[str, list[tuple[int, Place]]] = {}
    for report in reports:
        for rank, digest, place in report["held"]:
            found.setdefault(digest, []).append((rank, _place(place)))
    stored = {}
    for digest, held in found.items():
        best = [place for rank, place in held if rank == min(held)[0]]
        if len(held) > 1:
            arrays = repr([(path, name) for path, name, _ in best])
            stored[digest] = best[zlib.crc32(arrays.encode()) % len(best)]
    return {"stored": stored}


def _place(reported: Sequence[str]) -> Place:
    path, name, key = reported
    return path, name, key
