"""Bytes of every leaf over all recorded steps, by the way in which they are kept.

Told by manifests alone. A run has few kinds of steps: what each keeps of each leaf is found once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields

from adacheck_jax.format.manifest import BaseManifest, Delta, Encoding, Leaf
from adacheck_jax.store.packs.arrays import COMPRESSED, RAW
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.tools.history.differences import roles_of
from adacheck_jax.tools.report.facts import LeafBytes, Ways

_NAMES = tuple(each.name for each in fields(Ways))


class WaysCounter:
    """Adds up the bytes of leaves, step by step."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Leaf, str]] = {}
        self._known: dict[object, list[tuple[str, str, int]]] = {}
        self._counts = Counter[object]()
        self.zero_bytes = 0

    def add(self, lineage: Lineage) -> None:
        """Count one recorded step.

        Args:
            lineage: everything that it is restored from.
        """
        base, step = lineage.base, lineage.end
        key: object = base.checksum
        if isinstance(step, Delta):
            encodings = tuple(pack.encodings for pack in step.packs)
            key = (base.checksum, step.updates, step.stored, step.unreplayed, encodings)
            self.zero_bytes += _zero_bytes(step)
        if key not in self._known:
            roles = roles_of(len(base.leaves), base.update)
            self._seen |= {
                leaf.path: (leaf, role) for leaf, role in zip(base.leaves, roles, strict=True)
            }
            found = _of_delta(base, step) if isinstance(step, Delta) else _of_base(base)
            self._known[key] = [(base.leaves[i].path, way, size) for i, way, size in found]
        self._counts[key] += 1

    def found(self) -> tuple[LeafBytes, ...]:
        """The leaves of all counted steps, in the order in which they were met."""
        totals = {path: Counter[str]() for path in self._seen}
        for key, count in self._counts.items():
            for path, way, size in self._known[key]:
                totals[path][way] += size * count
        return tuple(
            LeafBytes(leaf.path, leaf.description, role, leaf.nbytes, Ways(**totals[path]))
            for path, (leaf, role) in self._seen.items()
        )


def added(leaves: Iterable[LeafBytes]) -> Ways:
    """The sum of the bytes of some leaves."""
    every = [leaf.ways for leaf in leaves]
    return Ways(**{name: sum(getattr(ways, name) for ways in every) for name in _NAMES})


def total(ways: Ways) -> int:
    """All bytes, however they are kept."""
    return sum(getattr(ways, name) for name in _NAMES)


def _of_base(base: BaseManifest) -> Iterable[tuple[int, str, int]]:
    """Leaf index, way and bytes of all leaves of a base."""
    ways = dict.fromkeys((index for index, _ in base.aliases), "equal")
    ways |= dict.fromkeys((index for index, _ in base.kept), "unchanged")
    for index, leaf in enumerate(base.leaves):
        yield index, ways.get(index, "stored"), leaf.nbytes


def _of_delta(base: BaseManifest, delta: Delta) -> Iterable[tuple[int, str, int]]:
    """Leaf index, way and bytes of all leaves at a delta's step; a leaf's boxes may differ."""
    update = base.update if delta.has_update else None
    computed, consumed = frozenset[int](), frozenset[int]()
    if update is not None:
        computed = update.computed_by(delta.updates) - {*update.passed, *delta.unreplayed}
        consumed = update.consumed_by(delta.updates)
    positions = {index: n for n, index in enumerate(delta.stored)}
    for index, leaf in enumerate(base.leaves):
        rest = "replayed" if index in computed else "unchanged"
        if index not in positions:
            yield index, rest, leaf.nbytes
            continue
        for box, process in zip(leaf.boxes, leaf.owners, strict=True):
            encoding = Encoding(delta.packs[process].encodings[positions[index]])
            way = "recorded" if index in consumed else "stored"
            if encoding is Encoding.SAME:
                way = rest
            elif encoding.is_difference:
                way = "differences"
            yield index, way, box.size * leaf.itemsize_bytes


def _zero_bytes(delta: Delta) -> int:
    return sum(
        (stop - start) * kind.block_bytes
        for pack in delta.packs
        for kind, ranges in ((RAW, pack.raw_zeros), (COMPRESSED, pack.compressed_zeros))
        for start, stop in ranges
    )
