"""Leaves of a recorded step or a published version, as an export reads them, verified.

Of a base each leaf is read by itself. A delta needs the state that it is replayed onto, so that
the whole state is restored, as any restore does it.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.stock.descriptions import check_described, damaged_descriptions
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    LineageError,
    first_line,
    unreadable,
)
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Leaf
from adacheck_jax.publish.follower import changed_words
from adacheck_jax.publish.reading import VersionReader, read_version
from adacheck_jax.publish.root import VERSIONS, Root
from adacheck_jax.store import volume_reader
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.handover.recorded_step import RecordedStep
from adacheck_jax.tools.steps import InputError, numbered

ReadLeaf = Callable[[int], np.ndarray]
"""Elements of a leaf by its index: key data of a typed PRNG key, a 0-d array of a number."""
_PARTS = ("indices", "bits")


class Source(abc.ABC):
    """Leaves that can be exported.

    Attributes:
        number: number of the step or version.
        kind: ``base``, ``delta``, ``deferred``, ``version`` or ``changes``.
        leaves: description of each leaf.
        fingerprints: one digest a leaf.
        tree: a tree with the same leaf paths, by which Orbax gets its own.
    """

    number: int
    kind: str
    leaves: Sequence[Leaf]
    fingerprints: Sequence[int]
    tree: PyTree

    @abc.abstractmethod
    def opened(self) -> ReadLeaf:
        """A function that reads one leaf."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release what was read."""


class StepSource(Source):
    """The leaves of a recorded step.

    Args:
        step: the step.

    Raises:
        AdaCheckError: the base's description is damaged.
    """

    def __init__(self, step: RecordedStep) -> None:
        self._step, self._stock = step, StockCheckpoints()
        self._values: Sequence[Any] = ()
        self.number, self.kind = step.number, step.kind
        base, directory = step.lineage.base, step.lineage.base_directory
        damage = damaged_descriptions(directory, base)
        damage.pop(manifests.SHARDINGS, None)
        for error in damage.values():
            raise error
        self.leaves = base.leaves
        self.fingerprints = step.lineage.end.fingerprints
        self.tree = self._stock.described(directory)
        self._described, _ = trees.flatten(self.tree)
        for leaf in base.leaves:
            if leaf.nbytes and leaf.path in self._described:
                check_described(directory, leaf, self._described[leaf.path])

    def opened(self) -> ReadLeaf:
        """A function that reads one leaf, verified; of a delta the state is restored here.

        Raises:
            AdaCheckError: the step is damaged, or cannot be restored exactly on this machine.
        """
        if self.kind == "base":
            return self._from_base
        self._values = self._step.restored(self._stock).leaves
        return self._restored

    def close(self) -> None:
        """Release the restored state."""
        self._values = ()
        self._stock.close()

    def params(self) -> list[int]:
        """Indices of the params: what the recorded update trains, else the leaves under ``params``.

        Raises:
            InputError: neither tells which leaves are params.
        """
        update = self._step.lineage.base.update
        if update is not None and update.params:
            return sorted(set(update.params))
        found = [i for i, leaf in enumerate(self.leaves) if leaf.path.split("/")[0] == "params"]
        if not found:
            raise InputError(
                f"{at(self._step.directory)}: expected params, found a step without a Recorder and "
                "no leaf under params. Export all leaves with --all."
            )
        return found

    def _restored(self, index: int) -> np.ndarray:
        words = transfer.raw(self._values[index])
        return np.asarray(words).astype(np.dtype(self.leaves[index].dtype), copy=False)

    def _from_base(self, index: int) -> np.ndarray:
        leaf = self.leaves[index]
        if not leaf.nbytes:
            return np.empty(leaf.shape, np.dtype(leaf.dtype))
        directory = self._step.lineage.base_directory
        try:
            name = self._described[leaf.path].name
            array = np.zeros(leaf.shape, np.dtype(leaf.dtype))
            found = volume_reader.fingerprint_of_array(directory, name, leaf.dtype, array)
        except (LookupError, ValueError, OSError) as error:
            if refused := unreadable(directory, error):
                raise refused from error
            raise _damaged(directory, leaf, first_line(error)) from error
        if found != self.fingerprints[index]:
            raise _damaged(directory, leaf, "found other bits, by their fingerprint")
        return array


def _damaged(directory: AnyPath, leaf: Leaf, found: str) -> AdaCheckError:
    return IntegrityError(
        f"{directory}: leaf {leaf.path}: expected the bits that were saved: {found}. Nothing was "
        "written; take another step."
    )


def is_published(root: AnyPath) -> bool:
    """True if a root is one of published weights, and no checkpoint root."""
    return (at(root) / VERSIONS).is_folder


class VersionSource(Source):
    """The weights of a published version, or what changed since the version before.

    Changes are for those who have that version: for each leaf that changed ``NAME.indices`` (int64,
    flat, C order, ascending) and ``NAME.bits`` (the new words as unsigned integers; a complex
    element is two words).

    Args:
        root: the root of published weights.
        version: number of the version, which has to be kept still; None for the newest; below zero
            a place counted from it.
        changes: True for what changed.

    Raises:
        LineageError: there is no such version, or none before it.
        AdaCheckError: the version is damaged.
    """

    def __init__(self, root: AnyPath, version: int | None, changes: bool) -> None:
        if version is None or version < 0:
            reader = VersionReader(Root(root))
            kept = [x.record.version for x in reader.versions(reader.sequences()).values()]
            version = numbered(kept, -1 if version is None else version, root)
        record, weights, found = read_version(Root(root), version)
        arrays = {x.path: y for x, y in zip(weights.leaves.leaves, weights.arrays, strict=True)}
        if changes:
            if record.parent is None:
                raise LineageError(
                    f"{root}: expected a version with one before it, found that {version} begins "
                    "with a base. Export all its weights."
                )
            arrays = {
                f"{name}/{part}": array
                for name, pair in changed_words(weights, found).items()
                for part, array in zip(_PARTS, pair, strict=True)
            }
        self.number, self.kind = version, "changes" if changes else "version"
        self.leaves = [_leaf(name, array) for name, array in arrays.items()]
        self.fingerprints = [fingerprint_of(array) for array in arrays.values()]
        self.tree = arrays[""] if {*arrays} == {""} else trees.nested(arrays)
        self._elements = [*arrays.values()]

    def opened(self) -> ReadLeaf:
        """A function that gives one leaf."""
        return self._elements.__getitem__

    def close(self) -> None:
        """Release the weights."""
        self._elements = []


def _leaf(name: str, array: np.ndarray) -> Leaf:
    dtype = str(array.dtype)
    cuts = cuts_of([Box.full(array.shape)], array.shape)
    return Leaf(name, array.shape, dtype, ITEMSIZES_BYTES[dtype], None, cuts, (0,))
