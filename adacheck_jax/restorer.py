"""The way of a restore after the base has been read; knows no Orbax.

Records are read ahead and folded onto the base by the compiled update; then the leaves that no
update explains are put back, and every leaf is compared with its fingerprint.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax import arrays, codecs, fingerprint, redundancy, replay, staging
from adacheck_jax import manifest as manifests
from adacheck_jax.arrays import PackReader
from adacheck_jax.boxes import Box
from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.lineage import DELTA, Lineage
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Encoding, Leaf, Update
from adacheck_jax.recorder import Recorder

_log = logging.getLogger(__name__)

_READ_AHEAD = 2
ROUNDING = 1e-6
"""What the order of sums may change in one update, relative to a leaf's largest value."""


class DeltaReader:
    """Reads boxes of the leaves that one delta stores.

    Args:
        base: the manifest that describes the leaves.
        delta: the delta's manifest.
        directory: the delta's item directory.

    Raises:
        IntegrityError: the manifest does not fit the base's.
    """

    def __init__(self, base: BaseManifest, delta: DeltaManifest, directory: Path) -> None:
        self._leaves = base.leaves
        self._directory = directory
        self._delta = delta
        encodings = [pack.encodings for pack in delta.packs]
        if len(encodings) != base.process_count or any(i >= len(base.leaves) for i in delta.stored):
            raise IntegrityError(
                f"{directory}: expected packs of {base.process_count} processes with some of "
                f"{len(base.leaves)} leaves, found {len(encodings)} packs with leaves up to "
                f"{max(delta.stored, default=0)}. Restore another step."
            )
        plan = redundancy.plan_delta(base.leaves, delta.stored, encodings)
        planned = tuple(zip(plan.raw_bytes, plan.difference_bytes, strict=True))
        found = tuple((pack.raw_bytes, pack.difference_bytes) for pack in delta.packs)
        if planned != found:
            raise IntegrityError(
                f"{directory}: expected packs of {planned} bytes from the stored leaves, found "
                f"{found}. Restore another step."
            )
        self._extents: dict[int, list[redundancy.Extent]] = {}
        for extent in plan.extents:
            self._extents.setdefault(extent.leaf, []).append(extent)
        self._packs: dict[tuple[int, arrays.Kind], PackReader] = {}

    @property
    def stored(self) -> tuple[int, ...]:
        """The leaves that the delta holds something of."""
        return self._delta.stored

    @property
    def has_update(self) -> bool:
        """Whether the delta replays an update."""
        return self._delta.has_update

    def holds_all_of(self, index: int) -> bool:
        """Whether every box of a leaf is stored as it is, so that nothing before it matters."""
        extents = self._extents.get(index, [])
        is_raw = all(extent.encoding is Encoding.RAW for extent in extents)
        return is_raw and len(extents) == len(self._leaves[index].owners)

    def read(self, index: int, box: Box) -> np.ndarray:
        """Reads one box of a leaf that is stored as it is.

        Raises:
            IntegrityError: stored bytes are damaged, or the leaf is not stored as it is.
            FormatError: a pack is missing.
        """
        if not self.holds_all_of(index):
            raise IntegrityError(
                f"{self._directory}: expected {self._leaves[index].path}, which the update "
                "consumed, stored as it is; found it otherwise. Restore another step."
            )
        block = np.empty(box.shape, jnp.dtype(self._leaves[index].dtype))
        self.patch(index, box, block)
        return block

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Brings one box of a leaf from the parent's bits to those of this delta, in place.

        Args:
            index: of the leaf.
            box: what the block holds; only the stored boxes that it meets are touched, of these
                only the rows that it needs.
            block: the elements, to be changed.

        Raises:
            IntegrityError, FormatError: as from :meth:`read`.
        """
        leaf = self._leaves[index]
        for extent in self._extents.get(index, ()):
            common = box.intersect(extent.box)
            if common is None:
                continue
            rows = _rows_of(extent.box, common)
            inside = (*common.relative_to(rows.start).slices, ...)
            target = block[(*common.relative_to(box.start).slices, ...)]
            if extent.encoding is Encoding.RAW:
                (data,) = self._pack(extent).read([_row_span(extent, rows)], what=leaf.path)
                target[...] = data.view(block.dtype).reshape(rows.shape)[inside]
                continue
            width_bytes = codecs.word_bytes(block.dtype)
            spans = _plane_spans(extent, rows, width_bytes)
            planes = np.stack(self._pack(extent).read(spans, what=leaf.path))
            whole = np.zeros(rows.shape, block.dtype)
            whole[inside] = target
            codecs.apply(extent.encoding, whole, planes)
            target[...] = whole[inside]

    def _pack(self, extent: redundancy.Extent) -> PackReader:
        kind = arrays.RAW if extent.encoding is Encoding.RAW else arrays.DIFFERENCE
        if (extent.process, kind) not in self._packs:
            directory = self._directory / DELTA / str(extent.process)
            pack = self._delta.packs[extent.process]
            reader = (
                PackReader(directory, kind, pack.raw_bytes)
                if kind is arrays.RAW
                else PackReader(directory, kind, pack.difference_bytes, pack.elided)
            )
            self._packs[extent.process, kind] = reader
        return self._packs[extent.process, kind]


def _rows_of(stored: Box, part: Box) -> Box:
    """The stored box narrowed, along its first axis, to the rows that a part of it needs."""
    if not stored.start:
        return stored
    return Box((part.start[0], *stored.start[1:]), (part.stop[0], *stored.stop[1:]))


def _row_span(extent: redundancy.Extent, rows: Box) -> tuple[int, int]:
    """Byte range, where the extent lies, of some rows of its box."""
    first, last = _row_range(extent, rows, extent.size_bytes)
    return (extent.offset_bytes + first, extent.offset_bytes + last)


def _plane_spans(extent: redundancy.Extent, rows: Box, width: int) -> list[tuple[int, int]]:
    """Byte ranges of some rows of a box in each of its ``width`` planes."""
    plane_bytes = extent.size_bytes // width
    first, last = _row_range(extent, rows, plane_bytes)
    starts = [extent.offset_bytes + plane * plane_bytes for plane in range(width)]
    return [(start + first, start + last) for start in starts]


def _row_range(extent: redundancy.Extent, rows: Box, box_bytes: int) -> tuple[int, int]:
    """Where some rows lie in something that has the same number of bytes for each row."""
    if not extent.box.start:
        return (0, box_bytes)
    row_bytes = box_bytes // extent.box.shape[0]
    start = extent.box.start[0]
    return ((rows.start[0] - start) * row_bytes, (rows.stop[0] - start) * row_bytes)


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
    readers = [DeltaReader(lineage.base, delta, directory) for delta, directory in lineage.deltas]
    leaves = list(leaves)
    patches = _Patches(leaves, lineage.base)
    if any(reader.has_update for reader in readers):
        update = lineage.base.update
        if update is None or not update.programs:
            raise FormatError(
                f"{lineage.base_directory}: expected the base of a delta to hold an update "
                "program, found none. Restore a base step."
            )
        function = _update_function(lineage, update, recorder, params_path)
        _fold(leaves, lineage.base, update, function, readers, patches)
    else:
        for reader in readers:
            patches.add(reader)
    patches.apply(range(len(leaves)))
    return leaves


class _Patches:
    """What deltas store of leaves, put in place as late as possible.

    A leaf that many deltas store is then taken off its devices and put back once.
    """

    def __init__(self, leaves: list[Any], base: BaseManifest) -> None:
        self._leaves = leaves
        self._specs = base.leaves
        self._waiting: dict[int, list[DeltaReader]] = {}

    def add(self, reader: DeltaReader) -> None:
        """Notes what one delta stores, after those noted before."""
        for index in reader.stored:
            waiting = self._waiting.setdefault(index, [])
            if reader.holds_all_of(index):
                waiting.clear()
            waiting.append(reader)

    def touches(self, indices: Collection[int]) -> bool:
        """Whether something waits for one of these leaves."""
        return not self._waiting.keys().isdisjoint(indices)

    def apply(self, indices: Collection[int]) -> None:
        """Puts in place what waits for these leaves."""
        for index in self._waiting.keys() & frozenset(indices):
            readers = self._waiting.pop(index)
            if self._leaves[index] is not None:
                self._leaves[index] = _patched(
                    self._leaves[index], self._specs[index], index, readers
                )


def _fold(
    leaves: list[Any],
    base: BaseManifest,
    update: Update,
    function: replay.UpdateFunction,
    readers: Sequence[DeltaReader],
    patches: _Patches,
) -> None:
    """Replays updates in place: read-ahead on a thread, one compiled program for all deltas."""
    working = _WorkingSet(leaves, update)
    passed = frozenset(update.passed)
    computed = update.explained - passed
    inputs = _read_ahead(base.leaves, update, [r for r in readers if r.has_update], working)
    fold: replay.UpdateFunction | None = None
    params, inner = working.take(update.params), working.take(update.inner)
    for reader in readers:
        if reader.has_update:
            consumed = next(inputs)
            # What is passed through is put in place before the update that takes it.
            if patches.touches(computed) or not passed.isdisjoint(reader.stored):
                working.put(update.params, params)
                working.put(update.inner, inner)
                patches.apply(computed)
                patches.add(reader)
                patches.apply(passed)
                params, inner = working.take(update.params), working.take(update.inner)
            else:
                patches.add(reader)
            fold = fold or replay.compile_fold(function, params, inner)
            params, inner = fold(params, inner, consumed.record, consumed.extra)
        else:
            patches.add(reader)
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
        self._key_impls: dict[int, Any] = {}
        touched = [*update.params, *update.inner, *update.consumed]
        on_devices = [staging.raw(leaves[i]) for i in touched if isinstance(leaves[i], jax.Array)]
        if on_devices:
            main = max(on_devices, key=lambda array: (len(array.sharding.device_set), array.size))
            self._main = main.sharding
        else:
            self._main = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def sharding(self, index: int) -> jax.sharding.Sharding:
        """Where a leaf lies while updates are replayed."""
        known = index in self._wanted
        wanted = self._wanted[index] if known else staging.raw(self._leaves[index])
        own = getattr(wanted, "sharding", None)
        if own is not None and own.device_set == self._main.device_set:
            return own
        return replicated(self._main)

    def take(self, indices: Sequence[int]) -> list[jax.Array]:
        """Takes leaves out of the list, onto the common devices."""
        taken = []
        for index in indices:
            if staging.is_key(self._leaves[index]):
                self._key_impls[index] = jax.random.key_impl(self._leaves[index])
            leaf, sharding = staging.raw(self._leaves[index]), self.sharding(index)
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

    def put(self, indices: Sequence[int], replayed: Sequence[jax.Array]) -> None:
        """Puts replayed leaves back, as and where they are wanted."""
        for index, array in zip(indices, replayed, strict=True):
            wanted = self._wanted[index]
            if isinstance(wanted, jax.ShapeDtypeStruct):
                self._leaves[index] = array
            elif isinstance(wanted, jax.Array):
                self._leaves[index] = jax.device_put(array, wanted.sharding)
            else:
                self._leaves[index] = _like_host(wanted, np.asarray(array))
            if index in self._key_impls:
                impl = self._key_impls[index]
                self._leaves[index] = jax.random.wrap_key_data(self._leaves[index], impl=impl)


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


def _patched(example: Any, spec: Leaf, index: int, readers: Sequence[DeltaReader]) -> Any:
    """A leaf after what some deltas store of it, as the type and where it was before."""
    plain = staging.raw(example)
    held: dict[Box, Any] = {Box.full(spec.shape): plain}
    if isinstance(plain, jax.Array):
        shards = plain.addressable_shards
        held = {Box.from_slices(shard.index, spec.shape): shard.data for shard in shards}

    def block(box: Box) -> np.ndarray:
        if readers[0].holds_all_of(index):
            result = np.empty(box.shape, jnp.dtype(spec.dtype))
        else:
            result = np.array(held[box])
        for reader in readers:
            reader.patch(index, box, result)
        return result

    if not isinstance(example, jax.Array):
        return _like_host(example, block(Box.full(spec.shape)))
    data = staging.place(spec.shape, plain.sharding, block)
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


def bound_to_mesh(lineage: Lineage) -> frozenset[int]:
    """The leaves of a step whose bits depend on the devices on which its updates are replayed.

    These are all that an update with sums in it computes: other leaves have exact arithmetic, but
    are compiled as parts of a program that is another one on other devices.
    """
    update = lineage.base.update
    if update is None or not update.reducing or not replayed_count(lineage):
        return frozenset()
    return update.explained.difference(update.passed)


def tolerance(lineage: Lineage, rounded: Sequence[int]) -> float:
    """How far leaves may be off that were replayed on other devices, about.

    Args:
        lineage: of the step.
        rounded: indices of those leaves.

    Returns:
        A bound relative to each leaf's largest value, for updates that are continuous: what the
        order of sums makes of each update in float32, and one rounding to the leaf's own type.
    """
    dtypes = [jnp.dtype(lineage.base.leaves[i].dtype) for i in rounded]
    roundings = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    return replayed_count(lineage) * ROUNDING + max(roundings, default=0.0)


def replayed_count(lineage: Lineage) -> int:
    """How many updates a restore of a step replays."""
    return sum(delta.has_update for delta, _ in lineage.deltas)


def verify(
    leaves: Sequence[Any],
    lineage: Lineage,
    where: Path,
    *,
    rounded: Collection[int] = (),
) -> list[int]:
    """Compares every leaf with the fingerprint taken when it was saved.

    Args:
        leaves: the restored leaves; None for one that was not asked for.
        lineage: of the step.
        where: the step's directory, for the message.
        rounded: indices of the leaves that need only be right to rounding.

    Returns:
        Those of ``rounded`` whose bits differ.

    Raises:
        IntegrityError: names every other leaf whose bits differ.
    """
    manifest, specs = lineage.manifest, lineage.base.leaves
    plain = {i: staging.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    found = fingerprint.of_leaves(plain)
    differing = [i for i, value in found.items() if value != manifest.fingerprints[i]]
    wrong = [specs[i].path for i in differing if i not in rounded]
    if wrong:
        shown = ", ".join(wrong[:20]) + (f", and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(found)} leaves of step {manifest.step} do not have "
            f"the bits that were saved: {shown}. The stored data is damaged, or replay of the "
            "update is not exact here. Nothing was returned; restore another step, or a base step."
        )
    return differing
