"""Reads the arrays of a base straight to where they are wanted, many at a time.

Orbax reads them too, a few milliseconds of Python each. Here all are described by one read, and
opened without another; what is on its way to the devices is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.store import aligned_read, volume_reader

_BATCH_BYTES = 64 << 20
"""Arrays are placed on devices so much at a time, while the next two batches are read."""
_READ_AHEAD = 2
_MAX_EXCESS = 1.25
"""Boxes are read as the one box around them if that is at most so much more."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """An array of a base, and where it is wanted.

    Attributes:
        name: in the base's database.
        shape: global.
        itemsize_bytes: of a stored element.
        sharding: where it goes; None for a numpy array.
    """

    name: str
    shape: tuple[int, ...]
    itemsize_bytes: int
    sharding: jax.sharding.Sharding | None

    @property
    def boxes(self) -> list[Box]:
        """The boxes that this process needs."""
        if self.sharding is None:
            return [Box.full(self.shape)]
        return transfer.boxes_here(self.shape, self.sharding)

    @property
    def nbytes(self) -> int:
        """Bytes that this process needs."""
        return sum(box.size for box in self.boxes) * self.itemsize_bytes


def read(directory: Path, wanted: Sequence[Wanted]) -> list[Any]:
    """Reads arrays, each process only the boxes that its devices need.

    Args:
        directory: of the base.
        wanted: the arrays.

    Returns:
        A jax or numpy array for each.

    Raises:
        ValueError: one is missing, damaged, or not as it was written.
    """
    stores = volume_reader.opened(directory, [each.name for each in wanted])
    batches = list(_batches(wanted))
    result: list[Any] = []
    reading = [_begin(stores, wanted, batch) for batch in batches[:_READ_AHEAD]]
    for number, batch in enumerate(batches):
        if number + _READ_AHEAD < len(batches):
            reading.append(_begin(stores, wanted, batches[number + _READ_AHEAD]))
        result += _placed([wanted[i] for i in batch], reading.pop(0))
    return result


def _batches(wanted: Sequence[Wanted]) -> Iterator[range]:
    start, size_bytes = 0, 0
    for number, each in enumerate(wanted):
        if size_bytes and size_bytes + each.nbytes > _BATCH_BYTES:
            yield range(start, number)
            start, size_bytes = number, 0
        size_bytes += each.nbytes
    if start < len(wanted):
        yield range(start, len(wanted))


Reads = list[tuple[Box, np.ndarray, Any]]
"""Boxes of an array, what will be their elements, and what tells when they are."""


def _begin(stores: Sequence[Any], wanted: Sequence[Wanted], batch: range) -> list[Reads]:
    return [
        [
            (box, *aligned_read.begin(stores[i][(*box.slices, ...)]))
            for box in _joined(wanted[i].boxes)
        ]
        for i in batch
    ]


def _joined(boxes: list[Box]) -> list[Box]:
    """The box around some boxes, if they fill it; a chunk that several need is read once then."""
    if len(boxes) < 2:
        return boxes
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    around = Box(start, stop)
    return [around] if around.size <= _MAX_EXCESS * sum(box.size for box in boxes) else boxes


def _placed(wanted: Sequence[Wanted], reading: Sequence[Reads]) -> list[Any]:
    for each in reading:
        for _, _, future in each:
            future.result()

    def block(number: int, box: Box) -> np.ndarray:
        around, data = next((b, data) for b, data, _ in reading[number] if b.contains(box))
        return data[(*box.relative_to(around.start).slices, ...)]

    result: list[Any] = [
        each[0][1] if w.sharding is None else None for w, each in zip(wanted, reading, strict=True)
    ]
    on_devices = [i for i, each in enumerate(wanted) if each.sharding is not None]
    targets: list[Any] = [(wanted[i].shape, wanted[i].sharding) for i in on_devices]
    placed = transfer.place_all(targets, lambda n, box: block(on_devices[n], box))
    for i, array in zip(on_devices, placed, strict=True):
        result[i] = array
    return result
