"""The fingerprint's loops as an operation of XLA programs on CPU devices.

XLA:CPU does not vectorize integer reductions: what these loops do in 1 ms takes its own programs
15. So a program on CPU devices calls them, by XLA's foreign function interface
(https://openxla.org/xla/custom_call). Nothing is copied, no Python runs, and XLA orders the call
with the steps before and after it, as it does on an accelerator.

The interface is one of C structures (``xla/ffi/api/c_api.h``). Those that are read here are the
same in its versions 0.3 to 0.5. XLA asks a handler for its version first, and does not call one
that it does not support; structures of other sizes are not read; and the first use compares the
result with that of the loops called from here. Where any of this fails, arrays are fingerprinted
from host memory.
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
import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from adacheck_jax.format import byte_loops

_log = logging.getLogger(__name__)

_TARGET = "adacheck_fingerprints"

_HEAD = [("size_bytes", "i8"), ("extension", "u8")]
_LIST = np.dtype([*_HEAD, ("length", "i8"), ("types", "u8"), ("items", "u8")])
_FRAME = np.dtype(
    [
        *(*_HEAD, ("api", "u8"), ("context", "u8")),
        *(("stage", "i4"), ("unused", "i4"), ("args", _LIST), ("rets", _LIST)),
    ]
)
_BUFFER = np.dtype(
    [*_HEAD, ("dtype", "i4"), ("unused", "i4"), ("data", "u8"), ("rank", "i8"), ("dims", "u8")]
)
_EXTENSION = np.dtype(
    [("size_bytes", "i8"), ("kind", "i4"), ("unused", "i4"), ("next", "u8"), ("metadata", "u8")]
)
_METADATA = np.dtype(
    [("size_bytes", "i8"), ("version", [*_HEAD, ("major", "i4"), ("minor", "i4")])]
)
_FRAME_BYTES, _LIST_BYTES, _BUFFER_BYTES = 168, 40, 48
_IS_METADATA, _EXECUTE = 1, 3


_carray: Any = numba.carray  # pyright: ignore[reportPrivateImportUsage]


@intrinsic
def _address(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


_at: Any = _address  # called from compiled code, which passes no typing context


@numba.njit
def _sum(buffer: Any, element_bytes: Any, starts: Any) -> Any:
    rank = buffer.rank
    dims = _carray(_at(buffer.dims), (rank,), np.int64)
    shape, first = np.ones(rank + 1, np.int64), np.zeros(rank + 1, np.int64)
    size = np.int64(1)
    for axis in range(rank):
        shape[axis], first[axis] = dims[axis], starts[axis]
        size *= dims[axis]
    if size == 0:
        return np.uint64(0)
    if element_bytes > 4:  # words along a further axis
        shape[rank] = element_bytes // 4
        size *= element_bytes // 4
        rank += 1
    data = _at(buffer.data)
    if element_bytes >= 4:
        return byte_loops.multilinear_of(_carray(data, (size,), np.uint32), shape, first, rank)
    if element_bytes == 2:
        return byte_loops.multilinear_of(_carray(data, (size,), np.uint16), shape, first, rank)
    return byte_loops.multilinear_of(_carray(data, (size,), np.uint8), shape, first, rank)


def _handle(address: Any) -> Any:
    """Takes what :func:`sums` passes: a table of starts and widths, and the shards."""
    frame = _carray(_at(address), (1,), _FRAME)[0]
    if frame.size_bytes != _FRAME_BYTES:
        return 0
    if frame.extension:
        extension = _carray(_at(frame.extension), (1,), _EXTENSION)[0]
        if extension.kind == _IS_METADATA:
            metadata = _carray(_at(extension.metadata), (1,), _METADATA)[0]
            metadata.version.major, metadata.version.minor = 0, 3
            return 0
    args, rets = frame.args, frame.rets
    if frame.stage != _EXECUTE or args.size_bytes != _LIST_BYTES or rets.size_bytes != _LIST_BYTES:
        return 0
    items = _carray(_at(args.items), (args.length,), np.uint64)
    buffers = _carray(_at(items[0]), (1,), _BUFFER)
    if buffers[0].size_bytes != _BUFFER_BYTES:
        return 0
    count = args.length - 1
    table = _carray(_at(buffers[0].data), (count, byte_loops.MAX_RANK + 1), np.int64)
    outputs = _carray(_at(rets.items), (1,), np.uint64)
    output = _carray(_at(outputs[0]), (1,), _BUFFER)[0]
    results = _carray(_at(output.data), (count,), np.uint64)
    for i in range(count):
        shard = _carray(_at(items[i + 1]), (1,), _BUFFER)[0]
        results[i] = _sum(shard, table[i, 0], table[i, 1:])
    return 0


def table_of(starts: Sequence[Sequence[int]], element_bytes: Sequence[int]) -> np.ndarray:
    """What :func:`sums` has to be told of some shards.

    Args:
        starts: for each its first index in its array.
        element_bytes: for each the width of its elements.

    Returns:
        uint32 of shape (rows, MAX_RANK + 1, 2), one row a shard and perhaps some more: 64-bit
        numbers, in a type that JAX always has.
    """
    table = np.zeros((max(len(starts), _MIN_ROWS), byte_loops.MAX_RANK + 1), np.int64)
    for row, start, width in zip(table, starts, element_bytes, strict=False):
        row[: 1 + len(start)] = width, *start
    return table.view(np.uint32).reshape(*table.shape, 2)


_MIN_ROWS = 32


def sums(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    """The partial sums of some shards; to be traced into a program for CPU devices.

    Args:
        shards: on one device.
        table: from :func:`table_of`.

    Returns:
        uint32 of shape (shards, 2): the low and the high half of each sum.
    """
    # XLA:CPU runs in the calling thread what has few floating-point operations, and so it would
    # these calls. Hence some, of which it cannot know that they change nothing.
    some = table[:, :, 0].astype(jnp.float32)
    table = table + (jnp.sum(some.T @ some) < 0).astype(jnp.uint32)
    if not shards:
        return jnp.zeros((0, 2), jnp.uint32)
    result = jax.ShapeDtypeStruct((len(shards), 2), jnp.uint32)
    return jax.ffi.ffi_call(_TARGET, result)(table, *shards)


def begin() -> None:
    """Compiles and tries the loops in the background, if this process has CPU devices alone."""
    if jax.default_backend() == "cpu" and not _state.thread:
        _state.thread = threading.Thread(target=_try, name="adacheck_compile")
        _state.thread.start()


def is_ready() -> bool:
    """Whether programs can call the loops by now."""
    return _state.works


def wait() -> bool:
    """Waits until it is known whether programs can call the loops, and tells."""
    begin()
    if _state.thread:
        _state.thread.join()
    return _state.works


@dataclass(slots=True)
class _State:
    """What is known of this process; the handler's code lives as long as it does."""

    thread: threading.Thread | None = None
    handler: Any = None
    works: bool = False


_state = _State()


def _try() -> None:
    try:
        _state.handler = _compiled()
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        pointer = capsule(_state.handler.address, None, None)
        jax.ffi.register_ffi_target(_TARGET, pointer, platform="cpu")
        block = np.arange(3 * 1111, dtype=np.uint32).reshape(3, 1111)
        table = table_of([(5, 7)], [4])
        found = np.asarray(jax.jit(sums)([jnp.asarray(block)], jnp.asarray(table)))
        expected = byte_loops.multilinear(block, (5, 7))
        _state.works = int(found.view(np.uint64)[0, 0]) == expected
        why: object = "the results differ"
    except Exception as error:
        why = error
    if not _state.works:
        _log.info("XLA programs do not call the fingerprint's loops here: %s", why)


def _compiled() -> Any:
    signature = types.uintp(types.uintp)
    try:
        return numba.cfunc(signature, cache=True)(_handle)
    except RuntimeError:  # no directory where the compiled code could be kept
        return numba.cfunc(signature)(_handle)
