"""The cost of saving a state, computed from shapes and shardings alone.

No array and no device is needed: a mesh of thousands is studied on a laptop, on a
``jax.sharding.AbstractMesh``. All numbers are upper bounds of array data. Savings that depend on
the content of arrays are not in them: equal leaves, unchanged leaves, runs of zeros, compression.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import FormatError
from adacheck_jax.update.binding import RecorderArgument, bind_all, recorders_of
from adacheck_jax.update.params_search import leaf_types, recorded_params
from adacheck_jax.update.recorder_state import find_nodes


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
        replica_bytes: bytes of declared replicas: ``held_bytes - state_bytes``.
        computed_bytes: bytes of params and optimizer state, which a replay computes.
        record_bytes: bytes that the update consumes: gradients, and declared extra arguments.
        other_bytes: bytes of leaves that the update does not compute. ``delta_bytes`` is their sum
            with ``record_bytes``.
        max_deltas: number of deltas for each base.
        amortised_bytes: mean bytes of a save over one base and ``max_deltas`` deltas.
        held_to_delta: ``held_bytes`` divided by ``delta_bytes``; None if nothing is written.
        stock_to_delta: ``state_bytes`` divided by ``delta_bytes``.
    """

    device_count: int
    process_count: int
    leaf_count: int
    held_bytes: int
    state_bytes: int
    base_bytes: int
    delta_bytes: int | None
    replica_bytes: int
    computed_bytes: int | None
    record_bytes: int | None
    other_bytes: int | None
    max_deltas: int
    amortised_bytes: float | None
    held_to_delta: float | None
    stock_to_delta: float | None


def redundancy_report(
    abstract_state: PyTree,
    recorder: RecorderArgument = None,
    *,
    params_path: str | Mapping[str, str] | None = None,
    devices_per_process: int = 8,
    max_deltas: int = 20,
) -> RedundancyReport:
    """Compute the bytes that each save of a state would write, without a device or an array.

    Example::

        mesh = jax.sharding.AbstractMesh((128,), ("data",))
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
            jax.eval_shape(init_state),
        )
        redundancy_report(state).held_to_delta

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
    named, _ = trees.flatten(abstract_state)
    if not named:
        raise FormatError(
            f"expected a state with arrays in it, found {type(abstract_state).__name__} without "
            "leaves. Give the pytree of jax.ShapeDtypeStruct that jax.eval_shape makes of a state."
        )
    placed = _place_all(named, devices_per_process)
    roles = _roles_of(named, recorder, params_path)
    return _totals(placed, roles, max_deltas)


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


@dataclass(frozen=True, slots=True)
class _Roles:
    """Positions of leaves by their role in the update.

    Attributes:
        added: leaves that the Recorder adds to the train state.
        consumed: leaves that the update consumes and every delta stores.
        computed: leaves that the update computes.
    """

    added: frozenset[int]
    consumed: frozenset[int]
    computed: frozenset[int]


def _place_all(named: Mapping[str, Any], devices_per_process: int) -> list[_Placed]:
    itemsizes_bytes = {path: _itemsize_bytes(path, leaf) for path, leaf in named.items()}
    without = [path for path, leaf in named.items() if _needs_sharding(leaf)]
    if without and any(_sharding_of(leaf) is not None for leaf in named.values()):
        raise FormatError(
            f"leaf {without[0]}: expected a sharding, as other leaves have one; {len(without)} of "
            f"{len(named)} leaves have none. Say where it lies: jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=NamedSharding(mesh, PartitionSpec()))."
        )
    return [
        _place(path, leaf, itemsizes_bytes[path], devices_per_process)
        for path, leaf in named.items()
    ]


def _place(path: str, leaf: Any, itemsize_bytes: int, devices_per_process: int) -> _Placed:
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


def _sharding_of(leaf: Any) -> Any:
    where = getattr(leaf, "sharding", None)
    # Traced without a mesh, JAX gives a sharding over the empty mesh.
    return None if where is None or not where.num_devices else where


def _needs_sharding(leaf: Any) -> bool:
    """True for an array without a sharding; host values and scalars need none.

    Under Explicit axes JAX gives no sharding to counters.
    """
    host = isinstance(leaf, np.ndarray) or not np.shape(leaf)
    return _sharding_of(leaf) is None and not host


def _itemsize_bytes(path: str, leaf: Any) -> int:
    if isinstance(leaf, bool | int | float | complex):
        leaf = np.asarray(leaf)
    if transfer.is_key(leaf):
        return _key_bytes(leaf.dtype)
    try:
        dtype = np.dtype(leaf.dtype)
        tuple(leaf.shape)
    except (AttributeError, TypeError):
        dtype = np.dtype(object)
    if dtype.kind in "OUSmM":
        raise FormatError(
            f"leaf {path}: expected an array or a jax.ShapeDtypeStruct of numbers, found "
            f"{getattr(leaf, 'dtype', type(leaf).__name__)}. Give the state as jax.eval_shape "
            "makes it."
        )
    return dtype.itemsize


@functools.cache
def _key_bytes(dtype: Any) -> int:
    """Bytes of all words of one typed PRNG key."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    return data.size * data.dtype.itemsize


def _roles_of(
    named: Mapping[str, Any],
    recorder: RecorderArgument,
    params_path: str | Mapping[str, str] | None,
) -> _Roles | None:
    """Roles of the leaves; None without a Recorder."""
    index = {path: position for position, path in enumerate(named)}
    types = leaf_types(named)
    counts, consumed, computed = set[str](), set[str](), set[str]()
    if recorder is not None:
        for binding in bind_all(recorders_of(recorder), types, params_path):
            counts.add(binding.count)
            consumed.update(binding.consumed)
            computed.update(binding.explained)
    else:
        nodes = find_nodes(list(named))
        if not nodes:
            return None
        for node in nodes:
            counts.add(node.count)
            consumed.update(node.record.values(), node.extra.values())
            computed.update(node.inner.values())
        computed.update(recorded_params(nodes, types, params_path))

    def positions(paths: set[str]) -> frozenset[int]:
        return frozenset(index[path] for path in paths)

    return _Roles(positions(counts | consumed), positions(consumed), positions(computed))


def _totals(placed: Sequence[_Placed], roles: _Roles | None, max_deltas: int) -> RedundancyReport:
    added, consumed = (roles.added, roles.consumed) if roles else (frozenset(), frozenset())
    computed = roles.computed if roles else frozenset()
    every = range(len(placed))

    def total_bytes(indices: Sequence[int] | frozenset[int]) -> int:
        return sum(placed[i].leaf_bytes for i in indices)

    train = [i for i in every if i not in added]
    stored = [i for i in every if i not in computed]
    state_bytes, base_bytes = total_bytes(train), total_bytes(every)
    held_bytes = sum(placed[i].held_bytes for i in train)
    delta_bytes = total_bytes(stored) if roles else None
    amortised_bytes = None
    if delta_bytes is not None:
        amortised_bytes = (base_bytes + max_deltas * delta_bytes) / (1 + max_deltas)
    return RedundancyReport(
        device_count=max(each.device_count for each in placed),
        process_count=max(each.process_count for each in placed),
        leaf_count=len(placed),
        held_bytes=held_bytes,
        state_bytes=state_bytes,
        base_bytes=base_bytes,
        delta_bytes=delta_bytes,
        replica_bytes=held_bytes - state_bytes,
        computed_bytes=total_bytes(computed) if roles else None,
        record_bytes=total_bytes(consumed) if roles else None,
        other_bytes=total_bytes(stored) - total_bytes(consumed) if roles else None,
        max_deltas=max_deltas,
        amortised_bytes=amortised_bytes,
        held_to_delta=_ratio(held_bytes, delta_bytes),
        stock_to_delta=_ratio(state_bytes, delta_bytes),
    )


def _ratio(whole_bytes: float, part_bytes: float | None) -> float | None:
    return whole_bytes / part_bytes if part_bytes else None
