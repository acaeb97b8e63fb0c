"""Rows of unsigned integers that devices of some processes send to those of others.

One program for all processes, which each of them has to call. Unsigned integers arrive with the
bits that they had; elements of bfloat16 would not, on CPU devices. No program waits for another one
where it is called, also on CPU devices, where XLA runs those with little work in the calling
thread.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from adacheck_jax.device import sharding
from adacheck_jax.device.shard_sums import device_words

Lengths = tuple[tuple[int, int], ...]
"""Bytes of a word, and words of a row, for each row that a device sends at once."""
Round = tuple[tuple[int, int], ...]
"""Pairs of a sender and a receiver, each process once as either."""
Cut = tuple[tuple[int, int], ...]
"""First index and end along each axis of an array."""
_FEWEST = 256  # words of a row: operands of the work that has a program run behind the caller


@functools.cache
def lanes(platform: str) -> tuple[Mapping[int, int], np.ndarray]:
    """Lane of each device, by its id, and the devices that send, by process and lane.

    Each process has as many lanes.
    """
    found: dict[int, list[Any]] = {}
    for device in sorted(jax.devices(platform), key=lambda each: each.id):
        found.setdefault(device.process_index, []).append(device)
    count = min(map(len, found.values()))
    lane_of = {each.id: n % count for own in found.values() for n, each in enumerate(own)}
    return lane_of, np.array([own[:count] for _, own in sorted(found.items())])


def lengths_of(words: Mapping[int, int]) -> Lengths:
    """Rows for so many words, by the bytes of one."""
    return tuple((width, max(count, _FEWEST)) for width, count in sorted(words.items()))


class Sender:
    """Sends rows of all lanes, in some rounds.

    Args:
        platform: platform of the devices.
        rounds: pairs of processes, and the rows that each of their lanes sends.
    """

    def __init__(self, platform: str, rounds: Sequence[tuple[Round, Lengths]]) -> None:
        _, devices = lanes(platform)
        mesh, shape = Mesh(devices, ("process", "lane")), devices.shape
        self._own, self._shape = [*devices[jax.process_index()]], shape
        self._cut, self._rounds = NamedSharding(mesh, PartitionSpec("process", "lane")), rounds

        def send(rows: Sequence[Sequence[jax.Array]]) -> Any:
            sent = [
                [jax.lax.ppermute(row, "process", pairs) for row in each]
                for each, (pairs, _) in zip(rows, rounds, strict=True)
            ]
            return sent, _worked(rows[0][0])

        rows = [
            [
                jax.ShapeDtypeStruct((*shape, n), f"uint{8 * width}", sharding=self._cut)
                for width, n in lengths
            ]
            for _, lengths in rounds
        ]
        parts = self._cut.spec
        mapped = jax.shard_map(send, mesh=mesh, in_specs=(parts,), out_specs=(parts, parts))
        self._program = jax.jit(mapped).lower(rows).compile()

    def row(self, number: int, lane: int, parts: Sequence[tuple[Any, Cut]]) -> Sequence[jax.Array]:
        """The rows of one lane in a round: elements of arrays on single devices, and zeros."""
        device, arrays, lengths = self._own[lane], list[Any](), self._rounds[number][1]
        for array, _ in parts:
            is_here = array.devices() == {device} and sharding.in_device_memory(array)
            arrays.append(array if is_here else jax.device_put(array, device))
        if not arrays:
            return _zeros(device, lengths)
        return _packer(tuple(cut for _, cut in parts), lengths)(arrays)[0]

    def send(self, rows: Sequence[Sequence[Sequence[jax.Array]]]) -> Sequence[Any]:
        """Sends rows, by round and lane; collective, and does not wait.

        Returns:
            The rows that are received, by round, lane, and length.
        """
        placed = [
            [
                jax.make_array_from_single_device_arrays(
                    (*self._shape, n), self._cut, [each[k] for each in own]
                )
                for k, (_, n) in enumerate(lengths)
            ]
            for own, (_, lengths) in zip(rows, self._rounds, strict=True)
        ]
        received = self._program(placed)[0]
        return [[[_on(row, device) for row in each] for device in self._own] for each in received]


def _on(row: jax.Array, device: Any) -> jax.Array:
    """The row that lies on one device, on its way to the host."""
    found = next(each.data for each in row.addressable_shards if each.device == device)
    found.copy_to_host_async()
    return found


def _worked(row: jax.Array) -> jax.Array:
    """Some operations, without which XLA:CPU runs a program in the calling thread."""
    square = row.reshape(-1)[:_FEWEST].astype(jnp.float32).reshape(16, 16)
    return (square @ square)[None]


@functools.lru_cache(maxsize=64)
def _packer(cuts: tuple[Cut, ...], lengths: Lengths) -> Any:
    def pack(arrays: Sequence[jax.Array]) -> Any:
        words: dict[int, list[jax.Array]] = {width: [] for width, _ in lengths}
        for array, cut in zip(arrays, cuts, strict=True):
            at = tuple(slice(*each) for each in cut)
            found = device_words(array[at] if at else array).reshape(-1)
            words[found.dtype.itemsize].append(found)
        rows = []
        for width, length in lengths:
            row = jnp.concatenate([*words[width], jnp.zeros(0, f"uint{8 * width}")])
            rows.append(jnp.pad(row, (0, length - row.size))[None, None])
        return rows, _worked(rows[0])

    return jax.jit(pack)


@functools.lru_cache(maxsize=64)
def _zeros(device: Any, lengths: Lengths) -> Sequence[jax.Array]:
    rows = [np.zeros((1, 1, length), f"uint{8 * width}") for width, length in lengths]
    return jax.device_put(rows, device)
