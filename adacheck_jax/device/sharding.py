"""Distinct boxes of a JAX sharding, and the devices that hold each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from adacheck_jax.format.boxes import Box, Cuts, cuts_of, grid


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
def boxes_by_device(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Mapping[Any, Box]:
    """The box of a sharding that each device, of all processes, holds."""
    indices = sharding.devices_indices_map(shape)
    return {device: Box.from_slices(index or (), shape) for device, index in indices.items()}


@functools.lru_cache(maxsize=4096)
def holders_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Mapping[Box, tuple[Holder, ...]]:
    """Distinct boxes of a sharding, and all devices, of all processes, that hold each.

    Both are ascending. The holders of one box are declared to hold the same bits.
    """
    found: dict[Box, list[Holder]] = {}
    for device, box in boxes_by_device(sharding, shape).items():
        found.setdefault(box, []).append(holder_of(device))
    return {box: tuple(sorted(found[box])) for box in sorted(found)}


@functools.lru_cache(maxsize=4096)
def layout_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout:
    """Layout of a sharding; declared replicas fall together into one box.

    Raises:
        FormatError: the shards do not tile the array as a grid.
    """
    holders = holders_of(sharding, shape)
    processes = (tuple(sorted({h.process for h in each})) for each in holders.values())
    return Layout(cuts_of(holders, shape), tuple(processes))


def mesh_of(array: jax.Array) -> Mesh | None:
    """The mesh by which programs name the devices of an array; None if there is none."""
    if isinstance(array.sharding, NamedSharding):
        return cast(Mesh, array.sharding.mesh)
    if len(array.sharding.device_set) == 1:
        return Mesh(np.array([*array.sharding.device_set]), ("d",))
    return None


def devices_of(array: Any) -> tuple[int, ...]:
    """Ids of the devices that an array lies on, in the order in which programs take them.

    The array may be abstract; a numpy array lies on none.
    """
    placed = getattr(array, "sharding", None)
    return () if placed is None else _order_of(placed, tuple(array.shape))


@functools.lru_cache(maxsize=4096)
def _order_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(each.id for each in boxes_by_device(sharding, shape))


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


def is_on_one_device_here(sharding: Any) -> bool:
    """True if arrays of a sharding are their only shard, on a device of this process."""
    return len(sharding.device_set) == 1 and sharding.is_fully_addressable


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
    """Text that describes an array's devices and cuts, the same in every process."""
    placed = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(placed, jax.sharding.NamedSharding):
        return f"{type(placed).__name__} {0 if placed is None else len(placed.device_set)}"
    mesh: Any = placed.mesh
    ids = [device.id for device in mesh.devices.flat]
    return f"{dict(mesh.shape)} {mesh.axis_types} {ids} {placed.spec}"
