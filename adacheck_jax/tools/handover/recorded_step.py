"""A recorded step, found by its number, and the elements of its leaves, verified.

Of a base each leaf is read by itself. A delta needs the state that it is replayed onto, so that
the whole state is restored, as any restore does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.descriptions import check_described, damaged_descriptions
from adacheck_jax.adapter.restoring import Restored, StepRestorer
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    StepDeletedError,
    first_line,
    unreadable,
)
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.layout.rules import Rule
from adacheck_jax.store import volume_reader
from adacheck_jax.store.steps import lookup, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.recompute import wide_integers
from adacheck_jax.tools.steps import InputError, selected, undeleted

ReadLeaf = Callable[[int], np.ndarray]
"""Elements of a leaf by its index: key data of a typed PRNG key, a 0-d array of a number."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that can be restored, with or without a directory of its own.

    Attributes:
        number: its step number.
        directory: item directory to restore it from.
        lineage: base and deltas that end at it.
        is_own: True if the directory is its own.
    """

    number: int
    directory: AnyPath
    lineage: Lineage
    is_own: bool

    @property
    def kind(self) -> str:
        """``base``, ``delta``, or ``deferred`` for a step that was saved with a later one."""
        if not self.lineage.deltas:
            return "base"
        return "deferred" if self.lineage.left_out else "delta"

    def restored(self, stock: StockCheckpoints, rules: Sequence[Rule] | None = None) -> Restored:
        """Restore the step, exactly, on its own devices or on one of this machine.

        Args:
            stock: reader of bases.
            rules: rules that give it another layout; None for its own.

        Raises:
            AdaCheckError: the step is damaged, cannot be restored exactly on this machine, or rules
                do not fit it.
        """
        with wide_integers(leaf.dtype for leaf in self.lineage.base.leaves):
            device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            number = None if self.is_own else self.number
            args = RestoreArgs(exact=True, fallback_sharding=device, step=number, transform=rules)
            return StepRestorer(stock, {}, None).restore(self.directory, args)


def find(root: AnyPath, number: int, item: str | None = None) -> RecordedStep:
    """Find a recorded step: saved, deferred, or held by a later step's directory.

    Args:
        root: the directory given to the checkpoint manager.
        number: step number.
        item: name of the item directory, needed if a step holds several.

    Raises:
        InputError: there is no such root, step or item, or stock Orbax saved the step.
        AdaCheckError: the step is damaged.
    """
    try:
        step = selected(root, number, item)
    except InputError as error:
        found = _held(root, number, item)
        if found is not None:
            return found
        if number in roots.stock_steps(root):
            raise InputError(
                f"{root}: expected a step saved by AdaCheckHandler, found that stock Orbax saved "
                f"step {number}: nothing can verify it. It is a plain checkpoint already; copy its "
                "directory, or restore it with ocp.StandardCheckpointer."
            ) from error
        raise
    with undeleted(step.directory):
        return RecordedStep(number, step.directory, lookup.resolve(step.directory), True)


def _held(root: AnyPath, number: int, item: str | None) -> RecordedStep | None:
    """A step without a directory of its own, in the first later directory that holds it."""
    places = {}
    for step in roots.steps_of(root, item):
        name = step.directory.name
        if step.error is not None or step.step <= number or name in places:
            continue
        try:
            with undeleted(step.directory):
                lineage = lookup.resolve(step.directory)
        except StepDeletedError:
            continue
        if number in lineage.steps:
            places[name] = RecordedStep(number, step.directory, lineage.to(number), False)
    if len(places) > 1:
        raise InputError(
            f"{root}: expected one item that holds step {number}, found {', '.join(places)}. Name "
            "one with --item."
        )
    return next(iter(places.values()), None)


class Contents:
    """The leaves of a recorded step.

    Args:
        step: the step.

    Attributes:
        leaves: the manifest's record of each leaf.
        fingerprints: one digest a leaf.
        tree: Orbax's metadata tree of the leaves.

    Raises:
        AdaCheckError: the base's description is damaged.
    """

    def __init__(self, step: RecordedStep) -> None:
        self._step, self._stock = step, StockCheckpoints()
        self._values: Sequence[Any] = ()
        base, directory = step.lineage.base, step.lineage.base_directory
        damage = damaged_descriptions(directory, base)
        damage.pop(manifests.SHARDINGS, None)
        for error in damage.values():
            raise error
        self.leaves = base.leaves
        self.fingerprints = step.lineage.end.fingerprints
        self.tree: PyTree = self._stock.described(directory)
        self._described, _ = trees.flatten(self.tree)
        for leaf in base.leaves:
            if leaf.nbytes and leaf.path in self._described:
                check_described(directory, leaf, self._described[leaf.path])

    def opened(self) -> ReadLeaf:
        """A function that reads one leaf, verified; of a delta the state is restored here.

        Raises:
            AdaCheckError: the step is damaged, or cannot be restored exactly on this machine.
        """
        if self._step.kind == "base":
            return self._from_base
        self._values = self._step.restored(self._stock).leaves
        return self._restored

    def close(self) -> None:
        """Release the restored state."""
        self._values = ()
        self._stock.close()

    def _restored(self, index: int) -> np.ndarray:
        value, leaf = self._values[index], self.leaves[index]
        words = jax.random.key_data(value) if transfer.is_key(value) else value
        return np.asarray(words).astype(np.dtype(leaf.dtype), copy=False)

    def _from_base(self, index: int) -> np.ndarray:
        leaf = self.leaves[index]
        if not leaf.nbytes:
            return np.empty(leaf.shape, np.dtype(leaf.dtype))
        directory = self._step.lineage.base_directory
        try:
            name = self._described[leaf.path].name
            array, found = volume_reader.whole_array(directory, name, leaf.dtype)
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


def params_of(step: RecordedStep, leaves: Sequence[Leaf]) -> list[int]:
    """Indices of the params: what the recorded update trains, else the leaves under ``params``.

    Raises:
        InputError: neither tells which leaves are params.
    """
    update = step.lineage.base.update
    if update is not None and update.params:
        return sorted(set(update.params))
    found = [i for i, leaf in enumerate(leaves) if leaf.path.split("/")[0] == "params"]
    if not found:
        raise InputError(
            f"{at(step.directory)}: expected params, found a step without a Recorder and no leaf "
            "under params. Export all leaves with --all."
        )
    return found
