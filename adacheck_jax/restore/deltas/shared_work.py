"""Work that the readers of one lineage share: layouts of packs, plans of reads, opened arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format import pack_plan
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Delta, DeltaManifest, Leaf, Pack
from adacheck_jax.store.packs import arrays
from adacheck_jax.store.packs.reader import PackArray, PackReader
from adacheck_jax.store.steps.lineage import LineageStep
from adacheck_jax.store.storage.location import AnyPath

Places = dict[int, list[tuple[int, tuple[int, int]]]]
"""By process, the position of each box among those that are wanted, and its range of bytes."""


class SharedWork:
    """Results that several readers need; most deltas of a lineage have the same layout."""

    def __init__(self) -> None:
        self._layouts: dict[Hashable, tuple[pack_plan.WritePlan, tuple[Leaf, ...]]] = {}
        self._places: dict[Hashable, Places] = {}
        self._opened: dict[tuple[AnyPath, arrays.ArrayKind], PackArray] = {}

    def layout(self, entry: LineageStep, delta: Delta) -> pack_plan.WritePlan:
        """The layout of a delta's packs, computed as its writer did, and compared with theirs.

        Raises:
            IntegrityError: the delta's manifest does not fit its leaves.
        """
        leaves = entry.leaves
        encodings = [pack.encodings for pack in delta.packs]
        aliases = [pack.aliases for pack in delta.packs]
        coded = [pack.coded for pack in delta.packs]
        key = (id(leaves), delta.stored, *encodings, *aliases, *coded)
        plan, _ = self._layouts.get(key, (None, ()))
        if plan is None:
            try:
                plan = pack_plan.plan_delta(leaves, delta.stored, encodings, aliases, coded)
            except (ValueError, IndexError) as error:
                raise IntegrityError(
                    f"{entry.place}: the manifest tells of parts that cannot be so ({error}). "
                    "Restore another step."
                ) from error
            self._layouts[key] = plan, leaves  # which are held, so that no others have their id
        planned = tuple(zip(plan.raw_bytes, plan.compressed_bytes, strict=True))
        found = tuple((pack.raw_bytes, pack.compressed_bytes) for pack in delta.packs)
        if planned != found:
            raise IntegrityError(
                f"{entry.place}: expected packs of {planned} bytes from the stored leaves, "
                f"found {found}. Restore another step."
            )
        return plan

    def places(
        self,
        layout: pack_plan.WritePlan,
        wanted: Sequence[tuple[int, Box]],
        whole: Callable[[int], Sequence[pack_plan.Extent]],
    ) -> Places:
        """Places in raw arrays of those boxes that are stored as they are, and by themselves."""
        key = (id(layout), tuple(wanted))  # the layout is held here, too
        if key not in self._places:
            found: Places = {}
            for n, (index, box) in enumerate(wanted):
                for extent in whole(index):
                    if extent.box == box and box.size and extent.how.is_viewed:
                        (span,), _ = extent.spans(box)
                        found.setdefault(extent.process, []).append((n, span))
            self._places[key] = found
        return self._places[key]

    def pack(
        self, entry: LineageStep, number: int, process: int, kind: arrays.ArrayKind
    ) -> PackReader:
        """A reader of a delta's section of a pack.

        Raises:
            FormatError: the pack is missing, or has another length than the manifest says.
        """
        assert isinstance(entry.manifest, DeltaManifest)
        start = entry.pack(process)
        sections = [_section_of(each.packs[process], kind) for each in entry.manifest.deltas]
        begins, length_bytes = arrays.laid_out(start, kind, sections)
        if (start, kind) not in self._opened:
            self._opened[start, kind] = PackArray(start, kind, length_bytes)
        return PackReader(self._opened[start, kind], *sections[number], begins[number])


def _section_of(pack: Pack, kind: arrays.ArrayKind) -> tuple[int, arrays.Ranges]:
    """Length in bytes of a delta's section of a pack array, and the zero blocks left out of it."""
    if kind is arrays.RAW:
        return pack.raw_bytes, pack.raw_zeros
    return pack.compressed_bytes, pack.compressed_zeros
