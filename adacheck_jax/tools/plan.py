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

from adacheck_jax.device import ownership, sharding, transfer, trees
from adacheck_jax.device.sharding import Layout
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import FormatError
from adacheck_jax.format.boxes import Box, Cuts, cuts_of
from adacheck_jax.update.binding import RecorderArgument, bind_all, recorders_of
from adacheck_jax.update.params_search import leaf_types, recorded_params
from adacheck_jax.update.recorder_state import find_nodes


@dataclass(frozen=True, slots=True)
class Balance:
    """Balance of the bytes of one save over the processes.

    Attributes:
        min_bytes: bytes of the process that writes least.
        max_bytes: bytes of the process that writes most: the others wait for it.
    """

    min_bytes: int
    max_bytes: int


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
        base: balance of a base over the processes, by :func:`ownership.share_out`.
        delta: balance of a delta over the processes.
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
    base: Balance
    delta: Balance | None
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
        layout: boxes, and the processes that hold them.
        itemsize_bytes: bytes of one element; for a typed PRNG key of all its words.
        leaf_bytes: bytes of the leaf, every element once.
        held_count: number of devices that hold each element.
        device_count: number of devices that hold some element.
    """

    layout: Layout
    itemsize_bytes: int
    leaf_bytes: int
    held_count: int
    device_count: int


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
        whole = Layout(cuts_of([Box.full(shape)], shape), ((0,),))
        return _Placed(whole, itemsize_bytes, leaf_bytes, 1, 1)
    try:
        if _is_abstract(where):
            layout = sharding.layout_on_mesh(where, shape, devices_per_process)
        else:
            layout = sharding.layout_of(where, shape)
    except (ValueError, IndexError, NotImplementedError, FormatError) as error:
        raise FormatError(
            f"leaf {path}: expected a sharding that fits its shape {shape}, found {where}: {error}"
        ) from error
    # All shards of a JAX sharding are of one size, so every box is held equally often.
    held_count = where.num_devices // len(layout.replicas)
    return _Placed(layout, itemsize_bytes, leaf_bytes, held_count, where.num_devices)


def _is_abstract(where: Any) -> bool:
    named = isinstance(where, jax.sharding.NamedSharding)
    return named and isinstance(where.mesh, jax.sharding.AbstractMesh)


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
    written = _written_bytes(placed, consumed)

    def total_bytes(indices: Sequence[int] | frozenset[int]) -> int:
        return sum(placed[i].leaf_bytes for i in indices)

    train = [i for i in every if i not in added]
    stored = [i for i in every if i not in computed]
    state_bytes, base_bytes = total_bytes(train), total_bytes(every)
    held_bytes = sum(placed[i].leaf_bytes * placed[i].held_count for i in train)
    delta_bytes = total_bytes(stored) if roles else None
    amortised_bytes = None
    if delta_bytes is not None:
        amortised_bytes = (base_bytes + max_deltas * delta_bytes) / (1 + max_deltas)
    return RedundancyReport(
        device_count=max(each.device_count for each in placed),
        process_count=written.shape[1],
        leaf_count=len(placed),
        held_bytes=held_bytes,
        state_bytes=state_bytes,
        base_bytes=base_bytes,
        delta_bytes=delta_bytes,
        replica_bytes=held_bytes - state_bytes,
        computed_bytes=total_bytes(computed) if roles else None,
        record_bytes=total_bytes(consumed) if roles else None,
        other_bytes=total_bytes(stored) - total_bytes(consumed) if roles else None,
        base=_balance(written.sum(axis=0)),
        delta=_balance(written[stored].sum(axis=0)) if roles else None,
        max_deltas=max_deltas,
        amortised_bytes=amortised_bytes,
        held_to_delta=_ratio(held_bytes, delta_bytes),
        stock_to_delta=_ratio(state_bytes, delta_bytes),
    )


def _ratio(whole_bytes: float, part_bytes: float | None) -> float | None:
    return whole_bytes / part_bytes if part_bytes else None


def _balance(process_bytes: np.ndarray) -> Balance:
    """The balance of bytes over processes, from the bytes of each."""
    least, most = int(process_bytes.min()), int(process_bytes.max())
    return Balance(least, most)


def _written_bytes(placed: Sequence[_Placed], first: frozenset[int]) -> np.ndarray:
    """Bytes of each leaf that each process writes: (leaves, processes)."""
    holders = {id(each.layout.replicas): each.layout.replicas for each in placed}
    processes = sorted({p for replicas in holders.values() for held in replicas for p in held})
    sole = {key: _sole_holders(replicas) for key, replicas in holders.items()}
    written = np.zeros((len(placed), processes[-1] + 1), np.int64)
    open_to_choice = []
    for index, each in enumerate(placed):
        owners = sole[id(each.layout.replicas)]
        if owners is not None:
            np.add.at(written[index], owners, _box_bytes(each.layout.cuts, each.itemsize_bytes))
        # A leaf whose boxes each have one holder, with equal loads, changes no choice about other
        # leaves, so the planner need not see its boxes: they may be millions.
        if owners is None or np.ptp(written[index][processes]):
            open_to_choice.append(index)
    for index, share in _planned(placed, open_to_choice, first).items():
        written[index] = 0
        sizes_bytes = _box_bytes(share.cuts, placed[index].itemsize_bytes)
        np.add.at(written[index], np.array(share.owners), sizes_bytes)
    return written[:, processes]


def _planned(
    placed: Sequence[_Placed], indices: Sequence[int], first: frozenset[int]
) -> dict[int, ownership.Share]:
    """The shares of some leaves, by the planner of real saves."""
    shares = ownership.share_out(
        [placed[i].layout for i in indices],
        [placed[i].itemsize_bytes for i in indices],
        frozenset(position for position, i in enumerate(indices) if i in first),
    )
    return dict(zip(indices, shares, strict=True))


def _sole_holders(replicas: Sequence[tuple[int, ...]]) -> np.ndarray | None:
    """The process that holds each box; None if several processes hold some box."""
    if any(len(held) > 1 for held in replicas):
        return None
    return np.array([held[0] for held in replicas])


def _box_bytes(cuts: Cuts, itemsize_bytes: int) -> np.ndarray:
    """Bytes of each box, in grid order."""
    lengths = [np.diff(points) if len(points) > 1 else np.zeros(1, int) for points in cuts]
    sizes = functools.reduce(np.multiply.outer, lengths, np.ones((), np.int64))
    return np.ravel(sizes) * itemsize_bytes
