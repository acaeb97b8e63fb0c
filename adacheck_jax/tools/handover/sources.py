"""Leaves of a recorded step or a published version, as an export reads them, verified.

Of a base each leaf is read by itself. A delta needs the state that it is replayed onto, so that
the whole state is restored, as any restore does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.restoring.restorer import Restored, StepRestorer
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.stock.descriptions import damaged_descriptions
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, first_line
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.layout.rules import Rule
from adacheck_jax.publish.reading import read_version
from adacheck_jax.publish.root import Root
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.history.differences import params_of
from adacheck_jax.tools.recompute import wide_integers
from adacheck_jax.tools.steps import RecordedStep, RecordedSteps, numbered, undeleted


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


def restored(
    step: RecordedStep, stock: StockCheckpoints, rules: Sequence[Rule] | None = None
) -> Restored:
    """Restore a step, exactly, on its own devices or on one of this machine.

    Raises:
        AdaCheckError: the step is damaged, cannot be restored exactly on this machine, or rules do
            not fit it.
    """
    with wide_integers(leaf.dtype for leaf in step.lineage.base.leaves):
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        number = None if step.is_own else step.number
        args = RestoreArgs(require_exact=True, fallback_sharding=device, step=number, rules=rules)
        return StepRestorer(stock, {}, None).restore(step.directory, args)


@contextlib.contextmanager
def step_source(root: AnyPath, number: int | None, item: str | None) -> Iterator[Source]:
    """The leaves of a recorded step; a delta is restored when its first leaf is read.

    Raises:
        InputError: there is no such root, step or item.
        AdaCheckError: the step is damaged, or cannot be restored exactly on this machine.
    """
    step = RecordedSteps(root, item).find(number)
    with undeleted(step.directory), contextlib.closing(StockCheckpoints()) as stock:
        base, directory = step.lineage.base, step.lineage.base_directory
        fingerprints = step.lineage.end.fingerprints
        for name, error in damaged_descriptions(directory, base).items():
            if name != manifests.SHARDINGS:
                raise error
        tree = stock.described(directory)
        by_path, _ = trees.flatten(tree)
        values: list[Any] = []

        def replayed(index: int) -> np.ndarray:
            if not values:
                values.extend(restored(step, stock).leaves)
            words = transfer.raw(values[index])
            return np.asarray(words).astype(np.dtype(base.leaves[index].dtype), copy=False)

        def from_base(index: int) -> np.ndarray:
            return _stored(stock, directory, base.leaves[index], by_path, fingerprints[index])

        yield Source(
            number=step.number,
            item=at(step.directory).below(at(root)),
            kind=step.kind,
            replayed_count=step.lineage.replayed_count,
            leaves=base.leaves,
            params=params_of(base.leaves, base.update),
            fingerprints=fingerprints,
            tree=tree,
            read=from_base if step.kind == "base" else replayed,
        )
        values.clear()  # the state is not needed to read the export back


def _stored(
    stock: StockCheckpoints, directory: AnyPath, leaf: Leaf, by_path: Any, fingerprint: int
) -> np.ndarray:
    """Elements of one leaf of a base."""
    plain = dataclasses.replace(leaf, key_type=None)  # key data, not keys
    described = {path: each for path, each in by_path.items() if path == leaf.path}
    found, cause = "found other bits, by their fingerprint", None
    try:
        value = stock.read(directory, [plain], {leaf.path: np.ndarray}, described)[leaf.path]
        array = np.asarray(value, np.dtype(leaf.dtype))
        if fingerprint_of(array) == fingerprint:
            return array
    except IntegrityError as error:
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
    record, weights = read_version(Root(root), lambda kept: numbered(kept, version, root))
    named = enumerate(weights.leaves.leaves)
    arrays = {each.path: weights.block(i, Box.full(each.shape)) for i, each in named}
    yield Source(
        number=record.version,
        item="",
        kind="version",
        replayed_count=0,
        leaves=weights.leaves.leaves,
        params=range(len(arrays)),
        fingerprints=record.fingerprints,
        tree=arrays[""] if {*arrays} == {""} else trees.nested(arrays),
        read=[*arrays.values()].__getitem__,
    )
