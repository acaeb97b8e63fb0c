"""The fingerprint's loops as an operation of XLA programs on CPU devices.

XLA:CPU does not vectorize integer reductions and takes about 15 times as long as these loops. So a
program on CPU devices calls them through XLA's foreign function interface
(https://openxla.org/xla/custom_call). Nothing is copied, no Python runs, and XLA orders the call
with the steps before and after it, as it does on an accelerator.

The handler is compiled in a background thread. Until it works (:func:`is_ready`), and where it
does not, arrays are fingerprinted from host memory.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

from adacheck_jax.format import byte_loops, fingerprint

_log = logging.getLogger(__name__)

_TARGET = "adacheck_fingerprints"
MAX_RANK = 16
"""Axes of an array in memory that the handler takes, with that of the words of wide elements."""
_MIN_ROWS = 32


def table_of(starts: Sequence[Sequence[int]], element_bytes: Sequence[int]) -> np.ndarray:
    """Table of the shards' positions and widths that :func:`sums` takes.

    Args:
        starts: first index of each shard in its array.
        element_bytes: width of each shard's elements.

    Returns:
        uint32 of shape (rows, MAX_RANK + 1, 2), one row a shard and perhaps some more: 64-bit
        numbers, in a type that JAX always has.
    """
    table = np.zeros((max(len(starts), _MIN_ROWS), MAX_RANK + 1), np.int64)
    for row, start, width in zip(table, starts, element_bytes, strict=False):
        row[: 1 + len(start)] = width, *start
    return table.view(np.uint32).reshape(*table.shape, 2)


def sums(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    """Partial sums of shards; to be traced into a program for CPU devices.

    Args:
        shards: arrays on one device.
        table: the shards' positions and widths, from :func:`table_of`.

    Returns:
        uint32 of shape (shards, 2): the low and the high half of each sum.
    """
    # XLA:CPU runs a program with few floating-point operations in the calling thread, and these
    # calls with it. Hence some operations that it cannot know to change nothing.
    some = table[:, :, 0].astype(jnp.float32)
    table = table + (jnp.sum(some.T @ some) < 0).astype(jnp.uint32)
    if not shards:
        return jnp.zeros((0, 2), jnp.uint32)
    result = jax.ShapeDtypeStruct((len(shards), 2), jnp.uint32)
    return jax.ffi.ffi_call(_TARGET, result)(table, *shards)


def begin() -> None:
    """Compiles and tries the handler in the background, if the process has CPU devices alone."""
    if jax.default_backend() == "cpu" and not _state.thread:
        _state.thread = threading.Thread(target=_try, name="adacheck_compile")
        _state.thread.start()


def is_ready() -> bool:
    """True if programs can call the loops by now."""
    return _state.works


def wait() -> bool:
    """Waits until the handler was tried; returns True if programs can call the loops."""
    begin()
    if _state.thread:
        _state.thread.join()
    return _state.works


@dataclass(slots=True)
class _State:
    """The process's one handler; its code lives as long as the process."""

    thread: threading.Thread | None = None
    handler: Any = None
    works: bool = False


_state = _State()


def _try() -> None:
    byte_loops.lower_priority()
    try:
        from adacheck_jax.device import xla_handler  # imports numba

        _state.handler = xla_handler.compiled()
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        pointer = capsule(_state.handler.address, None, None)
        jax.ffi.register_ffi_target(_TARGET, pointer, platform="cpu")
        block = np.arange(3 * 1111, dtype=np.uint32).reshape(3, 1111)
        table = table_of([(5, 7)], [4])
        found = np.asarray(jax.jit(sums)([jnp.asarray(block)], jnp.asarray(table)))
        expected = fingerprint.multilinear(block, (5, 7))
        _state.works = int(found.view(np.uint64)[0, 0]) == expected
        why: object = "the results differ"
    except Exception as error:
        why = error
    if not _state.works:
        _log.info("XLA programs do not call the fingerprint's loops here: %s", why)
