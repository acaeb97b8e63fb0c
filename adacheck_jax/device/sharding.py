"""Distinct boxes of a JAX sharding, and the devices that hold each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.format.boxes import Box, Cuts, cuts_of, grid

_Axes = tuple[tuple[int, ...], ...]
"""Positions of the mesh axes that cut each axis of an array, the slowest first."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Distinct boxes of a global array, and the processes that hold them.

    Attributes:
        cuts: cut points of the grid of distinct boxes.
        replicas: processes that hold each box, ascending, in grid order of the boxes.
    """

    cuts: Cuts
    replicas: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One device as a holder of a box.

    Attributes:
        process: index of the process that the device belongs to.
        device: the device's id.
        platform: the device's platform; ids are unique within it.
    """

    process: int
    device: int
    platform: str

    def __str__(self) -> str:
        return f"{self.platform}:{self.device}"


def holder_of(device: Any) -> Holder:
    """A JAX device as a holder of boxes."""
    return Holder(device.process_index, device.id, device.platform)


@functools.lru_cache(maxsize=4096)
def holders_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Mapping[Box, tuple[Holder, ...]]:
    """Distinct boxes of a sharding, and all devices, of all processes, that hold each.

    Args:
        sharding: any JAX sharding.
        shape: global shape of the array.

    Returns:
        Holders of each box, both ascending; holders of one box are declared to hold the same bits.
    """
    found: dict[Box, list[Holder]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(Box.from_slices(index or (), shape), []).append(holder_of(device))
    return {box: tuple(sorted(found[box])) for box in sorted(found)}


@functools.lru_cache(maxsize=4096)
def layout_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout:
    """Layout of a sharding; declared replicas fall together into one box.

    Args:
        sharding: any JAX sharding.
        shape: global shape of the array.

    Raises:
        FormatError: the shards do not tile the array as a grid.
    """
    holders = holders_of(sharding, shape)
    processes = (tuple(sorted({h.process for h in each})) for each in holders.values())
    return Layout(cuts_of(holders, shape), tuple(processes))


def devices_of(array: Any) -> tuple[int, ...]:
    """Ids of the devices that an array lies on, in the order in which programs take them.

    Args:
        array: jax or numpy array, or a ``jax.ShapeDtypeStruct``; a numpy array lies on none.
    """
    placed = getattr(array, "sharding", None)
    return () if placed is None else _order_of(placed, tuple(array.shape))


@functools.lru_cache(maxsize=4096)
def _order_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(each.id for each in sharding.devices_indices_map(shape))


def in_device_memory(array: Any) -> bool:
    """True for an array in the memory that its devices compute in; False if it is offloaded."""
    return isinstance(array, jax.Array) and array.sharding == computable(array.sharding)


def computable(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """A sharding over the same devices, in the memory that they compute in."""
    own = _device_memory(next(iter(sharding.device_set)).platform)
    return sharding if sharding.memory_kind in (None, own) else sharding.with_memory_kind(own)


@functools.cache
def _device_memory(platform: str) -> str:
    return jax.local_devices(backend=platform)[0].default_memory().kind


def has_replicas(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> bool:
    """True if several devices hold the same box."""
    return any(len(each) > 1 for each in holders_of(sharding, shape).values())


@functools.lru_cache(maxsize=4096)
def layout_on_mesh(
    sharding: jax.sharding.NamedSharding, shape: tuple[int, ...], devices_per_process: int
) -> Layout:
    """Layout of a sharding over a mesh that does not exist here, from its sizes alone.

    Consecutive devices, in row-major order of the mesh, belong to one process, as
    ``jax.make_mesh`` arranges them unless the network asks for another order.

    Args:
        sharding: a sharding over a ``jax.sharding.AbstractMesh``.
        shape: global shape of the array.
        devices_per_process: number of devices of a process; the last process may have fewer.

    Returns:
        The layout. Arrays that are cut by the same mesh axes share one ``replicas``.

    Raises:
        ValueError: JAX refuses the sharding for this shape, or it leaves a dimension to the
            compiler, or the array is a sum that is yet to be reduced.
        IndexError: it names more dimensions than there are.
    """
    shard_shape = sharding.shard_shape(shape)  # raises where JAX would refuse the real sharding
    positions = {name: position for position, name in enumerate(sharding.mesh.axis_names)}
    axes = tuple(
        # An axis without elements is one empty box, however often it is cut.
        _mesh_axes(entry, positions) if length else ()
        for entry, length in zip(_entries(sharding.spec, len(shape)), shape, strict=True)
    )
    cuts = tuple(
        (*range(0, length, step), length) if length else (0,)
        for length, step in zip(shape, shard_shape, strict=True)
    )
    return Layout(cuts, _replicas(sharding.mesh.axis_sizes, axes, devices_per_process))


def _entries(spec: jax.sharding.PartitionSpec, rank: int) -> tuple[Any, ...]:
    if spec.unreduced:
        raise ValueError("devices hold parts of sums, not of the array; reduce them before a save")
    entries = spec.partitions  # a spec with reduced axes cannot be iterated
    return (*entries, *(None,) * (rank - len(entries)))


def _mesh_axes(entry: Any, positions: dict[str, int]) -> tuple[int, ...]:
    if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
        raise ValueError("PartitionSpec.UNCONSTRAINED leaves it to the compiler where data lies")
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return tuple(positions[name] for name in names)


@functools.lru_cache(maxsize=256)
def _replicas(
    mesh_shape: tuple[int, ...], axes: _Axes, devices_per_process: int
) -> tuple[tuple[int, ...], ...]:
    """Processes that hold each box, in grid order; independent of the lengths of the axes."""
    coordinates = np.indices(mesh_shape).reshape(len(mesh_shape), -1)  # [mesh axis, device]
    box = np.zeros(coordinates.shape[1], np.int64)  # position in grid order, for each device
    for position in (position for each in axes for position in each):
        box = box * mesh_shape[position] + coordinates[position]
    process = np.arange(len(box)) // devices_per_process
    holds = np.unique(np.stack([box, process]), axis=1)  # sorted by box, then by process
    starts = np.flatnonzero(np.diff(holds[0], prepend=-1))
    return tuple(tuple(part.tolist()) for part in np.split(holds[1], starts[1:]))


def is_local(array: Any) -> bool:
    """True if every process of the program has an array of its own for this leaf.

    So it is with host values and, in a program of several processes, with arrays on the devices of
    one process. They are expected to be equal in all processes: undeclared replicas.
    """
    return not isinstance(array, jax.Array) or (
        jax.process_count() > 1 and array.is_fully_addressable
    )


def layout_of_array(array: Any) -> Layout:
    """Layout of an array; every process holds all boxes of a local one (:func:`is_local`)."""
    shape = tuple(array.shape)
    if not is_local(array):
        return layout_of(array.sharding, shape)
    everyone = tuple(range(jax.process_count()))
    cuts = cuts_of([Box.full(shape)], shape)
    if isinstance(array, jax.Array):
        cuts = layout_of(array.sharding, shape).cuts
    return Layout(cuts, (everyone,) * len(grid(cuts)))


def distinct_boxes(array: Any) -> list[Box]:
    """Distinct boxes of an array, in grid order."""
    return grid(layout_of_array(array).cuts)


def describe(array: Any) -> str:
    """Text that describes an array's devices and cuts, the same in every process.

    Args:
        array: jax or numpy array.
    """
    placed = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(placed, jax.sharding.NamedSharding):
        return f"{type(placed).__name__} {0 if placed is None else len(placed.device_set)}"
    mesh: Any = placed.mesh
    ids = [device.id for device in mesh.devices.flat]
    return f"{dict(mesh.shape)} {mesh.axis_types} {ids} {placed.spec}"
