"""Device-to-host copies of what this process owns, and the way back onto devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.boxes import Box

Blocks = dict[Box, np.ndarray]
"""Host copies (or, on CPU devices, read-only views) of the owned boxes of one leaf."""


def raw(leaf: Any) -> Any:
    """The leaf as an array of plain elements: key data for typed PRNG keys, numpy for scalars."""
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if is_key(leaf) else leaf
    return np.asarray(leaf)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key array."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def stage(arrays: Mapping[int, Any], owned: Mapping[int, frozenset[Box]]) -> dict[int, Blocks]:
    """Brings the owned boxes of several arrays to the host.

    All transfers are started before the first is awaited. When this returns, the arrays may be
    donated: what is staged is either a copy, or a view that makes XLA leave the buffer alone.

    Args:
        arrays: jax or numpy arrays by leaf index (see :func:`raw`).
        owned: the boxes of each array that this process writes.

    Returns:
        The blocks of each array.
    """
    shards = {index: _owned_shards(array, owned[index]) for index, array in arrays.items()}
    for blocks in shards.values():
        for data in blocks.values():
            if isinstance(data, jax.Array):
                data.copy_to_host_async()
    return {
        index: {box: np.asarray(data) for box, data in blocks.items()}
        for index, blocks in shards.items()
    }


def _owned_shards(array: Any, owned: frozenset[Box]) -> dict[Box, Any]:
    if not isinstance(array, jax.Array):
        return dict.fromkeys(owned, np.array(array))  # the caller may change a numpy array in place
    found: dict[Box, Any] = {}
    for shard in array.addressable_shards:
        box = Box.from_slices(shard.index, array.shape)
        if box in owned and box not in found:
            found[box] = shard.data
    return found


def place(
    shape: Sequence[int],
    sharding: jax.sharding.Sharding,
    read: Callable[[Box], np.ndarray],
) -> jax.Array:
    """Builds a global array from the boxes that this process's devices need.

    Args:
        shape: global shape.
        sharding: target sharding.
        read: gives the elements of a box in global coordinates; called once a distinct box.
    """
    cache: Blocks = {}

    def block(index: tuple[slice, ...]) -> np.ndarray:
        box = Box.from_slices(index, shape)
        if box not in cache:
            cache[box] = read(box)
        return cache[box]

    return jax.make_array_from_callback(tuple(shape), sharding, block)
