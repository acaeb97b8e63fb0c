"""Versions written in the background: the delta from the last one, a base where one is due.

Host memory holds this process's share of the version that was written last. That of a new version
takes its place only once the record is written: after an error the next delta begins where readers
are. Each process writes its share; process 0 writes the records, and what it could not all hear of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from adacheck_jax.device.replicas import ReplicaCheck
from adacheck_jax.errors import (
    FormatError,
    IntegrityError,
    MismatchError,
    StorageError,
    first_line,
    listed,
)
from adacheck_jax.format import manifest_records
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.processes.meetings import Exchange
from adacheck_jax.processes.messages import Report
from adacheck_jax.publish import plan, reading, records, weights
from adacheck_jax.publish.reading import VersionReader
from adacheck_jax.publish.records import Base, Claim, Leaves, ParentVersion, Stored, Version
from adacheck_jax.publish.root import BASES, LEAVES, VERSIONS, GoneError, Root, check_owner
from adacheck_jax.publish.weights import Weights

_log = logging.getLogger(__name__)
_THREADS = 4


@dataclass(frozen=True, slots=True)
class Published:
    """A version that was published.

    Attributes:
        version: the caller's number.
        sequence: its place in the root's sequence.
        changed: number of words whose bits changed; all of them without a parent.
        words: number of words.
        delta_bytes: bytes of the deltas of all shares; 0 if there is none.
        record_bytes: bytes of the version's record.
        base_bytes: bytes of the base that was written with it; 0 if none was.
    """

    version: int
    sequence: int
    changed: int
    words: int
    delta_bytes: int
    record_bytes: int
    base_bytes: int


@dataclass(slots=True)
class NewVersion:
    """A version that is to be written.

    Attributes:
        version: the caller's number.
        weights: this process's share.
        sums: its contribution to the fingerprint of each leaf, taken before it was copied. Of
            several processes the shares may be others than those of the weights.
        check: compares the replicas of its boxes.
        replicas: this process's part of that.
        together: exchange of the processes about it.
    """

    version: int
    weights: Weights
    sums: Sequence[int]
    check: ReplicaCheck
    replicas: Report
    together: Exchange


class Writer:
    """The owner of a root, or of several processes one of its owners.

    Args:
        root: the root.
        mine: the claim on it.
        share: number of the share that this process writes.
        base_every: largest number of versions between bases.
        keep: number of the newest versions that stay readable; None for all.

    Attributes:
        last: the newest version that counts; None if there is none.
    """

    def __init__(
        self, root: Root, mine: Claim, *, share: int, base_every: int, keep: int | None
    ) -> None:
        self._root, self._mine, self._share = root, mine, share
        self._base_every, self._keep_versions = base_every, keep
        self._reader = VersionReader(root)
        found = self._reader.versions(self._reader.sequences())
        self.last = found[max(found)] if found else None
        self._next = mine.first
        self._weights: Weights | None = None
        self._leaves, self._leaves_checksum = Leaves((), 0), ""
        self._since_base, self._since_base_bytes = 0, 0

    def clear(self) -> None:
        """Deletes what a publisher before this one began and did not end."""
        self._root.clear_temporary()
        kept = {VERSIONS: self._root.numbers(VERSIONS), BASES: self._root.numbers(BASES)}
        for kind, sequence, epoch, place in self._root.payloads():
            if sequence not in kept[kind] and epoch < self._mine.epoch:
                self._root.delete(place)

    def write(self, new: NewVersion) -> Published:
        """Writes one version, and a base if one is due; prunes.

        All processes call this, with the same version.

        Raises:
            StorageError: it cannot be written, or another publisher has taken over.
            MismatchError: its elements changed since they were fingerprinted, or the processes do
                not publish the same.
            ReplicaError: replicas differ.
        """
        with self._owning():
            made, is_following = new.weights, self._follows(new)
            before, data, changed = self._weights, b"", 0
            if is_following and before is not None:
                data, changed = weights.encode(before, made, self._share)
            while (found := self._recorded(new, data, changed, is_following=is_following)) is None:
                self._next += 1  # that one is of a publisher that did not know that it had to stop
            known, is_due = found
            self.last, self._weights, self._next = known, made, known.sequence + 1
            self._since_base += 1
            self._since_base_bytes += known.delta_bytes
            has_base = self._write_due_base(new, known) if is_due else not is_following
        if has_base:
            self._since_base, self._since_base_bytes = 0, 0
        words = sum(each.nbytes // each.word_bytes for each in made.leaves.leaves)
        return Published(
            version=new.version,
            sequence=known.sequence,
            changed=known.changed if is_following else words,
            words=words,
            delta_bytes=known.delta_bytes,
            record_bytes=len(records.encode(known)),
            base_bytes=made.leaves.nbytes if has_base else 0,
        )

    @contextlib.contextmanager
    def _owning(self) -> Iterator[None]:
        """Tells as its cause that a newer publisher cleared what this one was writing."""
        try:
            yield
        except FileNotFoundError:
            check_owner(self._root, self._mine)
            raise

    def _follows(self, new: NewVersion) -> bool:
        """True if the version is a delta from the last one, in all processes; else a base."""
        leaves = new.weights.leaves
        if leaves != self._leaves:
            self._leaves = leaves
            self._leaves_checksum = records.sealed(leaves, self._root)[1].checksum
        sums = None
        if self._weights is None and self.last is not None:
            self._weights = self._read_back(self.last, leaves)
            sums = None if self._weights is None else self._weights.fingerprints()
        has_them = self._weights is not None and self._weights.leaves == leaves
        own = {
            "leaves": self._leaves_checksum,
            "last": self.last.checksum if self.last is not None and has_them else "",
            "sums": sums,
        }
        return new.together.turn(own, self._judged)["follows"]

    def _judged(self, reports: Sequence[Report]) -> Report:
        """Process 0's decision on how a version begins, by the reports of all processes."""
        if len({each["leaves"] for each in reports}) > 1:
            raise MismatchError(
                f"{self._root}: expected the same params in all processes, found others in one: "
                "not published. Publish arrays of the same paths, shapes, types and shardings."
            )
        follows = {each["last"] for each in reports} == {self.last.checksum if self.last else None}
        read = [each["sums"] for each in reports if each["sums"] is not None]
        if follows and self.last is not None and read:
            try:
                reading.check(self.last, self._leaves, _combined(read), self._root)
            except IntegrityError as error:
                _log.warning("Publishing goes on with a base: %s", error)
                follows = False
        return {"follows": follows}

    def _read_back(self, last: Version, leaves: Leaves) -> Weights | None:
        """Weights that a publisher before this one wrote last, if they can be read."""
        try:
            route = self._reader.route(None)
            if route is None or route.end != last:
                raise IntegrityError(f"{self._root}: the newest version cannot be reached.")
            if self._reader.leaves(last) != leaves:
                return None
            found, _ = self._reader.load(route, None, [self._share])
        except (FormatError, IntegrityError, GoneError) as error:
            _log.warning("Publishing goes on with a base: %s", error)
            return None
        self._since_base = len(route.deltas)
        self._since_base_bytes = sum(each.delta_bytes for each in route.deltas)
        return found

    def _recorded(
        self, new: NewVersion, data: bytes, changed: int, *, is_following: bool
    ) -> tuple[Version, bool] | None:
        """Writes a version under the next number; None if there is a record of that number.

        True with it if a base is due, by the versions that process 0 has counted.
        """
        delta, parts = None, list[Stored]()
        if data:
            place = self._root.delta_at(self._next, self._mine.epoch, self._share)
            delta = self._root.store(place, data)
        if not is_following:
            parts = self._stored_parts(self._next, new.weights)
        own = {
            "sums": [*new.sums],
            "copied": new.weights.fingerprints(),
            "delta": None if delta is None else dataclasses.asdict(delta),
            "changed": changed,
            "parts": [dataclasses.asdict(each) for each in parts],
            "replicas": new.replicas,
        }

        def judged(reports: Sequence[Report]) -> Report:
            new.check.expect_equal(f"version {new.version}", [x["replicas"] for x in reports])
            with named(self._root, f"version {new.version}"), self._owning():
                record = self._write_record(new.version, reports, is_following=is_following)
            if record is None:
                return {}
            since = self._since_base + 1, self._since_base_bytes + record.delta_bytes
            is_due = plan.base_is_due(*since, self._leaves.nbytes, self._base_every)
            return {"record": records.encode(record).decode(), "is_due": is_following and is_due}

        told = new.together.turn(own, judged)
        if not told:
            return None
        return records.decode(told["record"].encode(), Version, self._root), told["is_due"]

    def _write_record(
        self, version: int, reports: Sequence[Report], *, is_following: bool
    ) -> Version | None:
        """Writes the record of a version whose shares all processes have stored.

        Raises:
            MismatchError: elements changed while they were copied.
        """
        sums, leaves, last = _combined([x["copied"] for x in reports]), self._leaves, self.last
        seen = zip(leaves.leaves, sums, _combined([x["sums"] for x in reports]), strict=True)
        if wrong := [leaf.path for leaf, copied, before in seen if copied != before]:
            raise MismatchError(
                f"{self._root}: expected params that stay as they are until version {version} is "
                f"written, found that {listed(wrong, 5)} changed: not published. Call wait() "
                "before you change memory of numpy's that they lie in."
            )
        parent = None
        if is_following and last is not None:
            parent = ParentVersion(last.sequence, last.checksum)
        record = Version(
            sequence=self._next,
            epoch=self._mine.epoch,
            version=version,
            parent=parent,
            leaves=self._leaves_checksum,
            fingerprints=(*sums,),
            deltas=tuple(_stored(x["delta"]) for x in reports) if parent else (),
            changed=sum(each["changed"] for each in reports),
        )
        try:
            if parent is None:
                self._describe(leaves)
                self._write_base(records.sealed(record, self._root)[1], reports)
            record = self._root.write(VERSIONS, record)
        except FileExistsError:
            check_owner(self._root, self._mine)
            return None
        check_owner(self._root, self._mine)
        if parent is None:
            self._prune()
        return record

    def _describe(self, leaves: Leaves) -> None:
        """Writes the record of the leaves, if it is not there."""
        try:
            self._root.write(LEAVES, leaves)
        except FileExistsError:
            try:
                self._root.read(LEAVES, self._leaves_checksum, Leaves)
            except (FormatError, IntegrityError):
                self._root.delete(self._root.record_at(LEAVES, self._leaves_checksum))
                self._describe(leaves)

    def _write_due_base(self, new: NewVersion, known: Version) -> bool:
        """Writes a base of a version; False if that is left to a later one."""
        parts = self._stored_parts(known.sequence, new.weights)
        own = {"parts": [dataclasses.asdict(each) for each in parts]}

        def judged(reports: Sequence[Report]) -> Report:
            with named(self._root, f"the base of version {new.version}"), self._owning():
                try:
                    self._write_base(known, reports)
                except FileExistsError as error:  # of a publisher that has stopped
                    _log.warning("The next version tries to write the base: %s", error)
                    return {"is_written": False}
                self._prune()
                return {"is_written": True}

        return new.together.turn(own, judged)["is_written"]

    def _stored_parts(self, sequence: int, own: Weights) -> list[Stored]:
        """Writes this process's share of a base."""

        def write(number: int) -> Stored:
            place = self._root.part_at(sequence, self._mine.epoch, self._share, number)
            return self._root.store(place, own.part(self._share, number))

        with ThreadPoolExecutor(_THREADS) as threads:
            return [*threads.map(write, range(weights.part_count(own.leaves, self._share)))]

    def _write_base(self, record: Version, reports: Sequence[Report]) -> None:
        """Writes the record of a base of which all processes have stored their parts."""
        parts = tuple(tuple(filter(None, map(_stored, each["parts"]))) for each in reports)
        check_owner(self._root, self._mine)  # who takes over deletes parts without a record
        self._root.write(BASES, Base(record.sequence, record.epoch, record.checksum, parts))

    def _prune(self) -> None:
        """Deletes what is too old: records first, so that nobody begins to read it."""
        if self._keep_versions is None:
            return
        sequences, bases = self._root.numbers(VERSIONS), self._root.numbers(BASES)
        first = plan.oldest_kept(sequences, bases, self._keep_versions)
        for folder, numbers in ((BASES, bases), (VERSIONS, sequences)):
            for number in numbers:
                if number < first:
                    self._root.delete(self._root.record_at(folder, number))
        for _, sequence, _, place in self._root.payloads():
            if sequence < first:
                self._root.delete(place)


@contextlib.contextmanager
def named(root: Root, what: str) -> Iterator[None]:
    """Tells errors of the operating system as a StorageError."""
    try:
        yield
    except (OSError, GoneError) as error:
        raise StorageError(
            f"{root}: expected to write {what}, found: {first_line(error)}. Versions that "
            "followers can see are whole. Make room or mend the storage, and publish the next one."
        ) from error


def _combined(contributions: Sequence[Sequence[int]]) -> list[int]:
    """Fingerprints of the leaves, of the contributions of all processes."""
    return [*map(combine, zip(*contributions, strict=True))]


def _stored(body: Any) -> Stored | None:
    """Bytes under a key, as a process reported them."""
    return None if body is None else manifest_records.record(Stored, body)
