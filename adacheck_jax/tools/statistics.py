"""Statistics of a checkpoint root: where the bytes go, by leaf and by redundancy.

From manifests alone; no array is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.format.manifest import BaseManifest, Delta, Leaf, Update
from adacheck_jax.format.pack_plan import plan_delta
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
    tally = Counter[tuple[str, str]]()  # bytes by redundancy and leaf path
    sizes, skipped, base_count = dict[str, int](), list[int](), 0
    seen = set[tuple[str, int]]()  # bases and deltas, of which each is counted once
    for step, lineage in resolved(steps_under(root)):
        if isinstance(lineage, AdaCheckError):
            if not isinstance(lineage, StepDeletedError):
                skipped.append(step.step)
            continue
        base = lineage.base
        if (base.checksum, base.step) not in seen:
            seen.add((base.checksum, base.step))
            base_count += 1
            sizes |= {leaf.path: leaf.nbytes for leaf in base.leaves}
            _count_base(tally, base)
        for manifest, entry in lineage.saves:
            for delta in manifest.deltas:
                if (manifest.checksum, delta.step) not in seen:
                    seen.add((manifest.checksum, delta.step))
                    _count_delta(tally, base.update, entry.leaves, delta)
    redundancy = Counter[str]()
    for (kind, _), size in tally.items():
        redundancy[kind] += size
    leaves = (LeafStatistics(x, sizes[x], tally[BASES, x], tally[DELTAS, x]) for x in sizes)
    leaves = [leaf for leaf in leaves if leaf.base_bytes or leaf.delta_bytes]
    return RootStatistics(
        root=str(root),
        recorded_count=len(seen),
        base_count=base_count,
        delta_count=len(seen) - base_count,
        full_bytes=redundancy.total(),
        redundancy={name: redundancy[name] for name in _ORDER if redundancy[name]},
        leaves=tuple(sorted(leaves, key=lambda leaf: -(leaf.base_bytes + leaf.delta_bytes))),
        skipped=tuple(skipped),
    )


_ORDER = (BASES, DELTAS, REPLAYED, CODED, UNCHANGED, EQUAL, KEPT)


def _count_base(tally: Counter[tuple[str, str]], base: BaseManifest) -> None:
    elsewhere = dict.fromkeys((i for i, _ in base.kept), KEPT)
    elsewhere |= dict.fromkeys((i for i, _ in base.aliases), EQUAL)
    for index, leaf in enumerate(base.leaves):
        tally[elsewhere.get(index, BASES), leaf.path] += leaf.nbytes


def _count_delta(
    tally: Counter[tuple[str, str]], update: Update | None, leaves: Sequence[Leaf], delta: Delta
) -> None:
    """Count a delta by what it stores, what equals another leaf's, and what a code spares."""
    encodings = [pack.encodings for pack in delta.packs]
    aliases = [pack.aliases for pack in delta.packs]
    equal = {(process, n) for process, pairs in enumerate(aliases) for n, _ in pairs}
    sizes = [pack.coded for pack in delta.packs]
    numbers, held = Counter[int](), Counter[int]()  # extents of a process, and bytes of a leaf
    for extent in plan_delta(leaves, delta.stored, encodings, aliases, sizes).extents:
        leaf, process = leaves[extent.leaf], extent.process
        whole_bytes = extent.box.size * leaf.itemsize_bytes
        kind = EQUAL if (process, numbers[process]) in equal else DELTAS
        tally[kind, leaf.path] += extent.size_bytes
        tally[CODED, leaf.path] += whole_bytes - extent.size_bytes
        numbers[process] += 1
        held[extent.leaf] += whole_bytes
    computed = computed_by(update, delta)
    for index, leaf in enumerate(leaves):
        kind = REPLAYED if index in computed else UNCHANGED
        tally[kind, leaf.path] += leaf.nbytes - held[index]


def computed_by(update: Update | None, delta: Delta) -> frozenset[int]:
    """Indices of the leaves that a restore computes from this delta."""
    if update is None or not delta.has_update:
        return frozenset()
    return update.computed_by(delta.updates).difference(update.passed, delta.unreplayed)
