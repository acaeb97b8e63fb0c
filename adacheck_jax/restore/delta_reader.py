"""Boxes of the leaves that a delta stores, read from its packs."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes  # noqa: F401  numpy knows bfloat16 and its kin by it
import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format import codes, pack_plan, planes
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Encoding, Pack
from adacheck_jax.store.packs import arrays
from adacheck_jax.store.packs.reader import PackArray, PackReader
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.location import AnyPath

Spans = list[tuple[int, int]]
"""Half-open byte ranges."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a pack that are read at once.

    Attributes:
        process: the pack's process.
        start, stop: half-open range of bytes of its raw array.
        parts: for each box in them its position among the wanted boxes, and its range of bytes.
    """

    process: int
    start: int
    stop: int
    parts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ReaderCache:
    """Work that the readers of one lineage's deltas share.

    Attributes:
        plans: pack layouts; most deltas of a lineage have the same one.
        pieces: pieces to read of boxes, by layout and boxes.
        opened: opened pack arrays; the deltas of one save lie one after another in an array.
    """

    plans: dict[Hashable, pack_plan.WritePlan] = field(default_factory=dict)
    pieces: dict[Hashable, list[_Piece]] = field(default_factory=dict)
    opened: dict[tuple[AnyPath, arrays.Kind], PackArray] = field(default_factory=dict)


class DeltaReader:
    """Reads boxes of the leaves that one delta stores.

    Args:
        base: the manifest that describes the leaves.
        entry: the save that wrote the delta.
        number: the delta's position among those of the save; -1 is the saved step's own.
        cache: work shared with other readers; None to share none.

    Raises:
        IntegrityError: the delta's manifest does not fit the base's.
    """

    def __init__(
        self,
        base: BaseManifest,
        entry: LineageStep,
        number: int = -1,
        cache: ReaderCache | None = None,
    ) -> None:
        manifest = entry.manifest
        assert isinstance(manifest, DeltaManifest)
        self._leaves = base.leaves
        self._entry = entry
        self._manifest = manifest
        self._number = number % len(manifest.deltas)
        self._delta = delta = manifest.deltas[number]
        self._cache = cache or ReaderCache()
        if len(delta.packs) != base.process_count or any(
            i >= len(base.leaves) for i in (*delta.stored, *delta.unreplayed)
        ):
            raise IntegrityError(
                f"{entry.place}: expected packs of {base.process_count} processes with some of "
                f"{len(base.leaves)} leaves, found {len(delta.packs)} packs with leaves up to "
                f"{max(delta.stored, default=0)}. Restore another step."
            )
        self._layout = self._plan()
        self._extents: dict[int, list[pack_plan.Extent]] = {}
        for extent in self._layout.extents:
            self._extents.setdefault(extent.leaf, []).append(extent)
        self._packs: dict[tuple[int, arrays.Kind], PackReader] = {}
        self._decoded: dict[tuple[int, Box], np.ndarray] | None = None

    def _plan(self) -> pack_plan.WritePlan:
        """The layout of the packs, computed as the writer computed it, and compared with theirs."""
        delta, plans = self._delta, self._cache.plans
        encodings = [pack.encodings for pack in delta.packs]
        try:
            aliases = [pack.aliases for pack in delta.packs]
            coded = [pack.coded for pack in delta.packs]
            key = (delta.stored, *encodings, *aliases, *coded)
            plan = plans.get(key)
            if plan is None:
                plan = pack_plan.plan_delta(self._leaves, delta.stored, encodings, aliases, coded)
        except (ValueError, IndexError) as error:
            raise IntegrityError(
                f"{self._entry.place}: the manifest tells of parts that cannot be so ({error}). "
                "Restore another step."
            ) from error
        plans[key] = plan
        planned = tuple(zip(plan.raw_bytes, plan.compressed_bytes, strict=True))
        found = tuple((pack.raw_bytes, pack.compressed_bytes) for pack in delta.packs)
        if planned != found:
            raise IntegrityError(
                f"{self._entry.place}: expected packs of {planned} bytes from the stored leaves, "
                f"found {found}. Restore another step."
            )
        return plan

    @property
    def stored(self) -> tuple[int, ...]:
        """Indices of the leaves of which the delta stores some box."""
        return self._delta.stored

    @property
    def has_update(self) -> bool:
        """True if the delta replays an update."""
        return self._delta.has_update

    @property
    def updates(self) -> tuple[int, ...]:
        """Positions of the recorders whose update is replayed."""
        return self._delta.updates

    @property
    def unreplayed(self) -> tuple[int, ...]:
        """Indices of the leaves that are not replayed: the parent's, changed by what is stored."""
        return self._delta.unreplayed

    def stores_whole(self, index: int) -> bool:
        """True if every box of a leaf is stored as it is, so that no earlier bits matter."""
        extents = self._extents.get(index, [])
        has_differences = any(extent.encoding.is_difference for extent in extents)
        return not has_differences and len(extents) == len(self._leaves[index].owners)

    def open_packs(self) -> dict[AnyPath, list[str]]:
        """Open every pack of the delta.

        Returns:
            Names of the arrays in each process's pack, by the path that its file names begin with.

        Raises:
            FormatError: a pack is missing, or has another length than the manifest says.
        """
        found: dict[AnyPath, list[str]] = {}
        for process in range(len(self._delta.packs)):
            for kind in (arrays.RAW, arrays.COMPRESSED):
                if self._pack(process, kind).stored_bytes:
                    found.setdefault(self._entry.pack(process), []).append(kind.name)
        return found

    def blocks(self, index: int) -> Iterator[tuple[Box, np.ndarray]]:
        """Read all that the delta stores of a leaf.

        Yields:
            Each stored box with its elements; of a stored difference the difference from zero.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        for extent in self._extents.get(index, ()):
            block = np.zeros(extent.box.shape, np.dtype(self._leaves[index].dtype))
            self.patch(index, extent.box, block)
            yield extent.box, block

    def read(self, index: int, box: Box) -> np.ndarray:
        """Read one box of a leaf that the delta stores whole.

        Args:
            index: the leaf's index.
            box: the box to read.

        Returns:
            The elements, which the caller must not change.

        Raises:
            IntegrityError: stored bytes are damaged, or the leaf is not stored whole.
            FormatError: a pack is missing.
        """
        leaf, dtype = self._leaves[index], np.dtype(self._leaves[index].dtype)
        if not self.stores_whole(index):
            raise IntegrityError(
                f"{self._entry.place}: expected {leaf.path}, which the update consumed, stored by "
                "itself; found it otherwise. Restore another step."
            )
        for extent in self._extents.get(index, ()):
            if extent.box == box and extent.encoding is Encoding.CODED:
                return self._decode(extent)
            if extent.box == box and box.size and extent.encoding is Encoding.RAW:
                spans, _ = _spans_of(extent, box)
                data = self._planes(extent.process, arrays.RAW, spans, leaf.path)
                return data.view(dtype).reshape(box.shape)  # as it was read, without a copy
        block = np.empty(box.shape, dtype)
        self.patch(index, box, block)
        return block

    def read_many(
        self, wanted: Sequence[tuple[int, Box]], *, checked: bool = True
    ) -> list[np.ndarray]:
        """Read boxes of leaves that the delta stores whole, most of them in few large pieces.

        Args:
            wanted: leaf indices and boxes.
            checked: False if the caller verifies all that it makes of them, and calls
                :meth:`check` if it is wrong: then checksums may be left unread.

        Returns:
            The elements of each box, which the caller must not change.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        found: dict[int, np.ndarray] = {}
        for piece in self._pieces(wanted):
            pack = self._pack(piece.process, arrays.RAW)
            with contextlib.suppress(IntegrityError):  # read() raises it with the leaf's path
                span = (piece.start, piece.stop)
                (data,) = pack.read([span], what="some leaves", checked=checked)
                for position, first, last in piece.parts:
                    index, box = wanted[position]
                    dtype = np.dtype(self._leaves[index].dtype)
                    found[position] = data[first:last].view(dtype).reshape(box.shape)
        rest = [each for n, each in enumerate(wanted) if n not in found]
        boxes: dict[int, list[Box]] = {}
        for index, box in rest:
            boxes.setdefault(index, []).append(box)
        with self.prefetched(boxes):
            return [found[n] if n in found else self.read(*each) for n, each in enumerate(wanted)]

    def check(self) -> None:
        """Read all that the delta stores.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        # The largest first: a chunk holds several small leaves, and is named by one.
        for index in sorted(self.stored, key=lambda each: -self._leaves[each].nbytes):
            for _ in self.blocks(index):
                pass

    def _pieces(self, wanted: Sequence[tuple[int, Box]]) -> list[_Piece]:
        """Pieces that hold those boxes that are stored as they are, and by themselves."""
        key = (id(self._layout), tuple(wanted))  # the cache holds the layout, too
        pieces = self._cache.pieces.get(key)
        if pieces is None:
            spans = []
            for n, (index, box) in enumerate(wanted):
                for extent in self._extents.get(index, ()) if self.stores_whole(index) else ():
                    if extent.box == box and box.size and extent.encoding is Encoding.RAW:
                        ((start, stop),), _ = _spans_of(extent, box)
                        spans.append((extent.process, start, stop, n))
            pieces = self._cache.pieces[key] = [*_merged(sorted(spans))]
        return pieces

    @contextlib.contextmanager
    def prefetched(self, wanted: Mapping[int, Sequence[Box]]) -> Iterator[None]:
        """Read all bytes of some boxes in few large pieces, and keep them inside the context.

        Args:
            wanted: boxes by leaf index.

        Raises:
            FormatError: a pack is missing. Damaged bytes raise later, from :meth:`read`.
        """
        needed: dict[tuple[int, arrays.Kind], Spans] = {}
        for index, boxes in wanted.items():
            for extent in self._extents.get(index, ()):
                for common in filter(None, (box.intersect(extent.box) for box in boxes)):
                    raw, compressed = _spans_of(extent, _rows_of(extent.box, common))
                    for kind, spans in ((arrays.RAW, raw), (arrays.COMPRESSED, compressed)):
                        needed.setdefault((extent.process, kind), []).extend(spans)
        readers = [(self._pack(*each), spans) for each, spans in needed.items() if spans]
        self._decoded = {}
        try:
            for reader, spans in readers:
                with contextlib.suppress(IntegrityError):  # read() raises it with the leaf's path
                    reader.hold(spans, what="the leaves that the update consumed")
            yield
        finally:
            self._decoded = None
            for reader, _ in readers:
                reader.hold([], what="nothing")

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Bring one box of a leaf from the parent's bits to those of this delta, in place.

        Only the stored boxes that meet the box are read, and of these only the rows in it.

        Args:
            index: the leaf's index.
            box: the box whose elements the block holds.
            block: the elements, to be changed.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        leaf = self._leaves[index]
        for extent in self._extents.get(index, ()):
            common = box.intersect(extent.box)
            if common is None:
                continue
            if extent.encoding is Encoding.CODED:
                part = self._decode(extent)[(*common.relative_to(extent.box.start).slices, ...)]
                block[(*common.relative_to(box.start).slices, ...)] = part
                continue
            rows = _rows_of(extent.box, common)
            inside = (*common.relative_to(rows.start).slices, ...)
            target = block[(*common.relative_to(box.start).slices, ...)]
            raw, compressed = _spans_of(extent, rows)
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

    def _decode(self, extent: pack_plan.Extent) -> np.ndarray:
        """The elements of a coded box, which the caller must not change; once while prefetched."""
        leaf, key = self._leaves[extent.leaf], (extent.leaf, extent.box)
        if self._decoded is not None and key in self._decoded:
            return self._decoded[key]
        raw, compressed = _spans_of(extent, extent.box)
        low = self._planes(extent.process, arrays.RAW, raw, leaf.path)
        high = self._planes(extent.process, arrays.COMPRESSED, compressed, leaf.path)
        block = np.empty(extent.box.shape, np.dtype(leaf.dtype))
        try:
            codes.decode(np.concatenate([low.reshape(-1), high.reshape(-1)]), block)
        except ValueError as error:
            raise IntegrityError(
                f"{self._entry.place}: expected a code of {leaf.path}, found other bytes "
                f"({error}). Restore another step."
            ) from error
        if self._decoded is not None:
            self._decoded[key] = block
        return block

    def _planes(self, process: int, kind: arrays.Kind, spans: Spans, path: str) -> np.ndarray:
        """Bytes of spans of one length, one span a row."""
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
            sections = [_section_of(each.packs[process], kind) for each in self._manifest.deltas]
            begins, length_bytes = arrays.laid_out(start, kind, sections)
            opened = self._cache.opened
            if (start, kind) not in opened:
                opened[start, kind] = PackArray(start, kind, length_bytes)
            self._packs[process, kind] = PackReader(
                opened[start, kind], *sections[self._number], begins[self._number]
            )
        return self._packs[process, kind]


def readers_of(lineage: Lineage) -> list[DeltaReader]:
    """A reader for every delta of a lineage, oldest first.

    Raises:
        IntegrityError: a delta's manifest does not fit the base's.
    """
    cache = ReaderCache()
    every = [
        DeltaReader(lineage.base, entry, number, cache)
        for manifest, entry in lineage.saves
        for number in range(len(manifest.deltas))
    ]
    return every[: len(every) - lineage.left_out]


def _merged(spans: Sequence[tuple[int, int, int, int]]) -> Iterator[_Piece]:
    """Spans that lie side by side in a pack as one; each has a process, two ends and a position."""
    groups: list[list[tuple[int, int, int, int]]] = []
    stop = 0
    for span in spans:
        if not groups or span[0] != groups[-1][0][0] or span[1] > stop:
            groups.append([])
            stop = 0
        groups[-1].append(span)
        stop = max(stop, span[2])
    for group in groups:
        process, start, _, _ = group[0]
        parts = tuple((n, first - start, last - start) for _, first, last, n in group)
        yield _Piece(process, start, max(last for _, _, last, _ in group), parts)


def _section_of(pack: Pack, kind: arrays.Kind) -> tuple[int, arrays.Ranges]:
    """Length in bytes of a delta's section of a pack array, and the zero blocks left out of it."""
    if kind is arrays.RAW:
        return pack.raw_bytes, pack.raw_zeros
    return pack.compressed_bytes, pack.compressed_zeros


def _rows_of(stored: Box, part: Box) -> Box:
    """A stored box narrowed, along its first axis, to the rows that meet a part of it."""
    if not stored.start:
        return stored
    return Box((part.start[0], *stored.start[1:]), (part.stop[0], *stored.stop[1:]))


def _spans_of(extent: pack_plan.Extent, rows: Box) -> tuple[Spans, Spans]:
    """Byte ranges of some rows of a stored box, one a plane, in the raw and compressed arrays.

    Of a code all bytes, one range in each array.
    """
    if extent.encoding is Encoding.CODED:  # read whole
        low, high = extent.raw_start, extent.compressed_start
        return [(low, low + extent.raw_bytes)], [(high, high + extent.compressed_bytes)]
    plane_count = extent.planes or 1
    plane_bytes = extent.size_bytes // plane_count
    first, last = 0, plane_bytes
    if extent.box.start:
        row_bytes = plane_bytes // extent.box.shape[0]
        first = (rows.start[0] - extent.box.start[0]) * row_bytes
        last = (rows.stop[0] - extent.box.start[0]) * row_bytes

    def spans(start: int, count: int) -> Spans:
        starts = [start + plane * plane_bytes for plane in range(count)]
        return [(each + first, each + last) for each in starts]

    return (
        spans(extent.raw_start, plane_count - extent.compressed),
        spans(extent.compressed_start, extent.compressed),
    )
