"""The way of a restore after the base has been read; knows no Orbax.

Records are read ahead and folded onto the base by the compiled update; then the leaves that no
update explains are put back, and every leaf is compared with its fingerprint.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import fingerprint, jax_settings, transfer
from adacheck_jax.errors import FormatError, IntegrityError, unreadable
from adacheck_jax.format import manifest_file
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.format.manifest import BaseManifest, Delta, Leaf, Update
from adacheck_jax.restore import patches as deltas
from adacheck_jax.restore import progress
from adacheck_jax.restore.patches import DeltaReader, Patches, like_host
from adacheck_jax.update import replay
from adacheck_jax.update.binding import LeafType, Recorders, bind_all

_log = logging.getLogger(__name__)

_READ_AHEAD = 2
ROUNDING = 1e-6
"""What the order of sums may change in one update, relative to a leaf's largest value."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What one replayed update consumes, on its target devices."""

    record: list[jax.Array]
    extra: list[jax.Array]

    @property
    def all(self) -> list[jax.Array]:
        """In the order of ``Update.consumed``."""
        return self.record + self.extra


class Folds:
    """The programs that apply updates in place, by base and by where its leaves lie.

    Args:
        recorders: used when this jax cannot read the exported update.
        params_path: as given to the handler.
    """

    def __init__(
        self,
        recorders: Recorders | None = None,
        params_path: str | Mapping[str, str] | None = None,
    ) -> None:
        self._recorders = recorders or {}
        self._params_path = params_path
        self._functions: dict[str, Future[replay.UpdateFunction]] = {}
        self._folds: dict[Hashable, Future[replay.UpdateFunction]] = {}

    def begin(self, lineage: Lineage) -> None:
        """Loads the update in the background, while it is found out where its leaves will lie.

        Args:
            lineage: of the step.
        """
        update = lineage.base.update
        if update is not None and update.programs and replayed_count(lineage):
            future = self._functions[lineage.base.checksum] = Future()
            load = functools.partial(
                _update_function, lineage, update, self._recorders, self._params_path
            )
            replay.in_background(load, future)

    def compile(self, lineage: Lineage, placements: Mapping[str, Any]) -> None:
        """Compiles in the background, while the base is read.

        Args:
            lineage: of the step; loaded by :meth:`begin`.
            placements: by leaf path the sharding that the leaf is read onto.
        """
        update, specs = lineage.base.update, lineage.base.leaves
        if update is None or lineage.base.checksum not in self._functions:
            return
        if any(specs[i].key_type for i in (*update.inner, *update.extra)):
            return  # what their data lies on is known once they are read
        leaves = [_abstract(spec, placements[spec.path]) for spec in specs]
        working = _WorkingSet(leaves, update)
        future = self._folds[self._key(lineage, update, working)] = Future()
        x64 = transfer.x64_enabled()

        def compile_it() -> Any:
            with jax_settings.own(x64):
                fold = self._made(lineage, update, working)
                lists = update.params, update.inner, update.record, update.extra
                shardings = [working.sharding(i) for each in lists for i in each]
                abstract = [
                    [_abstract(specs[i], working.sharding(i)) for i in each] for each in lists
                ]
                switches = replay.switches(len(update.counts), shardings=shardings)
                return fold.lower(*abstract, switches).compile()

        replay.in_background(compile_it, future)

    def of(self, lineage: Lineage, update: Update, working: _WorkingSet) -> replay.UpdateFunction:
        """The program for leaves that lie where they do.

        Raises:
            FormatError: there is no update that can be read here.
            IntegrityError: it is not the one that was written.
        """
        key = self._key(lineage, update, working)
        if key not in self._folds:
            self._folds[key] = Future()
            self._folds[key].set_result(self._made(lineage, update, working))
        return self._folds[key].result()

    def _key(self, lineage: Lineage, update: Update, working: _WorkingSet) -> Hashable:
        indices = (*update.params, *update.inner, *update.consumed)
        return lineage.base.checksum, *(working.sharding(i) for i in indices)

    def _made(self, lineage: Lineage, update: Update, working: _WorkingSet) -> Any:
        known = self._functions.get(lineage.base.checksum)
        if known is None:
            function = _update_function(lineage, update, self._recorders, self._params_path)
        else:
            function = known.result()
        shardings = [[working.sharding(i) for i in each] for each in (update.params, update.inner)]
        return replay.fold(function, *shardings)


def _abstract(spec: Leaf, sharding: Any) -> jax.ShapeDtypeStruct:
    """A leaf that is to be: on devices if a sharding says where, else on the host."""
    on_devices = isinstance(sharding, jax.sharding.Sharding)
    return jax.ShapeDtypeStruct(
        spec.shape, jnp.dtype(spec.dtype), sharding=sharding if on_devices else None
    )


def replay_onto(leaves: list[Any], lineage: Lineage, folds: Folds) -> list[Any]:
    """Brings the leaves of a base to the step that ends its lineage.

    Args:
        leaves: the base's leaves as they were read onto their target shardings. Those that the
            update computes are donated.
        lineage: the base and the deltas to replay.
        folds: programs that may be compiled already; what is compiled here is added.

    Returns:
        The leaves of the step, with the shardings and types of the given ones.

    Raises:
        IntegrityError, FormatError: the stored data is damaged or cannot be read.
    """
    return apply(leaves, lineage, deltas.readers(lineage), folds)


def apply(
    leaves: list[Any], lineage: Lineage, readers: Sequence[DeltaReader], folds: Folds
) -> list[Any]:
    """As :func:`replay_onto`, for some deltas that follow one another in the lineage."""
    leaves = list(leaves)
    patches = Patches(leaves, lineage.base)
    if any(reader.has_update for reader in readers):
        update = lineage.base.update
        if update is None or not update.programs:
            raise FormatError(
                f"{lineage.base_directory}: expected the base of a delta to hold an update "
                "program, found none. Restore a base step."
            )
        _fold(leaves, lineage, update, folds, readers, patches)
    else:
        for reader in readers:
            patches.add(reader)
    patches.apply(range(len(leaves)))
    return leaves


def newest_exact(
    leaves: list[Any], lineage: Lineage, folds: Folds, *, rounded: Collection[int] = ()
) -> Lineage | None:
    """The newest step of a lineage that has the bits that were saved, by replaying all of it.

    One pass: every delta is applied once, and every step compared with its fingerprints.

    Args:
        leaves: the base's leaves, as for :func:`replay_onto`.
        lineage: of a step that cannot be restored.
        folds: programs that may be compiled already.
        rounded: indices of the leaves of which a replayed step need only be right to rounding.

    Returns:
        The part of the lineage that ends at that step; None where not even the base is exact.
    """
    found = lineage.to(lineage.base.step) if _exact(leaves, lineage.base, ()) else None
    try:
        for reader, delta in zip(deltas.readers(lineage), lineage.deltas, strict=True):
            leaves = apply(leaves, lineage, [reader], folds)
            if _exact(leaves, delta, rounded):
                found = lineage.to(delta.step)
    except (IntegrityError, FormatError) as error:  # nothing can be built on it
        _log.debug("%s: replayed no further: %s", lineage.base_directory, error)
    return found


def _exact(leaves: Sequence[Any], step: BaseManifest | Delta, rounded: Collection[int]) -> bool:
    return not differing(leaves, step.fingerprints).difference(rounded)


def differing(leaves: Sequence[Any], fingerprints: Sequence[int]) -> set[int]:
    """The indices of the leaves that do not have these fingerprints; None is left out."""
    plain = {i: transfer.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    found = fingerprint.of_leaves(plain)
    return {i for i, value in found.items() if value != fingerprints[i]}


def check_kinds(leaves: Sequence[Any], base: BaseManifest, where: Path) -> None:
    """Compares what was read of a base with what its manifest says of it, but for the bits.

    Orbax takes shapes, data types and what is a key from files that nothing protects.

    Args:
        leaves: as they were read; None for one that was not.
        base: its manifest.
        where: the base's directory, for the message.

    Raises:
        IntegrityError: names every leaf of another shape or data type.
    """
    wrong = []
    for spec, leaf in zip(base.leaves, leaves, strict=True):
        if hasattr(leaf, "dtype"):
            found = f"{leaf.dtype}{list(leaf.shape)}"
            if found != spec.description:
                wrong.append(f"{spec.path}: expected {spec.description}, found {found}")
    if wrong:
        shown = ", ".join(wrong[:20]) + (f", and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(leaves)} leaves of the base do not have the shape and "
            f"data type that were saved: {shown}. Its metadata is damaged; restore another step."
        )


def _fold(
    leaves: list[Any],
    lineage: Lineage,
    update: Update,
    folds: Folds,
    readers: Sequence[DeltaReader],
    patches: Patches,
) -> None:
    """Replays updates in place: records read ahead, one compiled program for all deltas."""
    working = _WorkingSet(leaves, update)
    passed = frozenset(update.passed)
    computed = update.explained - passed
    updating = [reader for reader in readers if reader.has_update]
    inputs = _read_ahead(lineage.base.leaves, update, updating, working)
    fold = folds.of(lineage, update, working)
    touched = (*update.params, *update.inner, *update.consumed)
    shardings = [working.sharding(i) for i in touched]
    params, inner = working.take(update.params), working.take(update.inner)
    for reader in progress.track(readers, "Replaying updates"):
        if not reader.has_update:
            patches.add(reader)
            continue
        consumed, kept = next(inputs), {}
        # What is dispatched holds its inputs: never more than this update's, and those read
        # ahead, are in memory. All results of a program are there at once.
        jax.block_until_ready((params or inner)[0])
        # What is passed through is put in place before the update that takes it; what is not
        # replayed has to be there as it was before.
        if (
            reader.unreplayed
            or patches.touches(update.explained)
            or not passed.isdisjoint(reader.stored)
        ):
            working.put(update.params, params)
            working.put(update.inner, inner)
            patches.apply(computed)
            patches.add(reader)
            patches.apply(passed)
            kept = {i: leaves[i] for i in reader.unreplayed}
            params = working.take(update.params, copied=kept)
            inner = working.take(update.inner, copied=kept)
        else:
            patches.add(reader)
        switches = replay.switches(len(update.counts), reader.updates, shardings)
        params, inner = fold(params, inner, consumed.record, consumed.extra, switches)
        if kept:
            working.put(update.params, params)
            working.put(update.inner, inner)
            for index, leaf in kept.items():
                leaves[index] = leaf
            params, inner = working.take(update.params), working.take(update.inner)
        if reader is readers[-1]:  # then what it consumed is part of the state
            for index, array in zip(update.consumed, consumed.all, strict=True):
                if index in reader.stored:
                    patches.place(index, array)
    working.put(update.params, params)
    working.put(update.inner, inner)


def _read_ahead(
    specs: Sequence[Leaf], update: Update, readers: Sequence[DeltaReader], working: _WorkingSet
) -> Iterator[_Inputs]:
    """Yields the inputs of each update, reading the next ones meanwhile."""
    x64 = transfer.x64_enabled()

    wanted = [(specs[i].shape, working.sharding(i)) for i in update.consumed]
    boxes = {i: transfer.boxes_here(*each) for i, each in zip(update.consumed, wanted, strict=True)}
    record_count = len(update.record)

    def load(reader: DeltaReader) -> _Inputs:
        consumed = update.consumed_by(reader.updates)

        def read(position: int, box: Box) -> np.ndarray:
            index = update.consumed[position]
            if index not in consumed:  # of a recorder without an update
                return np.zeros(box.shape, jnp.dtype(specs[index].dtype))
            return reader.read(index, box)

        with reader.holding(boxes), jax_settings.own(x64):
            placed = transfer.place_all(wanted, read)
            return _Inputs(placed[:record_count], placed[record_count:])

    with ThreadPoolExecutor(_READ_AHEAD, thread_name_prefix="adacheck_read_ahead") as pool:
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
        on_devices = [
            (len(sharding.device_set), leaves[i].size, i)
            for i in touched
            if (sharding := _sharding_of(leaves[i])) is not None
        ]
        if on_devices:
            self._main: Any = _sharding_of(leaves[max(on_devices)[-1]])
        else:
            self._main = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def sharding(self, index: int) -> jax.sharding.Sharding:
        """Where a leaf lies while updates are replayed."""
        known = index in self._wanted
        own = _sharding_of(self._wanted[index] if known else self._leaves[index])
        if own is not None and own.device_set == self._main.device_set:
            return own
        return replay.replicated(self._main)

    def take(self, indices: Sequence[int], copied: Collection[int] = ()) -> list[jax.Array]:
        """Takes leaves out of the list, onto the common devices.

        Args:
            indices: of the leaves.
            copied: of those that may not be donated, and are copied therefore.
        """
        taken = []
        for index in indices:
            if transfer.is_key(self._leaves[index]):
                self._key_impls[index] = jax.random.key_impl(self._leaves[index])
            leaf, sharding = transfer.raw(self._leaves[index]), self.sharding(index)
            if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
                self._wanted[index] = jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=sharding
                )
                taken.append(jnp.copy(leaf) if index in copied else leaf)
            else:
                self._wanted[index] = leaf
                placed = jax.device_put(leaf, sharding)
                taken.append(jnp.copy(placed) if index in copied else placed)
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
                self._leaves[index] = like_host(wanted, np.asarray(array))
            if index in self._key_impls:
                impl = self._key_impls[index]
                self._leaves[index] = jax.random.wrap_key_data(self._leaves[index], impl=impl)


def _sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Where the elements of a leaf lie; None for one that is no array on devices."""
    return getattr(transfer.raw(leaf) if transfer.is_key(leaf) else leaf, "sharding", None)


def _update_function(
    lineage: Lineage,
    update: Update,
    recorders: Recorders,
    params_path: str | Mapping[str, str] | None,
) -> replay.UpdateFunction:
    """The stored update program, or the recorders' where this jax cannot read it."""
    path = lineage.base_directory / manifest_file.update_file(replay.platform())
    try:
        data = path.read_bytes()
    except OSError as error:
        if refused := unreadable(path, error):
            raise refused from error
        raise FormatError(
            f"{path}: expected the exported update of the base for this platform, found none "
            f"({error.strerror}); the base has it for {', '.join(update.programs)}. Restore on one "
            "of these, or restore a base step."
        ) from error
    try:
        return replay.load(data, update, str(path))
    except FormatError as error:
        if not recorders:
            raise
        _log.warning("Replaying the given recorder's update instead of the file's: %s", error)
    types = {
        leaf.path: LeafType(leaf.shape[:-1], leaf.key_type)
        if leaf.key_type
        else LeafType(leaf.shape, leaf.dtype)
        for leaf in lineage.base.leaves
    }
    return replay.joint_function(bind_all(recorders, types, params_path))


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
    return sum(delta.has_update for delta in lineage.deltas)


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
    end, specs = lineage.end, lineage.base.leaves
    plain = {i: transfer.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    found = fingerprint.of_leaves(plain)
    differing = [i for i, value in found.items() if value != end.fingerprints[i]]
    wrong = [specs[i].path for i in differing if i not in rounded]
    if wrong:
        shown = ", ".join(wrong[:20]) + (f", and {len(wrong) - 20} more" if len(wrong) > 20 else "")
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(found)} leaves of step {end.step} do not have "
            f"the bits that were saved: {shown}. The stored data is damaged, or replay of the "
            f"update is not exact here.{_other_settings(lineage)} Nothing was returned; restore "
            "another step, or a base step."
        )
    return differing


def _other_settings(lineage: Lineage) -> str:
    """Names the settings that arithmetic may depend on and that are others here."""
    here, saved = replay.environment(), lineage.base.environment
    if not replayed_count(lineage):
        return ""
    other = [
        f"{name} was {value or 'not set'} when the base was saved, and is {here[name] or 'not set'}"
        for name, value in saved.items()
        if name in here and here[name] != value
    ]
    return f" Not the same here: {'; '.join(other)}." if other else ""
