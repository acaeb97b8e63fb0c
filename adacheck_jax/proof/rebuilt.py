"""The caller's state made of the arrays that a shadow's file holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.proof.journal import Found


def examples_of(abstract_state: PyTree) -> Iterator[PyTree]:
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


def trained(leaves: Sequence[Any], found: Found) -> list[Any]:
    """The leaves of a state that was made, with the arrays in place of Python numbers."""
    return [
        np.array(found.arrays[i]) if _is_number(leaf) else leaf for i, leaf in enumerate(leaves)
    ]


def differing(leaves: Sequence[Any], found: Found) -> list[int]:
    """The leaves whose fingerprints are not those that were taken of the trained state."""
    own = fingerprint.of_leaves({i: transfer.raw(leaves[i]) for i in found.arrays})
    return sorted(i for i, each in own.items() if each != found.sums[i])


def _like(leaf: Any, value: np.ndarray) -> Any:
    """A leaf of some elements, as another one is."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return value.astype(leaf.dtype) if hasattr(leaf, "dtype") else type(leaf)(value)
    return jax.device_put(transfer.keyed(value, leaf), leaf.sharding)
