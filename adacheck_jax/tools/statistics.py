"""Statistics of a checkpoint root: where the bytes go, by leaf and by redundancy.

From manifests alone; no array is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.format.manifest import BaseManifest, Delta, Leaf, Update
from adacheck_jax.format.pack_plan import Extent, plan_delta
from adacheck_jax.store.steps.lineage import LineageStep
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools.steps import resolved, steps_under


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """One leaf, or leaves of one role.

    Attributes:
        path: leaf path.
        state_bytes: its bytes in one state, in memory.
        base_bytes: its bytes in all bases, before compression.
        delta_bytes: its bytes in all deltas, before compression.
    """

    path: str
    state_bytes: int
    base_bytes: int
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class RootStatistics:
    """The output of ``adacheck stats``.

    Attributes:
        root: the checkpoint root.
        recorded_count: number of steps that can be restored: saved, deferred, and held by others.
        base_count, delta_count: bases and deltas that these steps need, each counted once.
        full_bytes: bytes of all these states in full, in memory.
        redundancy: bytes of ``full_bytes``, by what became of them: ``stored in bases``, ``stored
            in deltas``, ``replayed``, ``left out by a code`` (of a compressed gradient),
            ``unchanged``, ``equal to another leaf``, ``kept from an earlier base``. They add up
            to ``full_bytes``.
        leaves: every leaf that takes bytes, the most expensive one first.
        skipped: numbers of steps that cannot be restored, and are left out.
    """

    root: str
    recorded_count: int
    base_count: int
    delta_count: int
    full_bytes: int
    redundancy: dict[str, int]
    leaves: tuple[LeafStatistics, ...]
    skipped: tuple[int, ...]


BASES, DELTAS, REPLAYED = "stored in bases", "stored in deltas", "replayed"
UNCHANGED, EQUAL, KEPT = "unchanged", "equal to another leaf", "kept from an earlier base"
CODED = "left out by a code"


def statistics_of(root: AnyPath) -> RootStatistics:
    """Tell where the bytes of a root go.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step of ours.
    """
    tally, skipped = _Tally(), list[int]()
    for step, lineage in resolved(steps_under(root)):
        if isinstance(lineage, AdaCheckError):
            if not isinstance(lineage, StepDeletedError):
                skipped.append(step.step)
            continue
        tally.add_base(lineage.base)
        for manifest, entry in lineage.saves:
            for delta in manifest.deltas:
                tally.add_delta(lineage.base.update, entry, delta)
    return RootStatistics(
        root=str(root),
        recorded_count=tally.base_count + tally.delta_count,
        base_count=tally.base_count,
        delta_count=tally.delta_count,
        full_bytes=sum(tally.redundancy.values()),
        redundancy={name: tally.redundancy[name] for name in _ORDER if tally.redundancy[name]},
        leaves=tally.leaves(),
        skipped=tuple(skipped),
    )


_ORDER = (BASES, DELTAS, REPLAYED, CODED, UNCHANGED, EQUAL, KEPT)


class _Tally:
    """Bytes by leaf and by redundancy, of bases and deltas that are each counted once."""

    def __init__(self) -> None:
        self._seen: set[object] = set()
        self._state: dict[str, int] = {}
        self._bases: Counter[str] = Counter()
        self._deltas: Counter[str] = Counter()
        self.redundancy: Counter[str] = Counter()
        self.base_count = self.delta_count = 0

    def add_base(self, base: BaseManifest) -> None:
        """Count a base."""
        if base.checksum in self._seen:
            return
        self._seen.add(base.checksum)
        self.base_count += 1
        elsewhere = {**dict.fromkeys((i for i, _ in base.kept), KEPT)}
        elsewhere |= dict.fromkeys((i for i, _ in base.aliases), EQUAL)
        for index, leaf in enumerate(base.leaves):
            self._state[leaf.path] = leaf.nbytes
            kind = elsewhere.get(index, BASES)
            self.redundancy[kind] += leaf.nbytes
            if kind is BASES:
                self._bases[leaf.path] += leaf.nbytes

    def add_delta(self, update: Update | None, entry: LineageStep, delta: Delta) -> None:
        """Count a delta of a saved step, replayed by the update of its base."""
        key = (entry.manifest.checksum, delta.step)
        if key in self._seen:
            return
        self._seen.add(key)
        self.delta_count += 1
        stored, equal, coded = _stored(entry.leaves, delta)
        computed = computed_by(update, delta)
        for index, leaf in enumerate(entry.leaves):
            self._deltas[leaf.path] += stored[index]
            self.redundancy[DELTAS] += stored[index]
            self.redundancy[EQUAL] += equal[index]
            self.redundancy[CODED] += coded[index]
            left = leaf.nbytes - stored[index] - equal[index] - coded[index]
            self.redundancy[REPLAYED if index in computed else UNCHANGED] += left

    def leaves(self) -> tuple[LeafStatistics, ...]:
        """The leaves, those that take most first."""
        rows = [
            LeafStatistics(path, size, self._bases[path], self._deltas[path])
            for path, size in self._state.items()
        ]
        rows = [row for row in rows if row.base_bytes or row.delta_bytes]
        return tuple(sorted(rows, key=lambda row: -(row.base_bytes + row.delta_bytes)))


def _stored(
    leaves: tuple[Leaf, ...], delta: Delta
) -> tuple[Counter[int], Counter[int], Counter[int]]:
    """Bytes of each leaf that a delta stores, that equal another leaf's, and that a code spares."""
    encodings = [pack.encodings for pack in delta.packs]
    aliases = [pack.aliases for pack in delta.packs]
    sizes = [pack.coded for pack in delta.packs]
    own: list[list[Extent]] = [[] for _ in delta.packs]
    stored, equal, coded = Counter[int](), Counter[int](), Counter[int]()
    for extent in plan_delta(leaves, delta.stored, encodings, aliases, sizes).extents:
        own[extent.process].append(extent)
        whole_bytes = extent.box.size * leaves[extent.leaf].itemsize_bytes
        stored[extent.leaf] += extent.size_bytes
        coded[extent.leaf] += whole_bytes - extent.size_bytes
    for process, pairs in enumerate(aliases):
        for number, _ in pairs:
            extent = own[process][number]
            stored[extent.leaf] -= extent.size_bytes
            equal[extent.leaf] += extent.size_bytes
    return stored, equal, coded


def computed_by(update: Update | None, delta: Delta) -> frozenset[int]:
    """Indices of the leaves that a restore computes from this delta."""
    if update is None or not delta.has_update:
        return frozenset()
    return update.computed_by(delta.updates).difference(update.passed, delta.unreplayed)
