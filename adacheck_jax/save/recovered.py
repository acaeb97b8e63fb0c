"""A state that another process has left in the shadow's file, taken and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.proof.journal import Found
from adacheck_jax.proof.shadow import ShadowThread
from adacheck_jax.proof.shadow_file import ShadowFileError
from adacheck_jax.save.line.planner import Planner
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps.lineage import Lineage


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest step of a line in storage.

    Attributes:
        step: its number.
        number: the number in the name of its directory.
        lineage: its lineage; None if it cannot be built on.
    """

    step: int
    number: int
    lineage: Lineage | None


def state_from(
    shadow: ShadowThread, planner: Planner, abstract_state: PyTree, newest: Newest | None
) -> tuple[Lineage | None, int, PyTree, Sequence[Any]]:
    """Takes the state in the shadow's file, and compares all its fingerprints.

    Gives the lineage of the same step in storage, None if storage has an older one; the step's
    number; the state that the caller gets; and its leaves as they are trained.

    Raises:
        ShadowFileError: there is none that can be taken; the message says why.
        RecorderError: the recorder cannot be tied to the state.
    """
    structure, found = _found_like(shadow, planner, abstract_state)
    if newest is not None and newest.step > found.step:
        raise ShadowFileError(f"it is of step {found.step}, and storage has step {newest.step}")
    state = _state_like(abstract_state, found)
    # As they are trained: with arrays in place of Python numbers.
    leaves = [
        np.array(found.arrays[i]) if _is_number(leaf) else leaf
        for i, leaf in enumerate(jax.tree.leaves(state))
    ]
    sums = fingerprint.of_leaves({i: transfer.raw(leaves[i]) for i in found.arrays})
    if wrong := sorted(i for i, each in sums.items() if each != found.sums[i]):
        raise ShadowFileError(
            f"step {found.step} does not have the bits that were trained, in "
            f"{structure.leaves[wrong[0]].path} and {len(wrong) - 1} more"
        )
    lineage = newest.lineage if newest and newest.step == found.step else None
    if lineage is not None and [*lineage.manifest.fingerprints] != [*found.sums]:
        raise ShadowFileError(f"storage has another state as step {found.step}")
    return lineage, found.step, state, leaves


def _found_like(
    shadow: ShadowThread, planner: Planner, abstract_state: PyTree
) -> tuple[Structure, Found]:
    """State in the shadow's file that is like an abstract one, and its structure."""
    refused = ShadowFileError()
    for example in _examples_of(abstract_state):
        structure = planner.snapshots.take(example).structure
        try:
            return structure, shadow.recover(structure, planner.updates.of(structure))
        except ShadowFileError as error:
            refused = error
    raise refused


def _examples_of(abstract_state: PyTree) -> Iterator[PyTree]:
    """States like an abstract one, to be taken apart: with zeros for what is abstract.

    A Python number, such as the step of a train state that was just created, has become an array
    once a compiled step returned it; so that comes first, and then the number.
    """
    made = jax.tree.map(_example_of, abstract_state)
    if any(map(_is_number, jax.tree.leaves(made))):
        yield jax.tree.map(_as_array, made)
    yield made


def _example_of(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf) if transfer.is_key(leaf) else leaf
    return _like(leaf, np.zeros(data.shape, data.dtype))


def _as_array(leaf: Any) -> Any:
    return jnp.zeros((), jnp.result_type(type(leaf))) if _is_number(leaf) else leaf


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic)


def _state_like(abstract_state: PyTree, found: Found) -> PyTree:
    """The state: a copy, on the devices and of the types of an abstract one."""
    leaves, treedef = jax.tree.flatten(abstract_state)
    # Views of memory that goes on: no array may have them.
    made = [
        _like(leaf, np.array(found.arrays[i])) if i in found.arrays else _example_of(leaf)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, made)


def _like(leaf: Any, value: np.ndarray) -> Any:
    """A leaf of some elements, as another one is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return value.astype(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)(value)
    return jax.device_put(transfer.keyed(value, leaf), leaf.sharding)
