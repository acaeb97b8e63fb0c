"""Plans of what is sent: who sends which boxes to whom, in which rows of words.

Every process computes the same, without an exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import sending, sharding, transfer
from adacheck_jax.device.primary import nearest
from adacheck_jax.device.sending import Sender
from adacheck_jax.format.boxes import Box
from adacheck_jax.memory.holdings import HeldBox
from adacheck_jax.state.snapshot import Snapshot, Structure


@dataclass(frozen=True, slots=True)
class SentBox:
    """A box of a leaf in a row.

    Attributes:
        leaf: position of the leaf.
        box: the box.
        lane: lane of its sender's device.
        width: bytes of a word.
        start: number of words before it.
        count: number of its words.
    """

    leaf: int
    box: Box
    lane: int
    width: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class SendPlan:
    """All that is sent of some leaves, as this process takes part in it.

    Attributes:
        dtypes: data type of each leaf.
        kept: boxes that this process keeps for others to whom no device of its own gives them, by
            leaf, with their owners; also of leaves that are not sent.
        sender: the program; None where none of the leaves is sent.
        picks: arrays' parts that it sends, by round and lane: position of the leaf, and pick.
        received: boxes that it gets, by round.
        digest: digest of all that all processes send, the same in all.
    """

    dtypes: Sequence[np.dtype]
    kept: Mapping[int, Sequence[tuple[int, Box]]]
    sender: Sender | None
    picks: Sequence[Sequence[Sequence[tuple[int, transfer.Pick]]]]
    received: Sequence[Sequence[SentBox]]
    digest: str


_Pair = tuple[int, int]
"""A sender and a receiver."""


def plan_of(snapshot: Snapshot, parts: Sequence[HeldBox], leaves: frozenset[int]) -> SendPlan:
    """The plan of some leaves, for the boxes that have to be sent."""
    structure, arrays, process = snapshot.structure, snapshot.arrays, jax.process_index()
    of_state: Any = arrays[parts[0].leaves[0]]
    platform = next(iter(of_state.sharding.device_set)).platform
    lane_of, senders = sending.lanes(platform)
    pieces, ends = _laid_out(snapshot, parts, leaves, lane_of)
    pairs, made = _rounds(ends), list[tuple[sending.Round, sending.Lengths]]()
    for each in pairs:
        words: dict[int, int] = {}
        for pair in each.items():
            for (_, width), end in ends[pair].items():
                words[width] = max(words.get(width, 0), end)
        made.append((tuple(sorted(each.items())), sending.lengths_of(words)))
    picks, received = [], list[Sequence[SentBox]]()
    for each in pairs:
        lanes = [list[tuple[int, transfer.Pick]]() for _ in range(senders.shape[1])]
        for x in pieces.get((process, each.get(process, -1)), ()):
            (pick,) = transfer.picks_of(arrays[x.leaf], [x.box], structure.ranks)
            lanes[x.lane].append((x.leaf, pick))
        picks.append(lanes)
        giver = next((owner for owner, holder in each.items() if holder == process), -1)
        received.append(pieces.get((giver, process), ()))
    kept = dict[int, list[tuple[int, Box]]]()
    for each in parts:
        for i in each.leaves if process in each.owners[-each.sent :] else ():
            kept.setdefault(i, []).append((each.owners[0], each.box))
    sent = [(pair, sorted(of_pair.items())) for pair, of_pair in sorted(ends.items())]
    digest = hashlib.sha256(repr((sent, sorted(leaves), made)).encode()).hexdigest()
    dtypes = [np.dtype(leaf.dtype) for leaf in structure.leaves]
    sender = Sender(platform, made) if made else None
    return SendPlan(dtypes, kept, sender, picks, received, digest)


def _laid_out(
    snapshot: Snapshot,
    parts: Sequence[HeldBox],
    leaves: frozenset[int],
    lane_of: Mapping[int, int],
) -> tuple[dict[_Pair, list[SentBox]], dict[_Pair, dict[tuple[int, int], int]]]:
    """Boxes that this process sends or gets, and the words of all rows by lane and width."""
    structure, process = snapshot.structure, jax.process_index()
    pieces: dict[_Pair, list[SentBox]] = {}
    ends: dict[_Pair, dict[tuple[int, int], int]] = {}
    for each, i in ((part, i) for part in parts for i in part.leaves if i in leaves):
        owner, itemsize = each.owners[0], structure.leaves[i].itemsize_bytes
        width = min(itemsize, 4)
        count = each.box.size * itemsize // width
        lane = lane_of[_device_of(structure, snapshot.arrays[i], owner, each.box)]
        for holder in each.owners[-each.sent :]:
            of_pair = ends.setdefault((owner, holder), {})
            start = of_pair.get((lane, width), 0)
            of_pair[lane, width] = start + count
            if process in (owner, holder):
                piece = SentBox(i, each.box, lane, width, start, count)
                pieces.setdefault((owner, holder), []).append(piece)
    return pieces, ends


def _rounds(pairs: Iterable[_Pair]) -> list[dict[int, int]]:
    """The receivers by their senders, in rounds in which each process is one of either at most."""
    rounds = list[dict[int, int]]()
    for owner, holder in sorted(pairs):
        fits = (each for each in rounds if owner not in each and holder not in each.values())
        if (free := next(fits, None)) is None:
            rounds.append(free := {})
        free[owner] = holder
    return rounds


def _device_of(structure: Structure, array: Any, process: int, box: Box) -> int:
    """Id of the device of a process whose replica of a box is saved."""
    held = sharding.holders_of(array.sharding, tuple(array.shape))
    holders = held.get(box) or next(each for x, each in held.items() if x.contains(box))
    own = [each for each in holders if each.process == process]
    return nearest(own, structure.ranks).device


def part_of(array: Any, pick: transfer.Pick) -> tuple[Any, sending.Cut]:
    """The data of one device that has a picked box, and where it lies in it."""
    _, position, at = pick
    data = transfer.shard_of(array, position)
    return data, tuple((each.start, each.stop) for each in at)
