"""This process's share of deltas: its pack, and how each leaf lies in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from adacheck_jax.format import pack_plan, planes
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Encoding, Leaf
from adacheck_jax.format.pack_plan import Extent, WritePlan
from adacheck_jax.store import equality, packs
from adacheck_jax.store.buffers import Buffers
from adacheck_jax.store.zarr import Codec, Compression, codec_of


@dataclass(slots=True)
class Habits:
    """What the deltas of one lineage have in common, so that it is found once.

    Attributes:
        choices: how leaves were chosen to be stored by themselves.
        letters: how all stored leaves were encoded last.
        plan: of the packs, for these letters and no aliases.
    """

    choices: dict[int, Encoding] = field(default_factory=dict)
    letters: tuple[tuple[int, Encoding], ...] | None = None
    plan: WritePlan | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """What one process has to write of a delta, as it will lie in the pack.

    Attributes:
        raw, compressed: its sections of the two arrays.
        letters: how the leaves are stored that this process holds something of.
        aliases: as in :class:`~adacheck_jax.format.manifest.Pack`.
    """

    raw: np.ndarray
    compressed: np.ndarray
    letters: list[tuple[int, Encoding]]
    aliases: list[tuple[int, int]]

    def told(self, raw_zeros: packs.Ranges, compressed_zeros: packs.Ranges) -> dict[str, Any]:
        """What the others, and the manifest, have to know of it."""
        return {
            "letters": self.letters,
            "aliases": self.aliases,
            "sizes_bytes": (self.raw.size, self.compressed.size),
            "zeros": (raw_zeros, compressed_zeros),
        }


@dataclass(slots=True)
class DeltaShare:
    """What one process has to write of a delta.

    Attributes:
        leaves: of the state.
        blocks: this process's boxes of the candidates.
        candidates: the leaves that are stored unless they are what they would be without it.
        previous: the same boxes of the parent, of the leaves that may be stored as differences.
        compression: what is compressed, and how.
        habits: of the lineage's deltas; changed.
        buffers: where the pack is put together.
    """

    leaves: tuple[Leaf, ...]
    blocks: Mapping[int, Blocks]
    candidates: tuple[int, ...]
    previous: Mapping[int, Blocks]
    compression: Compression
    habits: Habits
    buffers: Buffers

    def packed(self, process: int, process_count: int) -> Packed:
        """Decides how each leaf is stored, and puts the pack together.

        Args:
            process: index of this process.
            process_count: how many there are.
        """
        letters = {i: self._encoding(i) for i in self.candidates}
        letters = {i: each for i, each in sorted(letters.items()) if each is not Encoding.SAME}
        own = "".join(letters.values())
        others = Encoding.SAME * len(own)
        encodings = [own if each == process else others for each in range(process_count)]

        def plan_with(own_aliases: Sequence[tuple[int, int]]) -> WritePlan:
            aliases = [own_aliases if each == process else () for each in range(process_count)]
            return pack_plan.plan_delta(self.leaves, tuple(letters), encodings, aliases)

        if self.habits.plan is None or self.habits.letters != tuple(letters.items()):
            self.habits.letters, self.habits.plan = tuple(letters.items()), plan_with(())
        plan = self.habits.plan
        aliases = self._aliases(plan.extents)
        if aliases:
            plan = plan_with(aliases)
        raw = self.buffers.take(plan.raw_bytes[process])
        compressed = self.buffers.take(plan.compressed_bytes[process])
        skipped = {first for first, _ in aliases}
        self._fill(raw, compressed, [x for i, x in enumerate(plan.extents) if i not in skipped])
        return Packed(raw, compressed, [*letters.items()], aliases)

    def _fill(self, raw: np.ndarray, compressed: np.ndarray, extents: Sequence[Extent]) -> None:
        """Puts the stored boxes where the plan has them; gaps are filled with zeros."""
        end = 0
        for extent in sorted(extents, key=lambda x: x.raw_start):
            block = self.blocks[extent.leaf][extent.box]
            low = raw[extent.raw_start :][: extent.raw_bytes]
            if low.size:
                raw[end : extent.raw_start] = 0
                end = extent.raw_start + low.size
            if extent.encoding is Encoding.RAW:
                np.copyto(low.view(block.dtype).reshape(block.shape), block)
                continue
            high = compressed[extent.compressed_start :][: extent.compressed_bytes]
            old = self.previous[extent.leaf][extent.box] if extent.encoding.is_difference else None
            shapes = extent.planes - extent.compressed, extent.compressed
            low, high = (
                x.reshape(count, x.size // count if count else 0)
                for x, count in zip((low, high), shapes, strict=True)
            )
            planes.encode(extent.encoding, block, old, low, high)

    def _aliases(self, extents: Sequence[Extent]) -> list[tuple[int, int]]:
        """Pairs of extents of this process: the first has the bytes of the second."""
        chosen = [i for i, x in enumerate(extents) if x.size_bytes >= _MIN_ALIAS_BYTES]
        blocks = [self.blocks[extents[i].leaf][extents[i].box] for i in chosen]
        kinds = [(extents[i].encoding, blocks[k].dtype.name) for k, i in enumerate(chosen)]
        pairs = []
        for i, first in zip(chosen, equality.firsts(blocks, kinds), strict=True):
            a, b = extents[i], extents[chosen[first]]
            if a is b:
                continue
            old_is_equal = not a.encoding.is_difference or equality.same_bits(
                self.previous[a.leaf][a.box], self.previous[b.leaf][b.box]
            )
            if old_is_equal:
                pairs.append((i, chosen[first]))
        return pairs

    def _encoding(self, index: int) -> Encoding:
        """How this process stores its boxes of one leaf."""
        blocks, previous = self.blocks[index], self.previous.get(index)
        if not blocks:
            return Encoding.SAME
        if previous is None:
            return self._whole(index)
        return planes.choose_difference((block, previous[box]) for box, block in blocks.items())

    def _whole(self, index: int) -> Encoding:
        """How this process stores its boxes of one leaf by themselves."""
        if self.compression == "none":
            return Encoding.RAW
        if index in self.habits.choices:
            return self.habits.choices[index]
        chosen = planes.choose_whole(self.blocks[index].values())
        if chosen is not Encoding.PLANES:  # zeros may be a matter of this step alone
            self.habits.choices[index] = chosen
        return chosen

    @property
    def codec(self) -> Codec:
        """Codec of the compressed array; without a wish of the caller zstd, for differences."""
        return codec_of(self.compression) or "zstd"


def write(
    packed: Sequence[Packed], start: Path, codec: Codec, buffers: Buffers
) -> list[dict[str, Any]]:
    """Writes what one process has of successive deltas, durably and at once.

    Args:
        packed: of each delta.
        start: what the paths of the files of this process's pack begin with.
        codec: of what is compressed.
        buffers: that the sections lie in; they are given back.

    Returns:
        For the part, what is told of each delta (:meth:`Packed.told`).

    Raises:
        OSError: from the file system.
    """
    sections = [each.raw for each in packed], [each.compressed for each in packed]
    contents = list(zip((packs.RAW, packs.COMPRESSED), sections, strict=True))
    zeros = packs.write_pack(start, contents, codec)
    for section in (*sections[0], *sections[1]):
        buffers.give_back(section)
    return [each.told(*left_out) for each, *left_out in zip(packed, *zeros, strict=True)]


_MIN_ALIAS_BYTES = 256
"""Smaller extents are cheaper to store than to call equal."""
