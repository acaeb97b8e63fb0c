"""Reads of stored parts that several processes need: each reads its share, and gives it away.

Every process computes the same plan from shardings, shapes and cut points, with no exchange.
The bytes are exchanged as they are stored, so that every bit pattern of every type survives. What
stops one process from reading is told to all, and all of them raise: none waits for another.

A share may be read on any thread; :class:`SharedReads` is collective, and used by one thread alone.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import exchange
from adacheck_jax.device.sharding import holders_of
from adacheck_jax.errors import IntegrityError, MismatchError, StorageError, unreadable
from adacheck_jax.format.boxes import Box, Cuts, grid
from adacheck_jax.store import host_memory
from adacheck_jax.store.storage.location import AnyPath, at

_DONE, _DAMAGED, _UNREADABLE = 0, 1, 2

ReadOnce = bool | None
"""True or False as the caller wants it; None to decide by the storage, and by the bytes saved."""
WORTHWHILE_BYTES = 256 << 20
"""Bytes that a process reads in vain, on average, from which on the others are asked."""

Blocks = dict[tuple[int, Box], np.ndarray]
"""Elements of boxes, by position of the array and box."""
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class SharedPart:
    """A stored part of an array of which devices of several processes need elements.

    Attributes:
        array: position of its array among those that are read together.
        box: the part: a chunk of a base, or a stored box of a delta.
        holders: processes whose devices need some of it, ascending, two at least.
        nbytes: bytes of the part.
    """

    array: int
    box: Box
    holders: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharePiece:
    """A shared part in the row of the process that reads it.

    Attributes:
        part: the part.
        reader: position of the reading process among the holders.
        start: first byte in the row.
    """

    part: SharedPart
    reader: int
    start: int


@dataclass(frozen=True, slots=True)
class ShareExchange:
    """Rows of bytes that some processes give each other.

    Attributes:
        holders: the processes, ascending.
        pieces: all pieces of all rows.
        row_bytes: bytes of a row: those of the fullest one.
    """

    holders: tuple[int, ...]
    pieces: tuple[SharePiece, ...]
    row_bytes: int


def needed_by(target: jax.ShapeDtypeStruct) -> dict[Box, set[int]]:
    """The processes that hold each box of an array that has a sharding."""
    held = holders_of(target.sharding, target.shape)
    return {box: {each.process for each in devices} for box, devices in held.items()}


def users_of(
    needed: Mapping[Box, Iterable[int]], shape: Sequence[int], stored: Cuts
) -> dict[Box, tuple[int, ...]]:
    """The processes that need elements of each stored part of an array, ascending."""
    users = [frozenset(each) for each in needed.values()]
    starts = np.array([box.start for box in needed], int).reshape(len(needed), len(shape))
    stops = np.array([box.stop for box in needed], int).reshape(len(needed), len(shape))
    known: dict[bytes, tuple[int, ...]] = {}
    found = {}
    for part in grid(stored):
        is_met = np.all((starts < part.stop) & (stops > part.start), axis=1)
        key = is_met.tobytes()
        if key not in known:
            met = frozenset().union(*(users[i] for i in np.flatnonzero(is_met)))
            known[key] = tuple(sorted(met))
        found[part] = known[key]
    return found


def own_boxes(boxes: list[Box], stored: Cuts, shared: Collection[SharedPart]) -> list[Box]:
    """The boxes that a process reads of an array by itself, without the shared parts."""
    if not shared:
        return boxes
    taken = {part.box for part in shared}
    return [
        common
        for part in grid(stored)
        if part not in taken
        for box in boxes
        if (common := part.intersect(box)) is not None
    ]


def plan(shared: Iterable[SharedPart]) -> tuple[ShareExchange, ...]:
    """Choose who reads what: near-equal bytes for each holder, in contiguous runs.

    Runs, since parts that follow one another may lie in one stored chunk, which is read whole.
    """
    parts, dealt = [*shared], list[tuple[SharedPart, int]]()
    total_bytes, done_bytes = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for part in parts:
        total_bytes[part.holders] += part.nbytes
    for part in parts:
        holders, count = part.holders, len(part.holders)
        middle_bytes = done_bytes[holders] + part.nbytes // 2
        reader = min(middle_bytes * count // max(1, total_bytes[holders]), count - 1)
        done_bytes[holders] += part.nbytes
        dealt.append((part, reader))
    return exchanges(dealt)


def exchanges(dealt: Iterable[tuple[SharedPart, int]]) -> tuple[ShareExchange, ...]:
    """Exchanges of parts, each read by the process at a position among its holders.

    Returns:
        One exchange for each set of holders, in an order that is the same in every process.
    """
    groups: dict[tuple[int, ...], list[tuple[SharedPart, int]]] = {}
    for part, reader in dealt:
        groups.setdefault(part.holders, []).append((part, reader))
    made = []
    for holders, parts in sorted(groups.items()):
        ends, pieces = [0] * len(holders), list[SharePiece]()
        for part, reader in parts:
            pieces.append(SharePiece(part, reader, ends[reader]))
            ends[reader] += -(-part.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        made.append(ShareExchange(holders, tuple(pieces), max(ends)))
    return tuple(made)


def shared_parts(array: int, target: jax.ShapeDtypeStruct, cuts: Cuts) -> list[SharedPart]:
    """The stored parts of an array that devices of several processes need."""
    if target.sharding is None or target.sharding.is_fully_addressable or not target.size:
        return []
    needed = needed_by(target)
    return [
        SharedPart(array, box, users, box.size * target.dtype.itemsize)
        for box, users in users_of(needed, target.shape, cuts).items()
        if len(users) > 1
    ]


def elements_of(blocks: Blocks) -> Callable[[int, Box], np.ndarray]:
    """Function from the position of an array and a box to the elements, which blocks cover."""
    parts: dict[int, list[tuple[Box, np.ndarray]]] = {}
    for (i, box), data in blocks.items():
        parts.setdefault(i, []).append((box, data))
    return lambda i, box: put_together(box, parts[i])


def put_together(box: Box, parts: Sequence[tuple[Box, np.ndarray]]) -> np.ndarray:
    """Elements of a box, from parts that cover it: a view of one, or a copy of several."""
    for around, data in parts:
        if around.contains(box):
            return data[(*box.relative_to(around.start).slices, ...)]
    dtype = parts[0][1].dtype
    memory = host_memory.empty(box.size * dtype.itemsize).view(dtype).reshape(box.shape)
    for each, data in parts:
        common = box.intersect(each)
        if common is not None:
            source = data[(*common.relative_to(each.start).slices, ...)]
            memory[(*common.relative_to(box.start).slices, ...)] = source
    return memory


def members(
    targets: Iterable[jax.ShapeDtypeStruct],
    choice: ReadOnce,
    where: AnyPath,
    *,
    times: int = 1,
) -> tuple[int, ...]:
    """The processes that read together, ascending; none if this one reads for itself.

    Args:
        targets: shape, elements and target sharding of each array; the same in all processes.
        choice: the caller's wish.
        where: directory that is read from.
        times: number of times that they are read.
    """
    if not (at(where).spec()["driver"] != "file" if choice is None else choice):
        return ()
    found, saved_bytes = set[int](), 0
    for each in targets:
        devices = each.sharding.device_set if each.sharding is not None else ()
        processes = {device.process_index for device in devices}
        if len(processes) < 2:
            continue
        found |= processes
        for box, needing in needed_by(each).items():
            saved_bytes += times * (len(needing) - 1) * box.size * each.dtype.itemsize
    is_worthwhile = choice is not None or saved_bytes >= WORTHWHILE_BYTES * len(found)
    return tuple(sorted(found)) if is_worthwhile and jax.process_index() in found else ()


class SharedReads:
    """Reads that processes share, batch by batch; or those of one that reads for itself.

    Collective: all processes make one, and compare what they are going to read.

    Args:
        members: the processes that read together; none if this one reads for itself.
        where: directory that is read from.
        batches: the exchanges of each batch.

    Raises:
        AdaCheckError: as from :meth:`finish`.
    """

    def __init__(
        self, members: tuple[int, ...], where: AnyPath, batches: Sequence[Sequence[ShareExchange]]
    ) -> None:
        self._members = members
        self._where = where
        text = repr([*batches]).encode()
        self._digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        self._agree(None)

    def finish(self, share: OwnShare) -> Blocks:
        """Exchange what each process read of one batch. Collective; in the order of the batches.

        Returns:
            Elements of each shared part that this process needs.

        Raises:
            IntegrityError: another process found damage.
            StorageError: another process cannot read now what may be whole.
            MismatchError: another process reads something else.
            Exception: an error that stopped this process from reading.
        """
        self._agree(share.wait())
        found: Blocks = {}
        for each, row in zip(share.exchanges, share.rows, strict=True):
            rows = exchange.gather(row, each.holders)
            for piece in each.pieces:
                elements = _elements(rows[piece.reader], piece, share.dtypes)
                found[piece.part.array, piece.part.box] = elements
        return found

    def _agree(self, failure: Exception | None) -> None:
        """Tell the others of a failure, which is raised again, or hear of theirs."""
        status = _DONE
        if failure is not None:
            cannot_now = isinstance(failure, MemoryError | StorageError)
            cannot_now = cannot_now or unreadable(self._where, failure) is not None
            status = _UNREADABLE if cannot_now else _DAMAGED
        row = np.concatenate([np.array([status], np.uint8), self._digest])
        reports = exchange.gather(row, self._members)[:, : row.size] if self._members else ()
        if failure is not None:
            raise failure
        for process, each in zip(self._members, reports, strict=True):
            if each[0] == _UNREADABLE:
                raise StorageError(
                    f"{self._where}: process {process} cannot read its share now; its log says "
                    "why. What is there may be whole: try again."
                )
            if each[0] != _DONE:
                raise IntegrityError(
                    f"{self._where}: process {process} found its share damaged; its log says "
                    "where. Restore another step."
                )
            if not np.array_equal(each[1:], self._digest):
                raise MismatchError(
                    f"{self._where}: expected the same restore in all processes, found that "
                    f"process {process} restores another step, or onto other shardings, than "
                    f"process {jax.process_index()}. Nothing was returned."
                )


@dataclass(slots=True)
class OwnShare:
    """One process's share of a batch: rows of bytes that are being read.

    Attributes:
        exchanges: the exchanges that this process takes part in.
        dtypes: type of the stored elements of each array.
        rows: its row of each exchange.
        futures: futures that are done once all is read.
        failure: error that stopped a read from beginning; None for none.
    """

    exchanges: list[ShareExchange]
    dtypes: Mapping[int, np.dtype]
    rows: list[np.ndarray] = field(default_factory=list)
    futures: Sequence[Any] = ()
    failure: Exception | None = None

    def wait(self) -> Exception | None:
        """Wait until all is read; returns the first error."""
        for future in self.futures:
            try:
                future.result()
            except Exception as error:
                self.failure = self.failure or error
        return self.failure


def begin(
    exchanges: Sequence[ShareExchange],
    dtypes: Mapping[int, np.dtype],
    read: Callable[[Sequence[tuple[int, Box, np.ndarray]]], Sequence[Any]],
) -> OwnShare:
    """Begin to read what a process reads of a batch; also on background threads.

    An error is kept, and raised once the other processes were told.

    Args:
        exchanges: the batch's exchanges.
        dtypes: type of the stored elements of each array, by position.
        read: function that begins to read boxes of arrays into memory, and whatever else the
            process reads by itself; returns futures of what is not done yet.
    """
    process = jax.process_index()
    share = OwnShare([each for each in exchanges if process in each.holders], dtypes)
    wanted: list[tuple[int, Box, np.ndarray]] = []
    try:
        for each in share.exchanges:
            row = host_memory.empty(exchange.padded_length(each.row_bytes))
            share.rows.append(row)
            wanted += [
                (piece.part.array, piece.part.box, _elements(row, piece, dtypes))
                for piece in each.pieces
                if each.holders[piece.reader] == process
            ]
        share.futures = read(wanted)
    except Exception as error:
        share.failure = error
    return share


def _elements(row: np.ndarray, piece: SharePiece, dtypes: Mapping[int, np.dtype]) -> np.ndarray:
    """The elements of a piece in the row of its reader."""
    part = piece.part
    data = row[piece.start : piece.start + part.nbytes]
    return data.view(dtypes[part.array]).reshape(part.box.shape)
