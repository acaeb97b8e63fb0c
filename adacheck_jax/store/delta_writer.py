"""One process's part of a delta: the encoding of each leaf, and the pack that holds the boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from adacheck_jax.format import pack_plan
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.encodings import table
from adacheck_jax.format.encodings.form import Candidate, Choice, Code, Encoding
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.format.pack_plan import Extent, Pairs, WritePlan
from adacheck_jax.store import equality
from adacheck_jax.store.host_memory import ReusedMemory
from adacheck_jax.store.packs import arrays, writer
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.store.zarr import CODECS, Codec, Compression

_MIN_ALIAS_BYTES = 256
"""Smaller extents are cheaper to store than to alias."""


@dataclass(slots=True)
class DeltaEncodings:
    """Choices remembered between the deltas of one lineage.

    Attributes:
        choices: encodings of leaves that are stored by themselves, by leaf index.
        planned: leaves, letters and sizes of codes of the last delta, and the plan for them
            without aliases.
    """

    choices: dict[int, Encoding] = field(default_factory=dict)
    planned: tuple[Any, WritePlan] | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """One process's section of a pack, ready to be written.

    Attributes:
        raw, compressed: bytes for the pack's two arrays.
        report: what the other processes and the manifest are told of it, as JSON: ``letters``, leaf
            indices and encodings of the leaves that this process stores boxes of; ``aliases`` and
            ``coded``, as in :class:`~adacheck_jax.format.manifest.Pack`; ``sizes_bytes``.
        codec: codec of the compressed array.
        memory: what the memory of both arrays is given back to.
    """

    raw: np.ndarray
    compressed: np.ndarray
    report: dict[str, Any]
    codec: Codec
    memory: ReusedMemory

    def give_back(self) -> None:
        """Gives back the memory, once the bytes are nobody's business any more."""
        for section in (self.raw, self.compressed):
            self.memory.give_back(section)


@dataclass(slots=True)
class DeltaWriter:
    """Packs one process's boxes of a delta.

    Attributes:
        leaves: every leaf of the state.
        blocks: this process's boxes of the candidates, by leaf index.
        candidates: indices of the leaves that are stored unless they equal ``previous``.
        previous: boxes of the parent step, by leaf index; without them a leaf is stored by itself.
        compression: the caller's choice.
        encodings: choices of earlier deltas of the lineage; changed.
        memory: source of the memory for the sections.
    """

    leaves: tuple[Leaf, ...]
    blocks: Mapping[int, Blocks]
    candidates: tuple[int, ...]
    previous: Mapping[int, Blocks]
    compression: Compression
    encodings: DeltaEncodings
    memory: ReusedMemory

    @property
    def codec(self) -> Codec:
        """Codec of the compressed array; without a wish of the caller zstd, for differences."""
        return CODECS[self.compression] or "zstd"

    def packed(self, process: int, process_count: int) -> Packed:
        """Chooses each leaf's encoding, and fills this process's section of its pack."""
        chosen = {i: self._chosen(i) for i in sorted(self.candidates)}
        letters = {i: each for i, (each, _) in chosen.items() if each is not Encoding.SAME}
        coded = {i: codes for i, (_, codes) in chosen.items() if codes}
        own, none = "".join(letters.values()), Encoding.SAME * len(letters)
        sizes = [
            coded[i][box].sizes(is_split=self.compression != "none")
            for i in coded
            for box in self.leaves[i].boxes_of(process)
        ]

        def plan_with(aliases: Pairs) -> WritePlan:
            every = range(process_count)
            return pack_plan.plan_delta(
                self.leaves,
                tuple(letters),
                [own if each == process else none for each in every],
                [aliases if each == process else () for each in every],
                [sizes if each == process else () for each in every],
            )

        wanted = (self.leaves, letters, sizes)  # a step restored onto other devices is cut anew
        planned = self.encodings.planned  # another thread may pack a later step
        if planned is None or planned[0] != wanted:
            planned = self.encodings.planned = wanted, plan_with(())
        plan = planned[1]
        aliases = self._aliases(plan.extents)
        if aliases:
            plan = plan_with(aliases)
        raw = self.memory.take(plan.raw_bytes[process])
        compressed = self.memory.take(plan.compressed_bytes[process])
        skipped = {first for first, _ in aliases}
        kept = [x for i, x in enumerate(plan.extents) if i not in skipped]
        self._fill(raw, compressed, kept, coded)
        report = {
            "letters": [*letters.items()],
            "aliases": aliases,
            "coded": sizes,
            "sizes_bytes": (raw.size, compressed.size),
        }
        return Packed(raw, compressed, report, self.codec, self.memory)

    def _fill(
        self,
        raw: np.ndarray,
        compressed: np.ndarray,
        extents: Sequence[Extent],
        coded: Mapping[int, Mapping[Box, Code]],
    ) -> None:
        """Writes boxes to their planned places in the section, and zeros into the gaps."""
        end = 0
        for extent in sorted(extents, key=lambda x: x.raw_start):
            block = self.blocks[extent.leaf][extent.box]
            low = raw[extent.raw_start :][: extent.raw_bytes]
            if low.size:
                raw[end : extent.raw_start] = 0
                end = extent.raw_start + low.size
            high = compressed[extent.compressed_start :][: extent.compressed_bytes]
            if extent.how.has_own_size:
                coded[extent.leaf][extent.box].write(low, high)
                continue
            old = self.previous[extent.leaf][extent.box] if extent.how.needs_old else None
            extent.how.encode(block, old, low, high)

    def _aliases(self, extents: Sequence[Extent]) -> list[tuple[int, int]]:
        """Pairs of equal extents of this process; only the second, an earlier one, is stored."""
        chosen = [i for i, x in enumerate(extents) if x.size_bytes >= _MIN_ALIAS_BYTES]
        blocks = [self.blocks[extents[i].leaf][extents[i].box] for i in chosen]
        kinds = [(extents[i].encoding, blocks[k].dtype.name) for k, i in enumerate(chosen)]
        pairs = []
        for i, first in zip(chosen, equality.firsts(blocks, kinds), strict=True):
            a, b = extents[i], extents[chosen[first]]
            if a is b:
                continue
            old_is_equal = not a.how.needs_old or equality.same_bits(
                self.previous[a.leaf][a.box], self.previous[b.leaf][b.box]
            )
            if old_is_equal:
                pairs.append((i, chosen[first]))
        return pairs

    def _chosen(self, index: int) -> Choice:
        """Encoding of this process's boxes of one leaf, with the codes of one of its own size."""
        last, compresses = self.encodings.choices, self.compression != "none"
        known = self.previous.get(index), last.get(index)
        letter, made = table.choose(Candidate(self.blocks[index], *known, compresses))
        if letter is not Encoding.SAME and table.ENCODINGS[letter].lasts:
            last[index] = letter
        return letter, made


def write(packed: Sequence[Packed], start: AnyPath) -> list[dict[str, Any]]:
    """Writes one process's sections of successive deltas as one pack, durably.

    Returns:
        One report a delta, with the runs of ``zeros`` that were left out.
    """
    sections = [each.raw for each in packed], [each.compressed for each in packed]
    contents = list(zip((arrays.RAW, arrays.COMPRESSED), sections, strict=True))
    zeros = writer.write_pack(start, contents, packed[-1].codec)
    pairs = zip(packed, *zeros, strict=True)
    return [each.report | {"zeros": left_out} for each, *left_out in pairs]
