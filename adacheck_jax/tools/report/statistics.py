"""Bytes of the states of a run, by leaf and by what became of them, from manifests alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from adacheck_jax.format.manifest import Delta
from adacheck_jax.format.pack_plan import plan_delta
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.tools.inspection import computed_by


@dataclass(frozen=True, slots=True)
class LeafStatistics:
    """One leaf.

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
class Statistics:
    """Bytes of all recorded states, in full.

    Attributes:
        redundancy: bytes by what became of them: ``stored in bases``, ``stored in deltas``,
            ``replayed``, ``left out by a code`` (of a compressed gradient), ``unchanged``, ``equal
            to another leaf``, ``kept from an earlier base``.
        leaves: every leaf that takes bytes, the most expensive one first.
    """

    redundancy: dict[str, int]
    leaves: tuple[LeafStatistics, ...]


BASES, DELTAS, REPLAYED = "stored in bases", "stored in deltas", "replayed"
UNCHANGED, EQUAL, KEPT = "unchanged", "equal to another leaf", "kept from an earlier base"
CODED = "left out by a code"
_ORDER = (BASES, DELTAS, REPLAYED, CODED, UNCHANGED, EQUAL, KEPT)
_Tally = Counter[tuple[str, str]]
"""Bytes by what became of them, and by leaf path."""


def statistics_of(lineages: Iterable[Lineage]) -> Statistics:
    """Tell what became of the bytes of each state that a lineage ends at."""
    tally, sizes = _Tally(), dict[str, int]()
    for lineage in lineages:
        sizes |= {leaf.path: leaf.nbytes for leaf in lineage.base.leaves}
        end = lineage.end
        if isinstance(end, Delta):
            _count_delta(tally, lineage, end)
        else:
            elsewhere = dict.fromkeys((i for i, _ in end.kept), KEPT)
            elsewhere |= dict.fromkeys((i for i, _ in end.aliases), EQUAL)
            for index, leaf in enumerate(end.leaves):
                tally[elsewhere.get(index, BASES), leaf.path] += leaf.nbytes
    redundancy = Counter[str]()
    for (kind, _), size in tally.items():
        redundancy[kind] += size
    leaves = (LeafStatistics(x, sizes[x], tally[BASES, x], tally[DELTAS, x]) for x in sizes)
    leaves = [leaf for leaf in leaves if leaf.base_bytes or leaf.delta_bytes]
    return Statistics(
        redundancy={name: redundancy[name] for name in _ORDER if redundancy[name]},
        leaves=tuple(sorted(leaves, key=lambda leaf: -(leaf.base_bytes + leaf.delta_bytes))),
    )


def _count_delta(tally: _Tally, lineage: Lineage, delta: Delta) -> None:
    """Count a delta by what it stores, what equals another leaf's, and what a code spares."""
    leaves = lineage.leaves
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
    computed = computed_by(lineage.base.update, delta)
    for index, leaf in enumerate(leaves):
        kind = REPLAYED if index in computed else UNCHANGED
        tally[kind, leaf.path] += leaf.nbytes - held[index]
