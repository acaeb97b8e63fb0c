"""The fingerprint's loops as a handler of XLA's foreign function interface, compiled by numba.

The interface is one of C structures (``xla/ffi/api/c_api.h``). The structures that are read here
are equal in its versions 0.3 to 0.5. XLA asks a handler for its version first, and does not call a
handler of a version that it does not support; structures of other sizes are not read; and
:mod:`~adacheck_jax.device.xla_call` compares the first result with numpy's.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from adacheck_jax.format import compiled_loops
from adacheck_jax.format.compiled_loops import at as _at
from adacheck_jax.format.compiled_loops import carray as _carray

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


@numba.njit
def _sum(buffer: Any, element_bytes: Any, starts: Any) -> Any:
    rank = buffer.rank
    dims = _carray(_at(buffer.dims), (rank,), np.int64)
    shape, first = np.ones(rank + 1, np.int64), np.zeros(rank + 1, np.int64)
    for axis in range(rank):
        shape[axis], first[axis] = dims[axis], starts[axis]
    if element_bytes > 4:  # words along a further axis
        shape[rank] = element_bytes // 4
        rank += 1
    return compiled_loops.sum_at(buffer.data, min(element_bytes, 4), shape, first, rank)


def _handle(address: Any) -> Any:
    """Sums up shards: the operands are a table of their starts and widths, and the shards."""
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
    dims = _carray(_at(buffers[0].dims), (buffers[0].rank,), np.int64)
    table = _carray(_at(buffers[0].data), (count, dims[1]), np.int64)
    outputs = _carray(_at(rets.items), (1,), np.uint64)
    output = _carray(_at(outputs[0]), (1,), _BUFFER)[0]
    results = _carray(_at(output.data), (count,), np.uint64)
    for i in range(count):
        shard = _carray(_at(items[i + 1]), (1,), _BUFFER)[0]
        results[i] = _sum(shard, table[i, 0], table[i, 1:])
    return 0


def compiled() -> Any:
    """Compiles the handler, or loads it from disk; an object with its ``address``."""
    signature = types.uintp(types.uintp)
    try:
        return numba.cfunc(signature, cache=True)(_handle)
    except RuntimeError:  # no directory where the compiled code could be kept
        return numba.cfunc(signature)(_handle)
