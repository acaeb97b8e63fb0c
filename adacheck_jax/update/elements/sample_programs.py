"""Programs that take samples of arrays on the devices where they lie.

On CPU devices one program takes all arrays of a mesh by compiled loops
(:mod:`~adacheck_jax.device.loops.xla_call`). On others each program takes a few, and arrays that
are alike share one: XLA takes many seconds to compile a slice of each of a thousand arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import sharding, transfer
from adacheck_jax.device.loops import shard_tables, xla_call
from adacheck_jax.device.loops.programs import Place, Program, Result
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.format.boxes import Box
from adacheck_jax.update.elements.sample_sites import SampledShape, Sites, Starts, boxes_held


def sampled_mesh_of(array: Any, devices: Sequence[int]) -> Mesh | None:
    """The mesh of an array that lies on all devices that sample, and that programs take; or None.

    Elements of less than a byte have another layout in a program than outside of it.
    """
    if not sharding.in_device_memory(array) or is_narrow(array.dtype):
        return None
    if {device.id for device in array.sharding.addressable_devices} != set(devices):
        return None
    return sharding.mesh_of(array)


_AT_ONCE = 32
"""Leaves that one program samples. XLA takes many seconds for one of a thousand leaves."""
_RANK = 32
"""Largest number of axes of an array."""

_Cuts = Sequence[tuple[slice, np.dtype]]
_SampleProgram = tuple[Program, jax.Array, _Cuts]
"""A program that samples some leaves, and all that are alike; the table of its places; and where in
its result the elements of each data type are."""

Part = Callable[[], np.ndarray]
"""Waits for elements of some leaves of one data type, a row a device."""


@dataclass(frozen=True, slots=True)
class SampledLeaf:
    """An array, and its sampling.

    Attributes:
        spec: shape, data type and sharding.
        sampling: the sampling of its shape.
        sites: for each device that samples, in their order, the sampled box in its shard.
    """

    spec: jax.ShapeDtypeStruct
    sampling: SampledShape
    sites: tuple[Box, ...]

    @classmethod
    def of(cls, array: Any, index: int, sites: Sites) -> SampledLeaf:
        """The description of an array."""
        spec = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        sampling = sites.of(index)
        held = {device.id: box for device, box in boxes_held(array).items()}
        boxes = (sampling.sites[each].relative_to(held[each].start) for each in sites.devices)
        return cls(spec, sampling, tuple(boxes))

    @property
    def kind(self) -> tuple[str, Any, Any]:
        """Data type, shape and sharding: the same for arrays that are sampled alike."""
        return str(self.spec.dtype), self.spec.shape, self.spec.sharding


class MeshSampler:
    """The programs that sample some arrays on one mesh.

    Attributes:
        parts: leaves of one data type whose elements come together; in all every leaf.
    """

    def __init__(self, mesh: Mesh, leaves: Mapping[int, SampledLeaf], sites: Sites) -> None:
        self._mesh, self._devices = mesh, sites.devices
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._starts = np.zeros(len(sites.shapes), np.int32)
        has_loops = mesh.devices.flat[0].platform == "cpu" and xla_call.wait()
        by_dtype: dict[np.dtype, list[int]] = {}
        others: dict[int, tuple[str, Any, Any]] = {}
        for i, leaf in leaves.items():
            if has_loops and len(leaf.spec.shape) < shard_tables.MAX_RANK:
                by_dtype.setdefault(leaf.spec.dtype, []).append(i)
            else:
                others[i] = leaf.kind
        # Wide elements come first, so that no element lies across a multiple of its width.
        self.parts = [by_dtype[each] for each in sorted(by_dtype, key=lambda x: -x.itemsize)]
        self._programs: list[tuple[Sequence[int], _SampleProgram]] = []
        if looped := [i for part in self.parts for i in part]:
            self._programs.append((looped, self._looping({i: leaves[i] for i in looped})))
        shared: dict[Any, _SampleProgram] = {}
        for chunk in _chunks(others):
            alike = tuple(others[i] for i in chunk)
            if alike not in shared:
                shared[alike] = self._slicing([leaves[i] for i in chunk])
            self.parts.append([*chunk])
            self._programs.append((chunk, shared[alike]))

    def _looping(self, looped: Mapping[int, SampledLeaf]) -> _SampleProgram:
        """A program that calls the compiled loops for leaves in the order of their data types."""
        leaves = [*looped.values()]
        widths = [leaf.spec.dtype.itemsize for leaf in leaves]
        tables = [
            shard_tables.of_samples(
                [leaf.sites[row] for leaf in leaves],
                widths,
                [leaf.sampling.stride for leaf in leaves],
                [leaf.sampling.count for leaf in leaves],
                [leaf.sampling.column for leaf in leaves],
            )
            for row in range(len(self._devices))
        ]
        size_bytes = tables[0][1]

        def taken(shards: Sequence[Any], starts: Any, table: Any) -> Any:
            return xla_call.samples(shards, table[0], starts[0], size_bytes)[None]

        sizes_bytes = dict[np.dtype, int]()
        for leaf, width in zip(leaves, widths, strict=True):
            taken_bytes = sizes_bytes.get(leaf.spec.dtype, 0) + leaf.sampling.count * width
            sizes_bytes[leaf.spec.dtype] = taken_bytes
        ends = [*itertools.accumulate(sizes_bytes.values(), initial=0)]
        cuts = zip(map(slice, ends, ends[1:]), sizes_bytes, strict=True)
        rows = np.stack([table for table, _ in tables])
        return self._program(taken, leaves, rows, [*cuts], [(i, None) for i in looped])

    def _slicing(self, leaves: Sequence[SampledLeaf]) -> _SampleProgram:
        """A program of XLA's own operations; its table has the first elements of the sites."""
        offsets = np.zeros((len(self._devices), len(leaves), _RANK), np.int32)
        for n, leaf in enumerate(leaves):
            for row, box in enumerate(leaf.sites):
                offsets[row, n, : len(box.start)] = box.start

        def taken(shards: Sequence[Any], starts: Any, offsets: Any) -> Any:
            elements = [
                _taken(_block(shard, leaf.sites[0].shape, offsets[0, n]), starts[0], leaf.sampling)
                for n, (shard, leaf) in enumerate(zip(shards, leaves, strict=True))
            ]
            return jnp.concatenate(elements)[None]

        cut = slice(None), np.dtype(leaves[0].spec.dtype)
        return self._program(taken, leaves, offsets, [cut])

    def _program(
        self,
        function: Any,
        leaves: Sequence[SampledLeaf],
        rows: np.ndarray,
        cuts: _Cuts,
        places: Sequence[Place] | None = None,
    ) -> _SampleProgram:
        """The compiled program of a function of the shards, starts and a table of one device.

        It is traced once, and its result has an axis for the device in front.
        """
        specs, row = [leaf.spec for leaf in leaves], PartitionSpec(self._mesh.axis_names)
        if all(isinstance(each.sharding, NamedSharding) for each in specs):
            function = jax.shard_map(
                function,
                mesh=self._mesh,
                in_specs=([cast(NamedSharding, x.sharding).spec for x in specs], row, row),
                out_specs=row,
                check_vma=False,
            )
        tables = [
            jax.ShapeDtypeStruct((self._mesh.size, *x.shape), x.dtype, sharding=self._sharding)
            for x in (self._starts, rows[0])
        ]
        program = Program(jax.jit(function), self._mesh, specs, tables, places)
        program.compile()
        table = jax.device_put(self._placed(rows), self._sharding)
        return program, table, cuts

    def _placed(self, rows: np.ndarray) -> Any:
        """A table with the row of each device that samples on that device."""
        if self._mesh.size == 1:
            return rows
        return transfer.row_each(self._sharding, dict(zip(self._devices, rows, strict=True)))

    def dispatch(self, arrays: Sequence[Any], starts: Starts) -> list[Part]:
        """Start to take a sample; for each part what waits for its elements."""
        placed = self._placed(starts)
        outputs = [
            (program([arrays[i] for i in leaves], placed, table), cuts)
            for leaves, (program, table, cuts) in self._programs
        ]
        return [part for each in outputs for part in self._parts_of(*each)]

    def _parts_of(self, output: Result, cuts: _Cuts) -> Iterator[Part]:
        """The rows of a result, in the order of the devices, on their way to the host."""

        def rows() -> list[jax.Array]:
            shards = {shard.device.id: shard.data for shard in output().addressable_shards}
            return [shards[device] for device in self._devices]

        if self._mesh.devices.flat[0].platform != "cpu":
            for row in rows():
                row.copy_to_host_async()

        def elements(cut: slice, dtype: np.dtype) -> np.ndarray:
            parts = [np.asarray(row)[:, cut] for row in rows()]
            return (parts[0] if len(parts) == 1 else np.concatenate(parts)).view(dtype)

        return (functools.partial(elements, *each) for each in cuts)


def _block(shard: jax.Array, shape: Sequence[int], offset: jax.Array) -> jax.Array:
    """The elements of a leaf's site, row by row."""
    if (*shape,) != shard.shape:
        start = [offset[axis] for axis in range(shard.ndim)]
        shard = jax.lax.dynamic_slice(shard, start, shape)
    return shard.reshape(-1)


def _taken(flat: jax.Array, starts: jax.Array, sampling: SampledShape) -> jax.Array:
    """Elements of a flattened site, a stride apart."""
    if sampling.stride == 1:
        return flat
    places = starts[sampling.column] + jnp.arange(sampling.count, dtype=jnp.int32) * sampling.stride
    return flat.at[jnp.minimum(places, flat.shape[0] - 1)].get(mode="promise_in_bounds")


def _chunks(kinds: Mapping[int, tuple[str, Any, Any]]) -> list[tuple[int, ...]]:
    """Leaves in chunks of one data type; of each kind as many chunks as it fills, then the rest."""
    alike: dict[Any, list[int]] = {}
    for i, kind in kinds.items():
        alike.setdefault(kind, []).append(i)
    chunks: list[tuple[int, ...]] = []
    rest: dict[str, list[int]] = {}
    for (dtype, *_), leaves in alike.items():
        filled = len(leaves) - len(leaves) % _AT_ONCE
        chunks += [tuple(leaves[n : n + _AT_ONCE]) for n in range(0, filled, _AT_ONCE)]
        rest.setdefault(dtype, []).extend(leaves[filled:])
    for leaves in rest.values():
        chunks += [tuple(leaves[n : n + _AT_ONCE]) for n in range(0, len(leaves), _AT_ONCE)]
    return chunks
