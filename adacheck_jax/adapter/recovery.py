"""Recovery of a state from the memory of all processes: their files, boxes, and records.

What a process holds, and what all agree on, is decided in :mod:`~adacheck_jax.memory.holdings` and
:mod:`~adacheck_jax.memory.agreement`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.adapter import inputs
from adacheck_jax.adapter.arguments import Source
from adacheck_jax.device import transfer
from adacheck_jax.device.trees import PyTree
from adacheck_jax.format.boxes import Blocks, Box, batches, cuts_of
from adacheck_jax.format.manifest import Delta, Leaf, Update
from adacheck_jax.memory.files import step_file
from adacheck_jax.memory.files.shadow_file import ShadowFileError
from adacheck_jax.memory.files.step_file import FoundFile, Recorded
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.restore import compiled_update, shared_reads, working_set
from adacheck_jax.restore.compiled_update import Shardings
from adacheck_jax.restore.deltas.patches import put_in_place
from adacheck_jax.restore.deltas.records import Consumed
from adacheck_jax.restore.progress import Progress
from adacheck_jax.restore.replay import Replay
from adacheck_jax.restore.shared_reads import SharedPart, SharedReads, users_of
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update import exported_program

_BATCH_BYTES = 256 << 20
"""Bytes of leaves whose boxes are exchanged at once."""


class NoFilesError(ShadowFileError):
    """No process has a file of the root."""


def found_files(
    exchange: Exchange, directory: str, root: str, named: str | None, wanted: PyTree
) -> tuple[list[FoundFile], str]:
    """This process's files with states of a root, and the item of all, if all want the same state.

    Raises:
        MismatchError: they want other leaves.
        NoFilesError: no process has any.
        ValueError: there are states of several items.
    """
    every = step_file.files_in(directory)
    found = [x for x in every if x.place.root == root and named in (None, x.place.item)]
    own: Report = {
        "items": sorted({each.place.item for each in found}),
        "state": {} if jax.process_count() == 1 else inputs.described(wanted),
    }

    def judge(reports: Sequence[Report]) -> Report:
        inputs.expect_same([each["state"] for each in reports], root)
        return {"items": sorted({x for each in reports for x in each["items"]})}

    items = exchange.turn(own, judge)["items"]
    if len(items) > 1:
        raise ValueError(
            f"expected the states of one item in memory, found those of {', '.join(items)}. Name "
            "one of them (item=...)."
        )
    if not items:
        of_item = "" if named is None else f" of item {named!r}"
        places = [each.place for each in every]
        others = sorted({f"{x.root} (item {x.item!r})" if x.item else x.root for x in places})
        beside = f"; there are some of {', '.join(others)}" if others else ""
        raise NoFilesError(f"{directory} has no states{of_item} of {root}{beside}")
    return found, items[0]


class Delivery:
    """Delivery of boxes between the processes of one recovery.

    Args:
        root: root of the steps.

    Attributes:
        source: the memory from which this process gets what its devices need.
    """

    def __init__(self, root: AnyPath) -> None:
        self._root = root
        self.source: Source = "memory"

    def deliver(
        self,
        abstract: Sequence[Any],
        givers: Mapping[int, Mapping[Box, int]],
        own: Mapping[int, Blocks],
        ready: Callable[[], None],
    ) -> Callable[[int, Box], np.ndarray]:
        """Gives each process the elements that its devices need.

        See :data:`~adacheck_jax.memory.together.Deliver`.
        """
        process, blocks = jax.process_index(), dict[tuple[int, Box], np.ndarray]()
        pieces = list[tuple[SharedPart, int]]()
        for i, of_box in givers.items():
            users = _users(abstract[i], of_box)
            for box, giver in of_box.items():
                if giver == process:
                    blocks[i, box] = own[i][box]
                if process in users[box] and box not in own.get(i, ()):
                    self.source = "memory of others"
                if others := {*users[box]} - {giver}:
                    holders = tuple(sorted({giver, *others}))
                    nbytes = box.size * abstract[i].dtype.itemsize
                    pieces.append((SharedPart(i, box, holders, nbytes), holders.index(giver)))
        groups = batches([part.nbytes for part, _ in pieces], _BATCH_BYTES)
        exchanges = [shared_reads.exchanges(pieces[each.start : each.stop]) for each in groups]
        if not exchanges:
            return shared_reads.elements_of(blocks)
        dtypes = {i: np.dtype(leaf.dtype) for i, leaf in enumerate(abstract)}

        def read(wanted: Sequence[tuple[int, Box, np.ndarray]]) -> Sequence[Any]:
            for i, box, memory in wanted:
                memory[...] = own[i][box]
            return ()

        ready()
        reads = SharedReads((*range(jax.process_count()),), self._root, exchanges)
        for batch in exchanges:
            # Of its own the memory that it has anyway.
            blocks = reads.finish(shared_reads.begin(batch, dtypes, read)) | blocks
        return shared_reads.elements_of(blocks)


def _users(leaf: Any, boxes: Mapping[Box, int]) -> Mapping[Box, Sequence[int]]:
    """The processes that need elements of each box."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return dict.fromkeys(boxes, (*range(jax.process_count()),))
    needed = shared_reads.needed_by(leaf)
    return users_of(needed, leaf.shape, cuts_of(boxes, leaf.shape))


_Read = Callable[[int, int, Box], np.ndarray]


class _Reader:
    """Implements :class:`~adacheck_jax.restore.deltas.patches.StoredLeaves` for one record."""

    def __init__(self, number: int, record: Recorded, read: _Read) -> None:
        self._number, self._read = number, read
        replayed = record.updates, record.stored, record.unreplayed
        self.delta = Delta(number, (), *replayed, packs=(), fingerprints=(), checked="")

    def stores_whole(self, index: int) -> bool:
        """True: no differences are kept."""
        return True

    def read(self, index: int, box: Box) -> np.ndarray:
        """One box of a leaf that is stored."""
        return self._read(self._number, index, box)

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Puts one box of a leaf into its place; see the protocol."""
        block[...] = self.read(index, box)

    def prefetched(self, wanted: Mapping[int, Sequence[Box]]) -> contextlib.nullcontext[None]:
        """Nothing: all is in memory."""
        return contextlib.nullcontext()


def replay(
    leaves: Sequence[Any],
    specs: Sequence[Leaf],
    update: Update,
    program: bytes,
    records: Sequence[Recorded],
    read: _Read,
    ready: Callable[[], None],
) -> Sequence[Any]:
    """Implements :class:`~adacheck_jax.memory.recovered.RecordReplay`."""
    readers = [_Reader(number, record, read) for number, record in enumerate(records)]
    if not any(each.delta.has_update for each in readers):
        return put_in_place(leaves, specs, readers)
    shardings = working_set.replay_shardings(leaves, update)
    exported = exported_program.own(program)
    compiled = compiled_update.compiled(exported, update, specs, shardings, "memory")

    def advance(*args: Any) -> Any:
        ready()
        return compiled(*args)

    with Progress("recovering a state from memory") as progress:
        replaying = Replay(leaves, specs, update, advance, shardings, progress)
        return replaying.run(readers, _consumed(readers, update, specs, shardings))


def _consumed(
    readers: Sequence[_Reader], update: Update, specs: Sequence[Leaf], shardings: Shardings
) -> Iterator[Consumed]:
    """Record and state that each update consumes, on the shardings for replay; one placed ahead."""
    wanted = [working_set.abstract_leaf(specs[i], shardings[i]) for i in update.consumed]

    def placed(reader: _Reader) -> Consumed:
        own = update.consumed_by(reader.delta.updates)

        def read(n: int, box: Box) -> np.ndarray:
            if update.consumed[n] in own:
                # An array may use this memory, and the file's is overwritten one day.
                return np.array(reader.read(update.consumed[n], box))
            return np.zeros(box.shape, jax.numpy.dtype(wanted[n].dtype))

        return transfer.place_all(wanted, read)

    return (placed(each) for each in readers if each.delta.has_update)
