"""A root of published weights in a storage: its keys, its records, and who may write it.

What is read here is whole: records fit their checksums, other values the digests in records.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import TypeVar

import xxhash

from adacheck_jax.errors import (
    FormatError,
    IntegrityError,
    MismatchError,
    TakenOverError,
    listed,
    unreadable,
)
from adacheck_jax.format.manifest_json import MAX_MANIFEST_BYTES
from adacheck_jax.publish import records
from adacheck_jax.publish.records import Base, Claim, Record, Stored, Version
from adacheck_jax.store.steps.marks import STEP_METADATA
from adacheck_jax.store.storage.location import AnyPath, Location, at, located

PUBLISHERS, LEAVES, VERSIONS = "publishers", "leaves", "versions"
DELTAS, BASES, PARTS = "deltas", "bases", "parts"
_FOLDERS = {PUBLISHERS, LEAVES, VERSIONS, DELTAS, BASES, PARTS}
_DIGITS = 12
_TEMPORARY = re.compile(r"\..*\.tmp")
_R = TypeVar("_R", bound=Record)


class GoneError(Exception):
    """A value that a record names is not there: it was pruned."""


def digest(data: bytes | memoryview) -> str:
    """Digest of stored bytes, as :class:`~adacheck_jax.publish.records.Stored` has it."""
    return xxhash.xxh3_128_hexdigest(data)


class Root:
    """A root of published weights.

    Args:
        path: a local path, a URL, or a location in another storage.

    Attributes:
        top: location of the root.
    """

    def __init__(self, path: str | AnyPath) -> None:
        self.top: Location = at(located(path))

    def __str__(self) -> str:
        return str(self.top)

    def numbers(self, folder: str) -> list[int]:
        """Numbers that values in a folder are named by, ascending.

        Raises:
            StorageError: the folder cannot be read now.
        """
        place = self.top / folder
        with _looking_at(place):
            names = [each.name for each in place.list(deep=False)]
        return sorted(int(name) for name in names if re.fullmatch(rf"\d{{{_DIGITS}}}", name))

    def check_own(self) -> None:
        """Looks for what no publisher wrote, in a root that has no version yet.

        Raises:
            MismatchError: there is something else, and no publisher has begun here.
            StorageError: the root cannot be read now.
        """
        with _looking_at(self.top):
            top = self.top.listed()
            folders, values = top.folders(), [each.name for each in top.list(deep=False)]
        if PUBLISHERS in folders:
            return
        found = sorted({*folders, *values} - _FOLDERS)
        found = [name for name in found if not name.startswith(".")]
        if found:
            is_step = any((top / name / STEP_METADATA).exists for name in folders)
            what = "the root of a checkpoint manager" if is_step else "a directory of other content"
            raise MismatchError(
                f"{self}: expected a root of published weights, or nothing, found {what} "
                f"({listed(found, 3)}). No publisher has written there. Give the "
                "publisher, and those who follow it, a directory or URL of its own."
            )

    def payloads(self) -> list[tuple[str, int, int, Location]]:
        """Deltas, and folders of parts: folder of the record, sequence number, epoch, and place."""
        deltas = [(VERSIONS, each) for each in (self.top / DELTAS).list(deep=False)]
        parts = [(BASES, self.top / PARTS / name) for name in (self.top / PARTS).folders()]
        return [
            (kind, int(found[1]), int(found[2]), each)
            for kind, each in (*deltas, *parts)
            if (found := re.fullmatch(rf"(\d{{{_DIGITS}}})-(\d{{{_DIGITS}}})(-\d+)?", each.name))
        ]

    def record_at(self, folder: str, number: int | str) -> Location:
        """Place of a record."""
        return self.top / folder / (_name(number) if isinstance(number, int) else number)

    def read(self, folder: str, number: int | str, kind: type[_R]) -> _R:
        """A record.

        Raises:
            GoneError: it is not there.
            AdaCheckError: it is damaged, or cannot be read now.
        """
        place = self.record_at(folder, number)
        record = records.decode(_read(place), kind, place)
        if (own := _name_of(record)) != number:
            raise FormatError(f"{place}: expected the record of {number}, found that of {own}.")
        return record

    def claims(self, known: Sequence[Claim] = ()) -> tuple[Claim, ...]:
        """Claims of all publishers that can be read."""
        found = {each.epoch: each for each in known}
        for epoch in self.numbers(PUBLISHERS):
            if epoch not in found:
                try:
                    found[epoch] = self.read(PUBLISHERS, epoch, Claim)
                except (GoneError, FormatError, IntegrityError):
                    continue  # it governs nothing; its publisher's versions count all the same
        return tuple(found[epoch] for epoch in sorted(found))

    def load(self, place: Location, stored: Stored) -> bytes:
        """Bytes of a delta, or of a part of a base.

        Raises:
            GoneError: they are not there.
            IntegrityError: they are others.
        """
        data = _read(place, stored.nbytes)
        if len(data) != stored.nbytes or digest(data) != stored.digest:
            raise IntegrityError(
                f"{place}: expected {stored.nbytes} bytes of digest {stored.digest}, found "
                f"{len(data)} others. The file is damaged; a later base heals followers."
            )
        return data

    def store(self, place: Location, data: bytes) -> Stored:
        """Writes a delta, or a part of a base, and makes it durable."""
        place.write(data)
        place.sync()
        place.parent.sync()
        return Stored(len(data), digest(data))

    def write(self, folder: str, record: _R) -> _R:
        """Writes a record whole and durable, if it is absent.

        Returns:
            The record, with its checksum.

        Raises:
            FileExistsError: there is a record of that name.
        """
        data, record = records.sealed(record, self.top / folder)
        if isinstance(record, Base) and record.parts:
            (self.top / PARTS).sync()
        place = self.record_at(folder, _name_of(record))
        if not place.on_file_system:
            place.write(data, if_absent=True)
            return record
        made = place.with_name(f".{place.name}.{uuid.uuid4().hex}.tmp")
        try:
            made.write(data)
            made.sync()
            # A link comes to be at once, and only where there is none.
            if not place.parent.adopt({place.name: made.key}):
                place.write(data, if_absent=True)
                place.sync()
        finally:
            made.delete()
        place.parent.sync()
        self.top.sync()
        return record

    def delete(self, place: Location) -> None:
        """Deletes a value or a folder, which another publisher may be deleting at the same time."""
        with contextlib.suppress(FileNotFoundError):
            place.delete()

    def clear_temporary(self) -> None:
        """Deletes what killed writes left; of claims nothing, since others may be making some."""
        for folder in (LEAVES, VERSIONS, BASES, DELTAS):
            for each in [*(self.top / folder).list(deep=False)]:
                if _TEMPORARY.fullmatch(each.name):
                    self.delete(each)

    def delta_at(self, sequence: int, epoch: int, share: int) -> Location:
        """Place of a version's delta of a share."""
        return self.top / DELTAS / f"{_name(sequence)}-{_name(epoch)}-{share}"

    def part_at(self, sequence: int, epoch: int, share: int, number: int) -> Location:
        """Place of one part of a share in a base."""
        folder = self.top / PARTS / f"{_name(sequence)}-{_name(epoch)}"
        return folder / f"{share}-{_name(number)}"


def claim(root: Root) -> Claim:
    """Takes a root over from the publisher that had it, from the next sequence number on.

    Raises:
        MismatchError: something else than published weights is there.
    """
    while True:
        epochs, sequences = root.numbers(PUBLISHERS), root.numbers(VERSIONS)
        if not epochs:
            root.check_own()
        mine = Claim(
            epoch=epochs[-1] + 1 if epochs else 0,
            first=sequences[-1] + 1 if sequences else 0,
            token=uuid.uuid4().hex,
        )
        try:
            root.write(PUBLISHERS, mine)
        except FileExistsError:
            continue  # another one began at the same time: this one comes after it
        return mine


def check_owner(root: Root, mine: Claim) -> None:
    """Looks for a publisher that has taken the root over.

    Raises:
        TakenOverError: there is one, or the claim itself is gone.
    """
    newest = max(root.numbers(PUBLISHERS), default=-1)
    if newest < mine.epoch:
        raise TakenOverError(
            f"{root}: expected the claim of this publisher (number {mine.epoch}), found none: the "
            "root was deleted, or put back from an earlier copy. End this publisher, and begin "
            "again with a new one."
        )
    if newest != mine.epoch:
        raise TakenOverError(
            f"{root}: expected to be its only publisher (number {mine.epoch}), found that "
            f"publisher {newest} has taken it over. What this one publishes from now on does not "
            "count. End it, or give it a root of its own."
        )


def _name(number: int) -> str:
    return f"{number:0{_DIGITS}}"


def _name_of(record: Record) -> int | str:
    """The number that a record's file is named by, or the checksum."""
    if isinstance(record, Claim):
        return record.epoch
    return record.sequence if isinstance(record, Version | Base) else record.checksum


@contextlib.contextmanager
def _looking_at(place: Location) -> Iterator[None]:
    """Tells that a folder cannot be listed now as a StorageError."""
    try:
        yield
    except OSError as error:
        if refused := unreadable(place, error):
            raise refused from error
        raise


def _read(place: Location, nbytes: int | None = None) -> bytes:
    if nbytes is None and place.on_file_system:
        nbytes = MAX_MANIFEST_BYTES + 1  # of a file that is no record no more is read
    try:
        return place.read(0, nbytes)
    except FileNotFoundError as error:
        raise GoneError(str(place)) from error
    except OSError as error:
        raise unreadable(place, error) or IntegrityError(
            f"{place}: expected a file, found {error}. A later base heals followers."
        ) from error
