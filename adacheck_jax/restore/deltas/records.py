"""Records of the updates to replay, read ahead, onto the shardings for replay."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from adacheck_jax.device import jax_settings, transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.restore import shared_reads
from adacheck_jax.restore.agreed import ALONE, Agreed
from adacheck_jax.restore.compiled_update import Shardings
from adacheck_jax.restore.deltas.delta_reader import DeltaReader
from adacheck_jax.restore.shared_reads import (
    Blocks,
    OwnShare,
    ReadOnce,
    SharedPart,
    SharedReads,
    ShareExchange,
)
from adacheck_jax.restore.working_set import abstract_leaf
from adacheck_jax.store.storage.location import AnyPath

_AHEAD_BYTES = 128 << 20
"""Records that are read before their updates are replayed take at most this here, if not two do."""
_MOST_AHEAD = 8


Consumed = list[jax.Array]
"""Arrays that one update consumes, in the order of its leaves, on the shardings for replay."""


class _Share(NamedTuple):
    """Boxes of a delta that this process reads: its own, by position, and those it exchanges."""

    own: list[tuple[int, Box]]
    exchanges: tuple[ShareExchange, ...]


class Records:
    """Arrays that the updates of some deltas consume: begun on threads, finished on the caller's.

    Collective if processes read together: all take the same arrays from it.

    Args:
        specs: the base's description of each leaf.
        update: the update.
        readers: readers of the deltas, oldest first; those without an update too.
        shardings: the shardings for replay, by leaf index.
        read_once: as for :func:`~adacheck_jax.restore.base_reader.read`.
        where: directory of the base, for messages.
        checked: as for :meth:`DeltaReader.read`; what processes exchange is always checked.
        agreed: agreement of the processes.

    Attributes:
        are_shared: True if processes read together.
    """

    def __init__(
        self,
        specs: Sequence[Leaf],
        update: Update,
        readers: Sequence[DeltaReader],
        shardings: Shardings,
        read_once: ReadOnce,
        where: AnyPath,
        *,
        checked: bool,
        agreed: Agreed = ALONE,
    ) -> None:
        self._update, self._x64 = update, jax_settings.x64_enabled()
        self._readers = [reader for reader in readers if reader.delta.has_update]
        self._wanted = [abstract_leaf(specs[i], shardings[i]) for i in update.consumed]
        self._dtypes = {n: np.dtype(wanted.dtype) for n, wanted in enumerate(self._wanted)}
        members = shared_reads.members(self._wanted, read_once, where, times=len(self._readers))
        self.are_shared, known = bool(members), dict[int, _Share]()
        with agreed() if members else ALONE():
            for each in self._readers:  # most of them are cut alike
                if id(each.leaves) not in known:
                    known[id(each.leaves)] = self._share(each)
        self._shares = {each: known[id(each.leaves)] for each in self._readers}
        batches = [self._shares[each].exchanges for each in self._readers]
        self._together = SharedReads(members, where, batches)
        self._checked = checked or self.are_shared

    def _share(self, reader: DeltaReader) -> _Share:
        """Boxes to read of a delta."""
        own, shared = list[tuple[int, Box]](), list[SharedPart]()
        for n, (index, target) in enumerate(zip(self._update.consumed, self._wanted, strict=True)):
            cuts = reader.leaves[index].cuts
            parts = shared_reads.shared_parts(n, target, cuts) if self.are_shared else []
            shared += parts
            boxes = transfer.boxes_here(target.shape, target.sharding)
            own += [(n, box) for box in shared_reads.own_boxes(boxes, cuts, parts)]
        return _Share(own, shared_reads.plan(shared))

    @contextlib.contextmanager
    def read_ahead(self) -> Iterator[Iterator[Consumed]]:
        """Read what each update consumes, while earlier updates are replayed; begins at once."""
        own = self._shares[self._readers[0]].own if self._readers else ()
        size_bytes = sum(box.size * self._dtypes[n].itemsize for n, box in own)
        ahead = 2
        if not self.are_shared:
            ahead = max(ahead, min(_MOST_AHEAD, _AHEAD_BYTES // (size_bytes + 1)))
        pool = ThreadPoolExecutor(min(ahead, 4), thread_name_prefix="adacheck_read_ahead")
        left = iter(self._readers)
        pending = deque(pool.submit(self._begin, each) for each in itertools.islice(left, ahead))

        def finished() -> Iterator[Consumed]:
            while pending:
                yield self._finish(pending.popleft().result())
                pending.extend(pool.submit(self._begin, x) for x in itertools.islice(left, 1))

        try:
            yield finished()
        finally:
            pool.shutdown(cancel_futures=True)

    def _begin(self, reader: DeltaReader) -> tuple[Blocks, OwnShare | None] | Consumed:
        """Read what one update consumes, or this process's share of it; on a thread."""
        share = self._shares[reader]
        with jax_settings.own(self._x64):
            if not self.are_shared:
                return self._placed(self._read(reader, share.own))
            own: Blocks = {}

            def read(wanted: Sequence[tuple[int, Box, np.ndarray]]) -> Sequence[Any]:
                data = self._read(reader, [*((n, box) for n, box, _ in wanted), *share.own])
                for n, box, memory in wanted:
                    memory[...] = data[n, box]
                own.update({each: data[each] for each in share.own})
                return ()

            return own, shared_reads.begin(share.exchanges, self._dtypes, read)

    def _finish(self, begun: Any) -> Consumed:
        """Arrays on their devices; collective if processes read together."""
        if not self.are_shared:
            return begun
        own, share = begun
        return self._placed(own | self._together.finish(share))

    def _read(self, reader: DeltaReader, wanted: Sequence[tuple[int, Box]]) -> Blocks:
        """Boxes of the arrays, by position and box; zeros for a recorder without an update."""
        consumed = self._update.consumed
        of_updates = self._update.consumed_by(reader.delta.updates)
        stored = [each for each in wanted if consumed[each[0]] in of_updates]
        read = reader.read([(consumed[n], box) for n, box in stored], checked=self._checked)
        data = dict(zip(stored, read, strict=True))
        return data | {
            (n, box): np.zeros(box.shape, self._dtypes[n])
            for n, box in wanted
            if (n, box) not in data
        }

    def _placed(self, blocks: Blocks) -> Consumed:
        return transfer.place_all(self._wanted, shared_reads.elements_of(blocks))
