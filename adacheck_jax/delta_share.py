"""This process's share of a delta: its pack, and how each leaf lies in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adacheck_jax import arrays, codecs, equality, redundancy
from adacheck_jax.manifest import Encoding, Leaf
from adacheck_jax.redundancy import Extent
from adacheck_jax.staging import Blocks


@dataclass(slots=True)
class DeltaShare:
    """What one process has to write of a delta.

    Attributes:
        leaves: of the state.
        blocks: this process's boxes of the candidates, and of whatever a proof may find wrong.
        candidates: the leaves that are stored unless they are what they would be without it.
        previous: the same boxes of the parent, of the leaves that may be stored as differences.
        compresses: whether what pays is compressed.
        choices: how leaves were chosen to be stored by themselves at earlier saves of the lineage;
            changed.
    """

    leaves: tuple[Leaf, ...]
    blocks: dict[int, Blocks]
    candidates: tuple[int, ...]
    previous: Mapping[int, Blocks]
    compresses: bool
    choices: dict[int, Encoding]

    def write(
        self, directory: Path, process: int, process_count: int, wrong: Sequence[int]
    ) -> dict[str, Any]:
        """Writes the share durably.

        Args:
            directory: of this process's pack.
            process: index of this process.
            process_count: how many there are.
            wrong: leaves that are stored by themselves, whatever else would do.

        Returns:
            For the part, what the manifest says of the pack (:class:`~adacheck_jax.manifest.Pack`).

        Raises:
            OSError: from the file system.
        """
        letters = {i: self._encoding(i) for i in self.candidates}
        letters |= {i: self._whole(i) for i in wrong if self.blocks.get(i)}
        letters = {i: each for i, each in sorted(letters.items()) if each is not Encoding.SAME}
        own = "".join(letters.values())
        others = Encoding.SAME * len(own)
        encodings = [own if each == process else others for each in range(process_count)]
        leaves, stored = self.leaves, tuple(letters)
        nobody = [()] * process_count
        extents = redundancy.plan_delta(leaves, stored, encodings, nobody).extents
        own_aliases = self._aliases(extents)
        aliases = [own_aliases if each == process else () for each in range(process_count)]
        plan = redundancy.plan_delta(leaves, stored, encodings, aliases)
        raw: list[tuple[int, np.ndarray]] = []
        compressed: list[tuple[int, np.ndarray]] = []
        skipped = {first for first, _ in own_aliases}
        for extent in (x for i, x in enumerate(plan.extents) if i not in skipped):
            block = self.blocks[extent.leaf][extent.box]
            if extent.encoding is Encoding.RAW:
                raw.append((extent.raw_start, block))
                continue
            old = self.previous[extent.leaf][extent.box] if extent.encoding.is_difference else None
            planes = codecs.encode(extent.encoding, block, old)
            low = extent.planes - extent.compressed
            if low:
                raw.append((extent.raw_start, planes[:low]))
            compressed.append((extent.compressed_start, planes[low:]))
        sizes = plan.raw_bytes[process], plan.compressed_bytes[process]
        contents = [(arrays.RAW, sizes[0], raw), (arrays.COMPRESSED, sizes[1], compressed)]
        return {
            "letters": list(letters.items()),
            "aliases": own_aliases,
            "sizes_bytes": sizes,
            "zeros": arrays.write_pack(directory, contents),
        }

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
        pairs = ((block, previous[box]) for box, block in blocks.items())
        if not self.compresses:
            same = all(equality.same_bits(block, old) for block, old in pairs)
            return Encoding.SAME if same else Encoding.RAW
        return codecs.choose_difference(pairs)

    def _whole(self, index: int) -> Encoding:
        """How this process stores its boxes of one leaf by themselves."""
        if not self.compresses:
            return Encoding.RAW
        if index in self.choices:
            return self.choices[index]
        chosen = codecs.choose_whole(self.blocks[index].values())
        if chosen is not Encoding.PLANES:  # zeros may be a matter of this step alone
            self.choices[index] = chosen
        return chosen


_MIN_ALIAS_BYTES = 256
"""Smaller extents are cheaper to store than to call equal."""
