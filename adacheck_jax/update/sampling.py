"""Samples of a state: small leaves whole, and of large ones elements at regular distances.

An update whose elements stay in their places computes an element of each leaf from the same element
of the leaves that it takes. So a sample, taken on the devices at one save and at the next, tells
whether replaying the update between them gives what was trained, without a copy of the state. The
elements of a large leaf are a stride apart, from a start that changes from save to save: whatever
touches as many neighbours as the stride is long is always met.

Each device samples what it holds, at places that it holds of all leaves of one shape, wherever each
of them was cut: nothing crosses between devices, and each gives one row of the sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.update.pieces import Order, Vectors

WHOLE_ELEMENTS = 4096
"""The largest leaf that is sampled whole."""
SAMPLE_ELEMENTS = 1024
"""Elements that are sampled of a larger one, by all devices together."""
_MIN_ROW = 128
"""Elements that each device samples of it at least."""

Starts = np.ndarray
"""The first element that each device of this process takes of leaves of each shape: (rows, shapes)
of int32."""


@dataclass(frozen=True, slots=True)
class _Class:
    """Leaves of one shape.

    Attributes:
        members: leaf indices.
        sites: for each device a box that it holds of each of them.
        stride: distance of the elements that are taken of a site, read row by row.
        count: how many are taken; past the end of a site its last one again.
        replica: for each device of small leaves which of the first elements is its own: devices
            with the same site share it out. None where each draws one at random.
    """

    members: tuple[int, ...]
    sites: Mapping[int, Box]
    stride: int
    count: int
    replica: Mapping[int, int] | None


class Sites:
    """Where the leaves of one structure are sampled.

    Args:
        indices: the leaves that an update takes or computes.
        arrays: plain arrays of a state, one a leaf; their shapes and shardings are looked at.

    Attributes:
        devices: ids of the devices of this process that sample, one row each.
        uncovered: leaves of which some part can be sampled nowhere: no device holds it of all
            leaves of that shape.
    """

    def __init__(self, indices: Sequence[int], arrays: Sequence[Any]) -> None:
        held = {i: _held(arrays[i]) for i in indices}
        everywhere: list[Any] = max((list(each) for each in held.values()), key=len, default=[])
        process = jax.process_index()
        self.devices = [d.id for d in everywhere if d.process_index == process]
        shapes: dict[tuple[int, ...], list[int]] = {}
        for i in indices:
            shapes.setdefault(tuple(arrays[i].shape), []).append(i)
        self.classes: list[_Class] = []
        uncovered: set[int] = set()
        for shape, members in shapes.items():
            sites = {d.id: _common([held[i].get(d) for i in members], shape) for d in everywhere}
            whole = {site for site in sites.values() if site is not None}
            sizes = {site.shape for site in whole}
            if None in sites.values() or len(sizes) != 1:
                uncovered.update(members)
                sites, whole = dict.fromkeys(sites, Box.full(shape)), {Box.full(shape)}
            elif sum(site.size for site in whole) < math.prod(shape):
                uncovered.update(members)
            known = cast(dict[int, Box], sites)
            self.classes.append(_class_of(tuple(members), known, math.prod(shape)))
        self.uncovered = frozenset(uncovered)
        self._class_of = {i: each for each in self.classes for i in each.members}

    @property
    def sizes(self) -> dict[int, int]:
        """Elements of each leaf in a row of a sample, by leaf index."""
        return {i: each.count for each in self.classes for i in each.members}

    def starts_at(self, number: int) -> Starts:
        """The first elements of one sample.

        Args:
            number: of the sample; another number, other elements.
        """
        starts = np.zeros((len(self.devices), len(self.classes)), np.int32)
        for row, device in enumerate(self.devices):
            random = np.random.default_rng([number, device])
            drawn = random.integers([each.stride for each in self.classes])
            for n, each in enumerate(self.classes):
                starts[row, n] = drawn[n] if each.replica is None else each.replica[device]
        return starts

    def position(self, index: int) -> int:
        """The column of ``starts`` that a leaf belongs to."""
        return self.classes.index(self._class_of[index])

    def of(self, index: int) -> _Class:
        """The leaves of the shape of one."""
        return self._class_of[index]


def _held(array: Any) -> dict[Any, Box]:
    """What each device holds of an array; nothing for one on the host."""
    if not _is_on_device(array):
        return {}
    indices = array.sharding.devices_indices_map(tuple(array.shape))
    return {d: Box.from_slices(index or (), array.shape) for d, index in indices.items()}


def _common(boxes: Sequence[Box | None], shape: tuple[int, ...]) -> Box | None:
    """What some boxes have in common; those that are not there are wherever they are wanted."""
    if not math.prod(shape):
        return Box((0,) * len(shape), (0,) * len(shape))
    common: Box | None = Box.full(shape)
    for box in boxes:
        if box is not None and common is not None:
            common = common.intersect(box)
    return common


def _class_of(members: tuple[int, ...], sites: dict[int, Box], elements: int) -> _Class:
    site = next(iter(sites.values()), Box((), ()))
    if elements <= WHOLE_ELEMENTS:
        sharing: dict[Box, list[int]] = {}
        for device in sorted(sites):
            sharing.setdefault(sites[device], []).append(device)
        stride = max(1, min(site.size, *map(len, sharing.values()))) if sharing else 1
        replica = {d: n % stride for each in sharing.values() for n, d in enumerate(each)}
        return _Class(members, sites, stride, -(-site.size // stride), replica)
    wanted = min(site.size, max(_MIN_ROW, SAMPLE_ELEMENTS // max(1, len(sites))))
    stride = site.size // wanted
    while stride > 1 and math.gcd(stride, site.shape[-1]) > 1:  # else columns would be left out
        stride -= 1
    return _Class(members, sites, stride, -(-site.size // stride), None)


def _taken(flat: Any, start: Any, stride: int, count: int) -> Any:
    """Elements of a flat site, a stride apart."""
    if stride == 1:
        return flat
    last = flat.shape[0] - 1
    if isinstance(flat, np.ndarray):
        return flat[np.minimum(start + np.arange(count) * stride, last)]
    places = jnp.minimum(start + jnp.arange(count, dtype=jnp.int32) * stride, last)
    return flat.at[places].get(mode="promise_in_bounds")


class Sample:
    """A sample of a state, perhaps still on its way to the host.

    Args:
        starts: of the sample.
        rows: gives the elements of some leaves for each device, as they lie in vectors of an order.
    """

    def __init__(self, starts: Starts, rows: Callable[[Order], Vectors]) -> None:
        self.starts = starts
        self._rows = rows

    def vectors(self, order: Order) -> Vectors:
        """By data type, the elements of all leaves of an order; a row a device. Waits for them."""
        return self._rows(order)


def from_host(arrays: Sequence[Any], sites: Sites, starts: Starts, order: Order) -> Sample:
    """Takes a sample by way of the host; waits for the arrays.

    Args:
        arrays: plain arrays, one a leaf.
        sites: where to sample.
        starts: of the sample.
        order: of the leaves to sample.
    """
    taken = {i: _on_host(arrays[i], i, sites, starts) for i in order.leaves}
    return Sample(starts, functools.partial(_joined, taken))


def _on_host(array: Any, index: int, sites: Sites, starts: Starts) -> np.ndarray:
    """The elements of one leaf, a row a device."""
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


def _joined(taken: Mapping[int, np.ndarray], order: Order) -> Vectors:
    parts: dict[str, list[np.ndarray]] = {dtype: [] for dtype in order.lengths}
    for i in order.leaves:
        parts[order.dtypes[i]].append(taken[i])
    return {dtype: np.concatenate(each, axis=1) for dtype, each in parts.items()}


class Taker:
    """Takes samples of states of one structure on their devices, in order with their steps.

    One program for all arrays on one mesh, without communication. Compiled in the background: until
    then :meth:`take` cannot be used.

    Args:
        sites: where to sample.
        order: the leaves, as they are to lie in vectors.
        arrays: of a state, one a leaf; their shapes and shardings are noted.
    """

    def __init__(self, sites: Sites, order: Order, arrays: Sequence[Any]) -> None:
        self._sites, self._order = sites, order
        on_mesh: dict[Mesh, list[int]] = {}
        self._elsewhere: list[int] = []
        for i in order.leaves:
            mesh = _mesh_of(arrays[i], sites.devices)
            if mesh is None:
                self._elsewhere.append(i)
            else:
                on_mesh.setdefault(mesh, []).append(i)
        self._groups = [
            _Group(mesh, group, sites, order, arrays) for mesh, group in on_mesh.items()
        ]

    @property
    def is_ready(self) -> bool:
        """Whether all programs are compiled."""
        return all(group.compiled.done() for group in self._groups)

    def compile(self) -> None:
        """Compiles the programs."""
        for group in self._groups:
            group.compile()

    def take(self, arrays: Sequence[Any], first: Starts, second: Starts) -> tuple[Sample, Sample]:
        """Starts to take two samples; the arrays may be donated at once.

        Args:
            arrays: plain arrays, one a leaf.
            first: where the one begins.
            second: where the other begins.
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
            return Sample(starts, lambda order: self._order.chosen(only(), order))

        def rows(order: Order) -> Vectors:
            taken = dict(elsewhere)
            for group, given in zip(self._groups, dispatched, strict=True):
                vectors = given()
                taken |= {i: group.order.of(vectors, [i]) for i in group.order.leaves}
            return _joined(taken, order)

        return Sample(starts, rows)


def _mesh_of(array: Any, devices: Sequence[int]) -> Mesh | None:
    """The mesh of an array that lies on all devices that sample, else None."""
    if not _is_on_device(array):
        return None
    if {device.id for device in array.sharding.addressable_devices} != set(devices):
        return None
    if isinstance(array.sharding, NamedSharding):
        return cast(Mesh, array.sharding.mesh)
    if len(array.sharding.device_set) == 1:
        return Mesh(np.array([*array.sharding.device_set]), ("d",))
    return None


class _Group:
    """Arrays of which one program takes elements, on one mesh."""

    def __init__(
        self,
        mesh: Mesh,
        leaves: Sequence[int],
        sites: Sites,
        order: Order,
        arrays: Sequence[Any],
    ) -> None:
        self._mesh, self._sites = mesh, sites
        self.order = Order(leaves, order.dtypes, order.sizes)
        self.compiled: Future[Any] = Future()
        self._specs = [
            jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype, sharding=arrays[i].sharding)
            for i in leaves
        ]
        self._rows = PartitionSpec(mesh.axis_names)
        self._position = {device.id: n for n, device in enumerate(mesh.devices.flat)}
        # Where sites begin in what a device holds: alike for leaves that are cut alike.
        kinds: dict[Any, int] = {}
        self._kind_of = []
        for i in leaves:
            kind = (arrays[i].shape, getattr(arrays[i].sharding, "spec", None))
            self._kind_of.append(kinds.setdefault(kind, len(kinds)))
        self._offsets = np.zeros((len(sites.devices), len(kinds), _RANK), np.int32)
        for i, n in zip(leaves, self._kind_of, strict=True):
            held = {device.id: box for device, box in _held(arrays[i]).items()}
            for row, device in enumerate(sites.devices):
                start = sites.of(i).sites[device].relative_to(held[device].start).start
                self._offsets[row, n, : len(start)] = start

    def compile(self) -> None:
        """Compiles the program; what fails is raised by whoever uses it."""
        of, columns = self._sites.of, [self._sites.position(i) for i in self.order.leaves]

        def local(
            shards: Sequence[jax.Array], first: jax.Array, second: jax.Array, offsets: jax.Array
        ) -> list[dict[str, jax.Array]]:
            return [taken_of(shards, starts, offsets) for starts in (first, second)]

        def taken_of(
            shards: Sequence[jax.Array], starts: jax.Array, offsets: jax.Array
        ) -> dict[str, jax.Array]:
            by_dtype: dict[str, list[jax.Array]] = {}
            for n, (i, shard) in enumerate(zip(self.order.leaves, shards, strict=True)):
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
        if self._mesh.axis_names != ("d",) or self._mesh.size > 1:
            specs = [cast(NamedSharding, spec.sharding).spec for spec in self._specs]
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
                    for shape in (*[(len(self._sites.classes),)] * 2, self._offsets.shape[1:])
                ]
                self.compiled.set_result(program.lower(self._specs, *tables).compile())
        except BaseException as error:
            self.compiled.set_exception(error)

    @functools.cached_property
    def _placed_offsets(self) -> jax.Array:
        return self._placed(self._offsets)

    def _placed(self, rows: np.ndarray) -> jax.Array:
        """A row for each device, where it lies."""
        table = np.zeros((self._mesh.size, *rows.shape[1:]), rows.dtype)
        for row, device in zip(rows, self._sites.devices, strict=True):
            table[self._position[device]] = row
        sharding = NamedSharding(self._mesh, self._rows)
        return jax.make_array_from_callback(table.shape, sharding, lambda at: table[at])

    def dispatch(
        self, arrays: Sequence[Any], first: Starts, second: Starts
    ) -> list[Callable[[], Vectors]]:
        """Starts the program; returns what waits for the vectors of either sample."""
        given = [arrays[i] for i in self.order.leaves]
        with jax.enable_x64(True), jax.set_mesh(self._mesh):
            tables = self._placed(first), self._placed(second), self._placed_offsets
            outputs = self.compiled.result()(given, *tables)
        return [functools.partial(self._vectors, _by_device(each)) for each in outputs]

    def _vectors(self, shards: Mapping[str, Mapping[int, Any]]) -> Vectors:
        devices = self._sites.devices
        rows = {dtype: [np.asarray(x[d]) for d in devices] for dtype, x in shards.items()}
        return {dtype: x[0] if len(x) == 1 else np.concatenate(x) for dtype, x in rows.items()}


def _by_device(outputs: Mapping[str, jax.Array]) -> dict[str, dict[int, Any]]:
    """The rows of each data type by device, on their way to the host."""
    shards = {
        dtype: {shard.device.id: shard.data for shard in output.addressable_shards}
        for dtype, output in outputs.items()
    }
    for rows in shards.values():
        for row in rows.values():
            if transfer.on_accelerator(row):
                row.copy_to_host_async()
    return shards


_RANK = 32
"""Axes that an array may have."""


def _is_on_device(array: Any) -> bool:
    """Whether an array lies in the memory of devices, and not offloaded to the host."""
    if not isinstance(array, jax.Array):
        return False
    return not transfer.on_accelerator(array) or array.sharding.memory_kind in (None, "device")
