"""This process's share of a base: what is new of it, and what an earlier base still holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  numpy knows bfloat16 and its kin by it
import numpy as np

from adacheck_jax.format import chunks, lineage
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.store import volumes
from adacheck_jax.store.zarr import Compression, codec_of


@dataclass(frozen=True, slots=True)
class Name:
    """How the checkpoint's database knows a leaf.

    Attributes:
        name: of the array.
        dtype: that it is stored in.
        chunk_bytes: largest chunk that the caller wants, None for no wish.
    """

    name: str
    dtype: str
    chunk_bytes: int | None


@dataclass(frozen=True, slots=True)
class EarlierBase:
    """The base before this one, whose data is still good where nothing changed.

    Attributes:
        directory: of its item.
        step: its number.
        leaves: its leaves.
        sums: fingerprints of what this process owned of them; empty if they are not known.
    """

    directory: Path
    step: int
    leaves: tuple[Leaf, ...]
    sums: Mapping[int, int]


@dataclass(slots=True)
class BaseShare:
    """What one process has to write of a base.

    Attributes:
        leaves: of the state.
        blocks: this process's boxes of them.
        earlier: the base before this one, where its files can be linked; else None.
        still: the leaves that may well be the same at the next base.
        names: of the arrays, by leaf path; what is not among them (a number) Orbax writes.
        compression: of what is written, and how.
    """

    leaves: tuple[Leaf, ...]
    blocks: Mapping[int, Blocks]
    earlier: EarlierBase | None
    still: frozenset[int]
    names: Mapping[str, Name]
    compression: Compression

    def write(self, directory: Path, process: int, sums: Mapping[int, int]) -> dict[str, Any]:
        """Writes the share durably.

        Args:
            directory: of the item.
            process: index of this process.
            sums: what it contributes to the leaves' fingerprints.

        Returns:
            For the part: the volumes and what is to be taken from each, which leaves share the data
            of which others, and which were kept from which step.

        Raises:
            OSError: from the file system.
        """
        drafts = {i: self._part(i) for i, blocks in self.blocks.items() if blocks}
        own = {i: part for i, part in drafts.items() if part is not None}
        index = {part.name: i for i, part in own.items()}
        kept: dict[str, str] = {}
        still = self.still
        if self.earlier is not None:
            same = self._unchanged(self.earlier, sums).intersection(own)
            still |= same
            kept = volumes.keep(
                _volumes_of(self.earlier, process),
                [own[i] for i in sorted(same)],
                directory / lineage.KEPT,
            )
        contents: dict[str, list[str] | None] = {}
        for name, volume in kept.items():
            names = contents.setdefault(f"{lineage.KEPT}/{volume}", [])
            assert names is not None
            names.append(name)
        left = {i: self._with_codec(part) for i, part in own.items() if part.name not in kept}
        aliases = []
        # What does not change lies by itself, so that a later base finds a volume of nothing else.
        for suffix, chosen in (
            ("", [part for i, part in left.items() if i not in still]),
            (_STILL, [part for i, part in left.items() if i in still]),
        ):
            if chosen:
                path = f"{lineage.BASE}/{process}{suffix}"
                shared = volumes.write(directory / path, chosen)
                aliases += [(index[name], index[other]) for name, other in shared.items()]
                contents[path] = None
        return {
            "volumes": contents,
            "aliases": aliases,
            "kept": [(index[name], _step_of(volume)) for name, volume in kept.items()],
        }

    def _part(self, index: int) -> volumes.Part | None:
        """This process's part of a leaf, if the leaf is an array that Orbax leaves to us."""
        leaf = self.leaves[index]
        name = self.names.get(leaf.path)
        if name is None:
            return None
        blocks = {
            box: block.astype(np.dtype(name.dtype), copy=False)
            for box, block in self.blocks[index].items()
        }
        return volumes.Part(name.name, leaf.shape, chunk_shape(leaf, name.chunk_bytes), blocks)

    def _with_codec(self, part: volumes.Part) -> volumes.Part:
        if part.nbytes < _MIN_COMPRESSED_BYTES:
            return part
        return dataclasses.replace(part, codec=codec_of(self.compression))

    def _unchanged(self, earlier: EarlierBase, sums: Mapping[int, int]) -> frozenset[int]:
        """The leaves of which this process's part may be what it was: it has the same sum."""
        before = {leaf: earlier.sums.get(i) for i, leaf in enumerate(earlier.leaves)}
        return frozenset(
            i for i, leaf in enumerate(self.leaves) if leaf in before and before[leaf] == sums[i]
        )


_MIN_COMPRESSED_BYTES = 1 << 12


def chunk_shape(leaf: Leaf, wanted_bytes: int | None) -> tuple[int, ...]:
    """Shape of a leaf's chunks in a base.

    Args:
        leaf: its description.
        wanted_bytes: largest chunk that the caller wants, None for no wish.
    """
    max_bytes = wanted_bytes or chunks.MAX_CHUNK_BYTES
    return chunks.chunk_shape(leaf.cuts, leaf.itemsize_bytes, max_bytes)


_STILL = ".still"


def _volumes_of(base: EarlierBase, process: int) -> list[tuple[str, Path]]:
    """The volumes of one process in a base, under the names that a later one keeps them by."""
    own = [f"{process}", f"{process}{_STILL}"]
    found = [(f"{base.step}.{name}", base.directory / lineage.BASE / name) for name in own]
    kept = base.directory / lineage.KEPT
    names = [path.name for path in kept.iterdir()] if kept.is_dir() else []
    names = [name for name in names if name.split(".", 1)[1] in own]
    return found + [(n, kept / n) for n in sorted(names, key=_step_of, reverse=True)]


def _step_of(volume: str) -> int:
    """The step that wrote a kept volume."""
    return int(volume.split(".", 1)[0])
