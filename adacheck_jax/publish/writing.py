"""Versions written in the background: the delta from the last one, a base where one is due.

Host memory holds the weights of the version that was written last. They take over a new version's
words only once its record is written: after an error the next delta begins where readers are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.publish import plan, reading, records, weights
from adacheck_jax.publish.plan import Known
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
        self._leaves: tuple[Leaves | None, str] = (None, "")
        self._since_base, self._since_base_bytes = 0, 0
        self._clear()

    def _clear(self) -> None:
        """Deletes what a publisher before this one began and did not end."""
        self._root.clear_temporary()
        kept = {VERSIONS: self._root.numbers(VERSIONS), BASES: self._root.numbers(BASES)}
        for kind, sequence, epoch, place in self._root.payloads():
            if sequence not in kept[kind] and epoch < self._mine.epoch:
                self._root.delete(place)

    def resume(self, leaves: Leaves) -> None:
        """Reads the newest version back, to go on with a delta, if it has the same leaves.

        Args:
            leaves: the leaves of the next version.
        """
        if self._weights is not None or self.last is None:
            return
        try:
            route = self._reader.route(None)
            if route is None or route.end != self.last:
                raise IntegrityError(f"{self._root}: the newest version cannot be reached.")
            if self._reader.leaves(self.last.record) != leaves:
                return
            found, _ = self._reader.load(route, None)
            reading.check(self.last.record, leaves, found.fingerprints(), self._root)
        except (FormatError, IntegrityError, GoneError) as error:
            _log.warning("Publishing goes on with a base: %s", error)
            return
        self._weights = found
        self._since_base = len(route.deltas)
        stored = (each.record.delta for each in route.deltas)
        self._since_base_bytes = sum(each.nbytes for each in stored if each is not None)

    def write(
        self, version: int, leaves: Leaves, arrays: Sequence[np.ndarray], sums: Sequence[int]
    ) -> Published:
        """Writes one version, and a base if one is due; prunes.

        Args:
            version: the caller's number.
            leaves: the leaves.
            arrays: elements of each leaf, contiguous.
            sums: fingerprint of each leaf.

        Raises:
            StorageError: it cannot be written, or another publisher has taken over.
        """
        try:
            return self._written(version, leaves, arrays, sums)
        except FileNotFoundError:  # a newer publisher clears what this one was writing
            check_owner(self._root, self._mine)
            raise

    def _written(
        self, version: int, leaves: Leaves, arrays: Sequence[np.ndarray], sums: Sequence[int]
    ) -> Published:
        self.resume(leaves)
        if self._weights is not None and self._weights.leaves != leaves:
            self._weights = None
        made = Version(
            sequence=self._next,
            epoch=self._mine.epoch,
            version=version,
            parent=None,
            leaves=self._described(leaves),
            fingerprints=tuple(sums),
            delta=None,
            changed=0,
        )
        if self._weights is None or self.last is None:
            return self._first(made, Weights(leaves, [np.array(each) for each in arrays]))
        return self._following(made, self._weights, self.last, arrays)

    def _described(self, leaves: Leaves) -> str:
        """Checksum of the record of the leaves, which is there."""
        if leaves != self._leaves[0]:
            try:
                self._leaves = leaves, self._root.write(LEAVES, leaves)
            except FileExistsError:
                checksum = records.encode(leaves)[1]
                try:
                    self._root.read(LEAVES, checksum, Leaves)
                except (FormatError, IntegrityError):
                    self._root.record_at(LEAVES, checksum).delete()
                    return self._described(leaves)
                self._leaves = leaves, checksum
        return self._leaves[1]

    def _first(self, made: Version, own: Weights) -> Published:
        """Writes a version with nothing before it: the base, then its record."""

        def attempt(sequence: int) -> Known:
            known = _known(replace(made, sequence=sequence))
            self._write_base(known, own)
            self._root.write(VERSIONS, known.record)
            return known

        self._commit(attempt, own)
        self._prune()
        words = sum(each.size for each in weights.segments_of(own.leaves))
        return self._published(words, words, own.leaves.nbytes)

    def _following(
        self, made: Version, own: Weights, parent: Known, arrays: Sequence[np.ndarray]
    ) -> Published:
        """Writes a version as a delta, and a base of it if one is due."""
        changes = own.changes_to(arrays)
        changed = weights.changed_count(changes)
        data = weights.encode(own.leaves, changes) if changed else b""
        link = ParentVersion(parent.record.sequence, parent.checksum)

        def attempt(sequence: int) -> Known:
            place = self._root.delta_at(sequence, made.epoch)
            stored = self._root.store(place, data) if changed else None
            record = replace(made, sequence=sequence, parent=link, delta=stored, changed=changed)
            return Known(record, self._root.write(VERSIONS, record))

        known = self._commit(attempt, own)
        own.apply([change for of_segment in changes for change in of_segment])
        self._since_base += 1
        self._since_base_bytes += len(data)
        base_bytes = 0
        if plan.base_is_due(
            self._since_base, self._since_base_bytes, own.leaves.nbytes, self._base_every
        ):
            try:
                self._write_base(known, own)
            except FileExistsError as error:  # of a publisher that has stopped: one comes later
                _log.warning("The next version tries to write the base: %s", error)
            else:
                base_bytes = own.leaves.nbytes
                self._prune()
        return self._published(
            changed, sum(each.size for each in weights.segments_of(own.leaves)), base_bytes
        )

    def _commit(self, attempt: Callable[[int], Known], own: Weights) -> Known:
        """Writes a version under the next sequence number that is free.

        Args:
            attempt: function that writes the version under a number.
            own: weights that the next version is compared with; let go if this one does not count.
        """
        while True:
            try:
                known = attempt(self._next)
                break
            except FileExistsError:  # of a publisher that did not know yet that it had to stop
                check_owner(self._root, self._mine)
                self._next += 1
        check_owner(self._root, self._mine)
        self.last, self._weights, self._next = known, own, self._next + 1
        return known

    def _write_base(self, known: Known, own: Weights) -> None:
        record = known.record

        def write(number: int) -> Stored:
            place = self._root.part_at(record.sequence, record.epoch, number)
            return self._root.store(place, own.part(number))

        with ThreadPoolExecutor(_THREADS) as threads:
            parts = tuple(threads.map(write, range(weights.part_count(own.leaves))))
        check_owner(self._root, self._mine)  # who takes over deletes parts without a record
        self._root.write(BASES, Base(record.sequence, record.epoch, known.checksum, parts))
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

    def _published(self, changed: int, words: int, base_bytes: int) -> Published:
        assert self.last is not None
        record = self.last.record
        return Published(
            version=record.version,
            sequence=record.sequence,
            changed=changed,
            words=words,
            delta_bytes=0 if record.delta is None else record.delta.nbytes,
            record_bytes=len(records.encode(record)[0]),
            base_bytes=base_bytes,
        )


def _known(record: Version) -> Known:
    return Known(record, records.encode(record)[1])
