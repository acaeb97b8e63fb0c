"""From a JAX sharding to distinct boxes and the devices that hold each."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax

from adacheck_jax.boxes import Box, Cuts, cuts_of


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


def whole(shape: tuple[int, ...]) -> Layout:
    """The layout of a host value, which every process holds and the first one writes."""
    return Layout(cuts_of([Box.full(shape)], shape), ((0,),))
