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

    One program serves all arrays on one mesh, without communication. The programs are compiled in
    the background; :meth:`take` needs them.

    Args:
        sites: places to sample.
        layout: layout of the leaves to sample.
        arrays: plain arrays of a state, one a leaf; only their shapes and shardings are kept.
    """

    def __init__(self, sites: Sites, layout: VectorLayout, arrays: Sequence[Any]) -> None:
        self._sites, self._layout = sites, layout
        on_mesh: dict[Mesh, list[int]] = {}
        self._elsewhere: list[int] = []
        for i in layout.leaves:
            mesh = _mesh_of(arrays[i], sites.devices)
            if mesh is None:
                self._elsewhere.append(i)
            else:
                on_mesh.setdefault(mesh, []).append(i)
        self._groups = [
            _Group(mesh, group, sites, layout, arrays) for mesh, group in on_mesh.items()
        ]

    @property
    def is_ready(self) -> bool:
        """True if all programs are compiled."""
        return all(group.compiled.done() for group in self._groups)

    def compile(self) -> None:
        """Compile the programs."""
        for group in self._groups:
            group.compile()

    def take(self, arrays: Sequence[Any], first: Starts, second: Starts) -> tuple[Sample, Sample]:
        """Start to take two samples; the arrays may be donated at once.

        Args:
            arrays: plain arrays, one a leaf.
            first: first elements of one sample.
            second: first elements of the other sample.
        """
        dispatched = [group.dispatch(arrays, first, second) for group in self._groups]
        return (
            self._sample(arrays, first, [each[0] for each in dispatched]),
            self._sample(arrays, second, [each[1] for each in dispatched]),
        )

    def _sample(
        self, arrays: Sequence[Any], starts: Starts, dispatched: Sequence[Callable[[], Vectors]]
    ) -> Sample:
        elsewhere = {i: _on_host(arrays[i], i, self._sites, starts) for i in self._elsewhere}
        if len(dispatched) == 1 and not elsewhere:
            (only,) = dispatched
            return Sample(starts, lambda layout: self._layout.selected(only(), layout))

        def rows(layout: VectorLayout) -> Vectors:
            taken = dict(elsewhere)
            for group, wait in zip(self._groups, dispatched, strict=True):
                vectors = wait()
                taken |= {i: group.layout.of(vectors, [i]) for i in group.layout.leaves}
            return _joined(taken, layout)

        return Sample(starts, rows)


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


_RANK = 32
"""Largest number of axes of an array."""


class _Group:
    """Arrays on one mesh, which one program samples."""

    def __init__(
        self,
        mesh: Mesh,
        leaves: Sequence[int],
        sites: Sites,
        layout: VectorLayout,
        arrays: Sequence[Any],
    ) -> None:
        self._mesh, self._sites = mesh, sites
        self.layout = VectorLayout(leaves, layout.dtypes, layout.sizes)
        self.compiled: Future[Any] = Future()
        self._specs = [
            jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype, sharding=arrays[i].sharding)
            for i in leaves
        ]
        self._rows = PartitionSpec(mesh.axis_names)
        self._position = {device.id: n for n, device in enumerate(mesh.devices.flat)}
        # Starts of the sites in each device's shards: the same for leaves that are cut alike.
        kinds: dict[Any, int] = {}
        self._kind_of = []
        for i in leaves:
            kind = (arrays[i].shape, getattr(arrays[i].sharding, "spec", None))
            self._kind_of.append(kinds.setdefault(kind, len(kinds)))
        self._offsets = np.zeros((len(sites.devices), len(kinds), _RANK), np.int32)
        for i, n in zip(leaves, self._kind_of, strict=True):
            boxes = {device.id: box for device, box in boxes_held(arrays[i]).items()}
            for row, device in enumerate(sites.devices):
                start = sites.of(i).sites[device].relative_to(boxes[device].start).start
                self._offsets[row, n, : len(start)] = start

    def compile(self) -> None:
        """Compile the program; an error is raised when the program is used."""
        of, columns = self._sites.of, [self._sites.position(i) for i in self.layout.leaves]

        def local(
            shards: Sequence[jax.Array], first: jax.Array, second: jax.Array, offsets: jax.Array
        ) -> list[dict[str, jax.Array]]:
            return [taken_of(shards, starts, offsets) for starts in (first, second)]

        def taken_of(
            shards: Sequence[jax.Array], starts: jax.Array, offsets: jax.Array
        ) -> dict[str, jax.Array]:
            by_dtype: dict[str, list[jax.Array]] = {}
            for n, (i, shard) in enumerate(zip(self.layout.leaves, shards, strict=True)):
                own, block = of(i), shard
                shape = next(iter(own.sites.values())).shape
                if shape != shard.shape:
                    offset = [offsets[0, self._kind_of[n], axis] for axis in range(shard.ndim)]
                    block = jax.lax.dynamic_slice(shard, offset, shape)
                start = starts[0, columns[n]]
                taken = _taken(block.reshape(-1), start, own.stride, own.count)
                by_dtype.setdefault(str(shard.dtype), []).append(taken)
            return {dtype: jnp.concatenate(x)[None] for dtype, x in by_dtype.items()}

        program: Any = jax.jit(local)
        shardings = [spec.sharding for spec in self._specs]
        if all(isinstance(sharding, NamedSharding) for sharding in shardings):
            specs = [cast(NamedSharding, sharding).spec for sharding in shardings]
            mapped = jax.shard_map(
                local,
                mesh=self._mesh,
                in_specs=(specs, self._rows, self._rows, self._rows),
                out_specs=self._rows,
                check_vma=False,
            )
            program = jax.jit(mapped)
        try:
            with jax.enable_x64(True), jax.set_mesh(self._mesh):
                tables = [
                    jax.ShapeDtypeStruct(
                        (self._mesh.size, *shape),
                        np.int32,
                        sharding=NamedSharding(self._mesh, self._rows),
                    )
                    for shape in (*[(len(self._sites.shapes),)] * 2, self._offsets.shape[1:])
                ]
                self.compiled.set_result(program.lower(self._specs, *tables).compile())
        except BaseException as error:
            self.compiled.set_exception(error)

    @functools.cached_property
    def _placed_offsets(self) -> jax.Array:
        return self._placed(self._offsets)

    def _placed(self, rows: np.ndarray) -> jax.Array:
        """A table with each device's row on that device."""
        table = np.zeros((self._mesh.size, *rows.shape[1:]), rows.dtype)
        for row, device in zip(rows, self._sites.devices, strict=True):
            table[self._position[device]] = row
        sharding = NamedSharding(self._mesh, self._rows)
        return jax.make_array_from_callback(table.shape, sharding, lambda at: table[at])

    def dispatch(
        self, arrays: Sequence[Any], first: Starts, second: Starts
    ) -> list[Callable[[], Vectors]]:
        """Start the program.

        Returns:
            For each sample a function that waits for its vectors.
        """
        sampled = [arrays[i] for i in self.layout.leaves]
        with jax.enable_x64(True), jax.set_mesh(self._mesh):
            tables = self._placed(first), self._placed(second), self._placed_offsets
            outputs = self.compiled.result()(sampled, *tables)
        return [functools.partial(self._vectors, _by_device(each)) for each in outputs]

    def _vectors(self, shards: Mapping[str, Mapping[int, Any]]) -> Vectors:
        devices = self._sites.devices
        rows = {dtype: [np.asarray(x[d]) for d in devices] for dtype, x in shards.items()}
        return {dtype: x[0] if len(x) == 1 else np.concatenate(x) for dtype, x in rows.items()}


def _by_device(outputs: Mapping[str, jax.Array]) -> dict[str, dict[int, Any]]:
    """The rows of each data type by device id, on their way to the host."""
    shards = {
        dtype: {shard.device.id: shard.data for shard in output.addressable_shards}
        for dtype, output in outputs.items()
    }
    for rows in shards.values():
        for row in rows.values():
            if transfer.on_accelerator(row):
                row.copy_to_host_async()
    return shards
