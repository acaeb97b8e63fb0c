"""The way of a restore after the base has been read; knows no Orbax.

Records are read ahead and folded onto the base by the compiled update; then the leaves that no
update explains are put back, and every leaf is compared with its fingerprint.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax import fingerprint, redundancy, replay, staging
from adacheck_jax import manifest as manifests
from adacheck_jax.arrays import PackReader
from adacheck_jax.boxes import Box
from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.lineage import DELTA, Lineage
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Leaf, Update
from adacheck_jax.recorder import Recorder

_log = logging.getLogger(__name__)

_READ_AHEAD = 2


class DeltaReader:
    """Reads boxes of the leaves that one delta stores.

    Args:
        base: the manifest that describes the leaves.
        delta: the delta's manifest.
        directory: the delta's item directory.
    """

    def __init__(self, base: BaseManifest, delta: DeltaManifest, directory: Path) -> None:
        self._leaves = base.leaves
        self._directory = directory
        plan = redundancy.plan_delta(base.leaves, delta.stored, base.process_count)
        if plan.process_bytes != delta.process_bytes:
            raise IntegrityError(
                f"{directory}: expected packs of {plan.process_bytes} bytes from the stored "
                f"leaves, found {delta.process_bytes}. Restore another step."
            )
        self._process_bytes = plan.process_bytes
        self._extents: dict[int, list[redundancy.Extent]] = {}
        for extent in plan.extents:
            self._extents.setdefault(extent.leaf, []).append(extent)
        self._packs: dict[int, PackReader] = {}

    def read(self, index: int, box: Box) -> np.ndarray:
        """Reads one box of one leaf, touching only the stored boxes that it meets.

        Raises:
            IntegrityError: stored bytes are damaged.
            FormatError: a pack is missing.
        """
        leaf = self._leaves[index]
        dtype = jnp.dtype(leaf.dtype)
        result = np.empty(box.shape, dtype)
        for extent in self._extents[index]:
            common = box.intersect(extent.box)
            if common is None or not extent.size_bytes:
                continue
            rows = _row_span(extent, common, leaf.itemsize_bytes)
            (data,) = self._pack(extent.process).read(
                [(extent.offset_bytes + rows[0], extent.offset_bytes + rows[1])], what=leaf.path
            )
            stored = _rows_of(extent.box, common)
            block = data.view(dtype).reshape(stored.shape)
            result[common.relative_to(box.start).slices] = block[
                common.relative_to(stored.start).slices
            ]
        return result

    def _pack(self, process: int) -> PackReader:
        if process not in self._packs:
            directory = self._directory / DELTA / str(process)
            self._packs[process] = PackReader(directory, self._process_bytes[process])
        return self._packs[process]


def _rows_of(stored: Box, part: Box) -> Box:
    """The stored box narrowed, along its first axis, to the rows that a part of it needs."""
    if not stored.start:
        return stored
    return Box((part.start[0], *stored.start[1:]), (part.stop[0], *stored.stop[1:]))


def _row_span(extent: redundancy.Extent, part: Box, itemsize_bytes: int) -> tuple[int, int]:
    """Byte range, within the extent, of the rows that a part of its box needs."""
    if not extent.box.start:
        return (0, extent.size_bytes)
    row_bytes = math.prod(extent.box.shape[1:]) * itemsize_bytes
    first = part.start[0] - extent.box.start[0]
    last = part.stop[0] - extent.box.start[0]
    return (first * row_bytes, last * row_bytes)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What one replayed update consumes, on its target devices."""

    record: list[jax.Array]
    extra: list[jax.Array]


def replay_onto(
    leaves: list[Any], lineage: Lineage, recorder: Recorder | None, params_path: str | None
) -> list[Any]:
    """Brings the leaves of a base to the step that ends its lineage.

    Args:
        leaves: the base's leaves as they were read onto their target shardings. Those that the
            update computes are donated.
        lineage: the base and the deltas to replay.
        recorder: used when this jax cannot read the exported update.
        params_path: as given to the handler.

    Returns:
        The leaves of the step, with the shardings and types of the given ones.

    Raises:
        IntegrityError, FormatError: the stored data is damaged or cannot be read.
    """
    deltas = lineage.deltas
    if not deltas:
        return leaves
    readers = [DeltaReader(lineage.base, delta, directory) for delta, directory in deltas]
    updates = [r for r, (delta, _) in zip(readers, deltas, strict=True) if delta.has_update]
    update = lineage.base.update
    if update is None:
        raise FormatError(
            f"{lineage.base_directory}: expected the base of a delta to hold an update program, "
            "found none. Restore a base step."
        )
    leaves = list(leaves)
    if updates:
        _fold(leaves, lineage, update, updates, recorder, params_path)
    for index in range(len(leaves)):
        newest = _newest(index, deltas)
        if index in update.explained and newest != len(deltas) - 1:
            continue  # computed; only what its replay could not reproduce is stored in the last
        if newest is not None and leaves[index] is not None:
            leaves[index] = _read_like(
                leaves[index], lineage.base.leaves[index], index, readers[newest]
            )
    return leaves


def _newest(index: int, deltas: Sequence[tuple[DeltaManifest, Path]]) -> int | None:
    """The last delta that stores a leaf."""
    return max((n for n, (delta, _) in enumerate(deltas) if index in delta.stored), default=None)


def _fold(
    leaves: list[Any],
    lineage: Lineage,
    update: Update,
    readers: Sequence[DeltaReader],
    recorder: Recorder | None,
    params_path: str | None,
) -> None:
    """Replays updates in place: read-ahead on a thread, one compiled program for all deltas."""
    function = _update_function(lineage, update, recorder, params_path)
    working = _WorkingSet(leaves, update)
    params, inner = working.take(update.params), working.take(update.inner)
    fold = replay.compile_fold(function, params, inner)
    for inputs in _read_ahead(lineage.base.leaves, update, readers, working):
        params, inner = fold(params, inner, inputs.record, inputs.extra)
    working.put(update.params, params)
    working.put(update.inner, inner)


def _read_ahead(
    specs: Sequence[Leaf], update: Update, readers: Sequence[DeltaReader], working: _WorkingSet
) -> Iterator[_Inputs]:
    """Yields the inputs of each update, reading the next ones meanwhile."""
    x64 = staging.x64_enabled()

    def load(reader: DeltaReader) -> _Inputs:
        def place(index: int) -> jax.Array:
            sharding = working.sharding(index)
            return staging.place(specs[index].shape, sharding, lambda box: reader.read(index, box))

        with jax.enable_x64(x64):
            return _Inputs([place(i) for i in update.record], [place(i) for i in update.extra])

    with ThreadPoolExecutor(1, thread_name_prefix="adacheck_read_ahead") as pool:
        waiting = [pool.submit(load, reader) for reader in readers[:_READ_AHEAD]]
        for following in [*readers[_READ_AHEAD:], *[None] * len(waiting)]:
            yield waiting.pop(0).result()
            if following is not None:
                waiting.append(pool.submit(load, following))


class _WorkingSet:
    """The leaves that an update touches, on one set of devices while they are replayed.

    A compiled program wants all its arrays on the same devices. A leaf that is wanted elsewhere
    (a counter on one device, a host value) is replicated over the devices of the largest leaf
    meanwhile, and brought back in the end.
    """

    def __init__(self, leaves: list[Any], update: Update) -> None:
        self._leaves = leaves
        self._wanted: dict[int, Any] = {}
        touched = [*update.params, *update.inner, *update.consumed]
        on_devices = [leaves[i] for i in touched if isinstance(leaves[i], jax.Array)]
        if on_devices:
            main = max(on_devices, key=lambda array: (len(array.sharding.device_set), array.size))
            self._main = main.sharding
        else:
            self._main = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def sharding(self, index: int) -> jax.sharding.Sharding:
        """Where a leaf lies while updates are replayed."""
        leaf = self._leaves[index] if index not in self._wanted else self._wanted[index]
        if isinstance(leaf, jax.Array) and leaf.sharding.device_set == self._main.device_set:
            return leaf.sharding
        return replicated(self._main)

    def take(self, indices: Sequence[int]) -> list[jax.Array]:
        """Takes leaves out of the list, onto the common devices."""
        taken = []
        for index in indices:
            leaf, sharding = self._leaves[index], self.sharding(index)
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                self._wanted[index] = jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding
                )
                taken.append(leaf)
            else:
                self._wanted[index] = leaf
                taken.append(jax.device_put(leaf, sharding))
            self._leaves[index] = None
        return taken

    def put(self, indices: Sequence[int], arrays: Sequence[jax.Array]) -> None:
        """Puts replayed leaves back, as and where they are wanted."""
        for index, array in zip(indices, arrays, strict=True):
            wanted = self._wanted[index]
            if isinstance(wanted, jax.ShapeDtypeStruct):
                self._leaves[index] = array
            elif isinstance(wanted, jax.Array):
                self._leaves[index] = jax.device_put(array, wanted.sharding)
            else:
                self._leaves[index] = _like_host(wanted, np.asarray(array))


def replicated(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """A sharding over the same devices that gives each the whole array."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    if len(sharding.device_set) == 1:
        return sharding
    devices = np.array(sorted(sharding.device_set, key=lambda d: d.id))
    mesh = jax.sharding.Mesh(devices, ("all",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _like_host(example: Any, value: np.ndarray) -> Any:
    """A host value of the example's type: numpy stays numpy, Python scalars stay scalars."""
    if isinstance(example, np.ndarray | np.generic):
        return value.astype(example.dtype)
    return type(example)(value)


def _read_like(example: Any, spec: Leaf, index: int, reader: DeltaReader) -> Any:
    """Reads a whole leaf as the type, and onto the sharding, of an example of it."""
    if not isinstance(example, jax.Array):
        return _like_host(example, reader.read(index, Box.full(spec.shape)))
    plain = staging.raw(example)
    data = staging.place(spec.shape, plain.sharding, lambda box: reader.read(index, box))
    if staging.is_key(example):
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(example))
    return data


def _update_function(
    lineage: Lineage, update: Update, recorder: Recorder | None, params_path: str | None
) -> replay.UpdateFunction:
    """The stored update program, or the recorder's where this jax cannot read it."""
    path = lineage.base_directory / manifests.update_file(replay.platform())
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(
            f"{path}: expected the exported update of the base for this platform, found none "
            f"({error.strerror}); the base has it for {', '.join(update.programs)}. Restore on one "
            "of these, or restore a base step."
        ) from error
    try:
        return replay.load(data, update, str(path))
    except FormatError:
        if recorder is None:
            raise
        _log.warning("%s cannot be read by this jax; replaying the given recorder's update.", path)
    shapes = {
        leaf.path: leaf.shape[:-1] if leaf.key_type else leaf.shape for leaf in lineage.base.leaves
    }
    binding = replay.bind(recorder, shapes, params_path)
    return replay.update_function(recorder, binding.signature)


def verify(
    leaves: Sequence[Any], manifest: manifests.Manifest, specs: Sequence[Leaf], where: Path
) -> None:
    """Compares every leaf with the fingerprint taken when it was saved.

    Args:
        leaves: the restored leaves; None for one that was not asked for.
        manifest: of the step.
        specs: the leaves' descriptions, in the same order.
        where: the step's directory, for the message.

    Raises:
        IntegrityError: names every leaf whose bits differ.
    """
    arrays = {i: staging.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    found = fingerprint.of_leaves(arrays)
    wrong = [specs[i].path for i, value in found.items() if value != manifest.fingerprints[i]]
    if wrong:
        shown = ", ".join(wrong[:20]) + (f", and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(found)} leaves of step {manifest.step} do not have "
            f"the bits that were saved: {shown}. The stored data is damaged, or replay of the "
            "update is not exact here. Nothing was returned; restore another step, or a base step."
        )
