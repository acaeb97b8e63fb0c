"""Loops for fingerprints, samples and copies as operations of XLA programs on CPU devices.

XLA:CPU does not vectorize integer reductions and takes about 15 times as long as these loops; and
it takes many seconds to compile a slice of each of many arrays. So a program on CPU devices calls
them through XLA's foreign function interface
(https://openxla.org/xla/custom_call). Nothing is copied, no Python runs, and XLA orders the call
with the steps before and after it, as it does on an accelerator.

The handlers are compiled in a background thread. Until they work (:func:`is_ready`), and where they
do not, arrays are fingerprinted and sampled from host memory.

Any thread may call, and has what the background thread made from its future. XLA calls the handlers
from threads of its own, without Python's lock.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from adacheck_jax.device.background import in_background
from adacheck_jax.device.loops import shard_tables
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.format import byte_loops, fingerprint
from adacheck_jax.format.boxes import Box

_log = logging.getLogger(__name__)

_SUMS, _SAMPLES, _COPIES = "adacheck_fingerprints", "adacheck_samples", "adacheck_copies"


def sums(shards: Sequence[jax.Array], table: jax.Array) -> jax.Array:
    """Partial sums of shards; to be traced into a program for CPU devices.

    Returns:
        uint32 of shape (shards, 2): the low and the high half of each sum.
    """
    if not shards:
        return jnp.zeros((0, 2), jnp.uint32)
    result = jax.ShapeDtypeStruct((len(shards), 2), jnp.uint32)
    return jax.ffi.ffi_call(_SUMS, result)(table, *shards)


def samples(
    shards: Sequence[jax.Array], table: jax.Array, starts: jax.Array, size_bytes: int
) -> jax.Array:
    """Elements of shards, one shard behind another; to be traced into a program for CPU devices.

    Args:
        shards: arrays on one device.
        table: places of the elements (:func:`~adacheck_jax.device.loops.shard_tables.of_samples`).
        starts: the first elements that the table speaks of: int32.
        size_bytes: bytes of all elements.

    Returns:
        uint8 of shape (size_bytes,).
    """
    result = jax.ShapeDtypeStruct((size_bytes,), jnp.uint8)
    return jax.ffi.ffi_call(_SAMPLES, result)(table, starts, *shards)


def copies(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Copies of arrays on one device; to be traced into a program for CPU devices."""
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    sizes_bytes = [x.size * x.dtype.itemsize for x in arrays]
    table = jnp.asarray(shard_tables.of_sums([()] * len(arrays), sizes_bytes))
    return jax.ffi.ffi_call(_COPIES, results)(table, *arrays)


_lock = threading.Lock()
_trials: list[Future[bool]] = []
"""The one trial of this process's handlers; its result is True if programs can call them."""
_handlers: list[Any] = []
"""The handlers, whose code lives as long as the process."""


def begin() -> None:
    """Compiles and tries the handler in the background, if the process has CPU devices alone."""
    if jax.default_backend() != "cpu":
        return
    with _lock:  # XLA refuses a second handler, and the first one's code would be let go of
        if not _trials:
            _trials.append(in_background(_tried))
            byte_loops.hold_up_forks(_trials[0].exception)


def is_ready() -> bool:
    """True if programs can call the loops by now."""
    return any(each.done() and each.result() for each in _trials)


def takes(mesh: Mesh | None, dtypes: Iterable[Any]) -> bool:
    """True if programs on a mesh can call the loops by now, for elements of these types."""
    is_cpu = mesh is not None and mesh.devices.flat[0].platform == "cpu"
    return is_cpu and is_ready() and not any(map(is_narrow, dtypes))


def wait() -> bool:
    """Waits until the handler was tried; returns True if programs can call the loops."""
    begin()
    return any(each.result() for each in _trials)


def _tried() -> bool:
    """Compiles the handlers, and compares what they compute with numpy's."""
    byte_loops.lower_priority()
    try:
        from adacheck_jax.device.loops import xla_handler  # imports numba

        _handlers.extend(xla_handler.compiled())
        for target, handler in zip((_SUMS, _SAMPLES, _COPIES), _handlers, strict=True):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(handler.ctypes), platform="cpu")
        block = np.arange(3 * 1111, dtype=np.uint32).reshape(3, 1111)
        box = Box((1, 100), (3, 1100))
        table, _ = shard_tables.of_samples([box], [4], [17], [100], [0])

        def all_three(given: jax.Array, own: Sequence[Any], starts: Any) -> Any:
            few = given[:1, :1].astype(jnp.uint8)
            taken = samples([given], own[1], starts, 400)
            return sums([given], own[0]), taken, copies([given, few])

        own = [shard_tables.of_sums([(5, 7)], [4]), table]
        results = jax.jit(all_three)(block, own, np.array([9], np.int32))
        total, taken, (copied, few) = jax.tree.map(np.asarray, results)
        is_sum = int(total.view(np.uint64)[0, 0]) == fingerprint.multilinear(block, (5, 7))
        expected = block[box.slices].reshape(-1)[9::17][:100]
        is_copied = np.array_equal(copied, block) and few[0, 0] == block[0, 0]
        if is_sum and is_copied and np.array_equal(taken.view(np.uint32), expected):
            return True
        why: object = "the results differ"
    except Exception as error:
        why = error
    _log.info("XLA programs do not call the compiled loops here: %s", why)
    return False
