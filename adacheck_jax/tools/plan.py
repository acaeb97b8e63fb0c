"""The cost of saving a state, computed from shapes and shardings alone.

No array and no device is needed: a mesh of thousands is studied on a laptop, on a
``jax.sharding.AbstractMesh``. All numbers are upper bounds of array data. Savings that depend on
the content of arrays are not in them: equal leaves, unchanged leaves, runs of zeros, compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import FormatError
from adacheck_jax.update.binding import Binding, RecorderArgument, bind_all, recorders_of
from adacheck_jax.update.params_search import LeafType, leaf_types, recorded_params
from adacheck_jax.update.recorder_state import find_nodes

_PROGRAM_BYTES, _LEAF_BYTES = 200_000_000, 400_000
"""Host memory of what a process compiles for its saves, in all and a leaf: measured for AdamW."""


@dataclass(frozen=True, slots=True)
class RedundancyReport:
    """The cost of one save of a state, and the redundancy that makes it cheaper.

    The *train state* is the state without the leaves that the Recorder adds. All figures of deltas
    are None for a state without a Recorder.

    Attributes:
        device_count: number of devices of the largest mesh.
        process_count: number of processes that these devices belong to.
        leaf_count: number of leaves of the state, with those of the Recorder.
        held_bytes: bytes of the train state if every device writes all that it holds.
        state_bytes: bytes of the train state with each distinct box once, as stock Orbax writes it
            at every save.
        base_bytes: bytes of a base: the state with the record.
        delta_bytes: bytes of a delta of one replayed update: the leaves that the update consumes,
            and those that it does not compute.
        computed_bytes: bytes of params and optimizer state, which a replay computes.
        record_bytes: bytes that the update consumes: gradients, and declared extra arguments.
        other_bytes: bytes of leaves that the update does not compute. ``delta_bytes`` is their sum
            with ``record_bytes``.
        max_deltas: number of deltas for each base.
        amortised_bytes: mean bytes of a save over one base and ``max_deltas`` deltas.
        memory_bytes: host memory that saves take in each process at most, beside the training's:
            the copy of its part of a base, to check in full, a state that is being saved in full,
            and three deltas. Where every save is waited for, that state is the training's own.
        sampled_memory_bytes: the same without a copy to check by (``shadow=None``): two states that
            are being saved, of which the second is that of the first delta, and two deltas.
        program_bytes: host memory of compiled programs in each process, as measured for AdamW.
        disk_bytes: bytes of a root that keeps few steps, at most: two bases, and the deltas
            between.
    """

    device_count: int
    process_count: int
    leaf_count: int
    held_bytes: int
    state_bytes: int
    base_bytes: int
    delta_bytes: int | None
    computed_bytes: int | None
    record_bytes: int | None
    other_bytes: int | None
    max_deltas: int
    amortised_bytes: float | None
    memory_bytes: int | None
    sampled_memory_bytes: int | None
    program_bytes: int | None
    disk_bytes: int | None


def redundancy_report(
    abstract_state: PyTree,
    recorder: RecorderArgument = None,
    *,
    params_path: str | Mapping[str, str] | None = None,
    devices_per_process: int = 8,
    max_deltas: int = 20,
) -> RedundancyReport:
    """Compute the bytes of each save of a state, without a device or an array.

    Example::

        mesh = jax.sharding.AbstractMesh((128,), ("data",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            jax.eval_shape(init_state),
        )
        redundancy_report(state).delta_bytes

    Args:
        abstract_state: pytree of ``jax.ShapeDtypeStruct`` with shardings, or of arrays. If no leaf
            has a sharding, all lie on one device. A host value, or a scalar to which JAX gave no
            sharding, is counted once.
        recorder: the recorder in the optimizer chain, or several, as for
            :class:`AdaCheckHandler`. Without it the Recorder's state is found by its field names.
        params_path: leaf path of the trained params, or a mapping of them by leaf-path prefix of
            the optimizer state; None to find it.
        devices_per_process: consecutive devices of an ``AbstractMesh`` that belong to one process.
            Real devices tell their process themselves.
        max_deltas: number of deltas for each base; a handler begins with 20.

    Raises:
        ValueError: ``devices_per_process`` is less than 1, or ``max_deltas`` is negative.
        FormatError: a leaf is no array, has no sharding though others have one, or has one that
            does not fit its shape; or there are no leaves.
        MismatchError: two leaves have the same leaf path.
        RecorderError: the recorder cannot be tied to the state.
    """
    if devices_per_process < 1 or max_deltas < 0:
        raise ValueError(
            "expected devices_per_process of at least 1 and max_deltas of at least 0, found "
            f"{devices_per_process} and {max_deltas}"
        )
    named = _leaves_of(abstract_state)
    placed = _place_all(named, devices_per_process)
    types, bindings = leaf_types(named), None
    if recorder is not None:
        bindings = bind_all(recorders_of(recorder), types, params_path)
    return _totals(placed, _roles_of(types, bindings, params_path), max_deltas)


def _leaves_of(abstract_state: PyTree) -> dict[str, Any]:
    named, _ = trees.flatten(abstract_state)
    if not named:
        raise FormatError(
            f"expected a state with arrays in it, found {type(abstract_state).__name__} without "
            "leaves. Give the pytree of jax.ShapeDtypeStruct that jax.eval_shape makes of a state."
        )
    return named


@dataclass(frozen=True, slots=True)
class _Placed:
    """One leaf on its devices.

    Attributes:
        leaf_bytes: bytes of the leaf, every element once.
        held_bytes: bytes of all that devices hold of it.
        device_count: number of devices that hold some element.
        process_count: number of processes that these devices belong to.
    """

    leaf_bytes: int
    held_bytes: int
    device_count: int = 1
    process_count: int = 1


def _place_all(named: Mapping[str, Any], devices_per_process: int) -> dict[str, _Placed]:
    without = [path for path, leaf in named.items() if _needs_sharding(leaf)]
    if without and any(_sharding_of(leaf) is not None for leaf in named.values()):
        raise FormatError(
            f"leaf {without[0]}: expected a sharding, as other leaves have one; {len(without)} of "
            f"{len(named)} leaves have none. Say where it lies: jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=NamedSharding(mesh, PartitionSpec()))."
        )
    return {path: _place(path, leaf, devices_per_process) for path, leaf in named.items()}


def _place(path: str, leaf: Any, devices_per_process: int) -> _Placed:
    itemsize_bytes = _itemsize_bytes(path, leaf)
    shape, where = tuple(np.shape(leaf)), _sharding_of(leaf)
    leaf_bytes = math.prod(shape) * itemsize_bytes
    if where is None:  # on one device, or on the host, from where the first process writes it
        return _Placed(leaf_bytes, leaf_bytes)
    try:
        spec = getattr(where, "spec", None) or jax.P()
        if jax.P.UNCONSTRAINED in spec.partitions:
            raise ValueError("PartitionSpec.UNCONSTRAINED leaves it to the compiler where data is")
        if spec.unreduced:
            raise ValueError("devices hold parts of sums, not of the array")
        # All shards of a JAX sharding are of one size.
        held_bytes = where.num_devices * math.prod(where.shard_shape(shape)) * itemsize_bytes
    except (ValueError, IndexError, NotImplementedError) as error:
        raise FormatError(
            f"leaf {path}: expected a sharding that fits its shape {shape}, found {where}: {error}"
        ) from error
    if isinstance(getattr(where, "mesh", None), jax.sharding.AbstractMesh):
        process_count = -(-where.num_devices // devices_per_process)
    else:
        process_count = len({device.process_index for device in where.device_set})
    return _Placed(leaf_bytes, held_bytes, where.num_devices, process_count)


def _needs_sharding(leaf: Any) -> bool:
    """True for an array without a sharding; host values and scalars need none.

    Under Explicit axes JAX gives no sharding to counters.
    """
    host = isinstance(leaf, np.ndarray) or not np.shape(leaf)
    return _sharding_of(leaf) is None and not host


def _itemsize_bytes(path: str, leaf: Any) -> int:
    is_array = hasattr(leaf, "shape") or isinstance(leaf, int | float | complex)
    if not (is_array and transfer.is_storable(trees.dtype_of(leaf))):
        raise FormatError(
            f"leaf {path}: expected an array or a jax.ShapeDtypeStruct of numbers, found "
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Give the state as jax.eval_shape "
            "makes it."
        )
    if not transfer.is_key(leaf):
        return np.dtype(trees.dtype_of(leaf)).itemsize
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), trees.dtype_of(leaf)))
    return words.size * words.dtype.itemsize


def _sharding_of(leaf: Any) -> Any:
    """The sharding of a leaf; None where it has none."""
    where = getattr(leaf, "sharding", None)
    # Traced without a mesh, JAX gives a sharding over the empty mesh.
    return None if where is None or not where.num_devices else where


def _roles_of(
    types: Mapping[str, LeafType],
    bindings: Sequence[Binding] | None,
    params_path: str | Mapping[str, str] | None,
) -> tuple[set[str], set[str], set[str]]:
    """Paths of the counters, of what updates consume, and of what they compute; else none."""
    if bindings is not None:
        counts = {each.count for each in bindings}
        consumed = {path for each in bindings for path in each.consumed}
        return counts, consumed, {path for each in bindings for path in each.explained}
    nodes = find_nodes([*types])
    kinds = [kind for each in nodes for kind in (each.record, each.extra, each.reduced)]
    computed = {path for each in nodes for path in each.inner.values()}
    if nodes:
        computed.update(recorded_params(nodes, types, params_path))
    consumed = {path for kind in kinds for path in kind.values()}
    return {each.count for each in nodes}, consumed, computed


def _totals(
    placed: Mapping[str, _Placed], roles: tuple[set[str], set[str], set[str]], max_deltas: int
) -> RedundancyReport:
    """The sums over all leaves."""
    counts, consumed, computed = roles

    def total_bytes(paths: Iterable[str]) -> int:
        return sum(placed[path].leaf_bytes for path in paths)

    held = placed.keys() - counts - consumed  # without what the Recorder adds
    base_bytes, delta_bytes = total_bytes(placed), total_bytes(placed.keys() - computed)
    record_bytes, has_deltas = total_bytes(consumed), bool(counts)
    mean_bytes = (base_bytes + max_deltas * delta_bytes) / (1 + max_deltas)
    process_count = max(each.process_count for each in placed.values())
    own_base_bytes, own_delta_bytes = (
        -(-base_bytes // process_count),
        -(-delta_bytes // process_count),
    )
    return RedundancyReport(
        device_count=max(each.device_count for each in placed.values()),
        process_count=process_count,
        leaf_count=len(placed),
        held_bytes=sum(placed[path].held_bytes for path in held),
        state_bytes=total_bytes(held),
        base_bytes=base_bytes,
        delta_bytes=delta_bytes if has_deltas else None,
        computed_bytes=total_bytes(computed) if has_deltas else None,
        record_bytes=record_bytes if has_deltas else None,
        other_bytes=delta_bytes - record_bytes if has_deltas else None,
        max_deltas=max_deltas,
        amortised_bytes=mean_bytes if has_deltas else None,
        memory_bytes=2 * own_base_bytes + 3 * own_delta_bytes if has_deltas else None,
        sampled_memory_bytes=2 * own_base_bytes + 2 * own_delta_bytes if has_deltas else None,
        program_bytes=_PROGRAM_BYTES + len(placed) * _LEAF_BYTES if has_deltas else None,
        disk_bytes=2 * base_bytes + max_deltas * delta_bytes if has_deltas else None,
    )
