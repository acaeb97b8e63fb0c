"""A state on devices that are not there yet, taken apart as one that is saved.

An abstract mesh has no devices, and no processes. Here its devices are numbered row by row, and
belong to processes in turn; all else is computed by the functions that take a real state apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import sharding, transfer
from adacheck_jax.device.lead import Lead, grid_of
from adacheck_jax.device.sharding import Layout
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.state.snapshot import Structure, leaves_of
from adacheck_jax.update.binding import Binding
from adacheck_jax.update.elements.sample_sites import Sites, common


def sharding_of(leaf: Any) -> Any:
    """The sharding of a leaf; None where it has none."""
    where = getattr(leaf, "sharding", None)
    # Traced without a mesh, JAX gives a sharding over the empty mesh.
    return None if where is None or not where.num_devices else where


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """A device of an abstract mesh, by its number and that of its process."""

    id: int
    process_index: int
    platform: str = "planned"


@dataclass(frozen=True, slots=True)
class PlannedSharding:
    """A sharding over an abstract mesh, as far as it is asked for its boxes.

    Attributes:
        named: the sharding.
        devices_per_process: consecutive devices that belong to one process.
    """

    named: jax.sharding.NamedSharding
    devices_per_process: int

    def devices_indices_map(
        self, shape: tuple[int, ...]
    ) -> Mapping[PlannedDevice, tuple[slice, ...]]:
        """The part of an array that each device holds, as JAX's shardings tell it."""
        sizes = dict(self.named.mesh.shape)
        count = self.named.num_devices
        places = np.unravel_index(np.arange(count), tuple(sizes.values()))
        at = dict(zip(sizes, places, strict=True))
        entries = [*self.named.spec, *(None,) * len(shape)][: len(shape)]
        bounds = list[tuple[np.ndarray, int]]()
        for length, entry in zip(shape, entries, strict=True):
            number, parts = np.zeros(count, np.int64), 1
            for name in entry if isinstance(entry, tuple) else (entry,) if entry else ():
                number, parts = number * sizes[name] + at[name], parts * sizes[name]
            bounds.append((number, length // parts))
        return {
            PlannedDevice(n, n // self.devices_per_process): tuple(
                slice(int(k[n]) * size, (int(k[n]) + 1) * size) for k, size in bounds
            )
            for n in range(count)
        }


@dataclass(frozen=True, slots=True)
class PlannedArray:
    """Shape, data type and sharding of a leaf; None for a sharding of what each process has."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Any

    @classmethod
    def of(cls, leaf: Any, devices_per_process: int) -> PlannedArray:
        """The plain array of an abstract leaf, an array, or a value of the host."""
        where = sharding_of(leaf)
        if isinstance(getattr(where, "mesh", None), jax.sharding.AbstractMesh):
            where = PlannedSharding(where, devices_per_process)
        if transfer.is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        elif not hasattr(leaf, "dtype"):
            leaf = np.asarray(leaf)
        return cls(tuple(leaf.shape), np.dtype(leaf.dtype), where)


class PlannedSites(Sites):
    """The leaves that samples would cover, and no places: each leaf is taken whole.

    As those of a real state, they leave out leaves of which no device has some part together with
    that of all leaves of the same shape.
    """

    def __init__(self, touched: Collection[int], arrays: Sequence[PlannedArray]) -> None:
        super().__init__((), ())
        self._sizes = {i: math.prod(arrays[i].shape) for i in touched}
        held = {i: _boxes_of(arrays[i]) for i in touched}
        everywhere = max(held.values(), key=len, default={})
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for i in touched:
            by_shape.setdefault(arrays[i].shape, []).append(i)
        uncovered = set[int]()
        for shape, members in by_shape.items():
            kinds = [*{id(held[i]): held[i] for i in members}.values()]
            sites = {common([x.get(d) for x in kinds], shape) for d in everywhere}
            found = [x for x in sites if x is not None]
            is_even = len(found) == len(sites) and len({x.shape for x in found}) == 1
            if not is_even or sum(x.size for x in found) < math.prod(shape):
                uncovered.update(members)
        self.uncovered = frozenset(uncovered)

    @property
    def sizes(self) -> dict[int, int]:
        """Number of elements of each leaf, by leaf index."""
        return self._sizes


def _boxes_of(array: PlannedArray) -> Mapping[Any, Box]:
    return {} if array.sharding is None else sharding.boxes_by_device(array.sharding, array.shape)


def structure_of(
    named: Mapping[str, Any],
    bindings: tuple[Binding, ...],
    process_count: int,
    devices_per_process: int,
) -> Structure:
    """The structure that saves of an abstract state will have, but for what needs its devices.

    Args:
        named: leaves by leaf path, which may be abstract.
        bindings: update of each recorder.
        process_count: number of processes.
        devices_per_process: consecutive devices of an abstract mesh that belong to one.
    """
    arrays = [PlannedArray.of(leaf, devices_per_process) for leaf in named.values()]
    everyone = (*range(process_count),)
    layouts = tuple(_layout_of(each, everyone) for each in arrays)
    leaves = leaves_of(named, arrays, layouts, bindings)
    structure = Structure(leaves, layouts, bindings, process_count, grid_of(()), Lead())
    return dataclasses.replace(structure, sites=PlannedSites(structure.touched, arrays))


def _layout_of(array: PlannedArray, everyone: Sequence[int]) -> Layout:
    if array.sharding is None:
        return Layout(cuts_of([Box.full(array.shape)], array.shape), (tuple(everyone),))
    return sharding.layout_of(array.sharding, array.shape)
