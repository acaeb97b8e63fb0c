"""Export of a recorded step, or a published version, in a format of others.

What was written is read back, and compared with the fingerprints taken when the step was saved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adacheck_jax.adapter.stock import plain
from adacheck_jax.device import trees
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.handover import (
    destination,
    formats,
    npz_file,
    safetensors_files,
    sources,
)
from adacheck_jax.tools.handover.formats import ExportedLeaf, Format
from adacheck_jax.tools.handover.recorded_step import find
from adacheck_jax.tools.handover.sources import ReadLeaf, Source
from adacheck_jax.tools.steps import InputError, newest, undeleted

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


def export(
    root: str | AnyPath,
    number: int | None,
    target: str,
    wanted: Format = Format.SAFETENSORS,
    *,
    params_only: bool = True,
    changes: bool = False,
    shard_bytes: int = SHARD_BYTES,
    item: str | None = None,
) -> ExportReport:
    """Write one recorded step, or published version, in another format, read it back and compare.

    Args:
        root: the directory given to the checkpoint manager, or the root of published weights.
        number: number of the step, saved or deferred, or of the version; None for the newest;
            below zero a place counted from it.
        target: path of the export, where nothing is yet.
        wanted: the format.
        params_only: False to export every leaf of a step.
        changes: True for what changed since the version before, alone.
        shard_bytes: largest size of a safetensors file's arrays.
        item: name of the item directory, needed if a step holds several.

    Raises:
        InputError: there is no such step, or nothing can be written there.
        MismatchError: the format cannot hold some leaves.
        AdaCheckError: the step is damaged, or cannot be restored exactly here. Whatever is raised,
            nothing is left at the destination.
    """
    root = located(root) if isinstance(root, str) else root.absolute()
    path = destination.checked(target, root)
    if wanted is Format.SAFETENSORS:
        safetensors_files.library()
    if sources.is_published(root):
        source = sources.VersionSource(root, number, changes)
        every = range(len(source.leaves))
        return _exported(root, "", source, every, path, wanted, shard_bytes, params_only=True)
    if changes:
        raise InputError(f"--changes: expected a root of published weights, found {root}.")
    step = find(root, newest(root, number, item), item)
    with undeleted(step.directory), contextlib.closing(sources.StepSource(step)) as source:
        indices = source.params() if params_only else range(len(source.leaves))
        place = at(step.directory).below(at(root))
        report = _exported(root, place, source, indices, path, wanted, shard_bytes, params_only)
    return replace(report, replayed_count=step.lineage.replayed_count)


def _exported(
    root: AnyPath,
    item: str,
    source: Source,
    indices: Sequence[int],
    path: Path,
    wanted: Format,
    shard_bytes: int,
    params_only: bool,
) -> ExportReport:
    """Write leaves, close their source, read them back, and compare."""
    leaves = formats.planned(source.leaves, indices, wanted)
    kept = {each.index for each in leaves}
    with destination.temporary(path) as made:
        read_leaf = source.opened()
        if wanted is Format.ORBAX:
            _write_orbax(made, source, leaves, read_leaf)
        elif wanted is Format.NPZ:
            npz_file.write(made, leaves, read_leaf)
        else:
            # Hugging Face's loaders want to be told a framework, whose name says nothing of the
            # bytes.
            number = {"step" if item else "version": str(source.number)}
            metadata = {"format": "pt", **number}
            safetensors_files.write(made, leaves, read_leaf, shard_bytes, metadata)
        source.close()  # a restored state is not needed to read the export back
        _compare(_read_back(made, leaves, wanted), source.fingerprints, leaves, path)
        files = tuple(_files_of(made))
    return ExportReport(
        root=str(root),
        step=source.number,
        item=item,
        kind=source.kind,
        replayed_count=0,
        format=str(wanted),
        destination=str(path),
        params_only=params_only,
        leaf_count=len(leaves),
        leaf_bytes=sum(each.leaf.nbytes for each in leaves),
        empty=tuple(source.leaves[i].path for i in indices if i not in kept),
        files=files,
    )


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
