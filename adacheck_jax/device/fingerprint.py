"""Fingerprints of arrays: sums of their shards, on the devices or on the host.

A leaf's fingerprint takes the partial sum of one replica of each box; the sums of the other
replicas are there to be compared.

One thread sums up (:meth:`Contributions.sums`); another one, which lets the arrays be donated, may
wait at the same time (:meth:`Contributions.wait`). They meet in
:class:`~adacheck_jax.device.transfer.Staged` alone, which has the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental import multihost_utils

from adacheck_jax.device import transfer
from adacheck_jax.device.loops import programs, shard_tables, xla_call
from adacheck_jax.device.shard_sums import Summing
from adacheck_jax.device.sharding import (
    Holder,
    has_replicas,
    holder_of,
    holders_of,
    in_device_memory,
    is_local,
    layout_of_array,
)
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.format.boxes import Blocks, Box, grid
from adacheck_jax.format.byte_loops import fingerprint_of, fingerprints_of, processors
from adacheck_jax.format.fingerprint import combine, from_words, to_words

ReplicaSums = dict[int, dict[Box, dict[Holder, int]]]
"""Partial sums of shards by leaf index, box and holder."""
_GROUP_BYTES = 1 << 27
"""Bytes of host copies that are summed up in one call, and held until it is done."""


class Contributions:
    """This process's contributions to the fingerprints of arrays.

    Created while the arrays are alive; :meth:`sums` may be called after they were donated. Arrays
    on devices are fingerprinted there, by programs dispatched here; all others on the host, from
    their staged boxes, when ``sums`` is called.

    Args:
        arrays: plain arrays by leaf index; in a multi-process program every process passes the
            same leaves.
        picks: the boxes that this process accounts for; each box is accounted for by one process.
        whole_picks: picks of whole shards, for arrays that are fingerprinted on their devices: a
            box of ``picks`` may be a piece of a shard. None if ``picks`` are of whole shards.
        every_replica: True to fingerprint also the replicas that are not picked. Free on
            accelerators; on the host it costs a pass over each replica.
        staged: boxes that are on their way to the host already, of arrays that are fingerprinted
            there.
        copied: arrays or, where there are, copies of them that nobody donates, for what is
            fingerprinted on the host; the constructor need not wait then. None without copies.
        summing: programs for the arrays that are fingerprinted on devices, if they were made for
            arrays of equal shapes and shardings.

    Attributes:
        replicas: partial sums of every addressable shard of arrays that have replicas; empty before
            ``sums`` is called, and without ``every_replica``.
    """

    def __init__(
        self,
        arrays: Mapping[int, Any],
        picks: Mapping[int, Sequence[transfer.Pick]],
        whole_picks: Mapping[int, Sequence[transfer.Pick]] | None = None,
        *,
        every_replica: bool = False,
        staged: Mapping[int, Blocks] | None = None,
        copied: Mapping[int, Any] | None = None,
        summing: Summing | None = None,
    ) -> None:
        summing = summing or Summing({i: x for i, x in arrays.items() if hashes_on_device(x)})
        self._device, self._placed = summing.dispatch(arrays), summing.placed
        whole_picks = whole_picks or picks
        self._picked = {i: whole_picks[i] for i in self._placed}
        own = arrays if copied is None else copied
        on_host = {i: array for i, array in own.items() if i not in self._placed}
        self._elsewhere = {i: staged for i in on_host if staged is not None and i in staged}
        rest = {i: array for i, array in on_host.items() if i not in self._elsewhere}
        self._staged = transfer.Staged(rest, picks)
        self._every_replica = every_replica
        self.replicas: ReplicaSums = {}
        self._shards: list[tuple[int, Box, Holder]] = []
        others: dict[int, Any] = {}
        shards = _replica_shards(on_host, arrays, picks) if every_replica else ()
        for leaf, box, holder, data in shards:
            if data is not None:  # else it is a pick, and its sum is known
                others[len(self._shards)] = data
            self._shards.append((leaf, box, holder))
        boxes = {n: [(self._shards[n][1], None, ())] for n in others}
        self._others = transfer.Staged(others, boxes).begin()
        if copied is None:
            self.wait()

    @property
    def holds_blocks(self) -> bool:
        """True if host copies are still held, to be fingerprinted on the host."""
        return bool(self._staged or self._elsewhere or self._others)

    def wait(self) -> None:
        """Waits until the arrays may be donated."""
        self._staged.wait()
        self._others.wait()

    def sums(self, threads: int = 1) -> dict[int, int]:
        """Partial sums modulo 2**64 by leaf index; host copies are let go of one by one.

        Args:
            threads: how many sum up what is on the host, where nobody trains meanwhile.
        """
        picked: dict[int, dict[Box, int]] = {}
        waiting = [False] * len(self._staged) + [True] * len(self._elsewhere)
        with ThreadPoolExecutor(threads) as pool:
            mapped = pool.map if threads > 1 else map
            for found in mapped(self._next_on_host, waiting):
                picked |= found
        result = {i: combine([*boxes.values()]) for i, boxes in picked.items()}
        totals: dict[int, int] = {}
        while self._others:
            n, blocks = self._others.popitem()
            ((box, block),) = blocks.items()
            totals[n] = fingerprint_of(block, box.start)
        for n, (leaf, box, holder) in enumerate(self._shards):
            boxes = self.replicas.setdefault(leaf, {})
            boxes.setdefault(box, {})[holder] = totals[n] if n in totals else picked[leaf][box]
        self._shards = []
        for i, by_device in self._device().items():
            sharding, shape = self._placed[i]
            devices = list(sharding.addressable_devices_indices_map(shape))  # as shards are ordered
            # Of replicas the one that is staged and written: they may differ.
            positions = [position or 0 for _, position, _ in self._picked[i]]
            result[i] = combine([by_device[devices[position].id] for position in positions])
            if self._every_replica and has_replicas(sharding, shape):
                for box, holders in holders_of(sharding, shape).items():
                    here = {h: by_device[h.device] for h in holders if h.device in by_device}
                    self.replicas.setdefault(i, {})[box] = here
        return result

    def _next_on_host(self, is_elsewhere: bool) -> dict[int, dict[Box, int]]:
        """The sums of the boxes of some arrays that are summed up on the host; none if all are."""
        found: dict[int, dict[Box, int]] = {}  # of an array that has no box here, too
        blocks: dict[tuple[int, Box], Any] = {}
        while sum(x.nbytes for x in blocks.values()) < _GROUP_BYTES:
            try:
                if is_elsewhere:
                    index, staged = self._elsewhere.popitem()
                    own = staged[index]
                else:
                    index, own = self._staged.popitem()
            except (KeyError, StopIteration):
                break
            found[index] = {}
            blocks |= {(index, box): block for box, block in own.items()}
        given = ((block, box.start) for (_, box), block in blocks.items())
        for (index, box), value in zip(blocks, fingerprints_of(given), strict=True):
            found[index][box] = value
        return found


def hashes_on_device(array: Any) -> bool:
    """True if an array is fingerprinted in the memory of its devices."""
    if not in_device_memory(array):
        return False
    if transfer.on_accelerator(array):
        return True
    return xla_call.is_ready() and array.ndim < shard_tables.MAX_RANK and not is_narrow(array.dtype)


def _replica_shards(
    held: Mapping[int, Any],
    arrays: Mapping[int, Any],
    picks: Mapping[int, Sequence[transfer.Pick]],
) -> Iterator[tuple[int, Box, Holder, Any]]:
    """All addressable shards of the arrays that have replicas; without data if they are picked.

    They are taken from what is ``held`` of the arrays.
    """
    for i, given in held.items():
        array = arrays[i]
        if isinstance(array, jax.Array) and has_replicas(array.sharding, array.shape):
            whole = {position: box for box, position, _ in picks[i]}
            for position, shard in enumerate(programs.now(given).addressable_shards):
                box = Box.from_slices(shard.index or (), array.shape)
                is_picked = whole.get(position) == box
                yield i, box, holder_of(shard.device), None if is_picked else shard.data


def of_leaves(arrays: Mapping[int, Any]) -> dict[int, int]:
    """Whole-leaf fingerprints of plain arrays by leaf index; collective across processes.

    Of an array that every process has for itself each process gets the fingerprint of its own.
    """
    process = jax.process_index()
    local = {index for index, array in arrays.items() if is_local(array)}
    picks = {
        index: transfer.picks_of(x, accounted(x, 0 if index in local else process))
        for index, x in arrays.items()
        if index in local or x.addressable_shards  # else other processes alone hold it
    }
    parts = Contributions({index: arrays[index] for index in picks}, picks)
    sums = parts.sums(processors())
    if jax.process_count() == 1:
        return sums
    own = {index: sums[index] for index in local}
    gathered = multihost_utils.process_allgather(to_words([sums.get(i, 0) for i in arrays]))
    columns = zip(*(from_words(each) for each in gathered), strict=True)
    return dict(zip(arrays, map(combine, columns), strict=True)) | own


def accounted(array: Any, process: int) -> list[Box]:
    """Boxes that one process accounts for: it is the first process that holds each."""
    layout = layout_of_array(array)
    pairs = zip(grid(layout.cuts), layout.replicas, strict=True)
    return [box for box, holders in pairs if holders[0] == process]
