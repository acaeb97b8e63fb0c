"""A state taken apart for saving: its leaves, where they lie, and the update that ties them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax import (
    cpu_call,
    fingerprint,
    proof,
    redundancy,
    replay,
    replicas,
    sharding,
    staging,
    trees,
)
from adacheck_jax.errors import FormatError
from adacheck_jax.fingerprint import Summing
from adacheck_jax.manifest import Leaf
from adacheck_jax.recorder import Recorder
from adacheck_jax.replay import Binding
from adacheck_jax.trees import PyTree

_CACHED_STRUCTURES = 8


@dataclass(frozen=True)
class Structure:
    """What two saves of the same train state have in common.

    Attributes:
        leaves: one description a leaf, in tree order.
        binding: the recorder's update tied to the leaves; None without a recorder.
        index: leaf path to position.
        picks: what this process takes of each leaf: the boxes that it owns.
        whole_picks: whole shards that it accounts for, for fingerprints taken on devices.
        placement: digest of where the leaves of the update lie: devices, mesh, and cuts.
        proof_picks: what it takes of each leaf of the update to prove it; empty if it does not hold
            all of that, or there is no update.
        local_picks: all of each leaf that every process of several has for itself.
        replicated: which leaves lie on several devices in copies that are declared equal.
    """

    leaves: tuple[Leaf, ...]
    binding: Binding | None
    index: dict[str, int]
    picks: dict[int, tuple[staging.Pick, ...]]
    whole_picks: dict[int, tuple[staging.Pick, ...]]
    placement: str
    proof_picks: dict[int, tuple[staging.Pick, ...]]
    local_picks: dict[int, tuple[staging.Pick, ...]]
    replicated: tuple[replicas.Place, ...]

    @functools.cached_property
    def arguments(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the update's params, inner state, record and extra arguments."""
        binding = self.binding
        assert binding is not None
        lists = (binding.params, binding.inner, binding.record, binding.extra)
        return tuple(self.positions(paths) for paths in lists)

    def summing(self, arrays: Sequence[Any]) -> Summing:
        """How the arrays of a state are fingerprinted on devices."""
        key = cpu_call.is_ready()
        if key not in self._summings:
            # On CPU devices both engines may sum up one leaf, at one save and the next: what this
            # process contributes must be the same then, so no whole shards of which it owns a part.
            chosen = {
                i: x
                for i, x in enumerate(arrays)
                if fingerprint.hashes_on_device(x)
                and (staging.on_accelerator(x) or self.whole_picks[i] == self.picks[i])
            }
            self._summings[key] = Summing(chosen)
        return self._summings[key]

    @functools.cached_property
    def _summings(self) -> dict[bool, Summing]:
        return {}

    def positions(self, paths: Sequence[str]) -> tuple[int, ...]:
        """Positions of several leaf paths."""
        return tuple(self.index[path] for path in paths)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state to save.

    Attributes:
        structure: of the state.
        arrays: plain arrays (:func:`staging.raw`), one a leaf.
    """

    structure: Structure
    arrays: tuple[Any, ...]

    def count(self) -> int | None:
        """The recorder's update counter, None without a recorder; waits for the running step."""
        binding = self.structure.binding
        return None if binding is None else int(self.arrays[self.structure.index[binding.count]])


@dataclass(frozen=True, slots=True)
class _Seen:
    """A state as it was taken apart last: what the next one is compared with, one look a leaf.

    Attributes:
        treedef: of the state.
        kinds: for each leaf its abstract value and its sharding; the objects themselves.
        structure: what they make together.
    """

    treedef: Any
    kinds: tuple[tuple[Any, Any], ...]
    structure: Structure

    def fits(self, leaves: Sequence[Any], treedef: Any) -> bool:
        """Whether a state has the same structure; of some that have it this is not seen."""
        return (
            len(leaves) == len(self.kinds)
            and all(
                isinstance(leaf, jax.Array) and leaf.aval is aval and leaf.sharding is sharding
                for leaf, (aval, sharding) in zip(leaves, self.kinds, strict=True)
            )
            and treedef == self.treedef
        )


class Snapshots:
    """Takes states apart, remembering the structures that it has seen.

    Args:
        recorder: the recorder in the optimizer chain, or None.
        params_path: leaf path of the trained params, None to find it.
    """

    def __init__(self, recorder: Recorder | None, params_path: str | None) -> None:
        self._recorder = recorder
        self._params_path = params_path
        self._structures: dict[Any, Structure] = {}
        self._seen: _Seen | None = None

    def take(self, state: PyTree) -> Snapshot:
        """Takes a state apart, without a look at what is in it.

        Raises:
            RecorderError: the recorder cannot be tied to the state.
            MismatchError: two leaves have the same leaf path.
            FormatError: a leaf has a type that cannot be stored.
        """
        leaves, treedef = jax.tree.flatten(state)
        seen = self._seen
        if seen is not None and seen.fits(leaves, treedef):
            return Snapshot(seen.structure, tuple(leaves))
        arrays = tuple(staging.raw(leaf) for leaf in leaves)
        key = (treedef, tuple(map(_signature, leaves, arrays)))
        if key not in self._structures:
            if len(self._structures) >= _CACHED_STRUCTURES:
                self._structures.clear()
            self._structures[key] = self._describe(state, arrays)
        structure = self._structures[key]
        if all(
            leaf is array and isinstance(leaf, jax.Array)
            for leaf, array in zip(leaves, arrays, strict=True)
        ):
            kinds = tuple((array.aval, array.sharding) for array in arrays)
            self._seen = _Seen(treedef, kinds, structure)
        return Snapshot(structure, arrays)

    def _describe(self, state: PyTree, arrays: tuple[Any, ...]) -> Structure:
        named, _ = trees.flatten(state)
        binding = None
        if self._recorder is not None:
            shapes = {path: np.shape(leaf) for path, leaf in named.items()}
            binding = replay.bind(self._recorder, shapes, self._params_path)
        layouts = [sharding.layout_of_array(array) for array in arrays]
        itemsizes_bytes = [_itemsize_bytes(path, a) for path, a in zip(named, arrays, strict=True)]
        index = {path: position for position, path in enumerate(named)}
        consumed = frozenset(index[path] for path in binding.consumed) if binding else frozenset()
        shares = redundancy.share_out(layouts, itemsizes_bytes, consumed)
        leaves = tuple(
            Leaf(
                path=path,
                shape=tuple(arrays[i].shape),
                dtype=str(arrays[i].dtype),
                itemsize_bytes=itemsizes_bytes[i],
                key_type=str(leaf.dtype) if staging.is_key(leaf) else None,
                cuts=shares[i].cuts,
                owners=shares[i].owners,
            )
            for i, (path, leaf) in enumerate(named.items())
        )
        process = jax.process_index()
        loads_bytes: dict[int, int] = {}
        picks = {
            i: staging.picks_of(array, leaf.boxes_of(process), loads_bytes)
            for i, (leaf, array) in enumerate(zip(leaves, arrays, strict=True))
        }
        local_picks = {
            i: staging.picks_of(array, leaf.boxes)
            for i, (leaf, array) in enumerate(zip(leaves, arrays, strict=True))
            if jax.process_count() > 1 and sharding.is_local(array)
        }
        whole_picks = {
            i: picks[i]
            if shares[i].cuts == layouts[i].cuts
            else staging.picks_of(array, fingerprint.accounted(array, process))
            for i, array in enumerate(arrays)
        }
        replicated = replicas.places(tuple(named), arrays)
        structure = Structure(
            leaves, binding, index, picks, whole_picks, "", {}, local_picks, replicated
        )
        if binding is None:
            return structure
        touched = [i for indices in structure.arguments for i in indices]
        described = "\n".join(sharding.describe(arrays[i]) for i in touched)
        placement = hashlib.sha256(described.encode()).hexdigest()
        structure = dataclasses.replace(structure, placement=placement)
        sites = proof.sites(leaves, structure.arguments, process)
        proof_picks = {i: staging.picks_of(arrays[i], boxes) for i, boxes in sites.items()}
        if any(len(proof_picks[i]) < len(boxes) for i, boxes in sites.items()):
            return structure
        return dataclasses.replace(structure, proof_picks=proof_picks)


def _signature(leaf: Any, array: Any) -> Any:
    where = array.sharding if isinstance(array, jax.Array) else None
    return (tuple(array.shape), str(array.dtype), where, staging.is_key(leaf))


def _itemsize_bytes(path: str, array: Any) -> int:
    if array.dtype == object or array.dtype.kind in "USmM":
        raise FormatError(
            f"leaf {path}: expected numbers, found the data type {array.dtype}. Save it as a JSON "
            "item beside the state, or leave it out."
        )
    if not array.dtype.isnative:
        raise FormatError(
            f"leaf {path}: expected numbers in this machine's byte order, found the data type "
            f"{array.dtype.str}. Convert it: leaf.astype(leaf.dtype.newbyteorder('='))."
        )
    return array.dtype.itemsize
