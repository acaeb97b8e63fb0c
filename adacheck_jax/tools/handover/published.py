"""Export of one published version to safetensors, for inference servers."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.device import trees  # noqa: F401  (numpy knows bfloat16 once jax is imported)
from adacheck_jax.errors import IntegrityError, LineageError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Leaf
from adacheck_jax.publish.follower import changed_words
from adacheck_jax.publish.reading import read_version
from adacheck_jax.publish.root import Root
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.handover import destination, formats, safetensors_files
from adacheck_jax.tools.handover.export import SHARD_BYTES, ExportedFile
from adacheck_jax.tools.handover.formats import Format

INDICES, BITS = "indices", "bits"


@dataclass(frozen=True, slots=True)
class PublishedExport:
    """The output of ``adacheck publish-export``.

    Attributes:
        root: the root of published weights.
        version: number of the version.
        destination: path of the export.
        is_changes: True if it holds what changed since the version before, and not all weights.
        changed: number of words whose bits changed since then.
        leaf_count: number of leaves, or of leaves that changed.
        files: the files, by name.
    """

    root: str
    version: int
    destination: str
    is_changes: bool
    changed: int
    leaf_count: int
    files: tuple[ExportedFile, ...]


def export_version(
    root: str | AnyPath,
    version: int,
    target: str,
    *,
    changes: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> PublishedExport:
    """Write one published version as safetensors, read it back, and compare it.

    Args:
        root: the root of published weights.
        version: number of the version; it has to be kept still.
        target: path of the new directory.
        changes: True to write what changed since the version before, for those who have that one:
            for each leaf that changed ``NAME.indices`` (int64, flat, C order, ascending) and
            ``NAME.bits`` (the new words as unsigned integers; a complex element is two words).
        shard_bytes: largest size of a file's arrays.

    Raises:
        InputError: nothing can be written at the target.
        LineageError: there is no such version, or none before it.
        MismatchError: safetensors has no such data type.
        AdaCheckError: the version is damaged.
    """
    safetensors_files.library()
    path = destination.checked(target, None)
    record, weights, found = read_version(Root(root), version)
    arrays = {x.path: y for x, y in zip(weights.leaves.leaves, weights.arrays, strict=True)}
    count = len(arrays)
    if changes:
        if record.parent is None:
            raise LineageError(
                f"{root}: expected a version with one before it, found that {version} begins with "
                "a base. Export all its weights."
            )
        changed = changed_words(weights, found)
        arrays, count = _pairs(changed), len(changed)
    leaves = [_leaf(name, array) for name, array in arrays.items()]
    planned = formats.planned(leaves, range(len(leaves)), Format.SAFETENSORS)
    elements = [*arrays.values()]
    metadata = {"format": "pt", "version": str(version)}
    with destination.temporary(path) as made:
        safetensors_files.write(made, planned, elements.__getitem__, shard_bytes, metadata)
        _compare(elements, dict(safetensors_files.read(made, planned)), str(path))
        files = tuple(
            ExportedFile(each.name, each.stat().size_bytes)
            for each in sorted(at(made).list(), key=str)
        )
    return PublishedExport(
        root=str(root),
        version=version,
        destination=str(path),
        is_changes=changes,
        changed=record.changed,
        leaf_count=count,
        files=files,
    )


def _pairs(changed: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    pairs = ([(f"{k}/{INDICES}", i), (f"{k}/{BITS}", b)] for k, (i, b) in changed.items())
    return dict(itertools.chain.from_iterable(pairs))


def _leaf(name: str, array: np.ndarray) -> Leaf:
    dtype = str(array.dtype)
    box = Box.full(array.shape)
    cuts = cuts_of([box], array.shape)
    return Leaf(name, array.shape, dtype, ITEMSIZES_BYTES[dtype], None, cuts, (0,))


def _compare(wanted: Sequence[np.ndarray], found: Mapping[int, np.ndarray], path: str) -> None:
    for index, array in enumerate(wanted):
        if fingerprint_of(np.ascontiguousarray(found[index])) != fingerprint_of(array):
            raise IntegrityError(
                f"{path}: expected the bits of the version in what was written, found others. "
                "Nothing was kept; look after the disk, and export again."
            )
