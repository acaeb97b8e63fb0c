"""Programs that sum up every shard where it lies, for fingerprints.

The sums are those that :mod:`~adacheck_jax.format.fingerprint` defines. CPU devices call compiled
loops (:mod:`~adacheck_jax.device.loops.xla_call`), since XLA does not vectorize integer reductions
there; accelerators run XLA's own operations. Both are given one table, of the place and the width
of each shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import transfer
from adacheck_jax.device.loops import shard_tables, xla_call
from adacheck_jax.device.loops.programs import Place, Program
from adacheck_jax.device.sharding import boxes_by_device, is_on_one_device_here
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import from_words, weights

DeviceSums = Callable[[], dict[int, dict[int, int]]]
"""Waits for partial sums modulo 2**64 of the addressable shards, by leaf index and device id."""


class Summing:
    """Programs that compute the partial sum of every shard where the shard lies.

    One program for all arrays on one mesh, without communication: each device sums up its own
    shards, replicas included. Made once for all arrays of these shapes and shardings.

    Args:
        arrays: plain arrays by leaf index, on devices; in a multi-process program every process
            passes arrays of equal shapes and shardings.

    Attributes:
        placed: sharding and shape of each array.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        self.placed = {i: (array.sharding, array.shape) for i, array in arrays.items()}
        self._groups: list[tuple[Sequence[Place], Program, jax.Array]] = []
        on_mesh: dict[Mesh, dict[int, NamedSharding]] = {}
        on_device: dict[Any, list[tuple[int, int | None, Box]]] = {}
        for i, array in arrays.items():
            if isinstance(array.sharding, NamedSharding):
                mesh = cast(Mesh, array.sharding.mesh)
                on_mesh.setdefault(mesh, {})[i] = array.sharding
                continue
            # Any other sharding: its shards need not be of one shape, so each goes by itself.
            is_whole = is_on_one_device_here(array.sharding)
            for position, shard in enumerate(array.addressable_shards):
                box = Box.from_slices(shard.index or (), array.shape)
                entry = (i, None if is_whole else position, box)
                on_device.setdefault(shard.device, []).append(entry)
        for mesh, group in on_mesh.items():
            held = [boxes_by_device(*self.placed[i]) for i in group]
            boxes = [tuple(each[device] for each in held) for device in mesh.local_devices]
            if boxes:  # else the mesh is of other processes
                specs = tuple(each.spec for each in group.values())
                self._add(mesh, [(i, None) for i in group], specs, boxes, arrays)
        for device, entries in on_device.items():
            mesh, places = Mesh(np.array([device]), ("d",)), [(i, n) for i, n, _ in entries]
            boxes = [tuple(box for *_, box in entries)]
            self._add(mesh, places, (PartitionSpec(),) * len(entries), boxes, arrays)

    def _add(
        self,
        mesh: Mesh,
        places: Sequence[Place],
        specs: tuple[PartitionSpec, ...],
        boxes: Sequence[tuple[Box, ...]],
        arrays: Mapping[int, jax.Array],
    ) -> None:
        """Add a program, for arrays or for the shards at some positions of them."""
        dtypes = [arrays[i].dtype for i, _ in places]
        calls_loops = xla_call.takes(mesh, dtypes)
        widths = tuple(each.itemsize for each in dtypes)
        function, table = _summing(mesh, specs, widths, tuple(boxes), calls_loops)
        given = [_given(arrays[i], n) for i, n in places]
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in given]
        program = Program(function, mesh, types, [table], places if calls_loops else None)
        self._groups.append((places, program, table))

    def compile(self) -> None:
        """Compiles the programs; else that is done by those who dispatch them first."""
        for _, program, _ in self._groups:
            program.compile()

    def dispatch(self, arrays: Mapping[int, jax.Array]) -> DeviceSums:
        """Starts the programs without waiting; the arrays may be donated as each may be."""
        words = []
        for places, program, table in self._groups:
            given = [arrays[i] if n is None else _given(arrays[i], n) for i, n in places]
            words.append(([i for i, _ in places], program(given, table)))

        def sums() -> dict[int, dict[int, int]]:
            result: dict[int, dict[int, int]] = {}
            for group, result_of in words:
                for shard in result_of().addressable_shards:  # shape (1, len(group), 2)
                    totals = from_words(np.asarray(shard.data)[0])
                    for i, total in zip(group, totals, strict=True):
                        result.setdefault(i, {})[shard.device.id] = total
            return result

        return sums


def _given(array: jax.Array, position: int | None) -> jax.Array:
    """An array, or the shard at a position of it."""
    return array if position is None else array.addressable_shards[position].data


@functools.lru_cache(maxsize=64)
def _summing(
    mesh: Mesh,
    specs: tuple[PartitionSpec, ...],
    widths: tuple[int, ...],
    boxes: tuple[tuple[Box, ...], ...],
    calls_loops: bool,
) -> tuple[Any, jax.Array]:
    """Function of arrays on one mesh, with the boxes that each local device holds of them.

    Returns:
        A jitted function of a list of arrays, or shards, and a table, to uint32 of shape (devices,
        arrays, 2), cut by device; and that table.
    """
    rows = PartitionSpec(mesh.axis_names)
    tables = {
        device.id: shard_tables.of_sums([box.start for box in each], widths)
        for device, each in zip(mesh.local_devices, boxes, strict=True)
    }
    table = transfer.row_each(NamedSharding(mesh, rows), tables)
    sums = xla_call.sums if calls_loops else _sums

    def local(shards: Sequence[jax.Array], own: jax.Array) -> jax.Array:
        return sums(shards, own[0])[None]

    # Replicas may differ, which these sums are there to find: nothing is declared equal.
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=([*specs], rows), out_specs=rows, check_vma=False
    )
    return jax.jit(mapped), table


def _sums(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    """The sums that :func:`xla_call.sums` gives, by XLA's own operations."""
    starts = table[:, 1:, 0].astype(jnp.uint64) | table[:, 1:, 1].astype(jnp.uint64) << 32
    total = jnp.stack([_of_shard(shard, starts[row]) for row, shard in enumerate(shards)])
    low = (total & jnp.uint64(0xFFFFFFFF)).astype(jnp.uint32)
    return jnp.stack([low, (total >> jnp.uint64(32)).astype(jnp.uint32)], axis=-1)


def _of_shard(shard: jax.Array, start: jax.Array) -> jax.Array:
    """Partial sum of one shard."""
    words = device_words(shard)
    total = words.astype(jnp.uint64)
    for axis, length in enumerate(words.shape):
        position = start[axis] + jax.lax.iota(jnp.uint64, length)
        total = total * weights(position, axis).reshape(-1, *[1] * (words.ndim - axis - 1))
    return jnp.sum(total, dtype=jnp.uint64)


def device_words(array: jax.Array) -> jax.Array:
    """Elements as unsigned integers of their size, those of 64 bits and more in words of 32."""
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
