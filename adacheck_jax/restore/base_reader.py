"""Arrays of a base, read straight onto their target shardings, many at a time.

Orbax spends a few milliseconds of Python on each array. Here one read describes all arrays, no
other is needed to open them, and the bytes in flight to the devices are bounded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.device.sharding import holders_of
from adacheck_jax.format.boxes import Box
from adacheck_jax.restore import shared_reads, shares
from adacheck_jax.restore.shared_reads import OwnShare, ReadOnce, SharedReads, put_together
from adacheck_jax.restore.shares import Exchange, SharedBox
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
        """Bytes that the process needs which needs most: the same in all processes."""
        if self.sharding is None:
            return math.prod(self.shape) * self.itemsize_bytes
        sizes: dict[int, int] = {}
        for box, devices in holders_of(self.sharding, self.shape).items():
            for process in {each.process for each in devices}:
                sizes[process] = sizes.get(process, 0) + box.size
        return max(sizes.values()) * self.itemsize_bytes

    def shared(self, position: int, chunk_shape: Sequence[int]) -> list[SharedBox]:
        """Its boxes of whole chunks that several processes need.

        Args:
            position: its position among the requests.
            chunk_shape: shape of its chunks.
        """
        chunks = zip(self.shape, chunk_shape, strict=True)
        cuts = tuple((*range(0, length, step or 1), length) for length, step in chunks)
        return shared_reads.shared_boxes(
            position, self.shape, self.sharding, self.itemsize_bytes, cuts
        )


def read(
    directory: AnyPath, requests: Sequence[ReadRequest], read_once: ReadOnce = None
) -> list[Any]:
    """Read arrays; each process reads boxes that its devices need, or a share of them.

    Collective if processes share the reading: all call it with the same requests.

    Args:
        directory: the base's directory.
        requests: the arrays to read.
        read_once: True to read each box in one process, also if others need it, and to exchange
            what was read; False to read in each process what it needs; None to decide by the
            storage and by bytes.

    Returns:
        A jax or numpy array for each request.

    Raises:
        ValueError: an array is missing, damaged, or of another shape or type than was written.
        AdaCheckError: another process could not read its share.
    """
    asked = _asked(directory, requests, read_once)
    if jax.process_index() in asked:
        stores, batches, plans, together = _opened_together(directory, requests, asked, read_once)
    else:
        stores, together = volume_reader.opened(directory, [each.name for each in requests]), None
        batches = list(_batches([each.nbytes for each in requests]))
        plans: list[tuple[Exchange, ...]] = [()] * len(batches)
    result: list[Any] = []
    reading = [
        _begin(stores, requests, *each)
        for each in zip(batches[:_READ_AHEAD], plans[:_READ_AHEAD], strict=True)
    ]
    for number, batch in enumerate(batches):
        if number + _READ_AHEAD < len(batches):
            ahead = number + _READ_AHEAD
            reading.append(_begin(stores, requests, batches[ahead], plans[ahead]))
        result += _placed([*batch], requests, reading.pop(0), together)
    return result


def _opened_together(
    directory: AnyPath,
    requests: Sequence[ReadRequest],
    asked: tuple[int, ...],
    read_once: ReadOnce,
) -> tuple[list[Any], list[range], list[tuple[Exchange, ...]], SharedReads | None]:
    """Open arrays, plan who reads what of each batch, and learn that all processes did.

    Chunks are known once the arrays are open, so only then, alike in all processes, is it clear
    whether anything is read together.
    """
    stores, batches, plans, failure, is_shared = [], [], [], None, True
    try:
        stores = volume_reader.opened(directory, [each.name for each in requests])
        chunks = [each.chunk_layout.read_chunk.shape or () for each in stores]
        shared = [each.shared(i, chunks[i]) for i, each in enumerate(requests)]
        every = [*itertools.chain.from_iterable(shared)]
        is_shared = bool(shared_reads.members(every, read_once, directory))
        if not is_shared:
            shared = [[] for _ in requests]
        # A process holds all of what is shared of an array, also if it needs a part.
        sizes = [
            max(each.nbytes, sum(box.nbytes for box in boxes))
            for each, boxes in zip(requests, shared, strict=True)
        ]
        batches = list(_batches(sizes))
        plans = [shares.plan([box for i in batch for box in shared[i]]) for batch in batches]
    except Exception as error:
        failure = error
    together = SharedReads(asked, directory, plans)
    together.agree(failure)
    return stores, batches, plans, together if is_shared else None


def _asked(
    directory: AnyPath, requests: Sequence[ReadRequest], read_once: ReadOnce
) -> tuple[int, ...]:
    """Processes that may read together, ascending; none if each reads for itself in any case."""
    if not shared_reads.may_share(read_once, directory):
        return ()
    shardings = {each.sharding for each in requests if each.sharding is not None}
    spread = [each for each in shardings if not each.is_fully_addressable]
    found = {device.process_index for each in spread for device in each.device_set}
    return tuple(sorted(found)) if len(found) > 1 else ()


def _batches(sizes_bytes: Sequence[int]) -> Iterator[range]:
    start, size_bytes = 0, 0
    for number, each in enumerate(sizes_bytes):
        if size_bytes and size_bytes + each > _BATCH_BYTES:
            yield range(start, number)
            start, size_bytes = number, 0
        size_bytes += each
    if start < len(sizes_bytes):
        yield range(start, len(sizes_bytes))


Reads = list[tuple[Box, np.ndarray, Any]]
"""Boxes of an array, memory for their elements, and futures that are done once they are read."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """A batch that is being read.

    Attributes:
        reads: boxes that this process reads for itself, by position of the array.
        share: its share of the boxes that are read together.
    """

    reads: dict[int, Reads]
    share: OwnShare


def _begin(
    stores: Sequence[Any],
    requests: Sequence[ReadRequest],
    batch: range,
    exchanges: tuple[Exchange, ...],
) -> _Reading:
    def read_into(position: int, box: Box, memory: np.ndarray) -> Any:
        return aligned_read.begin_into(stores[position][(*box.slices, ...)], memory)

    dtypes = {i: stores[i].dtype.numpy_dtype for i in batch}
    share = shared_reads.begin(exchanges, dtypes, read_into)
    given = shared_reads.wholes(share.exchanges)
    reads: dict[int, Reads] = {i: [] for i in batch}
    try:
        for i in batch:
            own = [
                part
                for box in requests[i].boxes
                for part in shared_reads.without(box, given.get(i, ()))
            ]
            # The box around them might reach into chunks that another process reads.
            for box in own if i in given else _merged(own):
                reads[i].append((box, *aligned_read.begin(stores[i][(*box.slices, ...)])))
    except Exception as error:  # raised once the other processes were told
        share.failure = share.failure or error
    share.futures += [future for each in reads.values() for _, _, future in each]
    return _Reading(reads, share)


def _merged(boxes: list[Box]) -> list[Box]:
    """The box around some boxes, if they nearly fill it: then each chunk is read once."""
    if len(boxes) < 2:
        return boxes
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    around = Box(start, stop)
    return [around] if around.size <= _MAX_EXCESS * sum(box.size for box in boxes) else boxes


def _placed(
    batch: Sequence[int],
    requests: Sequence[ReadRequest],
    reading: _Reading,
    together: SharedReads | None,
) -> list[Any]:
    """Arrays of a batch, once all of it is read; collective if processes read together."""
    parts = {i: [(box, data) for box, data, _ in reads] for i, reads in reading.reads.items()}
    dtypes = reading.share.dtypes
    if together is not None:
        for (i, box), data in together.finish(reading.share).items():
            parts[i].append((box, data))
    elif failure := reading.share.wait():
        raise failure

    result = {i: reading.reads[i][0][1] for i in batch if requests[i].sharding is None}
    on_devices = [i for i in batch if i not in result]
    targets = [
        jax.ShapeDtypeStruct(requests[i].shape, dtypes[i], sharding=requests[i].sharding)
        for i in on_devices
    ]
    placed = transfer.place_all(targets, lambda n, box: put_together(box, parts[on_devices[n]]))
    result |= dict(zip(on_devices, placed, strict=True))
    return [result[i] for i in batch]
