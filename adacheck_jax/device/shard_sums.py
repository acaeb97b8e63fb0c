"""Programs that sum up every shard where it lies, for fingerprints.

The sums are those that :mod:`~adacheck_jax.format.fingerprint` defines. CPU devices call compiled
loops (:mod:`~adacheck_jax.device.loops.xla_call`), since XLA does not vectorize integer reductions
there; accelerators run XLA's own programs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device.loops import shard_tables, xla_call
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import from_words, weights


@dataclass(frozen=True, slots=True)
class _Group:
    """Arrays whose shards one program sums up.

    Attributes:
        indices: leaf indices.
        positions: for each leaf the position of its shard, None where the array is the shard; None
            for arrays over a whole mesh.
        program: function from the arrays, or the shards, to uint32 of shape (devices, arrays, 2).
    """

    indices: tuple[int, ...]
    positions: tuple[int | None, ...] | None
    program: Callable[[Sequence[jax.Array]], jax.Array]


class Summing:
    """Programs that compute the partial sum of every shard where the shard lies.

    One program for all arrays on one mesh, without communication: each device sums up its own
    shards, replicas included. Made once for all arrays of these shapes and shardings.

    Args:
        arrays: plain arrays by leaf index, on devices; in a multi-process program every process
            passes arrays of equal shapes and shardings.

    Attributes:
        indices: leaf indices of the arrays.
        placed: sharding and shape of each array.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        self.indices = tuple(arrays)
        self.placed = {i: (array.sharding, array.shape) for i, array in arrays.items()}
        on_mesh: dict[Mesh, list[int]] = {}
        on_device: dict[Any, list[tuple[int, int | None, Box, int]]] = {}
        for i, array in arrays.items():
            if isinstance(array.sharding, NamedSharding):
                on_mesh.setdefault(cast(Mesh, array.sharding.mesh), []).append(i)
                continue
            # Any other sharding: its shards need not be of one shape, so each goes by itself.
            is_whole = array.is_fully_addressable and len(array.sharding.device_set) == 1
            for position, shard in enumerate(array.addressable_shards):
                box = Box.from_slices(shard.index or (), array.shape)
                entry = (i, None if is_whole else position, box, array.dtype.itemsize)
                on_device.setdefault(shard.device, []).append(entry)
        self._groups: list[_Group] = []
        for mesh, group in on_mesh.items():
            if jax.process_index() not in {each.process_index for each in mesh.devices.flat}:
                continue
            kinds = tuple(
                (
                    cast(NamedSharding, arrays[i].sharding).spec,
                    arrays[i].shape,
                    arrays[i].dtype.itemsize,
                )
                for i in group
            )
            calls_loops = _calls_loops(mesh.devices.flat[0], [arrays[i].dtype for i in group])
            program = _mesh_program(mesh, kinds, calls_loops)
            self._groups.append(_Group(tuple(group), None, program))
        for device, entries in on_device.items():
            group, positions, boxes, widths = zip(*entries, strict=True)
            calls_loops = _calls_loops(device, [arrays[i].dtype for i in group])
            program = _device_program(device, boxes, widths, calls_loops)
            self._groups.append(_Group(group, positions, program))

    def dispatch(self, arrays: Mapping[int, jax.Array]) -> DeviceSums:
        """Starts the programs without waiting; the arrays may be donated at once."""
        words = []
        for group in self._groups:
            given = [arrays[i] for i in group.indices]
            if group.positions is not None:
                given = [
                    x if n is None else x.addressable_shards[n].data
                    for x, n in zip(given, group.positions, strict=True)
                ]
            words.append((group.indices, group.program(given)))
        return DeviceSums(words)


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """Partial sums that devices compute.

    Attributes:
        words: pairs of the leaf indices of one program and its result, (devices, leaves, 2).
    """

    words: Sequence[tuple[Sequence[int], jax.Array]]

    def sums(self) -> dict[int, dict[int, int]]:
        """Partial sums modulo 2**64 of the addressable shards: leaf index to device id to sum."""
        result: dict[int, dict[int, int]] = {}
        for group, words in self.words:
            for shard in words.addressable_shards:  # shape (1, len(group), 2)
                for i, total in zip(group, from_words(np.asarray(shard.data)[0]), strict=True):
                    result.setdefault(i, {})[shard.device.id] = total
        return result


_Kinds = tuple[tuple[PartitionSpec, tuple[int, ...], int], ...]
"""Spec, shape and bytes of an element of each array."""


@functools.lru_cache(maxsize=64)
def _mesh_program(
    mesh: Mesh, kinds: _Kinds, calls_loops: bool
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Program for arrays on one mesh; its result is sharded by device."""
    rows = PartitionSpec(mesh.axis_names)
    specs = [spec for spec, _, _ in kinds]
    # Replicas may differ, which these sums are there to find: nothing is declared equal.
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=rows, check_vma=False)
    if calls_loops:
        sharding = NamedSharding(mesh, rows)
        table = _mesh_table(sharding, kinds)

        def call(shards: Sequence[jax.Array], own: jax.Array) -> jax.Array:
            return xla_call.sums(shards, own[0])[None]

        jitted: Any = jax.jit(mapped(call, in_specs=(specs, rows)))
        return _on(mesh, lambda arrays: jitted(arrays, table))

    def local(shards: Sequence[jax.Array]) -> jax.Array:
        starts = [
            [_first_index(names, n) for names, n in zip(spec, shard.shape, strict=False)]
            for spec, shard in zip(specs, shards, strict=True)
        ]
        return _stack_sums(shards, starts)[None]

    return _on(mesh, jax.jit(mapped(local, in_specs=(specs,))))


def _on(mesh: Mesh, program: Any) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """A program run with 64-bit types and on its own mesh, whatever the caller has set."""

    def run(arrays: Sequence[jax.Array]) -> jax.Array:
        with jax.enable_x64(True), jax.set_mesh(mesh):
            return program(arrays)

    return run


def _mesh_table(sharding: NamedSharding, kinds: _Kinds) -> jax.Array:
    """Table of the shards on each device of a mesh, for the compiled loops."""
    widths = [width for _, _, width in kinds]
    boxes: dict[Any, list[Box]] = {}
    for spec, shape, _ in kinds:
        indices = NamedSharding(cast(Mesh, sharding.mesh), spec).devices_indices_map(shape)
        for device, index in indices.items():
            boxes.setdefault(device, []).append(Box.from_slices(index or (), shape))
    devices: list[Any] = list(cast(Mesh, sharding.mesh).devices.flat)
    tables = {
        device: shard_tables.of_sums([box.start for box in boxes[device]], widths)
        for device in devices
        if device.process_index == jax.process_index()
    }
    one = next(iter(tables.values()))
    return jax.make_array_from_callback(
        (len(devices), *one.shape),
        sharding,
        lambda index: tables[devices[_start_of(index)]][None],
    )


def _start_of(index: Any) -> int:
    return index[0].start or 0


def _device_program(
    device: Any, boxes: Sequence[Box], widths: Sequence[int], calls_loops: bool
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Program for shards on one device, each of its own box."""
    starts = [box.start for box in boxes]
    if calls_loops:
        table = jax.device_put(shard_tables.of_sums(starts, widths), device)
        return _on(Mesh(np.array([device]), ("d",)), lambda shards: _call_of_shards(shards, table))
    with jax.enable_x64(True):
        placed = [jax.device_put(np.array(start, np.uint64), device) for start in starts]
    return _on(Mesh(np.array([device]), ("d",)), lambda shards: _of_shards(shards, placed))


@jax.jit
def _call_of_shards(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    return xla_call.sums(shards, table)[None]


def _calls_loops(device: Any, dtypes: Sequence[Any]) -> bool:
    return device.platform == "cpu" and xla_call.is_ready() and not any(map(is_narrow, dtypes))


def _first_index(names: Any, length: int) -> Any:
    """First index of a device's shard along an axis that is cut over mesh axes."""
    if not names:
        return jnp.uint64(0)
    return jax.lax.axis_index(names).astype(jnp.uint64) * jnp.uint64(length)


@jax.jit
def _of_shards(shards: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
    return _stack_sums(shards, starts)[None]


def _stack_sums(shards: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
    sums = [_of_shard(shard, start) for shard, start in zip(shards, starts, strict=True)]
    total = jnp.stack(sums)
    low = (total & jnp.uint64(0xFFFFFFFF)).astype(jnp.uint32)
    return jnp.stack([low, (total >> jnp.uint64(32)).astype(jnp.uint32)], axis=-1)


def _of_shard(shard: jax.Array, start: Sequence[Any]) -> jax.Array:
    """Partial sum of one shard; axes past the end of ``start`` start at zero."""
    words = _device_words(shard)
    total = words.astype(jnp.uint64)
    for axis, length in enumerate(words.shape):
        position = jax.lax.iota(jnp.uint64, length)
        if axis < len(start):
            position = position + start[axis]
        total = total * weights(position, axis).reshape(-1, *[1] * (words.ndim - axis - 1))
    return jnp.sum(total, dtype=jnp.uint64)


def _device_words(array: jax.Array) -> jax.Array:
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
        words = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return words.reshape(*array.shape[:-1], dtype.itemsize // 4)
    if dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return array.astype(jnp.int8 if signed else jnp.uint8).view(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint4).astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned)


@functools.cache
def is_narrow(dtype: Any) -> bool:
    """True if elements have less than a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8
