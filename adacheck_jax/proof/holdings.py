"""Boxes that the shadow of each process holds: its own, and copies of what others own.

Every process computes the same from layouts and failure domains, with no exchange. The second owner
of a box is a process in another failure domain whose devices hold the box anyway, so that it has
the record without asking for it; a box that devices of one domain alone hold has none.

A number that is not cut is held by each process that has all that it is computed from.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from adacheck_jax.device.sharding import Layout
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import UnfitError
from adacheck_jax.update.elements.pieces import Pieces

Boxes = Mapping[int, tuple[Box, ...]]
"""Boxes of each leaf, by leaf index."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box that some leaves have in common, and the processes that hold it.

    Attributes:
        leaves: positions of the leaves, which one operation takes and computes together.
        box: the box.
        owners: its owner, and then those of its copies, each in another failure domain.
    """

    leaves: tuple[int, ...]
    box: Box
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """The boxes that one process's shadow holds.

    Attributes:
        own: those of which it is the owner, and all numbers that it can compute.
        copies: those that it holds for other processes, by the owner's index.
        elsewhere: those of its own that others hold copies of, by the copies' holder.
    """

    own: Boxes
    copies: Mapping[int, Boxes] = field(default_factory=dict)
    elsewhere: Mapping[int, Boxes] = field(default_factory=dict)

    def boxes(self, leaf: int) -> list[Box]:
        """The boxes of a leaf, in the order in which they lie in memory."""
        every = (self.own, *(self.copies[owner] for owner in sorted(self.copies)))
        return [box for each in every for box in each.get(leaf, ())]

    def to_json(self) -> Any:
        """A description that :meth:`of_json` reads."""
        copies = {str(owner): to_json(each) for owner, each in self.copies.items()}
        return {"own": to_json(self.own), "copies": copies}

    @classmethod
    def of_json(cls, found: Any) -> Held:
        """The boxes of a description; who else has copies is not in it."""
        copies = {int(owner): of_json(each) for owner, each in found["copies"].items()}
        return cls(of_json(found["own"]), copies)


def whole(structure: Structure) -> Held:
    """The boxes of a process alone: one for each leaf."""
    full = {i: (Box.full(leaf.shape),) for i, leaf in enumerate(structure.leaves) if leaf.nbytes}
    return Held(full)


def held_of(
    structure: Structure, pieces: Pieces | None, domains: Sequence[str], copies: int
) -> Held:
    """The boxes of this process's shadow, one of several.

    Args:
        structure: structure of the state.
        pieces: its update; None for what no update touches alone.
        domains: failure domain of each process; none for a shadow that lies in no file.
        copies: number of copies of each box, where there are so many other domains.

    Raises:
        UnfitError: parts of what one operation takes belong to several processes, or no process
            can compute some number.
    """
    parts, count = parts_of(structure, pieces, domains, copies), jax.process_count()
    numbers = {} if pieces is None else number_holders(structure, pieces, count)
    missing = [structure.leaves[i].path for i, holders in numbers.items() if not holders]
    if missing and domains:
        raise UnfitError(f"no process computes all of {missing[0]}")
    return held_by(jax.process_index(), structure, parts, numbers)


def held_by(
    process: int,
    structure: Structure,
    parts: Iterable[HeldBox],
    numbers: Mapping[int, Collection[int]],
) -> Held:
    """The boxes of one process's shadow.

    Args:
        process: index of the process.
        structure: structure of the state.
        parts: all boxes, with their owners.
        numbers: processes that have each number of the update.
    """
    own: dict[int, list[Box]] = {}
    kept: dict[int, dict[int, list[Box]]] = {}
    elsewhere: dict[int, dict[int, list[Box]]] = {}
    for part in parts:
        owner, *others = part.owners
        into = [own] if owner == process else []
        if owner == process:
            into += [elsewhere.setdefault(each, {}) for each in others]
        elif process in others:
            into = [kept.setdefault(owner, {})]
        for found in into:
            for i in part.leaves:
                found.setdefault(i, []).append(part.box)
    for i, holders in numbers.items():
        if process in holders:
            own[i] = [Box.full(structure.leaves[i].shape)]
    return Held(
        _frozen(own),
        {each: _frozen(kept[each]) for each in sorted(kept)},
        {each: _frozen(elsewhere[each]) for each in sorted(elsewhere)},
    )


def parts_of(
    structure: Structure, pieces: Pieces | None, domains: Sequence[str], copies: int
) -> list[HeldBox]:
    """All boxes of a state but for numbers of the update, each with its owners.

    Without an update the boxes of what none touches.
    """
    leaves, touched = structure.leaves, structure.touched
    rows: dict[int, tuple[int, ...]] = {}
    scalars = frozenset[int]()
    if pieces is not None:
        consumed, scalars = frozenset(pieces.leaves) - pieces.computed, {*pieces.scalar_leaves}
        for row in _rows_of(pieces):
            brought = [i for i in row if i in consumed]
            if any(
                (leaves[i].cuts, leaves[i].owners) != _place(leaves[brought[0]]) for i in brought
            ):
                raise UnfitError("other processes have parts of what the update consumes")
            rows[brought[0] if brought else row[0]] = row
    in_rows = {i for row in rows.values() for i in row}
    for i, leaf in enumerate(leaves):
        is_known = pieces is not None or i not in touched
        if leaf.nbytes and is_known and i not in in_rows and i not in scalars:
            rows[i] = (i,)
    load_bytes, parts = [0] * len(domains), list[HeldBox]()
    # What no update touches comes first: its owners are known before the update is.
    for first, row in sorted(rows.items(), key=lambda pair: (pair[0] in touched, pair[0])):
        row_bytes = sum(leaves[i].itemsize_bytes for i in row)
        lying = [*{id(x): x for x in (structure.layouts[i] for i in row)}.values()]  # mostly one
        for box, owner in zip(leaves[first].boxes, leaves[first].owners, strict=True):
            owners = [owner]
            if copies and domains:
                able = frozenset.intersection(*(_holders(each, box) for each in lying))
                owners += _others(owner, able, domains, copies, load_bytes)
                for each in owners[1:]:
                    load_bytes[each] += box.size * row_bytes
            parts.append(HeldBox(row, box, tuple(owners)))
    return parts


def unprotected_bytes(structure: Structure, parts: Iterable[HeldBox], copies: int) -> int:
    """Bytes of a state that have fewer copies than wanted."""
    leaves = structure.leaves
    return sum(
        part.box.size * leaves[i].itemsize_bytes
        for part in parts
        if len(part.owners) <= copies
        for i in part.leaves
    )


def _rows_of(pieces: Pieces) -> Iterable[tuple[int, ...]]:
    """Leaves that are computed together, element by element."""
    for batch in pieces.batches:
        for row in zip(*batch.taken, *batch.outputs, strict=True):
            yield tuple(dict.fromkeys(row))


def _place(leaf: Any) -> tuple[Any, Any]:
    return leaf.cuts, leaf.owners


def _holders(layout: Layout, box: Box) -> frozenset[int]:
    """The processes whose devices hold a box."""
    place = 0  # of the box of the layout around it, in grid order
    for cuts, start, stop in zip(layout.cuts, box.start, box.stop, strict=True):
        n = bisect.bisect_right(cuts, start) - 1
        if stop > cuts[n + 1]:
            return frozenset()
        place = place * (len(cuts) - 1) + n
    return frozenset(layout.replicas[place])


def _others(
    owner: int,
    able: Iterable[int],
    domains: Sequence[str],
    copies: int,
    load_bytes: Sequence[int],
) -> list[int]:
    """The owners of copies: in domains of their own, those of the owner's group first.

    Domains are grouped by as many as hold a box, and the next ones serve where no other of the
    group can (Gemini, SOSP '23): so few of all sets of domains are fatal if they are lost at once.
    """
    numbers = {name: n for n, name in enumerate(dict.fromkeys(domains))}
    chosen, used, first = list[int](), {domains[owner]}, numbers[domains[owner]]

    def rank(process: int) -> tuple[bool, int, int, int]:
        number = numbers[domains[process]]
        is_apart = number // (copies + 1) != first // (copies + 1)
        return is_apart, (number - first) % len(numbers), load_bytes[process], process

    while len(chosen) < copies:
        left = [each for each in able if domains[each] not in used]
        if not left:
            break
        best = min(left, key=rank)
        chosen.append(best)
        used.add(domains[best])
    return chosen


def number_holders(structure: Structure, pieces: Pieces, count: int) -> dict[int, Collection[int]]:
    """The processes, of so many, that have each number of an update at every step."""
    found: dict[int, Collection[int]] = {}
    behind_of, tellers = pieces.scalars_behind()[0], tellers_of(structure, pieces)
    for i in pieces.scalar_leaves:
        owners = {*structure.leaves[i].owners}
        if behind_of.get(i, frozenset([i])) <= structure.everywhere:
            owners = {*range(count)}
        elif i in behind_of:
            owners = {tellers[i]} if i in tellers else set()
        found[i] = owners if len(owners) in (1, count) else ()
    return found


def tellers_of(structure: Structure, pieces: Pieces) -> dict[int, int]:
    """The process that contributes each computed number's fingerprint: one that can compute it.

    Those that no process has all of what they are computed from are left out.
    """
    tellers = {}
    for leaf, behind in pieces.scalars_behind()[0].items():
        brought = behind - pieces.computed
        owners = {owner for i in brought for owner in structure.leaves[i].owners}
        if len(owners) <= 1:
            tellers[leaf] = min(owners, default=0)
    return tellers


def digests_of(boxes: Mapping[int, Boxes], sums: Mapping[tuple[int, Box], int]) -> dict[str, str]:
    """A digest of what two processes hold in common, by the other's index.

    Args:
        boxes: the boxes, by the index of the other process.
        sums: fingerprint of each box.
    """
    found = {}
    for other, leaves in boxes.items():
        told = [
            (i, combine([sums[i, box] for box in each if (i, box) in sums]))
            for i, each in sorted(leaves.items())
        ]
        found[str(other)] = hashlib.sha256(repr(told).encode()).hexdigest()[:32]
    return found


def _frozen(found: Mapping[int, Sequence[Box]]) -> dict[int, tuple[Box, ...]]:
    return {i: tuple(found[i]) for i in sorted(found)}


def to_json(boxes: Boxes) -> Any:
    """A description that :func:`of_json` reads."""
    return {
        str(i): [[*zip(b.start, b.stop, strict=True)] for b in each] for i, each in boxes.items()
    }


def of_json(found: Any) -> dict[int, tuple[Box, ...]]:
    """The boxes of a description."""

    def box(pairs: Sequence[tuple[int, int]]) -> Box:
        return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    return {int(i): tuple(map(box, each)) for i, each in found.items()}
