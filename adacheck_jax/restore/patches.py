"""What deltas store of leaves: read, and put in place."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format import pack_plan, planes
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.lineage import Lineage, LineageStep
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Encoding, Leaf, Pack
from adacheck_jax.store import packs as arrays
from adacheck_jax.store.packs import PackArray, PackReader


@dataclass(frozen=True, slots=True)
class Shared:
    """What the deltas of a lineage have in common.

    Attributes:
        plans: how packs are laid out, which mostly is the same.
        opened: the arrays in which the deltas of a save lie one after another.
    """

    plans: dict[Hashable, pack_plan.WritePlan] = field(default_factory=dict)
    opened: dict[tuple[Path, arrays.Kind], PackArray] = field(default_factory=dict)


class DeltaReader:
    """Reads boxes of the leaves that one delta stores.

    Args:
        base: the manifest that describes the leaves.
        entry: the save that the delta belongs to.
        number: which of its deltas; the last one is that of the saved step itself.
        shared: with other readers.

    Raises:
        IntegrityError: the manifest does not fit the base's.
    """

    def __init__(
        self,
        base: BaseManifest,
        entry: LineageStep,
        number: int = -1,
        shared: Shared | None = None,
    ) -> None:
        manifest = entry.manifest
        assert isinstance(manifest, DeltaManifest)
        self._leaves = base.leaves
        self._entry = entry
        self._manifest = manifest
        self._number = number % len(manifest.deltas)
        self._delta = delta = manifest.deltas[number]
        self._shared = shared = shared or Shared()
        encodings = [pack.encodings for pack in delta.packs]
        if len(encodings) != base.process_count or any(
            i >= len(base.leaves) for i in (*delta.stored, *delta.unreplayed)
        ):
            raise IntegrityError(
                f"{entry.place}: expected packs of {base.process_count} processes with some of "
                f"{len(base.leaves)} leaves, found {len(encodings)} packs with leaves up to "
                f"{max(delta.stored, default=0)}. Restore another step."
            )
        try:
            aliases = [pack.aliases for pack in delta.packs]
            key = (delta.stored, *encodings, *aliases)
            plan = shared.plans.get(key)
            if plan is None:
                plan = pack_plan.plan_delta(base.leaves, delta.stored, encodings, aliases)
        except (ValueError, IndexError) as error:
            raise IntegrityError(
                f"{entry.place}: the manifest calls parts equal that cannot be ({error}). Restore "
                "another step."
            ) from error
        shared.plans[key] = plan
        planned = tuple(zip(plan.raw_bytes, plan.compressed_bytes, strict=True))
        found = tuple((pack.raw_bytes, pack.compressed_bytes) for pack in delta.packs)
        if planned != found:
            raise IntegrityError(
                f"{entry.place}: expected packs of {planned} bytes from the stored leaves, found "
                f"{found}. Restore another step."
            )
        self._extents: dict[int, list[pack_plan.Extent]] = {}
        for extent in plan.extents:
            self._extents.setdefault(extent.leaf, []).append(extent)
        self._packs: dict[tuple[int, arrays.Kind], PackReader] = {}

    @property
    def stored(self) -> tuple[int, ...]:
        """The leaves that the delta holds something of."""
        return self._delta.stored

    @property
    def has_update(self) -> bool:
        """Whether the delta replays an update."""
        return self._delta.has_update

    @property
    def updates(self) -> tuple[int, ...]:
        """Positions of the recorders whose update is replayed."""
        return self._delta.updates

    @property
    def unreplayed(self) -> tuple[int, ...]:
        """The leaves that are the parent's, changed by what is stored, and not replayed."""
        return self._delta.unreplayed

    def holds_all_of(self, index: int) -> bool:
        """Whether every box of a leaf is stored by itself, so that nothing before it matters."""
        extents = self._extents.get(index, [])
        is_whole = not any(extent.encoding.is_difference for extent in extents)
        return is_whole and len(extents) == len(self._leaves[index].owners)

    def open_packs(self) -> dict[Path, list[str]]:
        """Opens every pack that the delta has.

        Returns:
            For the pack of each process, by what the paths of its files begin with, the names of
            the arrays that it has.

        Raises:
            FormatError: a pack is missing, or has another length than the manifest says.
        """
        found: dict[Path, list[str]] = {}
        for process in range(len(self._delta.packs)):
            for kind in (arrays.RAW, arrays.COMPRESSED):
                if self._pack(process, kind).stored_bytes:
                    found.setdefault(self._entry.pack(process), []).append(kind.name)
        return found

    def blocks(self, index: int) -> Iterator[tuple[Box, np.ndarray]]:
        """Reads all that the delta stores of a leaf; a difference comes as one from zero.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        for extent in self._extents.get(index, ()):
            block = np.zeros(extent.box.shape, jnp.dtype(self._leaves[index].dtype))
            self.patch(index, extent.box, block)
            yield extent.box, block

    def read(self, index: int, box: Box) -> np.ndarray:
        """Reads one box of a leaf that is stored by itself; the elements must not be changed.

        Raises:
            IntegrityError: stored bytes are damaged, or the leaf is not stored by itself.
            FormatError: a pack is missing.
        """
        if not self.holds_all_of(index):
            raise IntegrityError(
                f"{self._entry.place}: expected {self._leaves[index].path}, which the update "
                "consumed, stored by itself; found it otherwise. Restore another step."
            )
        leaf, dtype = self._leaves[index], jnp.dtype(self._leaves[index].dtype)
        for extent in self._extents.get(index, ()):
            if extent.box == box and box.size and extent.encoding is Encoding.RAW:
                spans, _ = _spans(extent, box)
                data = self._planes(extent.process, arrays.RAW, spans, leaf.path)
                return data.view(dtype).reshape(box.shape)  # as it was read, without a copy
        block = np.empty(box.shape, dtype)
        self.patch(index, box, block)
        return block

    @contextlib.contextmanager
    def holding(self, wanted: Mapping[int, Sequence[Box]]) -> Iterator[None]:
        """Reads all that some boxes need in as few pieces as possible, and holds it meanwhile.

        Args:
            wanted: boxes by leaf index.

        Raises:
            FormatError: as from :meth:`read`; of what is damaged that one tells.
        """
        needed: dict[tuple[int, arrays.Kind], Spans] = {}
        for index, boxes in wanted.items():
            for extent in self._extents.get(index, ()):
                for common in filter(None, (box.intersect(extent.box) for box in boxes)):
                    raw, compressed = _spans(extent, _rows_of(extent.box, common))
                    for kind, spans in ((arrays.RAW, raw), (arrays.COMPRESSED, compressed)):
                        needed.setdefault((extent.process, kind), []).extend(spans)
        packs = [(self._pack(*each), spans) for each, spans in needed.items() if spans]
        try:
            for pack, spans in packs:
                with contextlib.suppress(IntegrityError):  # to be told of the leaf that it is in
                    pack.hold(spans, what="the leaves that the update consumed")
            yield
        finally:
            for pack, _ in packs:
                pack.hold([], what="nothing")

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Brings one box of a leaf from the parent's bits to those of this delta, in place.

        Args:
            index: of the leaf.
            box: what the block holds; only the stored boxes that it meets are touched, of these
                only the rows that it needs.
            block: the elements, to be changed.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        leaf = self._leaves[index]
        for extent in self._extents.get(index, ()):
            common = box.intersect(extent.box)
            if common is None:
                continue
            rows = _rows_of(extent.box, common)
            inside = (*common.relative_to(rows.start).slices, ...)
            target = block[(*common.relative_to(box.start).slices, ...)]
            raw, compressed = _spans(extent, rows)
            low = self._planes(extent.process, arrays.RAW, raw, leaf.path)
            if extent.encoding is Encoding.RAW:
                target[...] = low.view(block.dtype).reshape(rows.shape)[inside]
                continue
            high = self._planes(extent.process, arrays.COMPRESSED, compressed, leaf.path)
            if rows == common and target.flags.c_contiguous:
                planes.decode(extent.encoding, target, low, high)
                continue
            whole = np.zeros(rows.shape, block.dtype)
            whole[inside] = target
            planes.decode(extent.encoding, whole, low, high)
            target[...] = whole[inside]

    def _planes(self, process: int, kind: arrays.Kind, spans: Spans, path: str) -> np.ndarray:
        """Reads spans of one length; one a row."""
        if not spans:
            return np.empty((0, 0), np.uint8)
        count, length = len(spans), spans[0][1] - spans[0][0]
        if spans[-1][1] - spans[0][0] == count * length:  # they lie side by side
            spans = [(spans[0][0], spans[-1][1])]
        read = self._pack(process, kind).read(spans, what=path)
        return (read[0] if len(read) == 1 else np.concatenate(read)).reshape(count, length)

    def _pack(self, process: int, kind: arrays.Kind) -> PackReader:
        if (process, kind) not in self._packs:
            start = self._entry.pack(process)
            sections = [_section(delta.packs[process], kind) for delta in self._manifest.deltas]
            begins, length_bytes = arrays.laid_out(start, kind, sections)
            opened = self._shared.opened
            if (start, kind) not in opened:
                opened[start, kind] = PackArray(start, kind, length_bytes)
            self._packs[process, kind] = PackReader(
                opened[start, kind], *sections[self._number], begins[self._number]
            )
        return self._packs[process, kind]


def _section(pack: Pack, kind: arrays.Kind) -> tuple[int, arrays.Ranges]:
    """The length of what a pack has in an array, and the blocks that were left out of it."""
    if kind is arrays.RAW:
        return pack.raw_bytes, pack.raw_zeros
    return pack.compressed_bytes, pack.compressed_zeros


def readers(lineage: Lineage) -> list[DeltaReader]:
    """A reader for every delta of a lineage, oldest first.

    Raises:
        IntegrityError: a manifest does not fit the base's.
    """
    shared = Shared()
    every = [
        DeltaReader(lineage.base, entry, number, shared)
        for manifest, entry in lineage.saves
        for number in range(len(manifest.deltas))
    ]
    return every[: len(every) - lineage.left_out]


def _rows_of(stored: Box, part: Box) -> Box:
    """The stored box narrowed, along its first axis, to the rows that a part of it needs."""
    if not stored.start:
        return stored
    return Box((part.start[0], *stored.start[1:]), (part.stop[0], *stored.stop[1:]))


Spans = list[tuple[int, int]]


def _spans(extent: pack_plan.Extent, rows: Box) -> tuple[Spans, Spans]:
    """Byte ranges, in either array of the pack, of some rows of a box: one a plane."""
    pieces = extent.planes or 1
    piece_bytes = extent.size_bytes // pieces
    first, last = 0, piece_bytes
    if extent.box.start:
        row_bytes = piece_bytes // extent.box.shape[0]
        first = (rows.start[0] - extent.box.start[0]) * row_bytes
        last = (rows.stop[0] - extent.box.start[0]) * row_bytes

    def spans(start: int, count: int) -> Spans:
        starts = [start + piece * piece_bytes for piece in range(count)]
        return [(each + first, each + last) for each in starts]

    return (
        spans(extent.raw_start, pieces - extent.compressed),
        spans(extent.compressed_start, extent.compressed),
    )


class Patches:
    """What deltas store of leaves, put in place as late as possible.

    A leaf that many deltas store is then taken off its devices and put back once.
    """

    def __init__(self, leaves: list[Any], base: BaseManifest) -> None:
        self._leaves = leaves
        self._specs = base.leaves
        self._waiting: dict[int, list[DeltaReader]] = {}

    def add(self, reader: DeltaReader) -> None:
        """Notes what one delta stores, after those noted before."""
        for index in reader.stored:
            waiting = self._waiting.setdefault(index, [])
            if reader.holds_all_of(index):
                waiting.clear()
            waiting.append(reader)

    def touches(self, indices: Collection[int]) -> bool:
        """Whether something waits for one of these leaves."""
        return not self._waiting.keys().isdisjoint(indices)

    def place(self, index: int, array: jax.Array) -> None:
        """Takes an array for what waits for a leaf, if it lies where the leaf does.

        Args:
            index: of the leaf.
            array: of what was noted last for the leaf.
        """
        leaf = self._leaves[index]
        is_plain = isinstance(leaf, jax.Array) and not transfer.is_key(leaf)
        if is_plain and leaf.sharding == array.sharding:
            self._leaves[index] = array
            self._waiting.pop(index, None)

    def apply(self, indices: Collection[int]) -> None:
        """Puts in place what waits for these leaves."""
        alone: dict[DeltaReader, list[int]] = {}
        for index in self._waiting.keys() & frozenset(indices):
            readers = self._waiting[index]
            if self._leaves[index] is None:
                del self._waiting[index]
            elif len(readers) == 1 and readers[0].holds_all_of(index):
                # Mostly the record of the last delta: read at once. Differences may be as large as
                # the state, and are read a leaf at a time.
                alone.setdefault(readers[0], []).append(index)
            else:
                self._patch(index)
        for reader, own in alone.items():
            with reader.holding({i: _boxes_of(self._leaves[i], self._specs[i]) for i in own}):
                for index in own:
                    self._patch(index)

    def _patch(self, index: int) -> None:
        readers = self._waiting.pop(index)
        self._leaves[index] = _patched(self._leaves[index], self._specs[index], index, readers)


def _boxes_of(leaf: Any, spec: Leaf) -> list[Box]:
    plain = transfer.raw(leaf)
    if isinstance(plain, jax.Array):
        return transfer.boxes_here(spec.shape, plain.sharding)
    return [Box.full(spec.shape)]


def _patched(example: Any, spec: Leaf, index: int, readers: Sequence[DeltaReader]) -> Any:
    """A leaf after what some deltas store of it, as the type and where it was before."""
    plain = transfer.raw(example)
    held: dict[Box, Any] = {Box.full(spec.shape): plain}
    if isinstance(plain, jax.Array):
        shards = plain.addressable_shards
        held = {Box.from_slices(shard.index, spec.shape): shard.data for shard in shards}

    def block(box: Box) -> np.ndarray:
        if readers[0].holds_all_of(index):
            result = np.empty(box.shape, jnp.dtype(spec.dtype))
        else:
            result = np.array(held[box])
        for reader in readers:
            reader.patch(index, box, result)
        return result

    if not isinstance(example, jax.Array):
        return like_host(example, block(Box.full(spec.shape)))
    data = transfer.place(spec.shape, plain.sharding, block)
    if transfer.is_key(example):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(example))
    return data


def like_host(example: Any, value: np.ndarray) -> Any:
    """A host value of the example's type: numpy stays numpy, Python scalars stay scalars."""
    if isinstance(example, np.ndarray | np.generic):
        return value.astype(example.dtype)
    return type(example)(value)
