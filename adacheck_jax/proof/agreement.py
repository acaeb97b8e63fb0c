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
from dataclasses import dataclass
from typing import Any

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.proof import holdings
from adacheck_jax.proof.holdings import Boxes, Held

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

    def boxes(self, step: OfferedStep) -> Boxes:
        """The boxes that it holds of a step."""
        found: dict[int, tuple[Box, ...]] = {**self.held.own}
        for owner, copies in self.held.copies.items():
            if owner not in step.bad:
                for i, boxes in copies.items():
                    found[i] = (*found.get(i, ()), *boxes)
        return found

    def to_json(self) -> Any:
        """A description that :meth:`of_json` reads."""
        steps = [(each.step, each.sums, each.own_sums, each.bad) for each in self.steps]
        return [self.run, self.process, self.count, self.held.to_json(), steps]

    @classmethod
    def of_json(cls, found: Any) -> Offer:
        """The offer of a description."""
        run, process, count, held, steps = found
        told = [
            OfferedStep(step, None if sums is None else tuple(sums), tuple(own), tuple(bad))
            for step, sums, own, bad in steps
        ]
        return cls(run, process, count, Held.of_json(held), tuple(told))


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
    if missing := missing_leaves([offer.boxes(each) for offer, each in having], sizes):
        processes = {offer.process for offer, _ in having}
        lost = sorted({*range(offers[0].count)} - processes)
        return (
            f"parts of {len(missing)} leaves lie in no file; there are none of the processes "
            f"{', '.join(map(str, lost[:10]))}"
        )
    known = {each.sums for _, each in having if each.sums is not None}
    if not known:
        told = {offer.process: each.own_sums for offer, each in having}
        if len(told) < offers[0].count:
            return "not all processes had stored it, or told so"
        known = {tuple(map(combine, zip(*told.values(), strict=True)))}
    if len(known) > 1:
        return "its files have several states"
    return known.pop()


def missing_leaves(held: Iterable[Boxes], sizes: Sequence[int]) -> list[int]:
    """The leaves of which some elements are in none of the boxes, which are of one grid."""
    found: dict[int, set[Box]] = {}
    for each in held:
        for i, boxes in each.items():
            found.setdefault(i, set()).update(boxes)
    return [
        i
        for i, size in enumerate(sizes)
        if size and sum(box.size for box in found.get(i, ())) != size
    ]


Prints = Mapping[int, Mapping[Box, int]]
"""Fingerprints of boxes, by leaf index."""


def prints_to_json(prints: Prints) -> Any:
    """A description that :func:`prints_of_json` reads."""
    return [[holdings.to_json({i: tuple(boxes)}), [*boxes.values()]] for i, boxes in prints.items()]


def prints_of_json(found: Any) -> dict[int, dict[Box, int]]:
    """The fingerprints of a description."""
    told = [(holdings.of_json(boxes), values) for boxes, values in found]
    return {
        i: dict(zip(each, values, strict=True))
        for boxes, values in told
        for i, each in boxes.items()
    }


def right_prints(found: Iterable[Prints], sums: Sequence[int]) -> dict[int, dict[Box, int]]:
    """Which of several fingerprints of a box are right, as those of a leaf's boxes add up.

    Args:
        found: what lies in each file.
        sums: fingerprint of each leaf.

    Returns:
        The fingerprints of boxes that files have with different bits. A leaf whose boxes add up to
        its fingerprint in no way is left out, as is one with thousands of ways to add them up.
    """
    told: dict[int, dict[Box, set[int]]] = {}
    for each in found:
        for i, boxes in each.items():
            for box, value in boxes.items():
                told.setdefault(i, {}).setdefault(box, set()).add(value)
    right = dict[int, dict[Box, int]]()
    for i, boxes in told.items():
        ways = math.prod(map(len, boxes.values()))
        if 1 < ways <= _MOST_WAYS:
            every = itertools.product(*map(sorted, boxes.values()))
            values = next((x for x in every if combine(x) == sums[i]), ())
            found_of = dict(zip(boxes, values, strict=False))
            right[i] = {box: x for box, x in found_of.items() if len(boxes[box]) > 1}
    return {i: boxes for i, boxes in right.items() if boxes}


def givers(held: Mapping[int, Sequence[Boxes]]) -> dict[int, dict[Box, int]]:
    """The process that gives each box of each leaf: of several that have it one with few so far.

    Args:
        held: boxes that each process has in its files, those of owners before copies.
    """
    has: dict[tuple[int, Box], list[int]] = {}
    for process, files in sorted(held.items()):
        for boxes in files:
            for i, each in boxes.items():
                for box in each:
                    has.setdefault((i, box), []).append(process)
    load = dict.fromkeys(held, 0)
    found: dict[int, dict[Box, int]] = {}
    for (i, box), able in sorted(has.items(), key=lambda pair: (len(pair[1]), pair[0])):
        giver = min(able, key=lambda each: (load[each], each))
        load[giver] += box.size
        found.setdefault(i, {})[box] = giver
    return found
