"""Export of one published version, or of what changed since the version before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.errors import LineageError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Leaf
from adacheck_jax.publish.follower import changed_words
from adacheck_jax.publish.reading import Reader, read_version
from adacheck_jax.publish.root import VERSIONS, Root
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.handover import export
from adacheck_jax.tools.handover.export import SHARD_BYTES, ExportReport
from adacheck_jax.tools.handover.formats import Format
from adacheck_jax.tools.handover.recorded_step import ReadLeaf
from adacheck_jax.tools.steps import numbered

INDICES, BITS = "indices", "bits"


def is_published(root: AnyPath) -> bool:
    """True if a root is one of published weights, and no checkpoint root."""
    return (at(root) / VERSIONS).is_folder


def export_version(
    root: str | AnyPath,
    version: int | None,
    target: str,
    wanted: Format = Format.SAFETENSORS,
    *,
    changes: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> ExportReport:
    """Write one published version in another format, read it back, and compare it.

    Args:
        root: the root of published weights.
        version: number of the version, which has to be kept still; None for the newest; below zero
            a place counted from it.
        target: path of the export, where nothing is yet.
        wanted: the format.
        changes: True to write what changed since the version before, for those who have that one:
            for each leaf that changed ``NAME.indices`` (int64, flat, C order, ascending) and
            ``NAME.bits`` (the new words as unsigned integers; a complex element is two words).
        shard_bytes: largest size of a safetensors file's arrays.

    Raises:
        InputError: nothing can be written at the target.
        LineageError: there is no such version, or none before it.
        MismatchError: the format has no such data type.
        AdaCheckError: the version is damaged.
    """
    top = located(root) if isinstance(root, str) else root
    path = export.checked(target, top, wanted)
    if version is None or version < 0:
        reader = Reader(Root(top))
        kept = [x.record.version for x in reader.versions(reader.sequences()).values()]
        version = numbered(kept, -1 if version is None else version, top)
    record, weights, found = read_version(Root(top), version)
    arrays = {x.path: y for x, y in zip(weights.leaves.leaves, weights.arrays, strict=True)}
    if changes:
        if record.parent is None:
            raise LineageError(
                f"{root}: expected a version with one before it, found that {version} begins with "
                "a base. Export all its weights."
            )
        arrays = {
            f"{name}/{part}": array
            for name, pair in changed_words(weights, found).items()
            for part, array in zip((INDICES, BITS), pair, strict=True)
        }
    source = _Arrays(arrays)
    every = range(len(source.leaves))
    numbers = {"version": str(version)}
    leaves, files = export.write(path, source, every, wanted, shard_bytes, numbers)
    return ExportReport(
        root=str(top),
        step=version,
        item="",
        kind="changes" if changes else "version",
        replayed_count=0,
        format=str(wanted),
        destination=str(path),
        params_only=True,
        leaf_count=len(leaves),
        leaf_bytes=sum(each.leaf.nbytes for each in leaves),
        empty=export.left_out(source.leaves, every, leaves),
        files=files,
    )


class _Arrays:
    """Arrays in memory, as leaves that can be exported."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.leaves = [_leaf(name, array) for name, array in arrays.items()]
        self.fingerprints = [fingerprint_of(array) for array in arrays.values()]
        self.tree = arrays[""] if {*arrays} == {""} else trees.nested(arrays)
        self._elements = [*arrays.values()]

    def opened(self) -> ReadLeaf:
        return self._elements.__getitem__

    def close(self) -> None:
        self._elements = []


def _leaf(name: str, array: np.ndarray) -> Leaf:
    dtype = str(array.dtype)
    cuts = cuts_of([Box.full(array.shape)], array.shape)
    return Leaf(name, array.shape, dtype, ITEMSIZES_BYTES[dtype], None, cuts, (0,))
