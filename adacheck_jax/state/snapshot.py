"""A state taken apart for saving: its leaves, where they lie, and the update that ties them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jax

from adacheck_jax.device import (
    fingerprint,
    ownership,
    replicas,
    sharding,
    transfer,
    trees,
)
from adacheck_jax.device.background import in_background
from adacheck_jax.device.loops import xla_call
from adacheck_jax.device.loops.copier import Copying
from adacheck_jax.device.primary import DeviceGrid, Primary, Ranks, grid_of, sole
from adacheck_jax.device.shard_sums import Summing
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import MismatchError, RecorderError
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.update import binding
from adacheck_jax.update.binding import Binding, Recorders
from adacheck_jax.update.elements.sample_sites import Sites
from adacheck_jax.update.params_search import leaf_types
from adacheck_jax.update.recorder_state import count_of, is_result

_CACHED_STRUCTURES = 8


@dataclass(frozen=True)
class Structure:
    """Everything that two saves of the same train state have in common.

    Attributes:
        leaves: description of each leaf, in tree order.
        layouts: layout of each leaf, with all processes that hold each box.
        bindings: update of each recorder, tied to the leaves; none without a recorder.
        process_count: number of processes of the program.
        grid: devices of the state.
        primary: the one of them whose replica is saved.
        picks: boxes of each leaf that this process owns and takes.
        whole_picks: whole shards that this process accounts for, in fingerprints on devices.
        placement: digest of where the leaves of the update lie: devices, mesh, and cuts.
        sites: places at which this process samples leaves of updates; None without a recorder.
        local_picks: all boxes of each leaf that every process of several has for itself.
        replicated: boxes that lie on several devices in copies declared equal.
        ephemeral: positions of the leaves that are saved with bases alone.
        devices: ids of the devices on which the leaves of updates lie, in a program's order.
        offloaded: positions of the leaves of updates that programs cannot take where they lie.
        on_accelerator: True if some leaves lie where the host cannot read them in place.
    """

    leaves: tuple[Leaf, ...]
    layouts: tuple[sharding.Layout, ...]
    bindings: tuple[Binding, ...]
    process_count: int
    grid: DeviceGrid
    primary: Primary
    picks: dict[int, tuple[transfer.Pick, ...]] = field(default_factory=dict)
    whole_picks: dict[int, tuple[transfer.Pick, ...]] = field(default_factory=dict)
    placement: str = ""
    sites: Sites | None = None
    local_picks: dict[int, tuple[transfer.Pick, ...]] = field(default_factory=dict)
    replicated: tuple[replicas.Site, ...] = ()
    ephemeral: frozenset[int] = frozenset()
    devices: tuple[int, ...] = ()
    offloaded: frozenset[int] = frozenset()
    on_accelerator: bool = False

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Leaf path to position."""
        return {leaf.path: position for position, leaf in enumerate(self.leaves)}

    @functools.cached_property
    def everywhere(self) -> frozenset[int]:
        """Positions of the numbers that every process has."""
        everyone = ((*range(self.process_count),),)
        numbers = (i for i, each in enumerate(self.layouts) if not each.cuts)
        return frozenset(i for i in numbers if self.layouts[i].replicas == everyone)

    @functools.cached_property
    def ranks(self) -> Ranks:
        """Distances of the devices from the primary."""
        return self.grid.ranks(self.primary.position)

    @functools.cached_property
    def owned_bytes(self) -> tuple[dict[int, int], ...]:
        """Bytes of each leaf that each process owns."""
        found: list[dict[int, int]] = []
        for leaf in self.leaves:
            found.append(held := {})
            for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
                held[owner] = held.get(owner, 0) + box.size * leaf.itemsize_bytes
        return tuple(found)

    @functools.cached_property
    def arguments(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the params, inner state, record and extra arguments of all updates."""
        lists = [(each.params, each.inner, each.record, each.extra) for each in self.bindings]
        return tuple(
            tuple(self.index[path] for paths in each for path in paths)
            for each in (zip(*lists, strict=True) if lists else [()] * 4)
        )

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, int, int, int], ...]:
        """Numbers of params, inner leaves, records and extra arguments of each update."""
        return tuple(
            (len(each.params), len(each.inner), len(each.record), len(each.extra))
            for each in self.bindings
        )

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Positions of the update counters."""
        return tuple(self.index[each.count] for each in self.bindings)

    @functools.cached_property
    def touched(self) -> frozenset[int]:
        """The leaves that updates take or return."""
        return frozenset(i for indices in self.arguments for i in indices)

    @functools.cached_property
    def computed(self) -> frozenset[int]:
        """Positions of what the updates compute."""
        return self.computed_by(range(len(self.bindings)))

    @functools.cached_property
    def consumed(self) -> frozenset[int]:
        """Positions of what the updates consume."""
        return self.consumed_by(range(len(self.bindings)))

    @functools.cached_property
    def derived(self) -> frozenset[int]:
        """Positions of the derived trees' leaves, which lie outside all optimizer state."""
        counts = [sum(len(tree.types) for tree in each.derived) for each in self.bindings]
        pairs = zip(self.bindings, counts, strict=True)
        return frozenset(
            self.index[path] for each, n in pairs for path in each.inner[len(each.inner) - n :]
        )

    def lies_like(self, other: Structure) -> bool:
        """True if the leaves of updates lie on the devices that another state's lie on, and alike.

        They may lie in other memory there.
        """
        return self is other or (self.devices == other.devices and self.sites == other.sites)

    def computed_by(self, updates: Iterable[int]) -> frozenset[int]:
        """Positions of what some of the updates compute."""
        return frozenset[int]().union(*(self._of_updates[k][0] for k in updates))

    def consumed_by(self, updates: Iterable[int]) -> frozenset[int]:
        """Positions of what some of the updates consume."""
        return frozenset[int]().union(*(self._of_updates[k][1] for k in updates))

    @functools.cached_property
    def _of_updates(self) -> list[list[frozenset[int]]]:
        """Positions of what each update computes, and of what it consumes."""
        pairs = ((each.explained, each.consumed) for each in self.bindings)
        return [[frozenset(map(self.index.__getitem__, x)) for x in pair] for pair in pairs]

    def replica_check(self, mode: replicas.Mode) -> replicas.ReplicaCheck:
        """Comparison of the replicas of a state that is being saved."""
        return replicas.ReplicaCheck(mode, self.replicated, self.leaves, self.grid, self.primary)

    def summing(self, arrays: Sequence[Any]) -> Summing:
        """Programs that fingerprint the arrays of a state on devices.

        On CPU devices there are none until they are compiled, in the background.
        """
        key = xla_call.is_ready()
        if key not in self._summings:
            made = self.summing_of(dict(enumerate(arrays)))
            is_used_at_once = self.on_accelerator or not key
            self._summings[key] = made, None if is_used_at_once else in_background(made.compile)
        made, compiling = self._summings[key]
        return made if compiling is None or compiling.done() else Summing({})

    def summing_of(self, arrays: Mapping[int, Any]) -> Summing:
        """As :meth:`summing`, of some arrays that lie as the leaves do."""
        # On CPU devices both engines may sum up one leaf, at one save and the next. This process
        # must contribute the same then, so no whole shards that it owns in part.
        return Summing(
            {
                i: x
                for i, x in arrays.items()
                if fingerprint.hashes_on_device(x)
                and (transfer.on_accelerator(x) or self.whole_picks[i] == self.picks[i])
            }
        )

    def copying(self, leaves: Collection[int], arrays: Sequence[Any]) -> Copying:
        """Programs that copy some leaves of a state on devices."""
        key = frozenset(leaves), xla_call.is_ready()
        if key not in self._copyings:
            self._copyings[key] = Copying({i: arrays[i] for i in sorted(leaves)})
        return self._copyings[key]

    @functools.cached_property
    def _copyings(self) -> dict[tuple[frozenset[int], bool], Copying]:
        return {}

    @functools.cached_property
    def _summings(self) -> dict[bool, tuple[Summing, Future[None] | None]]:
        return {}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One state to save.

    Attributes:
        structure: structure of the state.
        arrays: plain arrays (:func:`transfer.raw`), one a leaf.
    """

    structure: Structure
    arrays: tuple[Any, ...]

    def counts(self) -> tuple[int, ...]:
        """Each recorder's update counter; waits for the running step."""
        return tuple(count_of(self.arrays[i]) for i in self.structure.counts)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A state as it was taken apart last, to know the next one by one look at each leaf.

    Attributes:
        treedef: tree definition of the state.
        kinds: abstract value and sharding of each leaf; the objects themselves.
        version: the recorders' ``version``.
        structure: structure of such a state.
    """

    treedef: Any
    kinds: tuple[tuple[Any, Any], ...]
    version: Hashable
    structure: Structure

    def fits(self, leaves: Sequence[Any], treedef: Any, version: Hashable) -> bool:
        """True if a state has the same structure; a state that has it may be missed."""
        return (
            len(leaves) == len(self.kinds)
            and version == self.version
            and all(
                getattr(leaf, "aval", None) is aval and leaf.sharding is sharding
                for leaf, (aval, sharding) in zip(leaves, self.kinds, strict=True)
            )
            and treedef == self.treedef
        )


class Snapshots:
    """Takes states apart, remembering the structures that it has seen.

    The params that are trained lie at ``params_path``, for several recorders by their keys; None to
    find them. Leaves with paths of the patterns ``ephemeral`` are saved with bases alone.
    """

    def __init__(
        self,
        recorders: Recorders,
        params_path: str | Mapping[str, str] | None,
        ephemeral: Sequence[str] = (),
        *,
        compares_replicas: bool = True,
    ) -> None:
        self._recorders = recorders
        self._params_path, self._ephemeral = params_path, ephemeral
        self._compares_replicas = compares_replicas
        self._structures: dict[Any, Structure] = {}
        self._seen: _Seen | None = None
        self._primary = Primary()

    def follow(self, primary: Primary) -> None:
        """Takes states apart as another replica has them."""
        if primary != self._primary:
            self._primary, self._seen = primary, None
            self._structures.clear()

    def take(self, state: PyTree) -> Snapshot:
        """Takes a state apart, without a look at what is in it.

        Raises:
            RecorderError: the recorder cannot be tied to the state, or its update takes or returns
                a leaf that is to be ephemeral.
            MismatchError: two leaves have the same leaf path, or a leaf has a type that cannot be
                stored, or was donated.
        """
        leaves, treedef = jax.tree.flatten(state)
        seen, version = self._seen, self._version()
        is_known = seen is not None and seen.fits(leaves, treedef, version)
        if any(x.is_deleted() for x in leaves if is_known or isinstance(x, jax.Array)):
            raise _donated(state)
        if seen is not None and is_known:
            return Snapshot(seen.structure, tuple(leaves))
        arrays = tuple(transfer.raw(leaf) for leaf in leaves)
        key = (version, treedef, tuple(map(_signature, leaves, arrays)))
        if key not in self._structures:
            if len(self._structures) >= _CACHED_STRUCTURES:
                del self._structures[next(iter(self._structures))]
            self._structures[key] = self._describe(state, arrays)
        # The last one is the one that was seen last: what a run saves is not forgotten for others.
        structure = self._structures[key] = self._structures.pop(key)
        if all(
            leaf is array and isinstance(leaf, jax.Array)
            for leaf, array in zip(leaves, arrays, strict=True)
        ):
            kinds = tuple((array.aval, array.sharding) for array in arrays)
            self._seen = _Seen(treedef, kinds, version, structure)
        return Snapshot(structure, arrays)

    def _version(self) -> Hashable:
        """The versions of all recorders."""
        return tuple(each.version for own in self._recorders.values() for each in own)

    def _describe(self, state: PyTree, arrays: tuple[Any, ...]) -> Structure:
        named, _ = trees.flatten(state)
        bindings: tuple[Binding, ...] = ()
        if self._recorders:
            types = leaf_types(named)
            bindings = binding.bind_all(self._recorders, types, self._params_path)
        layouts, grid = [sharding.layout_of_array(array) for array in arrays], grid_of(arrays)
        ranks, written = grid.ranks(self._primary.position), layouts
        if self._primary.is_apart:
            written = [sole(each, x, ranks) for each, x in zip(layouts, arrays, strict=True)]
        leaves = leaves_of(named, arrays, written, bindings)
        picks, local_picks = _picks(leaves, arrays, ranks)
        process = jax.process_index()
        whole_picks = {
            i: picks[i]
            if leaves[i].cuts == layouts[i].cuts
            else transfer.picks_of(array, fingerprint.accounted(array, process), ranks)
            for i, array in enumerate(arrays)
        }
        structure = Structure(
            leaves=leaves,
            layouts=tuple(layouts),
            bindings=bindings,
            process_count=jax.process_count(),
            picks=picks,
            whole_picks=whole_picks,
            local_picks=local_picks,
            replicated=replicas.replicated_sites(tuple(named), arrays),
            grid=grid,
            primary=self._primary,
            ephemeral=_ephemeral(self._ephemeral, tuple(named), bindings),
            on_accelerator=any(map(transfer.on_accelerator, arrays)),
        )
        return self._with_update(structure, arrays) if bindings else structure

    def _with_update(self, structure: Structure, arrays: Sequence[Any]) -> Structure:
        """The structure, with the places where the leaves of its updates lie."""
        touched = [i for indices in structure.arguments for i in indices]
        described = "\n".join(sharding.describe(arrays[i]) for i in touched)
        placement = hashlib.sha256(described.encode()).hexdigest()
        sites = Sites(
            touched,
            arrays,
            in_turns=self._compares_replicas and not self._primary.is_apart,
            whole=[i for path, i in structure.index.items() if is_result(path)],
        )
        # Those of the leaf that lies on most devices, in a program's order.
        devices = max((sharding.devices_of(arrays[i]) for i in touched), key=len, default=())
        return dataclasses.replace(
            structure,
            placement=placement,
            sites=sites,
            devices=devices,
            offloaded=frozenset(i for i in touched if not sharding.in_device_memory(arrays[i])),
        )


def leaves_of(
    named: Mapping[str, Any],
    arrays: Sequence[Any],
    layouts: Sequence[sharding.Layout],
    bindings: Sequence[Binding],
) -> tuple[Leaf, ...]:
    """Descriptions of the leaves, with the owner of each box.

    Args:
        named: leaves by leaf path.
        arrays: their plain arrays, which may be abstract.
        layouts: their boxes, and the processes that may write each.
        bindings: update of each recorder.

    Raises:
        MismatchError: a leaf has a type that cannot be stored.
    """
    paths = {path for each in bindings for path in each.consumed}
    consumed = frozenset(i for i, path in enumerate(named) if path in paths)
    for path, leaf in named.items():
        if not transfer.is_storable(trees.dtype_of(leaf)):
            raise transfer.unsupported(path, leaf)
    itemsizes_bytes = [array.dtype.itemsize for array in arrays]
    shares = ownership.share_out(layouts, itemsizes_bytes, consumed)
    return tuple(
        Leaf(
            path=path,
            shape=tuple(arrays[i].shape),
            dtype=str(arrays[i].dtype),
            itemsize_bytes=itemsizes_bytes[i],
            key_type=str(leaf.dtype) if transfer.is_key(leaf) else None,
            cuts=shares[i].cuts,
            owners=shares[i].owners,
        )
        for i, (path, leaf) in enumerate(named.items())
    )


def bound_paths(bindings: Sequence[Binding]) -> frozenset[str]:
    """The leaf paths that updates consume, compute or count."""
    return frozenset(
        path for each in bindings for path in (*each.explained, *each.consumed, each.count)
    )


def _donated(state: PyTree) -> MismatchError:
    """Error for a state with arrays that have no elements any more."""
    named, _ = trees.flatten(state)
    paths = [p for p, x in named.items() if isinstance(x, jax.Array) and x.is_deleted()]
    return MismatchError(
        f"{len(paths)} leaves ({', '.join(paths[:3])}{', ...' if paths[3:] else ''}): expected "
        "arrays, found that they were donated or deleted: a train step with donate_argnums takes "
        "the memory of the state that it is given. Nothing was saved; save the state that the step "
        "returned, before the next step takes it."
    )


def _picks(
    leaves: Sequence[Leaf], arrays: Sequence[Any], ranks: Ranks
) -> tuple[dict[int, tuple[transfer.Pick, ...]], dict[int, tuple[transfer.Pick, ...]]]:
    """This process's boxes, and all boxes of leaves that each process has for itself."""
    process, pairs = jax.process_index(), list(zip(leaves, arrays, strict=True))
    own = {
        i: transfer.picks_of(array, leaf.boxes_of(process), ranks)
        for i, (leaf, array) in enumerate(pairs)
    }
    local = {
        i: transfer.picks_of(array, leaf.boxes, ranks)
        for i, (leaf, array) in enumerate(pairs)
        if jax.process_count() > 1 and sharding.is_local(array)
    }
    return own, local


def _ephemeral(
    patterns: Sequence[str], every: Sequence[str], bindings: Sequence[Binding]
) -> frozenset[int]:
    """Positions of the leaves that some patterns fit."""
    found = frozenset[int]()
    bound = bound_paths(bindings)
    for pattern in patterns:
        paths = {i: path for i, path in enumerate(every) if trees.matches(path, pattern)}
        if wrong := sorted(bound.intersection(paths.values())) or (not paths and ["no leaf"]):
            raise RecorderError(
                f"ephemeral={pattern!r}: expected leaves that no Recorder's update takes, returns "
                f"or counts with, found {', '.join(wrong[:3])}. Nothing was saved; name what a "
                "transformation before the Recorder keeps, such as 'opt_state/0/residual'."
            )
        found |= paths.keys()
    return found


def _signature(leaf: Any, array: Any) -> Any:
    where: Any = array.sharding if isinstance(array, jax.Array) else None
    if isinstance(where, jax.sharding.NamedSharding):
        # JAX says now P(), now P(None), of the elements of a PRNG key.
        axes = (*where.spec, None)
        while axes and axes[-1] is None:
            axes = axes[:-1]
        others = (getattr(where.spec, name, None) for name in ("reduced", "unreduced"))
        where = (where.mesh, axes, where.memory_kind, *others)
    return (tuple(array.shape), str(array.dtype), where, transfer.is_key(leaf))
