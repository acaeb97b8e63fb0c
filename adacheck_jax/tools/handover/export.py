"""Export of one recorded step in a format that needs nothing of this library.

What was written is read back, and compared with the fingerprints taken when the step was saved.
:mod:`~adacheck_jax.tools.handover.published` exports published versions by the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from adacheck_jax.adapter.stock import plain
from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.handover import destination, formats, npz_file, safetensors_files
from adacheck_jax.tools.handover.formats import ExportedLeaf, Format
from adacheck_jax.tools.handover.recorded_step import Contents, ReadLeaf, find, params_of
from adacheck_jax.tools.steps import undeleted

SHARD_BYTES = 5_000_000_000
"""Largest size of a safetensors file's arrays by default: that of Hugging Face's libraries."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of an export.

    Attributes:
        name: its path below the destination; the destination's own name for a single file.
        size_bytes: its size.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The output of ``adacheck export``.

    Attributes:
        root: the checkpoint root.
        step: number of the step, or of the published version.
        item: path of the item directory that the step was read from, relative to the root; empty
            for a version.
        kind: ``base``, ``delta``, ``deferred`` for a step that was saved with a later one,
            ``version``, or ``changes`` for what changed since the version before.
        replayed_count: number of updates that were replayed.
        format: ``orbax``, ``safetensors`` or ``npz``.
        destination: path of the export.
        params_only: True if the params alone were exported.
        leaf_count: number of leaves in the export; each was read back and compared.
        leaf_bytes: bytes of their elements.
        empty: leaf paths of arrays without elements, which Orbax does not store.
        files: the files, by name.
    """

    root: str
    step: int
    item: str
    kind: str
    replayed_count: int
    format: str
    destination: str
    params_only: bool
    leaf_count: int
    leaf_bytes: int
    empty: tuple[str, ...]
    files: tuple[ExportedFile, ...]


class Source(Protocol):
    """Leaves that can be exported."""

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Description of each leaf."""
        ...

    @property
    def fingerprints(self) -> Sequence[int]:
        """One digest a leaf."""
        ...

    @property
    def tree(self) -> PyTree:
        """A tree with the same leaf paths, by which Orbax gets its own."""
        ...

    def opened(self) -> ReadLeaf:
        """A function that reads one leaf."""
        ...

    def close(self) -> None:
        """Release what was read."""
        ...


def export(
    root: AnyPath,
    number: int,
    target: str,
    wanted: Format,
    *,
    params_only: bool = True,
    shard_bytes: int = SHARD_BYTES,
    item: str | None = None,
) -> ExportReport:
    """Write one recorded step in another format, and compare what was written with the step.

    Args:
        root: the directory given to the checkpoint manager.
        number: step number: of a saved step, or of a deferred one.
        target: path of the export, where nothing is yet.
        wanted: the format.
        params_only: False to export every leaf.
        shard_bytes: largest size of a safetensors file's arrays.
        item: name of the item directory, needed if a step holds several.

    Raises:
        InputError: there is no such step, or nothing can be written there.
        MismatchError: the format cannot hold some leaves.
        AdaCheckError: the step is damaged, or cannot be restored exactly here. Whatever is raised,
            nothing is left at the destination.
    """
    root = root.absolute()
    path = checked(target, root, wanted)
    step = find(root, number, item)
    with undeleted(step.directory), contextlib.closing(Contents(step)) as contents:
        every = range(len(contents.leaves))
        indices = params_of(step, contents.leaves) if params_only else every
        leaves, files = write(path, contents, indices, wanted, shard_bytes, {"step": str(number)})
    return ExportReport(
        root=str(root),
        step=number,
        item=at(step.directory).below(at(root)),
        kind=step.kind,
        replayed_count=step.lineage.replayed_count,
        format=str(wanted),
        destination=str(path),
        params_only=params_only,
        leaf_count=len(leaves),
        leaf_bytes=sum(each.leaf.nbytes for each in leaves),
        empty=left_out(contents.leaves, indices, leaves),
        files=files,
    )


def checked(target: str, root: AnyPath, wanted: Format) -> Path:
    """The destination that a user names, if a format can be written there.

    Args:
        target: path of the export, where nothing is yet.
        root: the root that is exported from.
        wanted: the format.

    Raises:
        InputError: nothing can be written there, or the safetensors library is not installed.
    """
    path = destination.checked(target, root)
    if wanted is Format.SAFETENSORS:
        safetensors_files.library()
    return path


def write(
    path: Path,
    source: Source,
    indices: Sequence[int],
    wanted: Format,
    shard_bytes: int,
    numbers: Mapping[str, str],
) -> tuple[list[ExportedLeaf], tuple[ExportedFile, ...]]:
    """Write leaves, close their source, read them back, and compare.

    Args:
        path: the destination, from :func:`checked`.
        source: the leaves.
        indices: indices of those to write.
        wanted: the format.
        shard_bytes: largest size of a safetensors file's arrays.
        numbers: number of the step or version, for the header of a safetensors file.

    Returns:
        The leaves and the files that were written.

    Raises:
        MismatchError: the format cannot hold some leaves.
        AdaCheckError: the leaves cannot be read, or what was written has other bits.
    """
    leaves = formats.planned(source.leaves, indices, wanted)
    with destination.temporary(path) as made:
        read_leaf = source.opened()
        if wanted is Format.ORBAX:
            _write_orbax(made, source, leaves, read_leaf)
        elif wanted is Format.NPZ:
            npz_file.write(made, leaves, read_leaf)
        else:
            # Hugging Face's loaders want to be told a framework, whose name says nothing of the
            # bytes.
            metadata = {"format": "pt", **numbers}
            safetensors_files.write(made, leaves, read_leaf, shard_bytes, metadata)
        source.close()  # a restored state is not needed to read the export back
        _compare(_read_back(made, leaves, wanted), source.fingerprints, leaves, path)
        return leaves, tuple(_files_of(made))


def left_out(
    leaves: Sequence[Leaf], indices: Iterable[int], planned: Sequence[ExportedLeaf]
) -> tuple[str, ...]:
    """Leaf paths of the leaves that an export leaves out.

    Args:
        leaves: all leaves.
        indices: indices of the leaves to export.
        planned: leaves of the export.
    """
    kept = {each.index for each in planned}
    return tuple(leaves[i].path for i in indices if i not in kept)


def _write_orbax(
    made: Path, source: Source, leaves: Sequence[ExportedLeaf], read_leaf: ReadLeaf
) -> None:
    described, _ = trees.flatten(source.tree)
    by_path = {each.leaf.path: each for each in leaves}

    def value(path: str) -> object:
        each = by_path[path]
        return plain.stored(read_leaf(each.index), each.leaf, described[path])

    plain.write(made, plain.tree_of(source.tree, by_path.keys(), value))


def _read_back(
    made: Path, leaves: Sequence[ExportedLeaf], wanted: Format
) -> Iterator[tuple[int, np.ndarray]]:
    if wanted is Format.NPZ:
        return npz_file.read(made, leaves)
    if wanted is Format.SAFETENSORS:
        return safetensors_files.read(made, leaves)
    found = plain.read(made)
    return ((each.index, found[each.leaf.path]) for each in leaves)


def _compare(
    found: Iterator[tuple[int, np.ndarray]],
    fingerprints: Sequence[int],
    leaves: Sequence[ExportedLeaf],
    path: Path,
) -> None:
    """Compare what was written with the fingerprints.

    Raises:
        IntegrityError: names the leaves that differ.
    """
    expected = {each.index: each.leaf for each in leaves}
    wrong, seen = [], 0
    for index, elements in found:
        leaf, seen = expected[index], seen + 1
        words = elements.astype(np.dtype(leaf.dtype), copy=False)
        if words.shape != leaf.shape or fingerprint_of(words) != fingerprints[index]:
            wrong.append(leaf.path)
        del elements, words  # or two leaves would be in memory at once
    if wrong or seen != len(leaves):
        raise IntegrityError(
            f"{path}: expected the saved bits in what was written, found others in "
            f"{len(wrong)} of {len(leaves)} leaves ({', '.join(wrong[:5])}). Nothing was kept; "
            "look after the disk, and export again."
        )


def _files_of(made: Path) -> Iterator[ExportedFile]:
    if made.is_file():
        yield ExportedFile(made.name, made.stat().st_size)
        return
    for each in sorted(at(made).list(), key=str):
        yield ExportedFile(each.below(at(made)), each.stat().size_bytes)
