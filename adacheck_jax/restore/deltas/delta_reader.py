"""Boxes of the leaves that a delta stores, read from its packs."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes  # noqa: F401  numpy knows bfloat16 and its kin by it
import numpy as np

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format import pack_plan
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import DeltaManifest, Leaf
from adacheck_jax.store.packs import arrays
from adacheck_jax.store.packs.reader import PackArray, PackReader
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.location import AnyPath

_Places = dict[int, list[tuple[int, tuple[int, int]]]]
"""By process, the position of each box among those that are wanted, and its range of bytes."""


@dataclass(frozen=True, slots=True)
class SharedWork:
    """Results that several readers need; most deltas of a lineage have the same layout.

    Attributes:
        layouts: layouts of packs, with the leaves, which are held so that no others have their id.
        places: places of the boxes of a read.
        opened: arrays of packs.
    """

    layouts: dict[Hashable, tuple[pack_plan.WritePlan, tuple[Leaf, ...]]] = field(
        default_factory=dict
    )
    places: dict[Hashable, _Places] = field(default_factory=dict)
    opened: dict[tuple[AnyPath, arrays.ArrayKind], PackArray] = field(default_factory=dict)


class DeltaReader:
    """Reads boxes of the leaves that one delta stores.

    Args:
        entry: the save that wrote the delta, in its lineage.
        number: the delta's position among those of the save; -1 is the saved step's own.
        shared: work shared with other readers; None to share none.

    Attributes:
        delta: the delta's part of the manifest.
        leaves: every leaf, in the boxes of the delta.

    Raises:
        IntegrityError: the delta's manifest does not fit the leaves.
    """

    def __init__(
        self,
        entry: LineageStep,
        number: int = -1,
        shared: SharedWork | None = None,
    ) -> None:
        manifest = entry.manifest
        assert isinstance(manifest, DeltaManifest)
        self.leaves = leaves = entry.leaves
        self._entry, self._manifest = entry, manifest
        self._number = number % len(manifest.deltas)
        self.delta = delta = manifest.deltas[number]
        self._shared = shared or SharedWork()
        if any(i >= len(leaves) for i in (*delta.stored, *delta.unreplayed)):
            raise IntegrityError(
                f"{entry.place}: expected packs of {len(leaves)} leaves, found leaves up to "
                f"{max(*delta.stored, *delta.unreplayed, 0)}. Restore another step."
            )
        self._layout = self._planned()
        self._extents: dict[int, list[pack_plan.Extent]] = {}
        for extent in self._layout.extents:
            self._extents.setdefault(extent.leaf, []).append(extent)
        self._packs: dict[tuple[int, arrays.ArrayKind], PackReader] = {}
        self._decoded: dict[tuple[int, Box], np.ndarray] | None = None

    def stores_whole(self, index: int) -> bool:
        """True if every box of a leaf is stored as it is, so that no earlier bits matter."""
        extents = self._extents.get(index, [])
        has_differences = any(extent.how.needs_old for extent in extents)
        return not has_differences and len(extents) == len(self.leaves[index].owners)

    def open_packs(self) -> dict[AnyPath, list[str]]:
        """Open every pack of the delta.

        Returns:
            Names of the arrays in each process's pack, by the path that its file names begin with.

        Raises:
            FormatError: a pack is missing, or has another length than the manifest says.
        """
        found: dict[AnyPath, list[str]] = {}
        for process in range(len(self.delta.packs)):
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
            block = np.zeros(extent.box.shape, np.dtype(self.leaves[index].dtype))
            self.patch(index, extent.box, block)
            yield extent.box, block

    def read(self, wanted: Sequence[tuple[int, Box]], *, checked: bool = True) -> list[np.ndarray]:
        """Read boxes of leaves that the delta stores whole, most of them in few large pieces.

        Args:
            wanted: leaf indices and boxes.
            checked: False if the caller verifies all that it makes of them, and calls
                :meth:`check` if it is wrong: then checksums may be left unread.

        Returns:
            The elements of each box, which the caller must not change.

        Raises:
            IntegrityError: stored bytes are damaged, or a leaf is not stored whole.
            FormatError: a pack is missing.
        """
        found: dict[int, np.ndarray] = {}
        for process, own in self._places(wanted).items():
            pack, spans = self._pack(process, arrays.RAW), [span for _, span in own]
            with contextlib.suppress(IntegrityError):  # _box_of() raises it with its path
                read = pack.read(spans, what="some leaves", checked=checked)
                for (n, _), data in zip(own, read, strict=True):
                    index, box = wanted[n]
                    found[n] = data.view(np.dtype(self.leaves[index].dtype)).reshape(box.shape)
        rest = [each for n, each in enumerate(wanted) if n not in found]
        boxes: dict[int, list[Box]] = {}
        for index, box in rest:
            boxes.setdefault(index, []).append(box)
        with self.prefetched(boxes):
            return [
                found[n] if n in found else self._box_of(*each) for n, each in enumerate(wanted)
            ]

    def _box_of(self, index: int, box: Box) -> np.ndarray:
        """One box of a leaf that the delta stores whole; the caller must not change it."""
        leaf = self.leaves[index]
        if not self.stores_whole(index):
            raise IntegrityError(
                f"{self._entry.place}: expected {leaf.path}, which the update consumed, stored by "
                "itself; found it otherwise. Restore another step."
            )
        for extent in self._extents.get(index, ()):
            if extent.box == box and extent.how.has_own_size:
                return self._whole_block(extent)  # without a copy
        block = np.empty(box.shape, np.dtype(leaf.dtype))
        self.patch(index, box, block)
        return block

    def check(self) -> None:
        """Read all that the delta stores.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        # The largest first: a chunk holds several small leaves, and is named by one.
        for index in sorted(self.delta.stored, key=lambda each: -self.leaves[each].nbytes):
            for _ in self.blocks(index):
                pass

    @contextlib.contextmanager
    def prefetched(self, wanted: Mapping[int, Sequence[Box]]) -> Iterator[None]:
        """Read all bytes of some boxes in few large pieces, and keep them inside the context.

        Raises:
            FormatError: a pack is missing. Damaged bytes raise later, from :meth:`patch`.
        """
        needed: dict[tuple[int, arrays.ArrayKind], pack_plan.Spans] = {}
        for index, boxes in wanted.items():
            for extent in self._extents.get(index, ()):
                for common in filter(None, (box.intersect(extent.box) for box in boxes)):
                    raw, compressed = extent.spans(extent.rows(common))
                    for kind, spans in ((arrays.RAW, raw), (arrays.COMPRESSED, compressed)):
                        needed.setdefault((extent.process, kind), []).extend(spans)
        readers = [(self._pack(*each), spans) for each, spans in needed.items() if spans]
        self._decoded = {}
        try:
            for reader, spans in readers:
                with contextlib.suppress(IntegrityError):  # patch() raises it with the leaf's path
                    reader.hold(spans, what="the leaves that the update consumed")
            yield
        finally:
            self._decoded = None
            for reader, _ in readers:
                reader.hold([], what="nothing")

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Bring one box of a leaf from the parent's bits to those of this delta, in place.

        Only the stored boxes that meet the box are read, and of these only the rows in it.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        leaf = self.leaves[index]
        for extent in self._extents.get(index, ()):
            common = box.intersect(extent.box)
            if common is None:
                continue
            if extent.how.has_own_size:
                part = self._whole_block(extent)[
                    (*common.relative_to(extent.box.start).slices, ...)
                ]
                block[(*common.relative_to(box.start).slices, ...)] = part
                continue
            rows = extent.rows(common)
            inside = (*common.relative_to(rows.start).slices, ...)
            target = block[(*common.relative_to(box.start).slices, ...)]
            raw, compressed = extent.spans(rows)
            low = self._planes(extent.process, arrays.RAW, raw, leaf.path)
            if extent.how.is_viewed:
                target[...] = low.view(block.dtype).reshape(rows.shape)[inside]
                continue
            high = self._planes(extent.process, arrays.COMPRESSED, compressed, leaf.path)
            if rows == common and target.flags.c_contiguous:
                extent.how.decode(target, low, high)
                continue
            whole = np.zeros(rows.shape, block.dtype)
            whole[inside] = target
            extent.how.decode(whole, low, high)
            target[...] = whole[inside]

    def _planned(self) -> pack_plan.WritePlan:
        """The layout of the packs, computed as their writer did, and compared with theirs."""
        leaves, delta, packs = self.leaves, self.delta, self.delta.packs
        told = ((pack.encodings, pack.aliases, pack.coded) for pack in packs)
        key = (id(leaves), delta.stored, *told)
        plan, _ = self._shared.layouts.get(key, (None, ()))
        if plan is None:
            try:
                plan = pack_plan.plan_of(leaves, delta)
            except (ValueError, IndexError) as error:
                raise IntegrityError(
                    f"{self._entry.place}: the manifest tells of parts that cannot be so ({error})."
                    " Restore another step."
                ) from error
            self._shared.layouts[key] = plan, leaves
        planned = tuple(zip(plan.raw_bytes, plan.compressed_bytes, strict=True))
        found = tuple((pack.raw_bytes, pack.compressed_bytes) for pack in packs)
        if planned != found:
            raise IntegrityError(
                f"{self._entry.place}: expected packs of {planned} bytes from the stored leaves, "
                f"found {found}. Restore another step."
            )
        return plan

    def _places(self, wanted: Sequence[tuple[int, Box]]) -> _Places:
        """Places in raw arrays of those boxes that are stored as they are, and by themselves."""
        key = (id(self._layout), tuple(wanted))  # the layout is held, too
        if key not in self._shared.places:
            found: _Places = {}
            for n, (index, box) in enumerate(wanted):
                for extent in self._extents.get(index, ()) if self.stores_whole(index) else ():
                    if extent.box == box and box.size and extent.how.is_viewed:
                        (span,), _ = extent.spans(box)
                        found.setdefault(extent.process, []).append((n, span))
            self._shared.places[key] = found
        return self._shared.places[key]

    def _whole_block(self, extent: pack_plan.Extent) -> np.ndarray:
        """The elements of a box, which the caller must not change; once while prefetched."""
        leaf, key = self.leaves[extent.leaf], (extent.leaf, extent.box)
        if self._decoded is not None and key in self._decoded:
            return self._decoded[key]
        raw, compressed = extent.spans(extent.box)
        low = self._planes(extent.process, arrays.RAW, raw, leaf.path)
        high = self._planes(extent.process, arrays.COMPRESSED, compressed, leaf.path)
        block = np.empty(extent.box.shape, np.dtype(leaf.dtype))
        try:
            extent.how.decode(block, low, high)
        except ValueError as error:
            raise IntegrityError(
                f"{self._entry.place}: expected a code of {leaf.path}, found other bytes "
                f"({error}). Restore another step."
            ) from error
        if self._decoded is not None:
            self._decoded[key] = block
        return block

    def _planes(
        self, process: int, kind: arrays.ArrayKind, spans: pack_plan.Spans, path: str
    ) -> np.ndarray:
        """Bytes of spans of one length, one span a row."""
        if not spans:
            return np.empty((0, 0), np.uint8)
        count, length = len(spans), spans[0][1] - spans[0][0]
        if spans[-1][1] - spans[0][0] == count * length:  # they lie side by side
            spans = [(spans[0][0], spans[-1][1])]
        read = self._pack(process, kind).read(spans, what=path)
        return (read[0] if len(read) == 1 else np.concatenate(read)).reshape(count, length)

    def _pack(self, process: int, kind: arrays.ArrayKind) -> PackReader:
        """The reader of this delta's section of a pack array."""
        if (process, kind) not in self._packs:
            start, sections = self._entry.pack(process), list[tuple[int, arrays.Ranges]]()
            for pack in (each.packs[process] for each in self._manifest.deltas):
                raw, compressed = pack.raw_zeros, pack.compressed_zeros  # blocks that are left out
                is_raw = kind is arrays.RAW
                size_bytes = pack.raw_bytes if is_raw else pack.compressed_bytes
                sections.append((size_bytes, raw if is_raw else compressed))
            begins, length_bytes = arrays.laid_out(start, kind, sections)
            opened = self._shared.opened
            if (start, kind) not in opened:
                opened[start, kind] = PackArray(start, kind, length_bytes)
            section = PackReader(opened[start, kind], *sections[self._number], begins[self._number])
            self._packs[process, kind] = section
        return self._packs[process, kind]


def readers_of(lineage: Lineage) -> list[DeltaReader]:
    """A reader for every delta of a lineage, oldest first.

    Raises:
        IntegrityError: a delta's manifest does not fit its leaves.
    """
    shared = SharedWork()
    every = [
        DeltaReader(entry, number, shared)
        for manifest, entry in lineage.saves
        for number in range(len(manifest.deltas))
    ]
    return every[: len(every) - lineage.left_out]
