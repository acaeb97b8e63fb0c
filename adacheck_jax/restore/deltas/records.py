"""Records of the updates to replay, read ahead, onto the shardings for replay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.restore import shared_reads, shares
from adacheck_jax.restore.compiled_update import Shardings, abstract_leaf
from adacheck_jax.restore.deltas.delta_reader import DeltaReader
from adacheck_jax.restore.shared_reads import OwnShare, ReadOnce, SharedReads
from adacheck_jax.restore.shares import Exchange
from adacheck_jax.store.storage.location import AnyPath

_READ_AHEAD = 2
"""Deltas whose records are read before their updates are replayed."""


class Consumed(NamedTuple):
    """Arrays that one update consumes, on the shardings for replay."""

    record: list[jax.Array]
    extra: list[jax.Array]


class _Begun(NamedTuple):
    """The arrays of one update that a thread reads, in this process.

    Attributes:
        share: its share of what is read together.
        blocks: boxes that it alone needs, by position of the array.
    """

    share: OwnShare
    blocks: dict[tuple[int, Box], np.ndarray]


def read_ahead(
    specs: Sequence[Leaf],
    update: Update,
    readers: Sequence[DeltaReader],
    shardings: Shardings,
    read_once: ReadOnce,
    where: AnyPath,
    *,
    checked: bool,
) -> Iterator[Consumed]:
    """Read the arrays that each update consumes, while earlier updates are replayed.

    Collective if processes read together: all take the same arrays from it.

    Args:
        specs: the base's description of each leaf.
        update: the update.
        readers: readers of the deltas, oldest first; those without an update too.
        shardings: the shardings for replay, by leaf index.
        read_once: as for :func:`~adacheck_jax.restore.base_reader.read`.
        where: directory of the base, for messages.
        checked: as for :meth:`DeltaReader.read_many`; what processes exchange is always checked.
    """
    updating = [reader for reader in readers if reader.has_update]
    records = _Records(specs, update, shardings, updating, read_once, where, checked=checked)
    with ThreadPoolExecutor(_READ_AHEAD, thread_name_prefix="adacheck_read_ahead") as pool:
        pending = [pool.submit(records.begin, reader) for reader in updating[:_READ_AHEAD]]
        for following in [*updating[_READ_AHEAD:], *[None] * len(pending)]:
            yield records.finish(pending.pop(0).result())
            if following is not None:
                pending.append(pool.submit(records.begin, following))


class _Records:
    """Reads of the arrays that updates consume: begun on threads, finished on the caller's.

    Args:
        specs: the base's description of each leaf.
        update: the update.
        shardings: the shardings for replay, by leaf index.
        readers: readers of the deltas that have an update.
        read_once: as for :func:`read_ahead`.
        where: directory of the base, for messages.
        checked: as for :func:`read_ahead`.
    """

    def __init__(
        self,
        specs: Sequence[Leaf],
        update: Update,
        shardings: Shardings,
        readers: Sequence[DeltaReader],
        read_once: ReadOnce,
        where: AnyPath,
        *,
        checked: bool,
    ) -> None:
        self._checked = checked
        self._update, self._x64 = update, transfer.x64_enabled()
        self._leaves = [specs[i] for i in update.consumed]
        self._wanted = [abstract_leaf(specs[i], shardings[i]) for i in update.consumed]
        self._needed = [(n, box) for n, each in enumerate(self._wanted) for box in _boxes_of(each)]
        self._dtypes = {n: np.dtype(leaf.dtype) for n, leaf in enumerate(self._leaves)}
        pairs = zip(self._leaves, self._wanted, strict=True)
        boxes = [
            shared_reads.shared_boxes(n, leaf.shape, each.sharding, leaf.itemsize_bytes, leaf.cuts)
            for n, (leaf, each) in enumerate(pairs)
        ]
        shared = [*itertools.chain.from_iterable(boxes)]
        members = shared_reads.members(shared, read_once, where, times=len(readers))
        self._exchanges: tuple[Exchange, ...] = ()
        self._together: SharedReads | None = None
        if jax.process_index() in members:
            self._exchanges = shares.plan(shared)
            self._together = SharedReads(members, where, [self._exchanges] * len(readers))
            self._together.agree(None)

    def begin(self, reader: DeltaReader) -> Consumed | _Begun:
        """Read what one update consumes, or this process's share of it; on a thread."""
        with jax_settings.own(self._x64):
            if self._together is not None:
                return self._begin_share(reader)
            data = self._read_all(reader, self._needed)
            return self._placed(lambda n, box: data[n, box])

    def finish(self, begun: Consumed | _Begun) -> Consumed:
        """Arrays on their devices; collective if processes read together."""
        if self._together is None or isinstance(begun, Consumed):
            assert isinstance(begun, Consumed)
            return begun
        parts: dict[int, list[tuple[Box, np.ndarray]]] = {}
        for (n, box), data in (begun.blocks | self._together.finish(begun.share)).items():
            parts.setdefault(n, []).append((box, data))
        return self._placed(lambda n, box: shared_reads.put_together(box, parts[n]))

    def _begin_share(self, reader: DeltaReader) -> _Begun:
        process, blocks = jax.process_index(), {}
        boxes: dict[int, list[Box]] = {n: [] for n in range(len(self._leaves))}
        given = shared_reads.wholes(self._exchanges)
        for n, each in enumerate(self._wanted):
            for box in _boxes_of(each):
                boxes[n] += shared_reads.without(box, given.get(n, ()))
        own = [(n, box) for n, each in boxes.items() for box in each]
        for each in self._exchanges:
            for piece in each.pieces:
                if each.holders[piece.reader] == process:
                    boxes[piece.array].append(piece.box)
        data: dict[tuple[int, Box], np.ndarray] = {}

        def read_into(n: int, box: Box, memory: np.ndarray) -> None:
            memory[...] = data[n, box]

        failure = None
        try:
            data = self._read_all(reader, [(n, box) for n, each in boxes.items() for box in each])
            share = shared_reads.begin(self._exchanges, self._dtypes, read_into)
            blocks = {each: data[each] for each in own}
        except Exception as error:  # told to the others by finish()
            failure = error
            share = shared_reads.begin((), self._dtypes, read_into)
        share.failure = share.failure or failure
        return _Begun(share, blocks)

    def _read_all(
        self, reader: DeltaReader, needed: Sequence[tuple[int, Box]]
    ) -> dict[tuple[int, Box], np.ndarray]:
        """Boxes of the arrays, by position and box; zeros for a recorder without an update."""
        consumed = self._update.consumed
        own = self._update.consumed_by(reader.updates)
        given = [each for each in needed if consumed[each[0]] in own]
        checked = self._checked or self._together is not None
        read = reader.read_many([(consumed[n], box) for n, box in given], checked=checked)
        data = dict(zip(given, read, strict=True))
        for n, box in needed:
            if (n, box) not in data:
                data[n, box] = np.zeros(box.shape, self._dtypes[n])
        return data

    def _placed(self, read: Callable[[int, Box], np.ndarray]) -> Consumed:
        placed = transfer.place_all(self._wanted, read)
        count = len(self._update.record)
        return Consumed(placed[:count], placed[count:])


def _boxes_of(wanted: jax.ShapeDtypeStruct) -> list[Box]:
    """Boxes of an array that this process's devices need."""
    sharding: Any = wanted.sharding
    return transfer.boxes_here(wanted.shape, sharding)
