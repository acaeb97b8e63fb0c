"""Versions written in the background: the delta from the last one, a base where one is due.

Host memory holds the weights of the version that was written last. Those of a new version take
their place only once its record is written: after an error the next delta begins where readers are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from adacheck_jax.errors import FormatError, IntegrityError
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
        delta_bytes: bytes of the delta; 0 if there is none.
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


class Writer:
    """The owner of a root.

    Args:
        root: the root.
        mine: the claim on it.
        base_every: largest number of versions between bases.
        keep_versions: number of the newest versions that stay readable; None for all.

    Attributes:
        last: the newest version that counts; None if there is none.
    """

    def __init__(self, root: Root, mine: Claim, base_every: int, keep_versions: int | None) -> None:
        self._root, self._mine = root, mine
        self._base_every, self._keep_versions = base_every, keep_versions
        self._reader = VersionReader(root)
        found = self._reader.versions(self._reader.sequences())
        self.last = found[max(found)] if found else None
        self._next = mine.first
        self._weights: Weights | None = None
        self._since_base, self._since_base_bytes = 0, 0
        self._clear()

    def _clear(self) -> None:
        """Deletes what a publisher before this one began and did not end."""
        self._root.clear_temporary()
        kept = {VERSIONS: self._root.numbers(VERSIONS), BASES: self._root.numbers(BASES)}
        for kind, sequence, epoch, place in self._root.payloads():
            if sequence not in kept[kind] and epoch < self._mine.epoch:
                self._root.delete(place)

    def write(self, version: int, made: Weights, sums: Sequence[int]) -> Published:
        """Writes one version, and a base if one is due; prunes.

        Raises:
            StorageError: it cannot be written, or another publisher has taken over.
        """
        try:
            return self._written(version, made, sums)
        except FileNotFoundError:  # a newer publisher clears what this one was writing
            check_owner(self._root, self._mine)
            raise

    def _written(self, version: int, made: Weights, sums: Sequence[int]) -> Published:
        before, last = self._before(made.leaves), self.last
        words = sum(each.size for each in made.words.values())
        if before is None or last is None:
            parent, leaves = None, self._described(made.leaves)
            data, changed = b"", 0
        else:
            parent = ParentVersion(last.sequence, last.checksum)
            leaves = last.leaves
            data, changed = weights.encode(before, made)
        epoch = self._mine.epoch
        record = Version(self._next, epoch, version, parent, leaves, (*sums,), None, changed)
        known = self._committed(record, data, made)
        has_base = parent is None
        if parent is not None:
            self._since_base += 1
            self._since_base_bytes += len(data)
            has_base = self._write_due_base(known, made)
        if has_base:
            self._prune()
        return Published(
            version=version,
            sequence=known.sequence,
            changed=words if parent is None else changed,
            words=words,
            delta_bytes=len(data),
            record_bytes=len(records.encode(known)),
            base_bytes=made.leaves.nbytes if has_base else 0,
        )

    def _before(self, leaves: Leaves) -> Weights | None:
        """Weights of the newest version, if it has these leaves; else one begins with a base."""
        if self._weights is None and self.last is not None:
            self._weights = self._read_back(self.last, leaves)
        if self._weights is None or self._weights.leaves != leaves:
            return None
        return self._weights

    def _read_back(self, last: Version, leaves: Leaves) -> Weights | None:
        """Weights that a publisher before this one wrote last, if they can be read."""
        try:
            route = self._reader.route(None)
            if route is None or route.end != last:
                raise IntegrityError(f"{self._root}: the newest version cannot be reached.")
            if self._reader.leaves(last) != leaves:
                return None
            found, _ = self._reader.load(route, None)
            reading.check(last, leaves, found.fingerprints(), self._root)
        except (FormatError, IntegrityError, GoneError) as error:
            _log.warning("Publishing goes on with a base: %s", error)
            return None
        self._since_base = len(route.deltas)
        stored = (each.delta for each in route.deltas)
        self._since_base_bytes = sum(each.nbytes for each in stored if each is not None)
        return found

    def _described(self, leaves: Leaves) -> str:
        """Checksum of the record of the leaves, which is written if it is not there."""
        checksum = records.sealed(leaves, self._root)[1].checksum
        try:
            self._root.write(LEAVES, leaves)
        except FileExistsError:
            try:
                self._root.read(LEAVES, checksum, Leaves)
            except (FormatError, IntegrityError):
                self._root.delete(self._root.record_at(LEAVES, checksum))
                return self._described(leaves)
        return checksum

    def _committed(self, made: Version, data: bytes, own: Weights) -> Version:
        """Writes a version under the next sequence number that is free."""
        while True:
            try:
                known = self._write_version(replace(made, sequence=self._next), data, own)
                break
            except FileExistsError:  # of a publisher that did not know yet that it had to stop
                check_owner(self._root, self._mine)
                self._next += 1
        check_owner(self._root, self._mine)
        self.last, self._weights, self._next = known, own, self._next + 1
        return known

    def _write_version(self, record: Version, data: bytes, own: Weights) -> Version:
        """Writes what a version needs, and then its record."""
        if data:
            place = self._root.delta_at(record.sequence, record.epoch)
            record = replace(record, delta=self._root.store(place, data))
        if record.parent is None:
            sealed = records.sealed(record, self._root)[1]
            self._write_base(sealed, own)
        return self._root.write(VERSIONS, record)

    def _write_due_base(self, known: Version, own: Weights) -> bool:
        """Writes a base if one is due; True if it did."""
        since, since_bytes = self._since_base, self._since_base_bytes
        if not plan.base_is_due(since, since_bytes, own.leaves.nbytes, self._base_every):
            return False
        try:
            self._write_base(known, own)
        except FileExistsError as error:  # of a publisher that has stopped: one comes later
            _log.warning("The next version tries to write the base: %s", error)
            return False
        return True

    def _write_base(self, record: Version, own: Weights) -> None:
        def write(number: int) -> Stored:
            place = self._root.part_at(record.sequence, record.epoch, number)
            return self._root.store(place, own.part(number))

        with ThreadPoolExecutor(_THREADS) as threads:
            parts = tuple(threads.map(write, range(weights.part_count(own.leaves))))
        check_owner(self._root, self._mine)  # who takes over deletes parts without a record
        self._root.write(BASES, Base(record.sequence, record.epoch, record.checksum, parts))
        self._since_base, self._since_base_bytes = 0, 0

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
