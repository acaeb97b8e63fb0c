"""Leaves of a recorded step or a published version, as an export reads them, verified.

Of a base each leaf is read by itself. A delta needs the state that it is replayed onto, so that
the whole state is restored, as any restore does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.stock.descriptions import check_described, damaged_descriptions
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, first_line, unreadable
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, BaseManifest, Leaf
from adacheck_jax.publish.reading import VersionReader, read_version
from adacheck_jax.publish.root import Root
from adacheck_jax.store import volume_reader
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.handover import recorded_step
from adacheck_jax.tools.steps import numbered, undeleted


@dataclass(frozen=True, slots=True)
class Source:
    """Leaves that can be exported.

    Attributes:
        number: number of the step or version.
        item: path of the step's item directory, relative to the root; empty for a version.
        kind: ``base``, ``delta``, ``deferred`` or ``version``.
        replayed_count: number of updates that are replayed.
        leaves: description of each leaf.
        params: indices of the params; none where nothing tells which leaves are params.
        fingerprints: one digest a leaf.
        tree: a tree with the same leaf paths, by which Orbax gets its own.
        read: reads a leaf by its index: key data of a typed PRNG key, a 0-d array of a number.
    """

    number: int
    item: str
    kind: str
    replayed_count: int
    leaves: Sequence[Leaf]
    params: Sequence[int]
    fingerprints: Sequence[int]
    tree: PyTree
    read: Callable[[int], np.ndarray]


@contextlib.contextmanager
def step_source(root: AnyPath, number: int | None, item: str | None) -> Iterator[Source]:
    """The leaves of a recorded step; a delta is restored when its first leaf is read.

    Raises:
        InputError: there is no such root, step or item.
        AdaCheckError: the step is damaged, or cannot be restored exactly on this machine.
    """
    step = recorded_step.find(root, number, item)
    with undeleted(step.directory), contextlib.closing(StockCheckpoints()) as stock:
        base, directory = step.lineage.base, step.lineage.base_directory
        fingerprints = step.lineage.end.fingerprints
        tree = _described(stock, directory, base)
        by_path, _ = trees.flatten(tree)
        values: list[Any] = []

        def restored(index: int) -> np.ndarray:
            if not values:
                values.extend(step.restored(stock).leaves)
            words = transfer.raw(values[index])
            return np.asarray(words).astype(np.dtype(base.leaves[index].dtype), copy=False)

        def from_base(index: int) -> np.ndarray:
            leaf = base.leaves[index]
            if not leaf.nbytes:
                return np.empty(leaf.shape, np.dtype(leaf.dtype))
            return _stored(directory, leaf, by_path, fingerprints[index])

        yield Source(
            number=step.number,
            item=at(step.directory).below(at(root)),
            kind=step.kind,
            replayed_count=step.lineage.replayed_count,
            leaves=base.leaves,
            params=_params(base),
            fingerprints=fingerprints,
            tree=tree,
            read=from_base if step.kind == "base" else restored,
        )
        values.clear()  # the state is not needed to read the export back


def _described(stock: StockCheckpoints, directory: AnyPath, base: BaseManifest) -> PyTree:
    """The tree of a base, of Orbax's descriptions.

    Raises:
        AdaCheckError: a description is damaged.
    """
    damage = damaged_descriptions(directory, base)
    damage.pop(manifests.SHARDINGS, None)
    for error in damage.values():
        raise error
    tree = stock.described(directory)
    by_path, _ = trees.flatten(tree)
    for leaf in base.leaves:
        if leaf.nbytes and leaf.path in by_path:
            check_described(directory, leaf, by_path[leaf.path])
    return tree


def _params(base: BaseManifest) -> list[int]:
    """Indices of what the recorded update trains, else of the leaves under ``params``."""
    if base.update is not None and base.update.params:
        return sorted({*base.update.params})
    return [i for i, leaf in enumerate(base.leaves) if leaf.path.split("/")[0] == "params"]


def _stored(directory: AnyPath, leaf: Leaf, by_path: Any, fingerprint: int) -> np.ndarray:
    """Elements of one leaf of a base."""
    found, cause = "found other bits, by their fingerprint", None
    try:
        name, array = by_path[leaf.path].name, np.zeros(leaf.shape, np.dtype(leaf.dtype))
        digest = volume_reader.fingerprint_of_array(directory, name, leaf.dtype, array)
        if digest == fingerprint:
            return array
    except (LookupError, ValueError, OSError) as error:
        if refused := unreadable(directory, error):
            raise refused from error
        found, cause = first_line(error), error
    raise IntegrityError(
        f"{directory}: leaf {leaf.path}: expected the bits that were saved: {found}. Nothing was "
        "written; take another step."
    ) from cause


@contextlib.contextmanager
def version_source(root: AnyPath, version: int | None) -> Iterator[Source]:
    """The weights of a published version.

    Raises:
        LineageError: there is no such version.
        AdaCheckError: the version is damaged.
    """
    if version is None or version < 0:
        reader = VersionReader(Root(root))
        kept = [x.version for x in reader.versions(reader.sequences()).values()]
        version = numbered(kept, version, root)
    _, weights, _ = read_version(Root(root), version)
    arrays = {x.path: y for x, y in zip(weights.leaves.leaves, weights.arrays, strict=True)}
    elements = [*arrays.values()]
    yield Source(
        number=version,
        item="",
        kind="version",
        replayed_count=0,
        leaves=[_leaf(name, array) for name, array in arrays.items()],
        params=range(len(arrays)),
        fingerprints=[fingerprint_of(array) for array in elements],
        tree=arrays[""] if {*arrays} == {""} else trees.nested(arrays),
        read=elements.__getitem__,
    )


def _leaf(name: str, array: np.ndarray) -> Leaf:
    dtype = str(array.dtype)
    cuts = cuts_of([Box.full(array.shape)], array.shape)
    return Leaf(name, array.shape, dtype, ITEMSIZES_BYTES[dtype], None, cuts, (0,))
