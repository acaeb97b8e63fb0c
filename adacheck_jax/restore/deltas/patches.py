"""Leaves that deltas store and no update explains, put in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Delta, Leaf
from adacheck_jax.restore.working_set import WorkingSet, like_host


class StoredLeaves(Protocol):
    """The leaves that a delta stores, on disk or in memory.

    Attributes:
        delta: the delta, as its manifest tells of it; one in memory has no packs.
    """

    delta: Delta

    def stores_whole(self, index: int) -> bool:
        """True if every box of a leaf is stored as it is, so that no earlier bits matter."""
        ...

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Bring one box of a leaf from the parent's bits to those of this delta, in place."""
        ...

    def prefetched(self, wanted: Mapping[int, Sequence[Box]]) -> AbstractContextManager[None]:
        """Read some boxes at once, and keep them inside the context."""
        ...


class Patches:
    """Stored leaves of several deltas, put in place as late as possible.

    A leaf that many deltas store is then taken off its devices and put back once.
    """

    def __init__(self, working: WorkingSet, specs: Sequence[Leaf]) -> None:
        self._working = working
        self._specs = specs
        self._pending: dict[int, list[StoredLeaves]] = {}

    def add(self, reader: StoredLeaves) -> None:
        """Note what the next delta stores."""
        for index in reader.delta.stored:
            pending = self._pending.setdefault(index, [])
            if reader.stores_whole(index):
                pending.clear()
            pending.append(reader)

    def touches(self, indices: Collection[int]) -> bool:
        """True if a patch is pending for one of these leaves."""
        return not self._pending.keys().isdisjoint(indices)

    def replace(self, index: int, array: jax.Array) -> None:
        """Take an array in place of a leaf's pending patches, if it lies where the leaf does.

        A leaf that was not read takes it anyhow.
        """
        leaf = self._working[index]
        is_plain = isinstance(leaf, jax.Array) and not transfer.is_key(leaf)
        if is_plain and leaf.sharding == array.sharding:
            self._working[index] = array
        elif not self._working.fill(index, array):
            return
        self._pending.pop(index, None)

    def apply(self, indices: Collection[int]) -> None:
        """Put the pending patches of these leaves in place."""
        read_at_once: dict[StoredLeaves, list[int]] = {}
        for index in self._pending.keys() & frozenset(indices):
            readers = self._pending[index]
            if self._working[index] is None:
                del self._pending[index]
            elif len(readers) == 1 and readers[0].stores_whole(index):
                # Mostly the record of the last delta. Differences may be as large as the state,
                # and are read a leaf at a time.
                read_at_once.setdefault(readers[0], []).append(index)
            else:
                self._patch(index)
        for reader, own in read_at_once.items():
            placed = {i: getattr(transfer.raw(self._working[i]), "sharding", None) for i in own}
            boxes = {i: transfer.boxes_here(self._specs[i].shape, x) for i, x in placed.items()}
            with reader.prefetched(boxes):
                for index in own:
                    self._patch(index)

    def _patch(self, index: int) -> None:
        readers = self._pending.pop(index)
        patched = _patched(self._working[index], self._specs[index], index, readers)
        self._working[index] = patched


def put_in_place(
    leaves: Sequence[Any], specs: Sequence[Leaf], readers: Sequence[StoredLeaves]
) -> list[Any]:
    """Leaves after some deltas of which none has an update."""
    working = WorkingSet(leaves, {})
    patches = Patches(working, specs)
    for each in readers:
        patches.add(each)
    patches.apply(range(len(specs)))
    return working.leaves


def _patched(leaf: Any, spec: Leaf, index: int, readers: Sequence[StoredLeaves]) -> Any:
    """A leaf after some deltas, of its former type and on its former sharding."""
    plain = transfer.raw(leaf)
    blocks: dict[Box, Any] = {Box.full(spec.shape): plain}
    if isinstance(plain, jax.Array):
        shards = plain.addressable_shards
        blocks = {Box.from_slices(shard.index, spec.shape): shard.data for shard in shards}

    def patched(box: Box) -> np.ndarray:
        if readers[0].stores_whole(index):
            result = np.empty(box.shape, jnp.dtype(spec.dtype))
        else:
            result = np.array(blocks[box])
        for reader in readers:
            reader.patch(index, box, result)
        return result

    if not isinstance(leaf, jax.Array):
        return like_host(leaf, patched(Box.full(spec.shape)))
    wanted = jax.ShapeDtypeStruct(spec.shape, plain.dtype, sharding=plain.sharding)
    return transfer.keyed(transfer.place(wanted, patched), leaf)
