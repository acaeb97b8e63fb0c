"""The replica of a state that is saved: of all leaves the same one.

A sharding that does not cut an array along a mesh axis declares that the devices along it hold the
same bits. Where they do not (:mod:`~adacheck_jax.device.replicas`), a state put together from
several replicas is one that no device had, and a record of one replica does not lead to the params
of another. So all boxes are taken from the devices nearest to one *primary* device of the mesh:
those that agree with it in every coordinate along which a leaf is not cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device.sharding import Holder, Layout, holder_of, holders_of, is_local

Ranks = Mapping[Holder, int]
"""Devices of a state by their distance from the primary; others come after them."""


@dataclass(frozen=True, slots=True)
class Primary:
    """The device that decides which replica of each box is saved.

    Attributes:
        position: its position among the devices of the state's mesh, row by row.
        is_apart: True once replicas were seen to differ. Until then devices share the work: of
            several processes that hold a box any may write it, and samples are taken in turns.
    """

    position: int = 0
    is_apart: bool = False


@dataclass(frozen=True, slots=True)
class DeviceGrid:
    """The devices of a state, as the largest mesh of its arrays arranges them.

    Attributes:
        shape: sizes of the mesh axes.
        devices: the devices, row by row.
    """

    shape: tuple[int, ...]
    devices: tuple[Holder, ...]

    def ranks(self, position: int) -> Ranks:
        """Distances from the device at a position: that along the last axis counts least."""
        if not self.devices:
            return {}
        at = np.unravel_index(position, self.shape)
        places = np.arange(len(self.devices)).reshape(self.shape)
        near = np.roll(places, [-int(each) for each in at], axis=tuple(range(len(self.shape))))
        return {self.devices[place]: rank for rank, place in enumerate(near.flat)}


def grid_of(arrays: Iterable[Any]) -> DeviceGrid:
    """The devices of some arrays; none if all of them lie on the host."""
    found = np.empty(0, object)
    for array in arrays:
        if isinstance(array, jax.Array) and len(array.sharding.device_set) > found.size:
            sharding = array.sharding
            mesh: Any = getattr(sharding, "mesh", None)
            devices = [*sharding.devices_indices_map(tuple(array.shape))]
            found = np.array(devices) if mesh is None else mesh.devices
    return DeviceGrid(found.shape, tuple(holder_of(device) for device in found.flat))


def nearest(holders: Collection[Holder], ranks: Ranks) -> Holder:
    """The nearest of some devices that hold a box; the first of those that are not known."""
    return min(holders, key=lambda holder: ranks.get(holder, len(ranks)))


def sole(layout: Layout, array: Any, ranks: Ranks) -> Layout:
    """A layout in which only the process of the nearest device holds each box."""
    if is_local(array):  # each process has one for itself
        return layout
    holders = holders_of(array.sharding, tuple(array.shape)).values()
    return Layout(layout.cuts, tuple((nearest(each, ranks).process,) for each in holders))
