"""Rows of bytes that processes give each other over their devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_STEPS = 8
"""Row lengths between two powers of two: each length is compiled for."""


def gather(row: np.ndarray, holders: tuple[int, ...]) -> np.ndarray:
    """Give every process the rows of all. Collective: not for background threads.

    Args:
        row: bytes of this process, uint8 of shape (n,), the same n in all processes; it must not
            change until this returns.
        holders: the processes that call this, ascending, this one among them; in the same order
            of calls.

    Returns:
        Bytes of shape (len(holders), n) in the order of the holders; they must not be changed.
    """
    length = padded_length(row.size)
    if length != row.size:
        row = np.concatenate([row, np.zeros(length - row.size, np.uint8)])
    mesh = _mesh(holders)
    mine = [each for each in mesh.devices.flat if each.process_index == jax.process_index()]
    placed = jax.device_put(row[None], mine[0])
    cut = NamedSharding(mesh, PartitionSpec("process"))
    rows = jax.make_array_from_single_device_arrays((len(holders), length), cut, [placed])
    return np.asarray(_gatherer(mesh)(rows).addressable_data(0))


def padded_length(nbytes: int) -> int:
    """Length of the rows that are exchanged for rows of so many bytes: one of few lengths."""
    unit = max(64, 1 << max(0, nbytes.bit_length() - _STEPS.bit_length()))
    return -(-nbytes // unit) * unit


@functools.lru_cache(maxsize=64)
def _mesh(holders: tuple[int, ...]) -> Mesh:
    """One device of each process."""
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    return Mesh(np.array([first[process] for process in holders]), ("process",))


@functools.lru_cache(maxsize=64)
def _gatherer(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))
