"""Boxes that the shadow of each process holds: its own, and copies of what others own.

Every process computes the same from layouts and failure domains, with no exchange. The second owner
of a box is a process in another failure domain, if there is one whose devices hold the box anyway,
so that it has the record without asking for it. To others the box is sent.

A number that is not cut is held by each process that has all that it is computed from.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from adacheck_jax.device.sharding import Layout
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import UnfitError
from adacheck_jax.update.elements.pieces import Pieces

Boxes = Mapping[int, tuple[Box, ...]]
"""Boxes of each leaf, by leaf index."""
LeafBox = tuple[int, Box]
"""A box of one leaf, by the leaf's index."""
OfBoxes = dict[LeafBox, int]
"""A number of each box of some leaves: its fingerprint, or who gives it."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box that some leaves have in common, and the processes that hold it.

    Attributes:
        leaves: positions of the leaves, which one operation takes and computes together.
        box: the box.
        owners: its owner, and then those of its copies, each in another failure domain.
        sent: number of them, at the end, to whom it has to be sent: no device of theirs holds it.
    """

    leaves: tuple[int, ...]
    box: Box
    owners: tuple[int, ...]
    sent: int = 0


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
        copies = {str(owner): _to_json(each) for owner, each in self.copies.items()}
        return {"own": _to_json(self.own), "copies": copies}

    @classmethod
    def of_json(cls, found: Any) -> Held:
        """The boxes of a description; who else has copies is not in it."""
        copies = {int(owner): _of_json(each) for owner, each in found["copies"].items()}
        return cls(_of_json(found["own"]), copies)


def whole(structure: Structure) -> Held:
    """The boxes of a process alone: one for each leaf."""
    full = {i: (Box.full(leaf.shape),) for i, leaf in enumerate(structure.leaves) if leaf.nbytes}
    return Held(full)


def held_of(
    structure: Structure,
    pieces: Pieces | None,
    domains: Sequence[str],
    copies: int,
    *,
    is_whole: bool = False,
) -> Held:
    """The boxes of this process's shadow, one of several.

    Args:
        structure: structure of the state.
        pieces: its update; None for what no update touches alone, or for all that ``is_whole``.
        domains: failure domain of each process; none for a shadow that lies in no file.
        copies: number of copies of each box, where there are so many other domains.
        is_whole: True for all leaves, each for itself where there are no pieces: nothing takes
            them together but a replay on devices.

    Raises:
        UnfitError: parts of what one operation takes belong to several processes, or no process
            can compute some number.
    """
    parts = parts_of(structure, pieces, domains, copies, is_whole=is_whole)
    numbers = {} if pieces is None else _number_holders(structure, pieces)
    missing = [structure.leaves[i].path for i, holders in numbers.items() if not holders]
    if missing and domains:
        raise UnfitError(f"no process computes all of {missing[0]}")
    own: dict[int, list[Box]] = {}
    kept: dict[int, dict[int, list[Box]]] = {}
    elsewhere: dict[int, dict[int, list[Box]]] = {}
    process = jax.process_index()
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
    structure: Structure,
    pieces: Pieces | None,
    domains: Sequence[str],
    copies: int,
    *,
    is_whole: bool = False,
) -> list[HeldBox]:
    """All boxes of a state but for numbers of the update, each with its owners.

    Without an update the boxes of what none touches, or of all that ``is_whole``.
    """
    leaves, touched = structure.leaves, structure.touched
    rows: dict[int, tuple[int, ...]] = {}
    scalars = frozenset[int]()
    if pieces is not None:
        consumed, scalars = frozenset(pieces.leaves) - pieces.computed, {*pieces.scalar_leaves}
        for row in _rows_of(pieces):
            brought = [i for i in row if i in consumed]
            if len({(leaves[i].cuts, leaves[i].owners) for i in brought}) > 1:
                raise UnfitError("other processes have parts of what the update consumes")
            rows[brought[0] if brought else row[0]] = row
    in_rows = {i for row in rows.values() for i in row}
    for i, leaf in enumerate(leaves):
        is_known = is_whole or pieces is not None or i not in touched
        if leaf.nbytes and is_known and i not in in_rows and i not in scalars:
            rows[i] = (i,)
    placing, parts = _Placing(domains, copies), list[HeldBox]()
    # What no update touches comes first: its owners are known before the update is.
    for first, row in sorted(rows.items(), key=lambda pair: (pair[0] in touched, pair[0])):
        row_bytes = sum(leaves[i].itemsize_bytes for i in row)
        lying = [*{id(x): x for x in (structure.layouts[i] for i in row)}.values()]  # mostly one
        is_wide = not any(is_narrow(np.dtype(leaves[i].dtype)) for i in row)
        for box, owner in zip(leaves[first].boxes, leaves[first].owners, strict=True):
            found, sent = [owner], 0
            if copies and domains:
                able = frozenset.intersection(*(_holders(each, box) for each in lying))
                sends = is_wide and owner in able
                found += placing.others(owner, able, box.size * row_bytes, sends=sends)
                sent = sum(each not in able for each in found[1:])
                if pieces is None and is_whole:  # checks on devices may be collective: none is sent
                    found, sent = found[: len(found) - sent], 0
            parts.append(HeldBox(row, box, tuple(found), sent))
    return parts


def may_be_sent(structure: Structure, domains: Sequence[str], copies: int) -> bool:
    """True if devices of too few domains hold some box, as far as is known without the update."""
    return copies > 0 and any(
        len({domains[each] for each in held}) <= copies
        for leaf, layout in zip(structure.leaves, structure.layouts, strict=True)
        for held in ({*layout.replicas} if leaf.nbytes else ())
    )


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


def _holders(layout: Layout, box: Box) -> frozenset[int]:
    """The processes whose devices hold a box."""
    place = 0  # the number, in grid order, of the layout's box around it
    for cuts, start, stop in zip(layout.cuts, box.start, box.stop, strict=True):
        n = bisect.bisect_right(cuts, start) - 1
        if stop > cuts[n + 1]:
            return frozenset()
        place = place * (len(cuts) - 1) + n
    return frozenset(layout.replicas[place])


class _Placing:
    """The choice of owners of copies, box by box.

    Domains are grouped by as many as hold a box, and the next ones serve where no other of the
    group can (Gemini, SOSP '23): so few of all sets of domains are fatal if they are lost at once.
    """

    def __init__(self, domains: Sequence[str], copies: int) -> None:
        numbers = {name: n for n, name in enumerate(dict.fromkeys(domains))}
        self._copies, self._number_of = copies, [numbers[each] for each in domains]
        self._members: list[list[int]] = [[] for _ in numbers]
        for process, number in enumerate(self._number_of):
            self._members[number].append(process)
        self._load_bytes = [0] * len(domains)
        self._order: dict[int, dict[int, int]] = {}

    def others(self, owner: int, able: Iterable[int], nbytes: int, *, sends: bool) -> list[int]:
        """Owners of the copies of a box, of so many bytes, in domains of their own.

        Those whose devices are ``able`` to give it come first. To others it is sent, if it can be:
        all of one owner's boxes to the same process of a domain.
        """
        chosen, order = list[int](), self._order_for(owner)
        used, place = {self._number_of[owner]}, self._members[self._number_of[owner]].index(owner)

        def rank(process: int) -> tuple[int, int, int]:
            return order[self._number_of[process]], self._load_bytes[process], process

        for best in sorted(able, key=rank):
            if len(chosen) < self._copies and self._number_of[best] not in used:
                chosen.append(best)
                used.add(self._number_of[best])
        members = (self._members[number] for number in order if sends and number not in used)
        sent = itertools.islice(members, self._copies - len(chosen))
        chosen += [each[place % len(each)] for each in sent]
        for each in chosen:
            self._load_bytes[each] += nbytes
        return chosen

    def _order_for(self, owner: int) -> dict[int, int]:
        """The domains by their order as places for an owner's copies: those of its group first."""
        first, count, size = self._number_of[owner], len(self._members), self._copies + 1
        if first not in self._order:
            last = max(count // size, 1) - 1  # a group of fewer domains joins the one before it
            group = [min(n // size, last) for n in range(count)]

            def key(number: int) -> tuple[bool, int]:
                return group[number] != group[first], (number - first) % count

            ordered = sorted(range(count), key=key)
            self._order[first] = {number: place for place, number in enumerate(ordered)}
        return self._order[first]


def _number_holders(structure: Structure, pieces: Pieces) -> dict[int, Collection[int]]:
    """The processes that have each number of an update at every step."""
    found: dict[int, Collection[int]] = {}
    count = jax.process_count()
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


def digests_of(boxes: Mapping[int, Boxes], sums: OfBoxes) -> dict[str, str]:
    """A digest of what two processes hold in common, by the other's index.

    Args:
        boxes: the boxes, by the index of the other process.
        sums: fingerprint of each box.
    """
    found = {}
    for other, leaves in boxes.items():
        listed = [
            (i, combine([sums[i, box] for box in each if (i, box) in sums]))
            for i, each in sorted(leaves.items())
        ]
        found[str(other)] = hashlib.sha256(repr(listed).encode()).hexdigest()[:32]
    return found


def _frozen(found: Mapping[int, Sequence[Box]]) -> dict[int, tuple[Box, ...]]:
    return {i: tuple(found[i]) for i in sorted(found)}


def _to_json(boxes: Boxes) -> Any:
    """A description that :func:`_of_json` reads."""
    return {
        str(i): [[*zip(b.start, b.stop, strict=True)] for b in each] for i, each in boxes.items()
    }


def numbers_to_json(numbers: Mapping[LeafBox, int | None]) -> Any:
    """A description that :func:`numbers_of_json` reads."""
    return [[i, box.start, box.stop, number] for (i, box), number in numbers.items()]


def numbers_of_json(found: Any) -> dict[LeafBox, Any]:
    """The numbers of a description."""
    return {(i, Box(tuple(a), tuple(b))): number for i, a, b, number in found}


def _of_json(found: Any) -> dict[int, tuple[Box, ...]]:
    """The boxes of a description."""

    def box(pairs: Sequence[tuple[int, int]]) -> Box:
        return Box(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))

    return {int(i): tuple(map(box, each)) for i, each in found.items()}
