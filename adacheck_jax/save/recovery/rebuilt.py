"""The caller's state made of the arrays that a shadow's file holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.save.recovery.journal import Found


def example_of(abstract_state: PyTree) -> PyTree:
    """A state like an abstract one, to be taken apart: with zeros for what is abstract."""
    return jax.tree.map(_example_of, abstract_state)


def _example_of(leaf: Any) -> Any:
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    data = jax.eval_shape(jax.random.key_data, leaf) if transfer.is_key(leaf) else leaf
    return _like(leaf, np.zeros(data.shape, data.dtype))


def state_of(abstract_state: PyTree, found: Found) -> PyTree:
    """The state: a copy, on the devices and of the types of an abstract one.

    Args:
        abstract_state: arrays, or their ``jax.ShapeDtypeStruct``, with the leaves of the found one.
        found: the state in memory.
    """
    leaves, treedef = jax.tree.flatten(abstract_state)
    # Views of memory that goes on: no array may have them.
    made = [
        _like(leaf, np.array(found.arrays[i])) if i in found.arrays else _example_of(leaf)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, made)


def differing(leaves: Mapping[int, Any], found: Found) -> list[int]:
    """The leaves whose fingerprints are not those that were taken of the trained state.

    Args:
        leaves: leaves of a state that was made, by leaf index.
        found: what it was made of.
    """
    own = fingerprint.of_leaves({i: transfer.raw(leaf) for i, leaf in leaves.items()})
    return sorted(i for i, each in own.items() if each != found.sums[i])


def _like(leaf: Any, value: np.ndarray) -> Any:
    """A leaf of some elements, as another one is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return value.astype(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)(value)
    data: Any = value
    if transfer.is_key(leaf):
        impls: list[Any] = []
        jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), leaf)
        data = jax.random.wrap_key_data(data, impl=impls[0])
    return jax.device_put(data, leaf.sharding)
