"""Sharding-invariant fingerprints of a leaf's bits.

The fingerprint of an array is a multilinear hash modulo 2**64 of its elements' bit patterns:

    F = sum over all indices (i, j, ...) of  W0[i] * W1[j] * ... * bits[i, j, ...]

with odd 64-bit weights, one vector an axis. A sum does not depend on how the array is cut into
shards, so the fingerprint taken on one mesh can be compared on any other, and partial sums of
shards simply add up. Elements wider than 32 bits count as several 32-bit words along a further
axis. A weight is itself the product of a factor for the position within a run of 1024 and one for
the run, so that long axes need short tables. Because a word has 32 bits and the modulus 64, changed
low bits are missed with a probability of about 2**-64 and the worst pattern, a box of flipped sign
bits, with about 2**-20; a modulus of 2**32 would miss every even number of flipped sign bits.
The weights are fixed by the format: this guards against accidents, not against an adversary.

Two engines give the same value: compiled loops on host memory and on CPU devices (where XLA does
not vectorize integer reductions), XLA on accelerators. Both give one partial sum a *shard*: the
leaf's fingerprint takes one replica of each box, and the sums of the others are there to be
compared.

Reference: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014 (multilinear
hashing); the weights come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import transfer, xla_call
from adacheck_jax.device.sharding import Holder, has_replicas, holders_of, is_local, layout_of_array
from adacheck_jax.format import byte_loops
from adacheck_jax.format.boxes import Blocks, Box, grid

_MASK = 2**64 - 1


def _factor(position: jax.Array, axis: int, level: int) -> jax.Array:
    """:func:`kernels.factor` of many positions, as XLA computes it."""
    u64 = jnp.uint64
    z = position * u64(0x9E3779B97F4A7C15)
    z = z + u64((2 * axis + level + 1) * 0xD1342543DE82EF95 & _MASK)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return (z ^ (z >> u64(31))) | u64(1)


def words_of(array: np.ndarray) -> np.ndarray:
    """Views an array's bits as unsigned words of at most 32 bits.

    Args:
        array: of any element type that JAX has.

    Returns:
        An array of uint8, uint16 or uint32; one axis longer where elements are wider than 32 bits.
    """
    dtype = array.dtype
    if dtype == np.bool_:
        return array.view(np.uint8)
    if dtype.kind == "V" and "int" in dtype.name:  # int4, uint4, ...: one sign-extended byte each
        return array.astype(np.int8 if dtype.name.startswith("int") else np.uint8).view(np.uint8)
    if dtype.itemsize <= 4:
        return array.view(np.dtype(f"u{dtype.itemsize}"))
    words = np.ascontiguousarray(array).reshape(*array.shape, 1).view(np.uint32)
    return words.reshape(*array.shape, dtype.itemsize // 4)


def of_block(block: np.ndarray, start: Sequence[int] | None = None) -> int:
    """The part that one block contributes to its leaf's fingerprint.

    Args:
        block: elements of one box.
        start: the box's first index in the leaf; None for a whole leaf.

    Returns:
        A partial sum modulo 2**64. The parts of boxes that tile the leaf add up to the whole.
    """
    words = words_of(block)
    if words.size == 0:
        return 0
    if words.ndim == 0:
        return int(words)
    starts = (*(start or (0,) * block.ndim), *(0,) * (words.ndim - block.ndim))
    return byte_loops.multilinear(np.ascontiguousarray(words), starts)


def combine(parts: Sequence[int]) -> int:
    """Adds up partial fingerprints."""
    return sum(parts) & _MASK


def from_words(words: Any) -> list[int]:
    """Turns rows of low and high words, shape (n, 2), into Python integers."""
    return [int(low) | int(high) << 32 for low, high in np.asarray(words)]


def to_words(sums: Sequence[int]) -> np.ndarray:
    """Turns sums into rows of low and high words, uint32 of shape (len(sums), 2)."""
    words = [[each & 0xFFFFFFFF, each >> 32] for each in sums]
    return np.array(words, np.uint32).reshape(len(sums), 2)


@dataclass(frozen=True, slots=True)
class _Group:
    """Arrays whose shards one program sums up.

    Attributes:
        indices: of the leaves.
        positions: of the shard of each of them, None where the array is one; none at all for
            arrays over a whole mesh.
        program: from the list of arrays, or of shards, to uint32 of shape (devices, arrays, 2).
    """

    indices: tuple[int, ...]
    positions: tuple[int | None, ...] | None
    program: Callable[[Sequence[jax.Array]], jax.Array]


class Summing:
    """How the partial sum of every shard of some arrays is computed where the shard lies.

    One program for all arrays on one mesh, without communication: each device sums up its own
    shards, replicas included. Made once for all arrays of these shapes and shardings.

    Args:
        arrays: plain arrays by leaf index, on devices; in a multi-process program every process
            passes alike ones.

    Attributes:
        indices: of these arrays.
        placed: sharding and shape of each.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        self.indices = tuple(arrays)
        self.placed = {i: (array.sharding, array.shape) for i, array in arrays.items()}
        on_mesh: dict[Mesh, list[int]] = {}
        on_device: dict[Any, list[tuple[int, int | None, Box, int]]] = {}
        for i, array in arrays.items():
            if isinstance(array.sharding, NamedSharding):
                on_mesh.setdefault(cast(Mesh, array.sharding.mesh), []).append(i)
                continue
            # Any other sharding: its shards need not be of one shape, so each goes by itself.
            is_whole = array.is_fully_addressable and len(array.sharding.device_set) == 1
            for position, shard in enumerate(array.addressable_shards):
                box = Box.from_slices(shard.index or (), array.shape)
                entry = (i, None if is_whole else position, box, array.dtype.itemsize)
                on_device.setdefault(shard.device, []).append(entry)
        self._groups: list[_Group] = []
        for mesh, group in on_mesh.items():
            kinds = tuple(
                (
                    cast(NamedSharding, arrays[i].sharding).spec,
                    arrays[i].shape,
                    arrays[i].dtype.itemsize,
                )
                for i in group
            )
            calls_loops = _calls_loops(mesh.devices.flat[0], [arrays[i].dtype for i in group])
            program = _mesh_program(mesh, kinds, calls_loops)
            self._groups.append(_Group(tuple(group), None, program))
        for device, entries in on_device.items():
            group, positions, boxes, widths = zip(*entries, strict=True)
            calls_loops = _calls_loops(device, [arrays[i].dtype for i in group])
            program = _device_program(device, boxes, widths, calls_loops)
            self._groups.append(_Group(group, positions, program))

    def dispatch(self, arrays: Mapping[int, jax.Array]) -> DeviceSums:
        """Starts to sum up; the arrays may be donated at once."""
        words = []
        for group in self._groups:
            given = [arrays[i] for i in group.indices]
            if group.positions is not None:
                given = [
                    x if n is None else x.addressable_shards[n].data
                    for x, n in zip(given, group.positions, strict=True)
                ]
            words.append((group.indices, group.program(given)))
        return DeviceSums(words)


@dataclass(frozen=True, slots=True)
class DeviceSums:
    """Partial sums that devices compute: for each group of leaves the words of every shard."""

    words: Sequence[tuple[Sequence[int], jax.Array]]

    def sums(self) -> dict[int, dict[int, int]]:
        """Partial sums modulo 2**64 of the addressable shards: leaf index to device id to sum."""
        result: dict[int, dict[int, int]] = {}
        for group, words in self.words:
            for shard in words.addressable_shards:  # shape (1, len(group), 2)
                for i, total in zip(group, from_words(np.asarray(shard.data)[0]), strict=True):
                    result.setdefault(i, {})[shard.device.id] = total
        return result


_Kinds = tuple[tuple[PartitionSpec, tuple[int, ...], int], ...]
"""For each array its spec, its shape, and the width of its elements in bytes."""


@functools.lru_cache(maxsize=64)
def _mesh_program(
    mesh: Mesh, kinds: _Kinds, calls_loops: bool
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Sums up arrays on one mesh; what comes out is cut by device."""
    rows = PartitionSpec(mesh.axis_names)
    specs = [spec for spec, _, _ in kinds]
    # What differs on replicas is the very thing that is looked for, so nothing is declared equal.
    mapped = functools.partial(jax.shard_map, mesh=mesh, out_specs=rows, check_vma=False)
    if calls_loops:
        sharding = NamedSharding(mesh, rows)
        table = _mesh_table(sharding, kinds)

        def call(shards: Sequence[jax.Array], own: jax.Array) -> jax.Array:
            return xla_call.sums(shards, own[0])[None]

        jitted: Any = jax.jit(mapped(call, in_specs=(specs, rows)))
        return _on(mesh, lambda arrays: jitted(arrays, table))

    def local(shards: Sequence[jax.Array]) -> jax.Array:
        starts = [
            [_first_index(names, n) for names, n in zip(spec, shard.shape, strict=False)]
            for spec, shard in zip(specs, shards, strict=True)
        ]
        return _stack_sums(shards, starts)[None]

    return _on(mesh, jax.jit(mapped(local, in_specs=(specs,))))


def _on(mesh: Mesh, program: Any) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Runs a program with 64-bit types, on a mesh that need not be the one that the caller set."""

    def run(arrays: Sequence[jax.Array]) -> jax.Array:
        with jax.enable_x64(True), jax.set_mesh(mesh):
            return program(arrays)

    return run


def _mesh_table(sharding: NamedSharding, kinds: _Kinds) -> jax.Array:
    """What the loops have to know of the shards on each device of a mesh."""
    widths = [width for _, _, width in kinds]
    boxes: dict[Any, list[Box]] = {}
    for spec, shape, _ in kinds:
        indices = NamedSharding(cast(Mesh, sharding.mesh), spec).devices_indices_map(shape)
        for device, index in indices.items():
            boxes.setdefault(device, []).append(Box.from_slices(index or (), shape))
    devices: list[Any] = list(cast(Mesh, sharding.mesh).devices.flat)
    tables = {
        device: xla_call.table_of([box.start for box in boxes[device]], widths)
        for device in devices
        if device.process_index == jax.process_index()
    }
    one = next(iter(tables.values()))
    return jax.make_array_from_callback(
        (len(devices), *one.shape),
        sharding,
        lambda index: tables[devices[_start_of(index)]][None],
    )


def _start_of(index: Any) -> int:
    return index[0].start or 0


def _device_program(
    device: Any, boxes: Sequence[Box], widths: Sequence[int], calls_loops: bool
) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Sums up shards on one device, each of its own box."""
    starts = [box.start for box in boxes]
    if calls_loops:
        table = jax.device_put(xla_call.table_of(starts, widths), device)
        return _on(Mesh(np.array([device]), ("d",)), lambda shards: _call_of_shards(shards, table))
    with jax.enable_x64(True):
        placed = [jax.device_put(np.array(start, np.uint64), device) for start in starts]
    return _on(Mesh(np.array([device]), ("d",)), lambda shards: _of_shards(shards, placed))


@jax.jit
def _call_of_shards(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    return xla_call.sums(shards, table)[None]


def _calls_loops(device: Any, dtypes: Sequence[Any]) -> bool:
    return device.platform == "cpu" and xla_call.is_ready() and not any(map(_is_narrow, dtypes))


def _first_index(names: Any, length: int) -> Any:
    """Where a device's shard starts along an axis that is cut over some mesh axes."""
    if not names:
        return jnp.uint64(0)
    return jax.lax.axis_index(names).astype(jnp.uint64) * jnp.uint64(length)


@jax.jit
def _of_shards(shards: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
    return _stack_sums(shards, starts)[None]


def _stack_sums(shards: Sequence[jax.Array], starts: Sequence[Any]) -> jax.Array:
    sums = [_of_shard(shard, start) for shard, start in zip(shards, starts, strict=True)]
    total = jnp.stack(sums)
    low = (total & jnp.uint64(0xFFFFFFFF)).astype(jnp.uint32)
    return jnp.stack([low, (total >> jnp.uint64(32)).astype(jnp.uint32)], axis=-1)


def _of_shard(shard: jax.Array, start: Sequence[Any]) -> jax.Array:
    """The partial sum of one shard; axes past the end of ``start`` start at zero."""
    words = _device_words(shard)
    total = words.astype(jnp.uint64)
    for axis, length in enumerate(words.shape):
        position = jax.lax.iota(jnp.uint64, length)
        if axis < len(start):
            position = position + start[axis]
        run = jnp.uint64(byte_loops.RUN)
        weight = _factor(position % run, axis, 0) * _factor(position // run, axis, 1)
        total = total * weight.reshape(-1, *[1] * (words.ndim - axis - 1))
    return jnp.sum(total, dtype=jnp.uint64)


def _device_words(array: jax.Array) -> jax.Array:
    dtype = array.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
        words = jax.lax.bitcast_convert_type(array, jnp.uint32)
        return words.reshape(*array.shape[:-1], dtype.itemsize // 4)
    if dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        signed = jnp.issubdtype(dtype, jnp.signedinteger)
        return array.astype(jnp.int8 if signed else jnp.uint8).view(jnp.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint4).astype(jnp.uint8)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, unsigned)


ReplicaSums = dict[int, dict[Box, dict[Holder, int]]]
"""Leaf index to box to device to the partial sum of the shard that the device holds."""


class Parts:
    """This process's part of the fingerprints of some arrays.

    Created where the arrays are alive; :meth:`sums` may be called when they are not. Arrays on
    devices are fingerprinted there, by programs dispatched here; all others on the host, from
    their staged boxes, when ``sums`` is called.

    Args:
        arrays: plain arrays by leaf index; in a multi-process program every process passes the
            same ones.
        picks: the boxes that this process accounts for; each box has one process.
        whole_picks: the same for arrays that are fingerprinted on their devices, where that takes
            whole shards: a box of ``picks`` may be a piece of one.
        every_replica: also fingerprint the replicas that are not picked. Free on accelerators; on
            the host it costs a pass over each.
        staged: the picked boxes of arrays that are fingerprinted on the host, as far as somebody
            else has staged them.
        owned: whether nobody donates the arrays, so that nothing is waited for here.
        summing: of the arrays that are fingerprinted on devices, if it is known from others like
            them.

    Attributes:
        replicas: what ``sums`` found of each addressable shard of arrays that have replicas; empty
            before, and where ``every_replica`` was not asked for.
    """

    def __init__(
        self,
        arrays: Mapping[int, Any],
        picks: Mapping[int, Sequence[transfer.Pick]],
        whole_picks: Mapping[int, Sequence[transfer.Pick]] | None = None,
        *,
        every_replica: bool = False,
        staged: Mapping[int, Blocks] | None = None,
        owned: bool = False,
        summing: Summing | None = None,
    ) -> None:
        summing = summing or Summing({i: x for i, x in arrays.items() if hashes_on_device(x)})
        self._device, self._placed = summing.dispatch(arrays), summing.placed
        whole_picks = whole_picks or picks
        self._picked = {i: whole_picks[i] for i in self._placed}
        on_host = {i: array for i, array in arrays.items() if i not in self._placed}
        self._elsewhere = {i: staged for i in on_host if staged is not None and i in staged}
        rest = {i: array for i, array in on_host.items() if i not in self._elsewhere}
        self._staged = transfer.Staged(rest, picks)
        self._host: list[_HostShard] = []
        self._lock = threading.Lock()
        self._every_replica = every_replica
        self.replicas: ReplicaSums = {}
        if every_replica:
            self._host = _host_shards(on_host, picks)
        if not owned:
            self.wait()

    @property
    def holds_blocks(self) -> bool:
        """Whether something is fingerprinted on the host, from blocks that are held for it."""
        return bool(self._staged or self._elsewhere or self._host)

    def wait(self) -> None:
        """Waits until the arrays may be donated."""
        self._staged.wait()
        with self._lock:
            for shard in self._host:
                shard.wait()

    def sums(self) -> dict[int, int]:
        """Partial sums modulo 2**64 by leaf index; lets go of the blocks as it goes."""
        result = {}
        picked: dict[int, dict[Box, int]] = {}
        while self._staged or self._elsewhere:
            if self._staged:
                index, blocks = self._staged.popitem()
            else:
                index, staged = self._elsewhere.popitem()
                blocks = staged[index]
            picked[index] = {box: of_block(block, box.start) for box, block in blocks.items()}
            result[index] = combine(list(picked[index].values()))
        while self._host:
            with self._lock:  # it is on the host before nobody waits for it any more
                data, shard = self._host[-1].wait(), self._host.pop()
            if data is None:  # a pick: its sum is known
                total = picked[shard.leaf][shard.box]
            else:
                total = of_block(data, shard.box.start)
            boxes = self.replicas.setdefault(shard.leaf, {})
            boxes.setdefault(shard.box, {})[shard.holder] = total
        for i, by_device in self._device.sums().items():
            sharding, shape = self._placed[i]
            devices = list(sharding.addressable_devices_indices_map(shape))  # as shards are ordered
            # Of replicas the very one that is staged and written: they may differ.
            positions = [position or 0 for _, position, _ in self._picked[i]]
            result[i] = combine([by_device[devices[position].id] for position in positions])
            if self._every_replica and has_replicas(sharding, shape):
                for box, holders in holders_of(sharding, shape).items():
                    here = {h: by_device[h.device] for h in holders if h.device in by_device}
                    self.replicas.setdefault(i, {})[box] = here
        return result


def hashes_on_device(array: Any) -> bool:
    """Whether an array is fingerprinted where it lies: in the memory of a device."""
    if not isinstance(array, jax.Array):
        return False
    if transfer.on_accelerator(array):
        return array.sharding.memory_kind in (None, "device")  # else offloaded to the host already
    return xla_call.is_ready() and array.ndim < byte_loops.MAX_RANK and not _is_narrow(array.dtype)


@functools.cache
def _is_narrow(dtype: Any) -> bool:
    """Whether elements have less than a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits < 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


@dataclass(slots=True)
class _HostShard:
    """A shard to fingerprint on the host; ``data`` is None where its box is picked from it."""

    leaf: int
    box: Box
    holder: Holder
    data: Any

    def wait(self) -> Any:
        """Waits for the data; on CPU devices a view, which makes XLA leave the buffer alone."""
        self.data = None if self.data is None else np.asarray(self.data)
        return self.data


def _host_shards(
    arrays: Mapping[int, Any], picks: Mapping[int, Sequence[transfer.Pick]]
) -> list[_HostShard]:
    """All addressable shards of those arrays that have replicas, none of them twice."""
    found = []
    for i, array in arrays.items():
        if not isinstance(array, jax.Array) or not has_replicas(array.sharding, array.shape):
            continue
        whole = {position: box for box, position, _ in picks[i]}
        places = {
            each.device: (box, each)
            for box, holders in holders_of(array.sharding, array.shape).items()
            for each in holders
        }
        for position, shard in enumerate(array.addressable_shards):
            box, holder = places[shard.device.id]
            is_picked = whole.get(position) == box
            found.append(_HostShard(i, box, holder, None if is_picked else shard.data))
    for each in found:
        if each.data is not None and transfer.on_accelerator(each.data):
            each.data.copy_to_host_async()
    return found


def of_leaves(arrays: Mapping[int, Any]) -> dict[int, int]:
    """Whole-leaf fingerprints of plain arrays by leaf index; collective across processes.

    Of arrays that every process has for itself each gets the fingerprint of its own.
    """
    process = jax.process_index()
    local = {index for index, array in arrays.items() if is_local(array)}
    picks = {
        index: transfer.picks_of(x, accounted(x, 0 if index in local else process))
        for index, x in arrays.items()
    }
    sums = Parts(arrays, picks).sums()
    if jax.process_count() == 1:
        return sums
    own = {index: sums[index] for index in local}
    gathered = multihost_utils.process_allgather(to_words([sums[i] for i in arrays]))
    columns = zip(*(from_words(each) for each in gathered), strict=True)
    return dict(zip(arrays, map(combine, columns), strict=True)) | own


def accounted(array: Any, process: int) -> list[Box]:
    """The shards' boxes that one process accounts for: the first of those that hold each."""
    layout = layout_of_array(array)
    pairs = zip(grid(layout.cuts), layout.replicas, strict=True)
    return [box for box, holders in pairs if holders[0] == process]
