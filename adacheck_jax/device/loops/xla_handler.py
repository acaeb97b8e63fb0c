"""Loops for fingerprints, samples and copies as handlers of XLA, compiled by numba.

XLA's foreign function interface is one of C structures (``xla/ffi/api/c_api.h`` in
``jax.ffi.include_dir()``). Those that are read here are equal in its versions 0.3 to 0.5. XLA asks
a handler for its version first, and does not call one of a version that it does not support. A call
of another major version, or with structures of other sizes, changes nothing: then the first result,
which :mod:`~adacheck_jax.device.loops.xla_call` compares with numpy's, differs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from adacheck_jax.device.loops.shard_tables import COLUMN, COUNT, FIRST, SHAPE, STRIDE, TO, WIDTH
from adacheck_jax.format import compiled_loops
from adacheck_jax.format.compiled_loops import at as _at
from adacheck_jax.format.compiled_loops import carray as _carray
from adacheck_jax.format.compiled_loops import numba, types

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
_VERSION = np.dtype([*_HEAD, ("major", "i4"), ("minor", "i4")])
_METADATA = np.dtype([("size_bytes", "i8"), ("version", _VERSION)])
_API = np.dtype([*_HEAD, ("version", _VERSION)])
_MAJOR, _MINOR = 0, 3
_FRAME_BYTES, _LIST_BYTES, _BUFFER_BYTES, _VERSION_BYTES = 168, 40, 48, 24
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


@numba.njit
def _take(buffer: Any, row: Any, start: Any, output: Any) -> None:
    """Copies elements of a box of a shard, a stride apart, counted row by row."""
    width, stride, count, rank = row[WIDTH], row[STRIDE], row[COUNT], buffer.rank
    dims = _carray(_at(buffer.dims), (rank,), np.int64)
    size, is_whole = 1, True
    for axis in range(rank):
        size *= row[SHAPE + axis]
        is_whole &= row[SHAPE + axis] == dims[axis]
    source, to = np.int64(buffer.data), output + row[TO]
    if is_whole and width == 4:  # as nearly all are: with a known width memory alone takes time
        words = _carray(_at(buffer.data), (size,), np.uint32)
        _stride(words, start, stride, _carray(_at(to), (count,), np.uint32))
    elif is_whole and width == 2:
        halves = _carray(_at(buffer.data), (size,), np.uint16)
        _stride(halves, start, stride, _carray(_at(to), (count,), np.uint16))
    else:
        for k in range(count):
            place = min(start + k * stride, size - 1)
            if not is_whole:
                rest, place, factor = place, 0, 1
                for axis in range(rank - 1, -1, -1):
                    length = row[SHAPE + axis]
                    place += (rest % length + row[FIRST + axis]) * factor
                    rest //= length
                    factor *= dims[axis]
            _copy(source + place * width, to + k * width, width)


@numba.njit
def _stride(words: Any, start: Any, stride: Any, taken: Any) -> None:
    """Copies words a stride apart; past the last one that again."""
    for k in range(len(taken)):
        taken[k] = words[min(start + k * stride, len(words) - 1)]


@numba.njit(inline="always")
def _copy(source: Any, to: Any, width: Any) -> Any:
    """Copies one element."""
    if width < 4:
        for n in range(width):
            _carray(_at(to), (width,), np.uint8)[n] = _carray(_at(source), (width,), np.uint8)[n]
    words = width // 4
    for n in range(words):
        _carray(_at(to), (words,), np.uint32)[n] = _carray(_at(source), (words,), np.uint32)[n]


@numba.njit
def _operands_of(address: Any) -> Any:
    """Addresses of the operands' descriptions, and of the results'; none if there is no call."""
    none = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
    frame = _carray(_at(address), (1,), _FRAME)[0]
    if frame.size_bytes != _FRAME_BYTES:
        return none
    if frame.extension:
        extension = _carray(_at(frame.extension), (1,), _EXTENSION)[0]
        if extension.kind == _IS_METADATA:
            metadata = _carray(_at(extension.metadata), (1,), _METADATA)[0]
            if metadata.version.size_bytes == _VERSION_BYTES:
                metadata.version.major, metadata.version.minor = _MAJOR, _MINOR
            return none
    if _carray(_at(frame.api), (1,), _API)[0].version.major != _MAJOR:
        return none
    args, rets = frame.args, frame.rets
    if frame.stage != _EXECUTE or args.size_bytes != _LIST_BYTES or rets.size_bytes != _LIST_BYTES:
        return none
    items = _carray(_at(args.items), (args.length,), np.uint64)
    if _carray(_at(items[0]), (1,), _BUFFER)[0].size_bytes != _BUFFER_BYTES:
        return none
    return items.copy(), _carray(_at(rets.items), (rets.length,), np.uint64).copy()


@numba.njit
def _data_of(item: Any) -> Any:
    """Address of the elements of an operand or a result."""
    return np.int64(_carray(_at(item), (1,), _BUFFER)[0].data)


@numba.njit
def _table_of(item: Any, rows: Any) -> Any:
    """The first operand: 64-bit numbers, in rows."""
    buffer = _carray(_at(item), (1,), _BUFFER)[0]
    dims = _carray(_at(buffer.dims), (buffer.rank,), np.int64)
    return _carray(_at(buffer.data), (rows, dims[1]), np.int64)


def _sums(address: Any) -> Any:
    """Sums up shards: the operands are a table of their starts and widths, and the shards."""
    items, outputs = _operands_of(address)
    count = len(items) - 1
    if count > 0:
        table = _table_of(items[0], count)
        results = _carray(_at(_data_of(outputs[0])), (count,), np.uint64)
        for i in range(count):
            shard = _carray(_at(items[i + 1]), (1,), _BUFFER)[0]
            results[i] = _sum(shard, table[i, 0], table[i, 1:])
    return 0


def _samples(address: Any) -> Any:
    """Copies elements of shards: the operands are a table, first elements, and the shards."""
    items, outputs = _operands_of(address)
    count = len(items) - 2
    if count > 0:
        table = _table_of(items[0], count)
        given = _carray(_at(items[1]), (1,), _BUFFER)[0]
        dims = _carray(_at(given.dims), (given.rank,), np.int64)
        starts = _carray(_at(given.data), (dims[0],), np.int32)
        for i in range(count):
            shard = _carray(_at(items[i + 2]), (1,), _BUFFER)[0]
            _take(shard, table[i], np.int64(starts[table[i, COLUMN]]), _data_of(outputs[0]))
    return 0


def _copies(address: Any) -> Any:
    """Copies shards: the operands are a table of their bytes, and the shards."""
    items, outputs = _operands_of(address)
    count = len(items) - 1
    if count > 0:
        table = _table_of(items[0], count)
        for i in range(count):
            size, source, to = table[i, 0], _data_of(items[i + 1]), _data_of(outputs[i])
            words, rest = size // 8, size // 8 * 8
            _carray(_at(to), (words,), np.uint64)[:] = _carray(_at(source), (words,), np.uint64)
            for k in range(rest, size):
                _carray(_at(to), (size,), np.uint8)[k] = _carray(_at(source), (size,), np.uint8)[k]
    return 0


def compiled() -> tuple[Any, Any, Any]:
    """Compiles the handlers of sums, of samples and of copies, or loads them from disk.

    Returns:
        Objects with their ``address``.
    """
    signature = types.uintp(types.uintp)
    try:
        sums, samples, copies = (numba.cfunc(signature, cache=True)(each) for each in _HANDLERS)
    except RuntimeError:  # no directory where the compiled code could be kept
        sums, samples, copies = (numba.cfunc(signature)(each) for each in _HANDLERS)
    return sums, samples, copies


_HANDLERS = _sums, _samples, _copies
