"""Programs that take samples of arrays on the devices where they lie.

On CPU devices one program takes all arrays of a mesh by compiled loops
(:mod:`~adacheck_jax.device.loops.xla_call`). On others each program takes a few, and arrays that
are alike share one: XLA takes many seconds to compile a slice of each of a thousand arrays.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import sharding, transfer
from adacheck_jax.device.loops import shard_tables, xla_call
from adacheck_jax.device.shard_sums import is_narrow
from adacheck_jax.format.boxes import Box
from adacheck_jax.update.elements.sample_sites import SampledShape, Sites, Starts, boxes_held


def mesh_of(array: Any, devices: Sequence[int]) -> Mesh | None:
    """The mesh of an array that lies on all devices that sample, and that programs take; or None.

    Elements of less than a byte have another layout in a program than outside of it.
    """
    if not sharding.in_device_memory(array) or is_narrow(array.dtype):
        return None
    if {device.id for device in array.sharding.addressable_devices} != set(devices):
        return None
    if isinstance(array.sharding, NamedSharding):
        return cast(Mesh, array.sharding.mesh)
    if len(array.sharding.device_set) == 1:
        return Mesh(np.array([*array.sharding.device_set]), ("d",))
    return None


_AT_ONCE = 32
"""Leaves that one program samples. XLA takes many seconds for one of a thousand leaves."""
_RANK = 32
"""Largest number of axes of an array."""

Part = Callable[[], np.ndarray]
"""Waits for elements of some leaves of one data type, a row a device."""


@dataclass(frozen=True, slots=True)
class SampledLeaf:
    """An array, and its sampling.

    Attributes:
        spec: shape, data type and sharding.
        sampling: the sampling of its shape.
        column: position of its first elements among those of all shapes.
        sites: for each device that samples, in their order, the sampled box in its shard.
    """

    spec: jax.ShapeDtypeStruct
    sampling: SampledShape
    column: int
    sites: tuple[Box, ...]

    @classmethod
    def of(cls, array: Any, index: int, sites: Sites) -> SampledLeaf:
        """The description of an array."""
        spec = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
        sampling = sites.of(index)
        held = {device.id: box for device, box in boxes_held(array).items()}
        boxes = (sampling.sites[each].relative_to(held[each].start) for each in sites.devices)
        return cls(spec, sampling, sites.position(index), tuple(boxes))

    @property
    def fits_loops(self) -> bool:
        """True if the compiled loops take its elements."""
        return len(self.spec.shape) < shard_tables.MAX_RANK

    @property
    def kind(self) -> tuple[str, Any, Any]:
        """Data type, shape and sharding: the same for arrays that are sampled alike."""
        return str(self.spec.dtype), self.spec.shape, self.spec.sharding


class SampledGroup(Protocol):
    """Arrays on one mesh that are sampled together.

    Attributes:
        parts: leaves of one data type whose elements come together; in all every leaf.
    """

    parts: list[tuple[int, ...]]

    def dispatch(
        self, arrays: Sequence[Any], first: Starts, second: Starts
    ) -> list[tuple[Part, Part]]:
        """Start to take two samples; for each part what waits for its elements."""
        ...


class _OnMesh:
    """Tables of which each device of a mesh has a row, and results of which each has one."""

    def __init__(self, mesh: Mesh, sites: Sites) -> None:
        self.mesh, self._devices = mesh, sites.devices
        self._position = {device.id: n for n, device in enumerate(mesh.devices.flat)}

    def placed(self, rows: np.ndarray) -> Any:
        """A table with each device's row on that device."""
        if self.mesh.size == 1:
            return rows
        table = np.zeros((self.mesh.size, *rows.shape[1:]), rows.dtype)
        for row, device in zip(rows, self._devices, strict=True):
            table[self._position[device]] = row
        return jax.make_array_from_callback(table.shape, self.sharding, lambda index: table[index])

    def kept(self, rows: np.ndarray) -> jax.Array:
        """A table that stays on the devices, for all samples."""
        return jax.device_put(self.placed(rows), self.sharding)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of tables and results."""
        return NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))

    def program(self, function: Any, specs: Sequence[Any], tables: Sequence[np.ndarray]) -> Any:
        """The compiled program of a function of the shards and the tables of one device.

        Args:
            function: traced once a device; gives results with an axis for the device in front.
            specs: shapes, data types and shardings of the arrays.
            tables: a row of each table.
        """
        rows, program = PartitionSpec(self.mesh.axis_names), jax.jit(function)
        if all(isinstance(each.sharding, NamedSharding) for each in specs):
            own = [cast(NamedSharding, each.sharding).spec for each in specs]
            mapped = jax.shard_map(
                function,
                mesh=self.mesh,
                in_specs=(own, *(rows for _ in tables)),
                out_specs=rows,
                check_vma=False,
            )
            program = jax.jit(mapped)
        shapes = [
            jax.ShapeDtypeStruct((self.mesh.size, *x.shape), x.dtype, sharding=self.sharding)
            for x in tables
        ]
        with self.entered():
            return program.lower(specs, *shapes).compile()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The mesh, and 64-bit types."""
        with jax.enable_x64(True), jax.set_mesh(self.mesh):
            yield

    def rows(self, output: jax.Array) -> list[jax.Array]:
        """The rows of a result, in the order of the devices, on their way to the host."""
        shards = {shard.device.id: shard.data for shard in output.addressable_shards}
        rows = [shards[device] for device in self._devices]
        for row in rows:
            if transfer.on_accelerator(row):
                row.copy_to_host_async()
        return rows


class LoopGroup:
    """Arrays on one mesh of CPU devices, all of which one program takes by compiled loops."""

    def __init__(self, mesh: Mesh, leaves: Mapping[int, SampledLeaf], sites: Sites) -> None:
        by_dtype: dict[np.dtype, list[int]] = {}
        for i, leaf in leaves.items():
            by_dtype.setdefault(np.dtype(leaf.spec.dtype), []).append(i)
        dtypes = sorted(by_dtype, key=lambda dtype: -dtype.itemsize)  # so that all are aligned
        self.parts = [tuple(by_dtype[dtype]) for dtype in dtypes]
        self._leaves, self._on = [i for part in self.parts for i in part], _OnMesh(mesh, sites)
        chosen = [leaves[i] for i in self._leaves]
        tables = [
            shard_tables.of_samples(
                [leaf.sites[row] for leaf in chosen],
                [leaf.spec.dtype.itemsize for leaf in chosen],
                [leaf.sampling.stride for leaf in chosen],
                [leaf.sampling.count for leaf in chosen],
                [leaf.column for leaf in chosen],
            )
            for row in range(len(sites.devices))
        ]
        _, places = tables[0]
        ends = np.cumsum([0, *map(len, self.parts)])
        self._runs = [
            (places[a], places[b], dtype)
            for a, b, dtype in zip(ends, ends[1:], dtypes, strict=False)
        ]
        self._table = self._on.kept(np.stack([table for table, _ in tables]))
        size_bytes = places[-1]

        def taken(shards: Sequence[Any], table: Any, starts: Any) -> Any:
            return xla_call.samples(shards, table[0], starts[0], size_bytes)[None]

        starts = np.zeros(len(sites.shapes), np.int32)
        specs = [leaf.spec for leaf in chosen]
        self._program = self._on.program(taken, specs, [tables[0][0], starts])

    def dispatch(
        self, arrays: Sequence[Any], first: Starts, second: Starts
    ) -> list[tuple[Part, Part]]:
        """Start the program, once a sample: the first is often awaited, the second hardly ever."""
        with self._on.entered():
            given = [arrays[i] for i in self._leaves]
            rows, other_rows = (
                self._on.rows(self._program(given, self._table, self._on.placed(starts)))
                for starts in (first, second)
            )
        return [(_bytes_of(rows, *run), _bytes_of(other_rows, *run)) for run in self._runs]


def _bytes_of(rows: Sequence[jax.Array], start: int, stop: int, dtype: np.dtype) -> Part:
    def elements() -> np.ndarray:
        parts = [np.asarray(row)[:, start:stop].view(dtype) for row in rows]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return elements


class ProgramGroup:
    """Arrays on one mesh, of which each program takes a few."""

    def __init__(self, mesh: Mesh, leaves: Mapping[int, SampledLeaf], sites: Sites) -> None:
        self._on = _OnMesh(mesh, sites)
        self._chunks: list[tuple[tuple[int, ...], _Program]] = []
        shared: dict[Any, _Program] = {}
        for chunk in _chunks({i: leaf.kind for i, leaf in leaves.items()}):
            alike = tuple(leaves[i].kind for i in chunk)
            if alike not in shared:
                shared[alike] = _Program(self._on, [leaves[i] for i in chunk], sites)
            self._chunks.append((chunk, shared[alike]))
        self.parts = [chunk for chunk, _ in self._chunks]

    def dispatch(
        self, arrays: Sequence[Any], first: Starts, second: Starts
    ) -> list[tuple[Part, Part]]:
        """Start the programs."""
        with self._on.entered():
            starts = self._on.placed(first), self._on.placed(second)
            outputs = [
                program.compiled([arrays[i] for i in chunk], *starts, program.offsets)
                for chunk, program in self._chunks
            ]
        return [(self._part(one), self._part(other)) for one, other in outputs]

    def _part(self, output: jax.Array) -> Part:
        rows = self._on.rows(output)
        if len(rows) == 1:
            return functools.partial(np.asarray, rows[0])
        return lambda: np.concatenate([np.asarray(row) for row in rows])


def _taken(flat: jax.Array, start: jax.Array, stride: int, count: int) -> jax.Array:
    """Elements of a flattened site, a stride apart."""
    if stride == 1:
        return flat
    places = start + jnp.arange(count, dtype=jnp.int32) * stride
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


class _Program:
    """The program that samples one chunk, and all that are alike.

    Args:
        on: the mesh of the leaves.
        leaves: leaves of the chunk.
        sites: places to sample.

    Attributes:
        compiled: the compiled program.
        offsets: first element of the site of each leaf in the shard of each device.
    """

    def __init__(self, on: _OnMesh, leaves: Sequence[SampledLeaf], sites: Sites) -> None:
        self._leaves = leaves
        offsets = np.zeros((len(sites.devices), len(leaves), _RANK), np.int32)
        for n, leaf in enumerate(leaves):
            for row, box in enumerate(leaf.sites):
                offsets[row, n, : len(box.start)] = box.start
        starts = np.zeros(len(sites.shapes), np.int32)
        specs = [leaf.spec for leaf in leaves]
        self.compiled = on.program(self._taken, specs, [starts, starts, offsets[0]])
        self.offsets = on.kept(offsets)

    def _taken(
        self, shards: Sequence[jax.Array], first: jax.Array, second: jax.Array, offsets: jax.Array
    ) -> list[jax.Array]:
        """The two samples of the shards of one device."""
        blocks = [self._block(n, shard, offsets[0, n]) for n, shard in enumerate(shards)]
        pairs = [
            (x, leaf.sampling, leaf.column) for x, leaf in zip(blocks, self._leaves, strict=True)
        ]
        return [
            jnp.concatenate(
                [_taken(x, starts[0, column], own.stride, own.count) for x, own, column in pairs]
            )[None]
            for starts in (first, second)
        ]

    def _block(self, number: int, shard: jax.Array, offset: jax.Array) -> jax.Array:
        """The elements of a leaf's site, row by row."""
        shape = self._leaves[number].sites[0].shape
        if shape != shard.shape:
            start = [offset[axis] for axis in range(shard.ndim)]
            shard = jax.lax.dynamic_slice(shard, start, shape)
        return shard.reshape(-1)
