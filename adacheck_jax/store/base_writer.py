"""One process's part of a base: volumes of new data, and links to volumes of an earlier base."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  gives numpy bfloat16 and its kin
import numpy as np

from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.store import sharing, volumes
from adacheck_jax.store.sharing import Agree, Report
from adacheck_jax.store.steps import folders
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.store.zarr import CODECS, Compression

_MIN_COMPRESSED_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Name:
    """An array of a leaf in the checkpoint's database.

    Attributes:
        name: the array's name.
        dtype: name of the type that its elements are stored in.
        chunk_shape: shape of its chunks.
    """

    name: str
    dtype: str
    chunk_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """Form in which the arrays of a base are stored.

    Attributes:
        names: the arrays, by leaf path; leaves without one have no elements.
        file_bytes: size in bytes at which a data file is full; see :meth:`volumes.Volume.write`.
    """

    names: Mapping[str, Name]
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EarlierBase:
    """The base before this one, whose data is good where nothing changed.

    Attributes:
        lineage: a lineage that begins with it.
        sums: this process's contributions to the fingerprints of its leaves, by leaf index; empty
            if unknown.
    """

    lineage: Lineage
    sums: Mapping[int, int]


@dataclass(slots=True)
class BaseWriter:
    """Writes one process's boxes of a base.

    Attributes:
        leaves: every leaf of the state.
        blocks: this process's boxes, by leaf index.
        earlier: the base before this one, where its files can be linked; else None.
        still: indices of the leaves that are likely to be equal in the next base.
        compression: the caller's choice.
    """

    leaves: tuple[Leaf, ...]
    blocks: Mapping[int, Blocks]
    earlier: EarlierBase | None
    still: frozenset[int]
    compression: Compression

    def write(
        self,
        directory: AnyPath,
        process: int,
        sums: Mapping[int, int],
        layout: ArrayLayout,
        agree: Agree,
    ) -> Report:
        """Writes this process's volumes durably.

        All processes call this, since they ask each other by ``agree`` which chunks are equal.

        Returns:
            The report for the other processes, as JSON: ``volumes``, the arrays to take from each
            volume; ``aliases``, pairs of leaves that share data; ``kept``, pairs of a leaf and the
            step that wrote its data; ``borrowed``, keys of chunks and the places in other volumes
            that have their bytes; ``lent``, places that others borrow.
        """
        own = {i: piece for i in self.blocks if (piece := self._piece(i, layout)) is not None}
        places = {leaf.path: i for i, leaf in enumerate(self.leaves)}
        index = {each.name: places[path] for path, each in layout.names.items()}
        kept, still = dict[str, str](), self.still
        if self.earlier is not None:
            leaves = self.earlier.lineage.base.leaves
            before = {leaf: self.earlier.sums.get(i) for i, leaf in enumerate(leaves)}
            same = [i for i in sorted(own) if before.get(self.leaves[i]) == sums.get(i, -1)]
            still = still.union(same)
            earlier = _volumes_of(self.earlier.lineage, process)
            kept = volumes.keep(earlier, [own[i] for i in same], directory / folders.KEPT)
        every = _volumes(process, own, kept, still)
        lent, written = sharing.share(every, agree), [each for each in every if each.rank]
        for each in written:
            each.write(directory, layout.file_bytes)
        unread = (each for each in lent if not each[0].startswith(folders.KEPT))
        sharing.check(directory, {place: lent[place] for place in unread})
        aliases = [pair for each in written for pair in each.aliases.items()]
        return {
            "volumes": {each.path: None if each.rank else each.names for each in every},
            "aliases": [(index[name], index[other]) for name, other in aliases],
            "kept": [(index[name], _step_of(volume)) for name, volume in kept.items()],
            "borrowed": [pair for each in written for pair in each.borrowed],
            "lent": [*lent],
        }

    def _piece(self, index: int, layout: ArrayLayout) -> volumes.ArrayPiece | None:
        """This process's piece of a leaf's array; None if it has none, or Orbax writes the leaf."""
        leaf, blocks = self.leaves[index], self.blocks[index]
        name = layout.names.get(leaf.path)
        if name is None or not blocks:
            return None
        dtype = np.dtype(name.dtype)
        blocks = {box: block.astype(dtype, copy=False) for box, block in blocks.items()}
        # The same for all processes that write chunks of the array.
        codec = CODECS[self.compression] if leaf.nbytes >= _MIN_COMPRESSED_BYTES else None
        return volumes.ArrayPiece(name.name, leaf.shape, name.chunk_shape, blocks, codec)


_MIN_STILL_BYTES = 1 << 16
"""Smaller leaves are no reason for files of their own."""


def merge(item_directory: AnyPath, reports: Sequence[Report]) -> None:
    """Makes a checkpoint's database of the volumes that all processes wrote.

    Raises:
        IntegrityError: a process relies on a chunk that no other one has written for it.
    """
    contents: dict[str, Sequence[str] | None] = {}
    for report in reports:
        contents |= report["volumes"]
    volumes.merge(item_directory, contents, sharing.borrowed(reports))


def seldom_changed(leaves: Sequence[Leaf], touched: Collection[int]) -> frozenset[int]:
    """The leaves that may well be the same at the next base: no update computes them."""
    large = {i for i, leaf in enumerate(leaves) if leaf.nbytes >= _MIN_STILL_BYTES}
    return frozenset(large.difference(touched))


def agreed(
    reports: Sequence[Mapping[str, Any]], key: str, writers: Mapping[int, Collection[int]]
) -> tuple[tuple[int, int], ...]:
    """The pairs of a leaf and something that hold in every process that wrote some of the leaf."""
    reported = [dict(report[key]) for report in reports]
    pairs = []
    for i in sorted(set().union(*reported)):
        values = {reported[writer].get(i) for writer in writers[i]}
        if len(values) == 1 and None not in values:
            pairs.append((i, values.pop()))
    return tuple(pairs)


def _volumes(
    process: int,
    pieces: Mapping[int, volumes.ArrayPiece],
    kept: Mapping[str, str],
    still: Collection[int],
) -> list[volumes.Volume]:
    """The volumes of one process's pieces, by leaf index: kept ones and those to be written.

    Arrays that do not change get a volume of their own, so that a later base finds all of it worth
    keeping.
    """
    chosen: dict[tuple[str, int], list[volumes.ArrayPiece]] = {}
    for i, piece in pieces.items():
        place = (f"{folders.BASE}/{process}", 2)
        if piece.name in kept:
            place = (f"{folders.KEPT}/{kept[piece.name]}", 0)
        elif i in still:
            place = (f"{folders.BASE}/{process}{folders.STILL}", 1)
        chosen.setdefault(place, []).append(piece)
    return [volumes.Volume(own, *place) for place, own in chosen.items()]


def _volumes_of(lineage: Lineage, process: int) -> list[tuple[str, AnyPath]]:
    """One process's volumes in a base, each under the name that a later base keeps it by."""
    own = [f"{process}", f"{process}{folders.STILL}"]
    top, kept = (lineage.base_directory / name for name in (folders.BASE, folders.KEPT))
    found: list[tuple[str, AnyPath]] = [(f"{lineage.base.step}.{name}", top / name) for name in own]
    names = [name for name in at(kept).folders() if name.split(".", 1)[1] in own]
    return found + [(n, kept / n) for n in sorted(names, key=_step_of, reverse=True)]


def _step_of(volume: str) -> int:
    """Number of the step that wrote a kept volume."""
    return int(volume.split(".", 1)[0])
