"""Samples of a state, taken on its devices or by way of the host.

An update whose elements stay in their places computes an element of each leaf from the same element
of the leaves that it takes. So a sample of one save and a sample of the next, at the same places
(:mod:`~adacheck_jax.update.elements.sample_sites`), show if a replay of the update between them
gives the trained state, without a copy of the state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import sharding, transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.update.elements.pieces import VectorLayout, Vectors
from adacheck_jax.update.elements.sample_sites import Sites, Starts, boxes_held


def _taken(flat: Any, start: Any, stride: int, count: int) -> Any:
    """Elements of a flattened site, a stride apart."""
    if stride == 1:
        return flat
    last = flat.shape[0] - 1
    if isinstance(flat, np.ndarray):
        return flat[np.minimum(start + np.arange(count) * stride, last)]
    places = jnp.minimum(start + jnp.arange(count, dtype=jnp.int32) * stride, last)
    return flat.at[places].get(mode="promise_in_bounds")


class Sample:
    """A sample of a state, which may still be on its way to the host.

    Args:
        starts: first elements of the sample.
        rows: function that waits for the vectors of a layout.
    """

    def __init__(self, starts: Starts, rows: Callable[[VectorLayout], Vectors]) -> None:
        self.starts = starts
        self._rows = rows

    def vectors(self, layout: VectorLayout) -> Vectors:
        """Wait for the elements of all leaves of a layout, as vectors with a row a device."""
        return self._rows(layout)


def from_host(arrays: Sequence[Any], sites: Sites, starts: Starts, layout: VectorLayout) -> Sample:
    """Take a sample by way of the host; waits for the arrays.

    Args:
        arrays: plain arrays, one a leaf.
        sites: places to sample.
        starts: first elements of the sample.
        layout: layout of the leaves to sample.
    """
    taken = {i: _on_host(arrays[i], i, sites, starts) for i in layout.leaves}
    return Sample(starts, functools.partial(_joined, taken))


def _on_host(array: Any, index: int, sites: Sites, starts: Starts) -> np.ndarray:
    """The sampled elements of one leaf, a row a device."""
    own, column = sites.of(index), sites.position(index)
    shards = {shard.device.id: shard for shard in getattr(array, "addressable_shards", ())}
    rows = []
    for row, device in enumerate(sites.devices):
        site = own.sites[device]
        if device in shards:
            shard = shards[device]
            box = Box.from_slices(shard.index or (), array.shape)
            block = np.asarray(shard.data)[site.relative_to(box.start).slices]
        else:
            block = np.asarray(array)[site.slices]
        rows.append(_taken(block.reshape(-1), starts[row, column], own.stride, own.count))
    return np.array(rows)


def _joined(taken: Mapping[int, np.ndarray], layout: VectorLayout) -> Vectors:
    parts: dict[str, list[np.ndarray]] = {dtype: [] for dtype in layout.lengths}
    for i in layout.leaves:
        parts[layout.dtypes[i]].append(taken[i])
    return {dtype: np.concatenate(each, axis=1) for dtype, each in parts.items()}


class Taker:
    """Takes samples of states of one structure on their devices.

    Small programs take a few leaves each, without communication; leaves that are alike share a
    program. They are compiled in the background; :meth:`take` needs them.

    Args:
        sites: places to sample.
        layout: layout of the leaves to sample.
        arrays: plain arrays of a state, one a leaf; only their shapes and shardings are kept.
    """

    def __init__(self, sites: Sites, layout: VectorLayout, arrays: Sequence[Any]) -> None:
        self._sites = sites
        kinds: dict[Mesh, dict[int, _Kind]] = {}
        self._elsewhere: list[int] = []
        for i in layout.leaves:
            mesh = _mesh_of(arrays[i], sites.devices)
            if mesh is None:
                self._elsewhere.append(i)
            else:
                kinds.setdefault(mesh, {})[i] = _kind_of(arrays[i])
        self._programs: dict[Any, _Program] = {}
        self._chunks: list[tuple[tuple[int, ...], _Program]] = []
        for mesh, of_leaves in kinds.items():
            for chunk in _chunks(of_leaves):
                key = (mesh, *(of_leaves[i] for i in chunk))
                if key not in self._programs:
                    self._programs[key] = _Program(mesh, chunk, sites, arrays)
                self._chunks.append((chunk, self._programs[key]))
        # Number of the part that has the elements of a leaf, and the first and last of them.
        self._places: dict[int, tuple[int, int, int]] = {}
        parts = [*(chunk for chunk, _ in self._chunks), *([i] for i in self._elsewhere)]
        for number, leaves in enumerate(parts):
            start = 0
            for i in leaves:
                self._places[i] = (number, start, start + layout.sizes[i])
                start += layout.sizes[i]
        self._plans: dict[VectorLayout, dict[str, list[list[int]]]] = {}

    @property
    def is_ready(self) -> bool:
        """True if all programs are compiled."""
        return all(each.compiled.done() for each in self._programs.values())

    def compile(self) -> None:
        """Compile the programs; an error is raised when a program is used."""
        for each in self._programs.values():
            each.compile()

    def take(self, arrays: Sequence[Any], first: Starts, second: Starts) -> tuple[Sample, Sample]:
        """Start to take two samples; the arrays may be donated at once.

        Args:
            arrays: plain arrays, one a leaf.
            first: first elements of one sample.
            second: first elements of the other sample.
        """
        meshes = dict.fromkeys(program.mesh for program in self._programs.values())
        devices = self._sites.devices
        tables = {m: [_placed(each, m, devices) for each in (first, second)] for m in meshes}
        pairs = [
            program([arrays[i] for i in chunk], tables[program.mesh])
            for chunk, program in self._chunks
        ]
        return (
            self._sample(arrays, first, [each for each, _ in pairs]),
            self._sample(arrays, second, [each for _, each in pairs]),
        )

    def _sample(self, arrays: Sequence[Any], starts: Starts, taken: Sequence[_Part]) -> Sample:
        others = [_on_host(arrays[i], i, self._sites, starts) for i in self._elsewhere]

        def rows(layout: VectorLayout) -> Vectors:
            parts = [*(part() for part in taken), *others]
            return {
                dtype: np.concatenate([parts[n][:, a:b] for n, a, b in runs], axis=1)
                for dtype, runs in self._plan(layout).items()
            }

        return Sample(starts, rows)

    def _plan(self, layout: VectorLayout) -> Mapping[str, Sequence[Sequence[int]]]:
        """The runs of elements of all parts, one behind another, that are a layout's vectors."""
        if layout not in self._plans:
            plan: dict[str, list[list[int]]] = {dtype: [] for dtype in layout.lengths}
            for i in layout.leaves:
                runs, (number, start, stop) = plan[layout.dtypes[i]], self._places[i]
                if runs and runs[-1][0] == number and runs[-1][2] == start:
                    runs[-1][2] = stop
                else:
                    runs.append([number, start, stop])
            self._plans[layout] = plan
        return self._plans[layout]


def _mesh_of(array: Any, devices: Sequence[int]) -> Mesh | None:
    """The mesh of an array that lies on all devices that sample, else None."""
    if not sharding.in_device_memory(array):
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

_Part = Callable[[], np.ndarray]
"""Waits for elements of some leaves of one data type, a row a device."""


_Kind = tuple[str, Any, Any]
"""Data type, shape and sharding of an array: the same for arrays that are sampled alike."""


def _placed(rows: np.ndarray, mesh: Mesh, devices: Sequence[int]) -> jax.Array:
    """A table with each device's row on that device."""
    table = np.zeros((mesh.size, *rows.shape[1:]), rows.dtype)
    position = {device.id: n for n, device in enumerate(mesh.devices.flat)}
    for row, device in zip(rows, devices, strict=True):
        table[position[device]] = row
    return jax.make_array_from_callback(table.shape, _by_rows(mesh), lambda at: table[at])


def _by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _kind_of(array: Any) -> _Kind:
    return str(array.dtype), array.shape, array.sharding


def _chunks(kinds: Mapping[int, _Kind]) -> list[tuple[int, ...]]:
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

    Attributes:
        mesh: mesh of the leaves.
        compiled: the compiled program, once it is there.
    """

    def __init__(
        self, mesh: Mesh, leaves: Sequence[int], sites: Sites, arrays: Sequence[Any]
    ) -> None:
        self.mesh, self._devices, self._shape_count = mesh, sites.devices, len(sites.shapes)
        self._own = [sites.of(i) for i in leaves]
        self._columns = [sites.position(i) for i in leaves]
        self._specs = [
            jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype, sharding=arrays[i].sharding)
            for i in leaves
        ]
        self.compiled: Future[Any] = Future()
        # First element of the site of each leaf in the shard of each device.
        self._offsets = np.zeros((len(sites.devices), len(leaves), _RANK), np.int32)
        for n, i in enumerate(leaves):
            boxes = {device.id: box for device, box in boxes_held(arrays[i]).items()}
            for row, device in enumerate(sites.devices):
                start = self._own[n].sites[device].relative_to(boxes[device].start).start
                self._offsets[row, n, : len(start)] = start

    def __call__(self, arrays: Sequence[jax.Array], starts: Sequence[jax.Array]) -> list[_Part]:
        """Start the program; returns the chunk's part of each of the two samples."""
        with jax.enable_x64(True), jax.set_mesh(self.mesh):
            outputs = self.compiled.result()(arrays, *starts, self._placed_offsets)
        return [self._part(each) for each in outputs]

    @functools.cached_property
    def _placed_offsets(self) -> jax.Array:
        return _placed(self._offsets, self.mesh, self._devices)

    def _part(self, output: jax.Array) -> _Part:
        """The rows of one output, on their way to the host."""
        shards = {shard.device.id: shard.data for shard in output.addressable_shards}
        rows = [shards[device] for device in self._devices]
        for row in rows:
            if transfer.on_accelerator(row):
                row.copy_to_host_async()
        if len(rows) == 1:
            return functools.partial(np.asarray, rows[0])
        return lambda: np.concatenate([np.asarray(row) for row in rows])

    def compile(self) -> None:
        """Compile the program; an error is raised when the program is used."""
        program, rows = jax.jit(self._taken), PartitionSpec(self.mesh.axis_names)
        shardings = [spec.sharding for spec in self._specs]
        if all(isinstance(sharding, NamedSharding) for sharding in shardings):
            specs = [cast(NamedSharding, sharding).spec for sharding in shardings]
            mapped = jax.shard_map(
                self._taken,
                mesh=self.mesh,
                in_specs=(specs, rows, rows, rows),
                out_specs=rows,
                check_vma=False,
            )
            program = jax.jit(mapped)
        shapes = [(self._shape_count,), (self._shape_count,), self._offsets.shape[1:]]
        try:
            with jax.enable_x64(True), jax.set_mesh(self.mesh):
                sharding = _by_rows(self.mesh)
                tables = [
                    jax.ShapeDtypeStruct((self.mesh.size, *shape), np.int32, sharding=sharding)
                    for shape in shapes
                ]
                self.compiled.set_result(program.lower(self._specs, *tables).compile())
        except BaseException as error:
            self.compiled.set_exception(error)

    def _taken(
        self, shards: Sequence[jax.Array], first: jax.Array, second: jax.Array, offsets: jax.Array
    ) -> list[jax.Array]:
        """The two samples of the shards of one device."""
        blocks = [self._block(n, shard, offsets[0, n]) for n, shard in enumerate(shards)]
        pairs = list(zip(blocks, self._own, self._columns, strict=True))
        return [
            jnp.concatenate(
                [_taken(x, starts[0, column], own.stride, own.count) for x, own, column in pairs]
            )[None]
            for starts in (first, second)
        ]

    def _block(self, number: int, shard: jax.Array, offset: jax.Array) -> jax.Array:
        """The elements of a leaf's site, row by row."""
        shape = next(iter(self._own[number].sites.values())).shape
        if shape != shard.shape:
            start = [offset[axis] for axis in range(shard.ndim)]
            shard = jax.lax.dynamic_slice(shard, start, shape)
        return shard.reshape(-1)
