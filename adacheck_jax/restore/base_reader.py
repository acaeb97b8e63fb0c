"""Arrays of a base, read straight onto their target shardings, many at a time.

Orbax spends a few milliseconds of Python on each array. Here one read describes all arrays, no
other is needed to open them, and the bytes in flight to the devices are bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.store import aligned_read, volume_reader
from adacheck_jax.store.storage.location import AnyPath

_BATCH_BYTES = 64 << 20
"""Size of a batch of arrays that is placed on devices at once."""
_READ_AHEAD = 2
"""Batches that are read while another one is placed on devices."""
_MAX_EXCESS = 1.25
"""Boxes are read as one box around them if its size is at most this multiple of theirs."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """An array of a base, and its target.

    Attributes:
        name: name of the array in the base's database.
        shape: global shape.
        itemsize_bytes: size of a stored element.
        sharding: target sharding; None to read a numpy array.
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


def read(directory: AnyPath, requests: Sequence[ReadRequest]) -> list[Any]:
    """Read arrays; each process reads only the boxes that its devices need.

    Args:
        directory: the base's directory.
        requests: the arrays to read.

    Returns:
        A jax or numpy array for each request.

    Raises:
        ValueError: an array is missing, damaged, or of another shape or type than was written.
    """
    stores = volume_reader.opened(directory, [each.name for each in requests])
    batches = list(_batches(requests))
    result: list[Any] = []
    reading = [_begin(stores, requests, batch) for batch in batches[:_READ_AHEAD]]
    for number, batch in enumerate(batches):
        if number + _READ_AHEAD < len(batches):
            reading.append(_begin(stores, requests, batches[number + _READ_AHEAD]))
        result += _placed([requests[i] for i in batch], reading.pop(0))
    return result


def _batches(requests: Sequence[ReadRequest]) -> Iterator[range]:
    start, size_bytes = 0, 0
    for number, each in enumerate(requests):
        if size_bytes and size_bytes + each.nbytes > _BATCH_BYTES:
            yield range(start, number)
            start, size_bytes = number, 0
        size_bytes += each.nbytes
    if start < len(requests):
        yield range(start, len(requests))


Reads = list[tuple[Box, np.ndarray, Any]]
"""Boxes of an array, memory for their elements, and futures that are done once they are read."""


def _begin(stores: Sequence[Any], requests: Sequence[ReadRequest], batch: range) -> list[Reads]:
    return [
        [
            (box, *aligned_read.begin(stores[i][(*box.slices, ...)]))
            for box in _merged(requests[i].boxes)
        ]
        for i in batch
    ]


def _merged(boxes: list[Box]) -> list[Box]:
    """The box around some boxes, if they nearly fill it: then each chunk is read once."""
    if len(boxes) < 2:
        return boxes
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    around = Box(start, stop)
    return [around] if around.size <= _MAX_EXCESS * sum(box.size for box in boxes) else boxes


def _placed(requests: Sequence[ReadRequest], reading: Sequence[Reads]) -> list[Any]:
    for each in reading:
        for _, _, future in each:
            future.result()

    def block(number: int, box: Box) -> np.ndarray:
        around, data = next((b, data) for b, data, _ in reading[number] if b.contains(box))
        return data[(*box.relative_to(around.start).slices, ...)]

    result: list[Any] = [
        each[0][1] if w.sharding is None else None
        for w, each in zip(requests, reading, strict=True)
    ]
    on_devices = [i for i, each in enumerate(requests) if each.sharding is not None]
    targets: list[Any] = [(requests[i].shape, requests[i].sharding) for i in on_devices]
    placed = transfer.place_all(targets, lambda n, box: block(on_devices[n], box))
    for i, array in zip(on_devices, placed, strict=True):
        result[i] = array
    return result
