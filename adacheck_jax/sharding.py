"""From a JAX sharding to distinct boxes and the devices that hold each."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.boxes import Box, Cuts, cuts_of, grid


@dataclass(frozen=True, slots=True)
class Layout:
    """How a global array lies on devices.

    Attributes:
        cuts: cut points of the grid of distinct boxes.
        replicas: for each box, in grid order, the processes whose devices hold it, ascending.
    """

    cuts: Cuts
    replicas: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=4096)
def layout_of(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> Layout:
    """Reduces a sharding to distinct boxes; declared replicas fall together.

    Args:
        sharding: any JAX sharding.
        shape: global shape of the array.

    Raises:
        FormatError: the shards do not tile the array as a grid.
    """
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        box = Box.from_slices(index or (), shape)
        holders.setdefault(box, set()).add(device.process_index)
    boxes = sorted(holders)
    return Layout(cuts_of(boxes, shape), tuple(tuple(sorted(holders[box])) for box in boxes))


def layout_of_array(array: Any) -> Layout:
    """The layout of a jax array; a host value every process holds whole, and the first writes."""
    shape = tuple(array.shape)
    if isinstance(array, jax.Array):
        return layout_of(array.sharding, shape)
    return Layout(cuts_of([Box.full(shape)], shape), ((0,),))


def distinct_boxes(array: Any) -> list[Box]:
    """The distinct boxes that an array is cut into, in grid order."""
    return grid(layout_of_array(array).cuts)


def describe(array: Any) -> str:
    """Where an array lies, alike in every process: equal texts, equal partitioning.

    Args:
        array: jax or numpy array.
    """
    placed = array.sharding if isinstance(array, jax.Array) else None
    if not isinstance(placed, jax.sharding.NamedSharding):
        return f"{type(placed).__name__} {0 if placed is None else len(placed.device_set)}"
    mesh: Any = placed.mesh
    ids = [device.id for device in mesh.devices.flat]
    return f"{dict(mesh.shape)} {mesh.axis_types} {ids} {placed.spec}"
