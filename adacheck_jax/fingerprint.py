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

Two engines give the same value: compiled loops on host memory (and on CPU devices, where XLA does
not vectorize integer reductions), XLA on accelerators. Both give one partial sum a *shard*: the
leaf's fingerprint takes one replica of each box, and the sums of the others are there to be
compared.

Reference: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014 (multilinear
hashing); the weights come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax import kernels, staging
from adacheck_jax.boxes import Box, grid
from adacheck_jax.sharding import Holder, has_replicas, holders_of, is_local, layout_of_array

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_RUN = 1024
"""A weight is a product: one factor for the position within its run of 1024, one for the run."""


@functools.lru_cache(maxsize=256)
def _factors(axis: int, level: int, count: int) -> np.ndarray:
    """Odd 64-bit factors 0 to ``count`` of an axis: level 0 within a run, level 1 of the runs."""
    with np.errstate(over="ignore"):
        return _mix(np.arange(count, dtype=np.uint64), axis, level, np.uint64)


def _mix(position: Any, axis: int, level: int, u64: Any) -> Any:
    """SplitMix64 of each position, made odd; the same code serves numpy and jax.numpy."""
    z = position * u64(_GOLDEN) + u64((2 * axis + level + 1) * 0xD1342543DE82EF95 & _MASK)
    z = (z ^ (z >> u64(30))) * u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u64(27))) * u64(0x94D049BB133111EB)
    return (z ^ (z >> u64(31))) | u64(1)


def _weights(axis: int, start: int, stop: int) -> np.ndarray:
    """The weights of positions ``start`` to ``stop`` along an axis."""
    position = np.arange(start, stop)
    within, runs = _factors(axis, 0, _RUN), _factors(axis, 1, -(-stop // _RUN))
    return within[position % _RUN] * runs[position // _RUN]


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
    # Rows of at least some length: short last axes are taken together with the one before.
    axis, width = words.ndim - 1, 1
    while axis and words.shape[axis] * width < _MIN_COLUMNS:
        width *= words.shape[axis]
        axis -= 1
    rows = _row_weights(0, starts[:axis], words.shape[:axis])
    within = _within(axis, starts[axis + 1 :], words.shape[axis + 1 :])
    offset, length = starts[axis] * width, words.shape[axis] * width
    runs = _factors(axis, 1, -(-(offset + length) // within.size))
    words = np.ascontiguousarray(words).reshape(rows.size, length)
    if rows.size >= _STREAMS or length < _STREAMS * within.size:
        return kernels.weighted_sum(words, rows, offset, within, runs)
    # Few long rows: their whole runs as rows of their own.
    head = -offset % within.size
    count = (length - head) // within.size
    tail = head + count * within.size
    total = 0
    for a, b in ((0, head), (tail, length)):
        end = np.ascontiguousarray(words[:, a:b])
        total += kernels.weighted_sum(end, rows, offset + a, within, runs)
    own = np.ascontiguousarray(runs[(offset + head) // within.size :][:count])
    for row, weight in zip(words, rows, strict=True):
        body = row[head:tail].reshape(count, within.size)
        total += int(weight) * kernels.weighted_sum(body, own, 0, within, np.ones(1, np.uint64))
    return total & _MASK


_STREAMS = 4
"""Rows that the kernel reads at once."""
_MIN_COLUMNS = 64


@functools.lru_cache(maxsize=256)
def _within(axis: int, starts: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """Weights within a run of an axis, each times those of the short axes after it."""
    weights = np.multiply.outer(_factors(axis, 0, _RUN), _row_weights(axis + 1, starts, lengths))
    return weights.reshape(-1)


def _row_weights(axis: int, starts: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    """The products of the weights of some successive axes, from one on; row-major."""
    few = math.prod(lengths) <= _KEPT_ROWS
    return (_kept_row_weights if few else _kept_row_weights.__wrapped__)(axis, starts, lengths)


_KEPT_ROWS = 1 << 13


@functools.lru_cache(maxsize=512)
def _kept_row_weights(first: int, starts: tuple[int, ...], lengths: tuple[int, ...]) -> np.ndarray:
    weights = np.ones(1, np.uint64)
    for axis, (start, length) in enumerate(zip(starts, lengths, strict=True), first):
        weights = np.multiply.outer(weights, _weights(axis, start, start + length)).reshape(-1)
    return weights


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


class DeviceSums:
    """The partial sum of every shard of some arrays, computed where the shard lies.

    One program for all arrays on one mesh, without communication: each device sums up its own
    shards, replicas included. Dispatched when this is created: the arrays may be donated at once.

    Args:
        arrays: plain arrays by leaf index, on devices; in a multi-process program every process
            passes the same ones.
    """

    def __init__(self, arrays: Mapping[int, jax.Array]) -> None:
        on_mesh: dict[Mesh, list[int]] = {}
        on_device: dict[Any, list[tuple[int, jax.Array, np.ndarray]]] = {}
        for i, array in arrays.items():
            if isinstance(array.sharding, NamedSharding):
                on_mesh.setdefault(cast(Mesh, array.sharding.mesh), []).append(i)
                continue
            # Any other sharding: its shards need not be of one shape, so each goes by itself.
            for shard in array.addressable_shards:
                start = Box.from_slices(shard.index or (), array.shape).start
                entry = (i, shard.data, np.array(start, np.uint64))
                on_device.setdefault(shard.device, []).append(entry)
        self._words: list[tuple[Sequence[int], jax.Array]] = []
        # The caller may have set a mesh, which need not be the one that an array lies on.
        for mesh, group in on_mesh.items():
            placed = [arrays[i] for i in group]
            specs = tuple(cast(NamedSharding, each.sharding).spec for each in placed)
            with jax.enable_x64(True), jax.set_mesh(mesh):
                self._words.append((group, _mesh_program(mesh, specs)(placed)))
        for device, entries in on_device.items():
            group, shards, starts = zip(*entries, strict=True)
            with jax.enable_x64(True), jax.set_mesh(Mesh(np.array([device]), ("d",))):
                self._words.append((group, _of_shards(shards, starts)))

    def sums(self) -> dict[int, dict[int, int]]:
        """Partial sums modulo 2**64 of the addressable shards: leaf index to device id to sum."""
        result: dict[int, dict[int, int]] = {}
        for group, words in self._words:
            for shard in words.addressable_shards:  # shape (1, len(group), 2)
                for i, total in zip(group, from_words(np.asarray(shard.data)[0]), strict=True):
                    result.setdefault(i, {})[shard.device.id] = total
        return result


@functools.lru_cache(maxsize=64)
def _mesh_program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """Arrays on one mesh, one a spec, to uint32 of shape (devices, arrays, 2), cut by device."""

    def local(shards: Sequence[jax.Array]) -> jax.Array:
        starts = [
            [_first_index(names, n) for names, n in zip(spec, shard.shape, strict=False)]
            for spec, shard in zip(specs, shards, strict=True)
        ]
        return _stack_sums(shards, starts)[None]

    rows = PartitionSpec(mesh.axis_names)
    # What differs on replicas is the very thing that is looked for, so nothing is declared equal.
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(list(specs),), out_specs=rows, check_vma=False)
    )


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
        within = _mix(position % jnp.uint64(_RUN), axis, 0, jnp.uint64)
        weight = within * _mix(position // jnp.uint64(_RUN), axis, 1, jnp.uint64)
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
    accelerators are fingerprinted there, by programs dispatched here; all others on the host,
    from the picked boxes, when ``sums`` is called.

    Args:
        arrays: plain arrays by leaf index; in a multi-process program every process passes the
            same ones.
        picks: the boxes that this process accounts for; each box has one process.
        whole_picks: the same for arrays that are fingerprinted on their devices, where that takes
            whole shards: a box of ``picks`` may be a piece of one.
        every_replica: also fingerprint the replicas that are not picked. Free on accelerators; on
            the host it costs a pass over each.

    Attributes:
        blocks: the staged boxes of the arrays that are fingerprinted on the host.
        replicas: what ``sums`` found of each addressable shard of arrays that have replicas; empty
            before, and where ``every_replica`` was not asked for.
    """

    def __init__(
        self,
        arrays: Mapping[int, Any],
        picks: Mapping[int, Sequence[staging.Pick]],
        whole_picks: Mapping[int, Sequence[staging.Pick]] | None = None,
        *,
        every_replica: bool = False,
    ) -> None:
        on_device = {i: array for i, array in arrays.items() if hashes_on_device(array)}
        on_host = {i: array for i, array in arrays.items() if i not in on_device}
        self._device = DeviceSums(on_device)
        self._placed = {i: (array.sharding, array.shape) for i, array in on_device.items()}
        whole_picks = whole_picks or picks
        self._picked = {i: [position for _, position, _ in whole_picks[i]] for i in on_device}
        self.blocks = staging.stage(on_host, picks)
        self._host: list[_HostShard] = []
        self._every_replica = every_replica
        self.replicas: ReplicaSums = {}
        if every_replica:
            self._host = _host_shards(on_host, picks)

    def sums(self) -> dict[int, int]:
        """Partial sums modulo 2**64 by leaf index; lets go of the blocks as it goes."""
        result = {}
        picked: dict[int, dict[Box, int]] = {}
        while self.blocks:
            index, blocks = self.blocks.popitem()
            picked[index] = {box: of_block(block, box.start) for box, block in blocks.items()}
            result[index] = combine(list(picked[index].values()))
        while self._host:
            shard = self._host.pop()
            if shard.data is None:  # a pick: its sum is known
                total = picked[shard.leaf][shard.box]
            else:
                total = of_block(shard.data, shard.box.start)
            boxes = self.replicas.setdefault(shard.leaf, {})
            boxes.setdefault(shard.box, {})[shard.holder] = total
        for i, by_device in self._device.sums().items():
            sharding, shape = self._placed[i]
            devices = list(sharding.addressable_devices_indices_map(shape))  # as shards are ordered
            # Of replicas the very one that is staged and written: they may differ.
            result[i] = combine([by_device[devices[position].id] for position in self._picked[i]])
            if self._every_replica and has_replicas(sharding, shape):
                for box, holders in holders_of(sharding, shape).items():
                    here = {h: by_device[h.device] for h in holders if h.device in by_device}
                    self.replicas.setdefault(i, {})[box] = here
        return result


def hashes_on_device(array: Any) -> bool:
    """Whether an array is fingerprinted where it lies: in the memory of an accelerator."""
    if not staging.on_accelerator(array):
        return False
    return array.sharding.memory_kind in (None, "device")  # else offloaded to the host already


@dataclass(frozen=True, slots=True)
class _HostShard:
    """A shard to fingerprint on the host; ``data`` is None where its box is picked from it."""

    leaf: int
    box: Box
    holder: Holder
    data: np.ndarray | None


def _host_shards(
    arrays: Mapping[int, Any], picks: Mapping[int, Sequence[staging.Pick]]
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
            found.append((i, box, holder, None if is_picked else shard.data))
    for _, _, _, data in found:
        if data is not None and staging.on_accelerator(data):
            data.copy_to_host_async()
    # On CPU devices a view, which makes XLA leave the buffer alone if the caller donates it.
    return [
        _HostShard(i, box, holder, None if data is None else np.asarray(data))
        for i, box, holder, data in found
    ]


def of_leaves(arrays: Mapping[int, Any]) -> dict[int, int]:
    """Whole-leaf fingerprints of plain arrays by leaf index; collective across processes.

    Of arrays that every process has for itself each gets the fingerprint of its own.
    """
    process = jax.process_index()
    local = {index for index, array in arrays.items() if is_local(array)}
    picks = {
        index: staging.picks_of(x, accounted(x, 0 if index in local else process))
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
