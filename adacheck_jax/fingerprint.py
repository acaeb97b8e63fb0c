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

Two engines give the same value: numpy on host memory (and on CPU devices, where XLA does not
vectorize integer reductions), XLA on accelerators.

Reference: D. Lemire, O. Kaser, "Strongly universal string hashing is fast", 2014 (multilinear
hashing); the weights come from SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from adacheck_jax import staging
from adacheck_jax.boxes import Box, grid
from adacheck_jax.sharding import layout_of_array

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_RUN = 1024
"""A weight is a product: one factor for the position within its run of 1024, one for the run."""
_WIDE = 256
"""Rows at least this long are contracted as they are; shorter ones a whole run at a time."""


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
    offsets = list(start or (0,) * block.ndim) + [0] * (words.ndim - block.ndim)
    total: np.ndarray = words.reshape(-1)
    for axis, (offset, length) in enumerate(zip(offsets, words.shape, strict=True)):
        total = _contract(total.reshape(length, -1), axis, offset)
    return int(total[0])


def _contract(rows: np.ndarray, axis: int, offset: int) -> np.ndarray:
    """Sums rows times their weights, modulo 2**64: shape (length, rest) to (rest,)."""
    length, rest = rows.shape
    head = -offset % _RUN
    run_count = (length - head) // _RUN
    if rest >= _WIDE or run_count < 2:
        return _weighted_sum(_weights(axis, offset, offset + length), rows)
    tail = head + run_count * _RUN
    first = (offset + head) // _RUN
    runs = _factors(axis, 1, first + run_count)[first:]
    body = _weighted_sum(runs, rows[head:tail].reshape(run_count, _RUN * rest))
    total = _weighted_sum(_factors(axis, 0, _RUN), body.reshape(_RUN, rest))
    for a, b in ((0, head), (tail, length)):
        total += _weighted_sum(_weights(axis, offset + a, offset + b), rows[a:b])
    return total


def _weighted_sum(weights: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.einsum("i,ij->j", weights, rows, dtype=np.uint64)


def combine(parts: Sequence[int]) -> int:
    """Adds up partial fingerprints."""
    return sum(parts) & _MASK


def of_arrays(arrays: Sequence[jax.Array]) -> jax.Array:
    """Fingerprints whole global arrays on their devices, without moving them.

    Dispatched asynchronously: the arrays may be donated as soon as this returns.

    Args:
        arrays: global arrays of any sharding, on one set of devices; no typed PRNG keys.

    Returns:
        uint32 array of shape (len(arrays), 2): low and high word of each fingerprint.
    """
    with jax.enable_x64(True):
        return _of_arrays(tuple(arrays))


def from_words(words: Any) -> list[int]:
    """Turns the result of :func:`of_arrays` into Python integers."""
    return [int(low) | int(high) << 32 for low, high in np.asarray(words)]


@jax.jit
def _of_arrays(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack([_of_array(array) for array in arrays])


def _of_array(array: jax.Array) -> jax.Array:
    words = _device_words(array)
    total = words.astype(jnp.uint64)
    for axis, length in enumerate(words.shape):
        position = jax.lax.iota(jnp.uint64, length)
        within = _mix(position % jnp.uint64(_RUN), axis, 0, jnp.uint64)
        weight = within * _mix(position // jnp.uint64(_RUN), axis, 1, jnp.uint64)
        total = total * weight.reshape(-1, *[1] * (words.ndim - axis - 1))
    total = jnp.sum(total, dtype=jnp.uint64)
    low = (total & jnp.uint64(0xFFFFFFFF)).astype(jnp.uint32)
    return jnp.stack([low, (total >> jnp.uint64(32)).astype(jnp.uint32)])


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


class Parts:
    """This process's part of the fingerprints of some arrays.

    Created where the arrays are alive; :meth:`sums` may be called when they are not. Arrays on
    accelerators are fingerprinted there, by one program dispatched here; all others on the host,
    from the picked boxes, when ``sums`` is called.

    Args:
        arrays: plain arrays by leaf index; in a multi-process program every process passes the
            same ones.
        picks: the boxes that this process accounts for; each box has one process.

    Attributes:
        blocks: the staged boxes of the arrays that are fingerprinted on the host.
    """

    def __init__(
        self, arrays: Mapping[int, Any], picks: Mapping[int, Sequence[staging.Pick]]
    ) -> None:
        groups: dict[frozenset[Any], list[int]] = {}
        for i, array in arrays.items():
            if staging.on_accelerator(array):  # one program has one set of devices
                groups.setdefault(frozenset(array.sharding.device_set), []).append(i)
        self._words = [(group, of_arrays([arrays[i] for i in group])) for group in groups.values()]
        on_host = {i: array for i, array in arrays.items() if not staging.on_accelerator(array)}
        self.blocks = staging.stage(on_host, picks)

    def sums(self) -> dict[int, int]:
        """Partial sums modulo 2**64 by leaf index; lets go of the blocks as it goes."""
        result = {}
        while self.blocks:
            index, blocks = self.blocks.popitem()
            result[index] = combine([of_block(block, box.start) for box, block in blocks.items()])
        first = jax.process_index() == 0  # every process has the totals; one accounts for them
        for group, words in self._words:
            totals = from_words(words)
            result |= {i: t if first else 0 for i, t in zip(group, totals, strict=True)}
        return result


def of_leaves(arrays: Mapping[int, Any]) -> dict[int, int]:
    """Whole-leaf fingerprints of plain arrays by leaf index; collective across processes."""
    process = jax.process_index()
    picks = {index: staging.picks_of(x, _accounted(x, process)) for index, x in arrays.items()}
    sums = Parts(arrays, picks).sums()
    if jax.process_count() == 1:
        return sums
    words = np.array([[sums[i] & 0xFFFFFFFF, sums[i] >> 32] for i in arrays], np.uint32)
    gathered = multihost_utils.process_allgather(words)
    columns = zip(*(from_words(each) for each in gathered), strict=True)
    return dict(zip(arrays, map(combine, columns), strict=True))


def _accounted(array: Any, process: int) -> list[Box]:
    """The boxes that one process accounts for: the first of those that hold each."""
    layout = layout_of_array(array)
    pairs = zip(grid(layout.cuts), layout.replicas, strict=True)
    return [box for box, holders in pairs if holders[0] == process]
