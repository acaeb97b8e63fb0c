"""Arrays of a base, read straight onto their target shardings, many at a time.

Orbax spends a few milliseconds of Python on each array. Here one read describes all arrays, no
other is needed to open them, and the bytes in flight to the devices are bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box, Cuts, batches
from adacheck_jax.restore import shared_reads
from adacheck_jax.restore.agreed import ALONE, Agreed
from adacheck_jax.restore.progress import Progress
from adacheck_jax.restore.shared_reads import (
    Blocks,
    OwnShare,
    ReadOnce,
    SharedPart,
    SharedReads,
    ShareExchange,
)
from adacheck_jax.store import host_memory, volume_reader, zarr
from adacheck_jax.store.storage.location import AnyPath

_BATCH_BYTES = 64 << 20
"""Size of a batch of arrays that is placed on devices at once."""
_READ_AHEAD = 2
"""Batches that are read while another one is placed on devices."""
_MAX_EXCESS = 1.25
"""Boxes are read as one box around them if its size is at most this multiple of theirs."""


def read(
    directory: AnyPath,
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    read_once: ReadOnce = None,
    agreed: Agreed = ALONE,
    *,
    is_donated: bool = False,
) -> list[Any]:
    """Read arrays; each process reads boxes that its devices need, or a share of them.

    Collective if processes share the reading: all call it with the same arrays.

    Args:
        directory: the base's directory.
        wanted: global shape, elements and target sharding of each array, by its name in the base's
            database; a numpy array is read without a sharding.
        read_once: True to read each box in one process, also if others need it, and to exchange
            what was read; False to read in each process what it needs; None to decide by the
            storage and by bytes.
        agreed: agreement of the processes.
        is_donated: as for :func:`~adacheck_jax.device.transfer.place_all`.

    Returns:
        A jax or numpy array for each name.

    Raises:
        ValueError: an array is missing, damaged, or of another shape or type than was written.
        AdaCheckError: another process could not read its share.
    """
    members = shared_reads.members([*wanted.values()], read_once, directory)
    with agreed() if members else ALONE():
        arrays = _Arrays(directory, wanted, is_shared=bool(members), is_donated=is_donated)
    together = SharedReads(members, directory, arrays.plans)
    result: list[Any] = []
    numbers = range(len(arrays.batches))
    reading = [arrays.begin(number) for number in numbers[:_READ_AHEAD]]
    total_bytes = sum(arrays.sizes_bytes)
    with Progress("restoring: reading the base") as progress:
        for number, batch in enumerate(arrays.batches):
            if number + _READ_AHEAD in numbers:
                reading.append(arrays.begin(number + _READ_AHEAD))
            result += arrays.placed(number, *reading.pop(0), together)
            progress.tell(sum(arrays.sizes_bytes[: batch.stop]), total_bytes)
    return result


class _Arrays:
    """The arrays of one read, opened, and a plan who reads what of each batch.

    Attributes:
        batches: positions of the arrays of each batch.
        sizes_bytes: bytes that each array takes here.
        plans: exchanges of each batch.
    """

    def __init__(
        self,
        directory: AnyPath,
        wanted: Mapping[str, jax.ShapeDtypeStruct],
        *,
        is_shared: bool,
        is_donated: bool,
    ) -> None:
        self._targets, self._is_donated = [*wanted.values()], is_donated
        self._stores: list[Any] = volume_reader.opened(zarr.database_in(directory), [*wanted])
        self._shared: dict[int, list[SharedPart]] = {}
        sizes_bytes = self.sizes_bytes = [_most_bytes(each) for each in self._targets]
        for i, each in enumerate(self._targets if is_shared else ()):
            parts = self._shared[i] = shared_reads.shared_parts(i, each, self._cuts(i))
            # Held whole, also where a piece is needed.
            sizes_bytes[i] = max(sizes_bytes[i], sum(part.nbytes for part in parts))
        self.batches = [*batches(sizes_bytes, _BATCH_BYTES)]
        self.plans: list[tuple[ShareExchange, ...]] = [
            shared_reads.plan(part for i in batch for part in self._shared.get(i, ()))
            for batch in self.batches
        ]

    def _cuts(self, position: int) -> Cuts:
        """Cut points between the chunks of an array."""
        chunk_shape = volume_reader.chunk_shape_of(self._stores[position])
        return volume_reader.chunk_cuts(self._targets[position].shape, chunk_shape)

    def begin(self, number: int) -> tuple[Blocks, OwnShare]:
        """Begin to read a batch: what this process needs alone, and its share of the rest."""
        batch, stores = self.batches[number], self._stores
        own: Blocks = {}

        def read(wanted: Sequence[tuple[int, Box, np.ndarray]]) -> list[Any]:
            futures = [
                host_memory.begin_read_into(stores[i][(*box.slices, ...)], memory)
                for i, box, memory in wanted
            ]
            for i in batch:
                boxes = transfer.boxes_here(self._targets[i].shape, self._targets[i].sharding)
                # The box around them might reach into chunks that another process reads.
                if shared := self._shared.get(i):
                    boxes = shared_reads.own_boxes(boxes, self._cuts(i), shared)
                else:
                    boxes = _merged(boxes)
                for box in boxes:
                    own[i, box], future = host_memory.begin_read(stores[i][(*box.slices, ...)])
                    futures.append(future)
            return futures

        dtypes = {i: stores[i].dtype.numpy_dtype for i in batch}
        return own, shared_reads.begin(self.plans[number], dtypes, read)

    def placed(self, number: int, own: Blocks, share: OwnShare, together: SharedReads) -> list[Any]:
        """Arrays of a batch, once all of it is read; collective if processes read together."""
        read = shared_reads.elements_of(own | together.finish(share))
        targets = {i: self._targets[i].update(dtype=share.dtypes[i]) for i in self.batches[number]}
        on_devices = [i for i, each in targets.items() if each.sharding is not None]
        placed = transfer.place_all(
            [targets[i] for i in on_devices],
            lambda n, box: read(on_devices[n], box),
            is_donated=self._is_donated,
        )
        known = dict(zip(on_devices, placed, strict=True))
        return [known[i] if i in known else read(i, Box.full(x.shape)) for i, x in targets.items()]


def _most_bytes(target: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array that the process needs which needs most: the same in all processes."""
    if target.sharding is None:
        return target.size * target.dtype.itemsize
    sizes = Counter[int]()
    for box, needing in shared_reads.needed_by(target).items():
        sizes.update(dict.fromkeys(needing, box.size))
    return max(sizes.values()) * target.dtype.itemsize


def _merged(boxes: list[Box]) -> list[Box]:
    """The box around some boxes, if they nearly fill it: then each chunk is read once."""
    if len(boxes) < 2:
        return boxes
    start = tuple(map(min, zip(*(box.start for box in boxes), strict=True)))
    stop = tuple(map(max, zip(*(box.stop for box in boxes), strict=True)))
    around = Box(start, stop)
    return [around] if around.size <= _MAX_EXCESS * sum(box.size for box in boxes) else boxes
