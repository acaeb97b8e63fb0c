"""Device-to-host copies of what this process owns, and the way back onto devices."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def x64_enabled() -> bool:
    """Whether the calling thread makes 64-bit arrays; other threads have to be told."""
    return jax.dtypes.canonicalize_dtype("float64") == "float64"


def on_accelerator(array: Any) -> bool:
    """Whether an array lies on devices whose memory the host cannot read in place."""
    if not isinstance(array, jax.Array):
        return False
    return next(iter(array.sharding.device_set)).platform != "cpu"


Pick = tuple[Box, int, tuple[slice, ...]]
"""A box, which of an array's addressable shards to take it from, and where it lies there."""


def picks_of(
    array: Any, wanted: Sequence[Box], loads_bytes: dict[int, int] | None = None
) -> tuple[Pick, ...]:
    """Chooses the shards that hold some boxes; depends on the array's sharding alone.

    Args:
        array: jax or numpy array (see :func:`raw`).
        wanted: the boxes to take, each within a shard; those that are not held here are left out.
        loads_bytes: by device what is taken from it already: of replicas the one is chosen that has
            least, and what it gets is added. Without it the first.
    """
    if not isinstance(array, jax.Array):
        return tuple((box, 0, box.slices) for box in wanted)
    loads_bytes = {} if loads_bytes is None else loads_bytes
    held: dict[Box, list[tuple[int, int]]] = {}
    for position, shard in enumerate(array.addressable_shards):
        box = Box.from_slices(shard.index, array.shape)
        held.setdefault(box, []).append((position, shard.device.id))
    picks = []
    for box in wanted:
        holder = box if box in held else next((h for h in held if h.contains(box)), None)
        if holder is None:
            continue
        position, device = min(held[holder], key=lambda each: loads_bytes.get(each[1], 0))
        loads_bytes[device] = loads_bytes.get(device, 0) + box.size * array.dtype.itemsize
        picks.append((box, position, box.relative_to(holder.start).slices))
    return tuple(picks)


def stage(arrays: Mapping[int, Any], picks: Mapping[int, Sequence[Pick]]) -> dict[int, Blocks]:
    """Brings boxes of several arrays to the host.

    All transfers are started before the first is awaited. When this returns, the arrays may be
    donated: what is staged is either a copy, or a view that makes XLA leave the buffer alone.

    Args:
        arrays: jax or numpy arrays by leaf index (see :func:`raw`).
        picks: what to take of each.

    Returns:
        The blocks of each array.
    """
    taken = {
        index: [(pick[0], *_taken(array, pick)) for pick in picks[index]]
        for index, array in arrays.items()
    }
    for _, data, _ in itertools.chain.from_iterable(taken.values()):
        if isinstance(data, jax.Array) and on_accelerator(data):
            data.copy_to_host_async()
    return {
        index: {box: np.asarray(data)[(*at, ...)] for box, data, at in each}
        for index, each in taken.items()
    }


def _taken(array: Any, pick: Pick) -> tuple[Any, tuple[slice, ...]]:
    """What holds a picked box, and where in it the box lies."""
    box, position, at = pick
    if not isinstance(array, jax.Array):
        return np.array(array), at  # the caller may change it in place
    # Of a replicated array addressable_data gives the first shard, whichever is asked for.
    data = array.addressable_shards[position].data if position else array.addressable_data(0)
    if data.shape == box.shape or not on_accelerator(array):
        return data, at
    # Cut there, so that no more crosses to the host than is wanted.
    return _cut(data, [each.start for each in at], box.shape), Box.full(box.shape).slices


@functools.partial(jax.jit, static_argnums=2)
def _cut(data: jax.Array, start: Sequence[int], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(data, start, shape)


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

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        box = Box.from_slices(index or (), shape)
        if box not in cache:
            cache[box] = read(box)
        return cache[box]

    return jax.make_array_from_callback(tuple(shape), sharding, block)
