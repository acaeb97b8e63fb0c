"""Agreement at a restart: the newest step that the files of all processes hold together.

Pure. A file is of one process of an earlier run, and lies now with whoever found it: never is it
looked for by the number of a process. A step may be recovered if all boxes of all leaves lie in
files of one run, whether of owners or copies, and its fingerprints are known: from a file in which
the step has passed the gate, or from what all processes contributed.

Newer of memory and storage wins, and memory where they are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.memory.holdings import Held, LeafBox, OfBoxes

_MOST_WAYS = 1 << 12
"""Ways to add up the fingerprints of a leaf's boxes that are tried."""


@dataclass(frozen=True, slots=True)
class OfferedStep:
    """One step that a file holds.

    Attributes:
        step: its number.
        sums: fingerprints of all leaves; None before it has passed the gate.
        own_sums: contributions of the file's process to them.
        bad: owners of the copies that were found bad.
    """

    step: int
    sums: tuple[int, ...] | None
    own_sums: tuple[int, ...]
    bad: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Boxes and steps in one file.

    Attributes:
        run: name of the run that wrote it.
        process: index of the process that wrote it, in that run.
        count: number of processes of that run.
        held: boxes in the file.
        steps: the steps that it may be brought to.
    """

    run: str
    process: int
    count: int
    held: Held
    steps: tuple[OfferedStep, ...]

    def boxes(self, step: OfferedStep) -> frozenset[LeafBox]:
        """The boxes that it holds of a step."""
        copies = (x for owner, x in self.held.copies.items() if owner not in step.bad)
        every = itertools.chain(self.held.own.items(), *(each.items() for each in copies))
        return frozenset((i, box) for i, boxes in every for box in boxes)

    def to_json(self) -> Any:
        """A description that :meth:`of_json` reads."""
        steps = [(each.step, each.sums, each.own_sums, each.bad) for each in self.steps]
        return [self.run, self.process, self.count, self.held.to_json(), steps]

    @classmethod
    def of_json(cls, found: Any) -> Offer:
        """The offer of a description."""
        run, process, count, held, steps = found
        offered = [
            OfferedStep(step, None if sums is None else tuple(sums), tuple(own), tuple(bad))
            for step, sums, own, bad in steps
        ]
        return cls(run, process, count, Held.of_json(held), tuple(offered))


@dataclass(frozen=True, slots=True)
class Choice:
    """A step that memory holds whole.

    Attributes:
        run: name of the run that left it.
        step: its number.
        sums: fingerprint of each leaf.
    """

    run: str
    step: int
    sums: tuple[int, ...]


def choose(offers: Sequence[Offer], sizes: Sequence[int], stored: int | None) -> Choice | str:
    """The newest step that all files hold together; or the reason why storage has to serve.

    Args:
        offers: what each file holds.
        sizes: number of elements of each leaf.
        stored: the newest step in storage; None if it has none.
    """
    every = {(each.step, offer.run) for offer in offers for each in offer.steps}
    why = "no file of this state was found"
    for step, run in sorted(every, reverse=True):
        if stored is not None and step < stored:
            return f"it is of step {step}, and storage has step {stored}"
        found = _whole(step, [each for each in offers if each.run == run], sizes)
        if not isinstance(found, str):
            return Choice(run, step, found)
        if not why.startswith("step"):
            why = f"step {step}: {found}"
    return why


def _whole(step: int, offers: Sequence[Offer], sizes: Sequence[int]) -> tuple[int, ...] | str:
    """The fingerprints of a step of one run; or the reason why it cannot be had."""
    having = [(offer, each) for offer in offers for each in offer.steps if each.step == step]
    held = frozenset[LeafBox]().union(*(offer.boxes(each) for offer, each in having))
    if missing := missing_leaves(held, sizes):
        processes = {offer.process for offer, _ in having}
        lost = sorted({*range(offers[0].count)} - processes)
        return (
            f"parts of {len(missing)} leaves lie in no file; there are none of the processes "
            f"{', '.join(map(str, lost[:10]))}"
        )
    known = {each.sums for _, each in having if each.sums is not None}
    if not known:
        offered = {offer.process: each.own_sums for offer, each in having}
        if len(offered) < offers[0].count:
            return "not all processes had stored it, or told so"
        known = {tuple(map(combine, zip(*offered.values(), strict=True)))}
    if len(known) > 1:
        return "its files have several states"
    return known.pop()


def missing_leaves(held: AbstractSet[LeafBox], sizes: Sequence[int]) -> list[int]:
    """The leaves with elements that are in none of the boxes, which are of one grid."""
    found = [0] * len(sizes)
    for i, box in held:
        found[i] += box.size
    return [i for i, size in enumerate(sizes) if size != found[i]]


def right_sums(found: Iterable[Mapping[LeafBox, int | None]], sums: Sequence[int]) -> OfBoxes:
    """Those of several fingerprints of a box that are right, as those of a leaf's boxes add up.

    Args:
        found: fingerprints of the boxes in each file; None for one that is not known.
        sums: fingerprint of each leaf.

    Returns:
        The fingerprints of boxes that files have with different bits. A leaf whose boxes add up to
        its fingerprint in no way is left out, as is one with thousands of ways to add them up.
    """
    offered: dict[int, dict[Box, set[int]]] = {}
    for each in found:
        for (i, box), value in each.items():
            if value is not None:
                offered.setdefault(i, {}).setdefault(box, set()).add(value)
    right: OfBoxes = {}
    for i, boxes in offered.items():
        torn = {box: values for box, values in boxes.items() if len(values) > 1}
        if not torn or math.prod(map(len, torn.values())) > _MOST_WAYS:
            continue
        alike = combine([value for box in boxes.keys() - torn for value in boxes[box]])
        for values in itertools.product(*torn.values()):
            if combine([alike, *values]) == sums[i]:
                right |= {(i, box): x for box, x in zip(torn, values, strict=True)}
                break
    return right


def givers(held: Mapping[int, AbstractSet[LeafBox]]) -> OfBoxes:
    """The process that gives each box of each leaf: among those that have it one with few so far.

    Args:
        held: boxes that each process has in its files.
    """
    has: dict[LeafBox, list[int]] = {}
    for process, boxes in sorted(held.items()):
        for each in boxes:
            has.setdefault(each, []).append(process)
    load = dict.fromkeys(held, 0)
    found: OfBoxes = {}
    for (i, box), able in sorted(has.items(), key=lambda pair: (len(pair[1]), pair[0])):
        giver = min(able, key=lambda each: (load[each], each))
        load[giver] += box.size
        found[i, box] = giver
    return found
