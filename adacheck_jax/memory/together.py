"""A state that lies in the files of several processes, taken and compared by all of them.

Each process offers what the files that it found hold; all agree on one step; each brings its files
to it, and leaves out what has changed since it was folded; all agree who gives which box to whom.
Where files have a box with different bits, and no process knows by itself which are right, those
are taken with which the leaf has its fingerprint.
What is not whole at any of these points is refused, and storage serves: never a mixture of steps.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.memory import agreement, holdings, making
from adacheck_jax.memory.agreement import Choice, Offer, OfferedStep
from adacheck_jax.memory.files.record_log import RecordLog
from adacheck_jax.memory.files.shadow_file import CutOffError, ShadowFileError
from adacheck_jax.memory.files.step_file import Found, FoundFile, Recorded, StepFile
from adacheck_jax.memory.holdings import LeafBox, OfBoxes
from adacheck_jax.memory.recovered import (
    RecordReplay,
    Recovered,
    StoredStep,
    compared,
    count_of,
    example_of,
    examples_of,
    leaf_like,
    replayed,
)
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.state.exported_update import ExportedUpdates
from adacheck_jax.state.snapshot import Snapshots, Structure

_log = logging.getLogger(__name__)


Deliver = Callable[
    [
        Sequence[Any],
        Mapping[int, Mapping[Box, int]],
        Mapping[int, Blocks],
        Callable[[], None],
    ],
    Callable[[int, Box], np.ndarray],
]
"""Gives each process the elements of the boxes that its devices need; collective.

It takes shape, data type and sharding of each leaf, or a numpy array where every process has the
leaf for itself; the process that gives each box, by leaf index; the boxes that this process has;
and what is called before anything is given, which raises where a process fails. It returns a
function from a leaf index and a box to its elements.
"""


@dataclass(frozen=True, slots=True)
class _File:
    """An open file.

    Attributes:
        number: number of the structure that its state has.
        journal: the file itself.
        offer: what it may be brought to.
    """

    number: int
    journal: StepFile
    offer: Offer

    @property
    def path(self) -> object:
        """Path of the file, for messages."""
        return self.journal.file.path


def state_of(
    snapshots: Snapshots,
    updates: ExportedUpdates,
    abstract_state: PyTree,
    stored: StoredStep | None,
    found: Sequence[FoundFile],
    exchange: Exchange,
    deliver: Deliver,
    replay: RecordReplay,
) -> Recovered:
    """Takes the newest state that the files of all processes hold; collective.

    Raises:
        ShadowFileError: storage has a newer one, or there is none; the message says why.
        RecorderError: the recorder cannot be tied to the state.
        AdaCheckError: another process failed.
    """
    structures = [snapshots.take(each).structure for each in examples_of(abstract_state)]
    files, refused = list[_File](), list[str]()
    try:
        for each in found:
            file = _opened(updates, structures, each)
            if isinstance(file, str):
                refused.append(file)
            else:
                files.append(file)
        number, choice = _chosen(structures, stored, files, refused, exchange)
        structure = structures[number]
        parts = _brought(structure, files, choice, exchange)

        def advance(
            leaves: Sequence[Any],
            records: Sequence[Recorded],
            read: Callable[..., Any],
            ready: Callable[[], None],
        ) -> Sequence[Any]:
            update = updates.of(structure)
            return replayed(structure, update, replay, leaves, records, read, ready)

        args = structure, abstract_state, stored, choice, parts
        return _delivered(*args, _Meeting(exchange), deliver, advance)
    finally:
        for each in files:
            each.journal.file.close()


def _opened(
    updates: ExportedUpdates, structures: Sequence[Structure], found: FoundFile
) -> _File | str:
    """A file of a state like one of some structures; or the reason why it cannot be taken."""
    why = ""
    for number, structure in enumerate(structures):
        update = updates.of(structure)
        try:
            file = making.opened(found, structure, update)
        except CutOffError as error:
            _log.warning("%s: its part of the state is not taken: %s", found.place.path, error)
            return str(error)
        except ShadowFileError as error:
            why = str(error)
            continue
        try:
            return _File(number, file, file.offer())
        except ShadowFileError as error:
            file.file.close()
            return str(error)
    return why


def _chosen(
    structures: Sequence[Structure],
    stored: StoredStep | None,
    files: Sequence[_File],
    refused: Sequence[str],
    exchange: Exchange,
) -> tuple[int, Choice]:
    """The step that all processes agree on, and the number of its structure."""
    leaves = structures[0].leaves
    sizes = [leaf.nbytes // leaf.itemsize_bytes for leaf in leaves]

    def judge(reports: Sequence[Report]) -> Report:
        offers = [(number, Offer.of_json(x)) for each in reports for number, x in each["offers"]]
        newest = reports[0]["stored"]
        chosen = agreement.choose([each for _, each in offers], sizes, newest)
        if isinstance(chosen, str):
            whys = [why for each in reports for why in each["refused"]]
            return {"why": "; ".join(dict.fromkeys([chosen, *whys[:3]]))}
        number = next(n for n, each in offers if each.run == chosen.run)
        return {"number": number, "choice": [chosen.run, chosen.step, chosen.sums]}

    own = {
        "offers": [[each.number, each.offer.to_json()] for each in files],
        "refused": [*refused],
        "stored": None if stored is None else stored.step,
    }
    answer = exchange.turn(own, judge)
    if "why" in answer:
        raise ShadowFileError(answer["why"])
    run, step, sums = answer["choice"]
    return answer["number"], Choice(run, step, tuple(sums))


@dataclass(frozen=True, slots=True)
class _Taken:
    """A file that was brought to the step.

    Attributes:
        file: itself.
        found: what it holds.
        boxes: the boxes in it that have not changed, as far as is known, with the fingerprint of
            each; None where all that changed is known.
    """

    file: _File
    found: Found
    boxes: Mapping[LeafBox, int | None]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The boxes that this process has of a step, and who gives which box.

    Attributes:
        blocks: boxes of the state before the records, or of the step where there are none.
        records: the records that follow it, with this process's boxes of each.
        givers: the process that gives each box, by leaf index.
        are_records: True if the files of all processes are for records.
    """

    blocks: Mapping[int, Blocks]
    records: Sequence[Recorded]
    givers: Mapping[int, Mapping[Box, int]]
    are_records: bool


def _brought(
    structure: Structure, files: Sequence[_File], choice: Choice, exchange: Exchange
) -> _Parts:
    """The parts of the step that this process has, and who gives which box."""
    taken = list[_Taken]()
    for each in files:
        offered = [x for x in each.offer.steps if x.step == choice.step]
        if each.offer.run != choice.run or not offered:
            continue
        try:
            taken.append(_resumed(each, offered[0]))
        except Exception as error:  # nothing that is wrong with one copy costs the step
            _log.warning("%s: its part of the state is not taken: %s", each.path, error)
    own = {
        "boxes": [holdings.numbers_to_json(each.boxes) for each in taken],
        "heads": [[x.head for x in each.found.records] for each in taken],
        "kinds": [*{each.file.journal.kind for each in taken}],
    }
    answer = exchange.turn(own, lambda reports: _judged(structure, choice, reports))
    if "why" in answer:
        raise ShadowFileError(answer["why"])
    givers = dict[int, dict[Box, int]]()
    for (i, box), giver in holdings.numbers_of_json(answer["givers"]).items():
        givers.setdefault(i, {})[box] = giver
    right = holdings.numbers_of_json(answer["right"])
    blocks, records = dict[int, Blocks](), [Recorded.of(head, {}) for head in answer["heads"]]
    for each in taken:
        good = _right(each.boxes, right)
        _tell_changed(each.file, len(each.boxes) - len(good))
        _join(blocks, good, each.found.blocks)
        for into, own in zip(records, each.found.records, strict=True):
            _join(into.blocks, good, own.blocks)
    return _Parts(blocks, records, givers, answer["kinds"] == [RecordLog.kind])


def _judged(structure: Structure, choice: Choice, reports: Sequence[Report]) -> Report:
    """Who gives which box, of what all processes have of the step; or why it cannot be had."""
    files = [[holdings.numbers_of_json(x) for x in each["boxes"]] for each in reports]
    right = agreement.right_sums(itertools.chain(*files), choice.sums)
    every = {
        process: frozenset[LeafBox]().union(*(_right(own, right) for own in each))
        for process, each in enumerate(files)
    }
    sizes = [leaf.nbytes // leaf.itemsize_bytes for leaf in structure.leaves]
    if lost := agreement.missing_leaves(frozenset().union(*every.values()), sizes):
        path = structure.leaves[lost[0]].path
        return {"why": f"step {choice.step}: no whole copy of {path} is left"}
    heads = [x for each in reports for x in each["heads"]]
    kinds = sorted({x for each in reports for x in each["kinds"]})
    if any(each != heads[0] for each in heads) or len(kinds) > 1:
        return {"why": f"step {choice.step}: its files have other records"}
    return {
        "heads": heads[0],
        "kinds": kinds,
        "right": holdings.numbers_to_json(right),
        "givers": holdings.numbers_to_json(agreement.givers(every)),
    }


def _join(into: Any, boxes: Iterable[LeafBox], found: Mapping[int, Blocks]) -> None:
    """Adds the blocks of some boxes, of the leaves that are there."""
    for i, box in boxes:
        if i in found:
            into.setdefault(i, {})[box] = found[i][box]


def _resumed(file: _File, offered: OfferedStep) -> _Taken:
    """Brings a file to a step."""
    file.journal.ready()
    found, every = file.journal.resume(offered.step), file.offer.boxes(offered)
    boxes = {each: found.box_sums.get(each) for each in every - found.changed}
    _tell_changed(file, len(every) - len(boxes))
    return _Taken(file, found, boxes)


def _right(boxes: Mapping[LeafBox, int | None], right: OfBoxes) -> list[LeafBox]:
    """The boxes that have no other fingerprints than the right ones."""
    return [x for x, found in boxes.items() if found is None or right.get(x, found) == found]


def _tell_changed(file: _File, count: int) -> None:
    """Warns of the boxes of a file that are not taken."""
    if count:
        _log.warning(
            "%s: %d parts of the state have changed since they were stored: copies are taken.",
            *(file.path, count),
        )


def _delivered(
    structure: Structure,
    abstract_state: PyTree,
    stored: StoredStep | None,
    choice: Choice,
    parts: _Parts,
    meet: _Meeting,
    deliver: Deliver,
    advance_by: Callable[..., Sequence[Any]],
) -> Recovered:
    """The state, put together from what all processes give; collective."""
    abstract = [
        _raw(leaf, described.shape, described.dtype)
        for leaf, described in zip(jax.tree.leaves(abstract_state), structure.leaves, strict=True)
    ]
    givers, delivered = parts.givers, list[Callable[[int, Box], np.ndarray]]()

    def read_record(number: int, i: int, box: Box) -> np.ndarray:
        while len(delivered) <= number:  # collective, and in the same order in all processes
            record = parts.records[len(delivered)]
            own = {leaf: givers[leaf] for leaf in record.stored if leaf in givers}
            delivered.append(deliver(abstract, own, record.blocks, meet))
        return delivered[number](i, box)

    def advance(leaves: Sequence[Any]) -> Sequence[Any]:
        advanced = advance_by(leaves, parts.records, read_record, meet)
        meet()
        return advanced

    def like(i: int, leaf: Any) -> Any:
        wanted = abstract[i]
        if not structure.leaves[i].nbytes:
            return example_of(leaf)
        if not isinstance(wanted, jax.ShapeDtypeStruct):
            return leaf_like(leaf, np.array(read(i, Box.full(wanted.shape))))
        placed = transfer.place(wanted, lambda box: np.array(read(i, box)))
        return transfer.keyed(placed, leaf)

    try:
        read = deliver(abstract, givers, parts.blocks, meet)
        found = compared(structure, abstract_state, like, choice.step, choice.sums, stored, advance)
    except Exception as error:  # nothing that goes wrong with memory keeps a run from its storage
        if meet.ended is None:
            why = str(error) if isinstance(error, ShadowFileError) else ""
            meet(why or f"{type(error).__name__}: {error}")
        raise meet.ended or error from None
    meet()  # all of them have it, or none
    replayed_count = count_of(parts.records)
    return replace(found, has_records=parts.are_records, replayed_count=replayed_count)


class _Meeting:
    """Has all processes wait for each other before anything collective: none is left alone in it.

    Attributes:
        ended: error that all have heard of, so that nobody comes any more; None before.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.ended: Exception | None = None

    def __call__(self, why: str = "") -> None:
        """Waits for all, or tells them why this process cannot go on.

        Raises:
            ShadowFileError: a process cannot go on.
            AdaCheckError: a process is gone.
        """

        def judge(reports: Sequence[Report]) -> Report:
            reasons = (f"process {n}: {x['why']}" for n, x in enumerate(reports) if x["why"])
            return {"why": next(reasons, "")}

        try:
            if why := self._exchange.turn({"why": why}, judge)["why"]:
                raise ShadowFileError(why)
        except Exception as error:
            self.ended = error
            raise


def _raw(leaf: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A leaf of plain elements, abstract; a numpy array if each process has its own."""
    sharding, element = getattr(leaf, "sharding", None), jax.numpy.dtype(dtype)
    if sharding is None or (jax.process_count() > 1 and sharding.is_fully_addressable):
        return np.empty(shape, element)
    return jax.ShapeDtypeStruct(shape, element, sharding=sharding)
