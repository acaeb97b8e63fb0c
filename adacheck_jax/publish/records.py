"""Records of a root of published weights: claims, leaves, versions and bases, and their JSON form.

A record is untrusted input: it is bounded before it is parsed, and consistent in itself once
:func:`decode` returned it. Its file has a checksum of the rest, by which records name each other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adacheck_jax.format import manifest_json, manifest_records
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Leaf
from adacheck_jax.format.manifest_json import FileKind
from adacheck_jax.format.manifest_records import MAX_STATE_BYTES, digits, natural, text, tuple_of

FORMAT_VERSION = 3
MAX_NUMBER = 10**12 - 1
"""Largest epoch and sequence number: names have so many digits."""
_RECORD = FileKind(
    "record", "version", FORMAT_VERSION, FORMAT_VERSION, "A later base heals followers."
)
_MAX_FINGERPRINTS = 2**22
_MAX_SHARES = 2**16
PART_BYTES = 1 << 26
"""Bytes of a part of a base; the last one has fewer."""
_T = TypeVar("_T", bound="Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The contents of a file of the root.

    Attributes:
        checksum: checksum of all else, by which other records name it; empty before it is written.
    """

    checksum: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Claim(Record):
    """The statement of a publisher that it owns the root.

    Attributes:
        epoch: number of the publisher: a later one has a higher one.
        first: first sequence number that is its own.
        token: random text, by which it tells its own claim from another's.
    """

    epoch: int
    first: int
    token: str


@dataclass(frozen=True)
class Leaves(Record):
    """All leaves, in the order of their paths, in shares of which each process writes one.

    Attributes:
        leaves: the leaves.
        shares: number of the shares.
    """

    leaves: tuple[Leaf, ...]
    shares: int

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves."""
        return sum(each.nbytes for each in self.leaves)

    @functools.cached_property
    def boxes(self) -> list[list[tuple[int, Box]]]:
        """The boxes of each share, with the indices of their leaves, in the order of the leaves."""
        found: list[list[tuple[int, Box]]] = [[] for _ in range(self.shares)]
        for index, leaf in enumerate(self.leaves):
            for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
                found[owner].append((index, box))
        return found

    def share_bytes(self, share: int) -> int:
        """Bytes of a share."""
        return sum(box.size * self.leaves[i].itemsize_bytes for i, box in self.boxes[share])


@dataclass(frozen=True, slots=True)
class ParentVersion:
    """The version that a delta is applied to.

    Attributes:
        sequence: its sequence number.
        checksum: checksum of its record.
    """

    sequence: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes under a key.

    Attributes:
        nbytes: number of bytes.
        digest: their XXH3-128, in hexadecimal digits.
    """

    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Version(Record):
    """One version of the weights.

    Attributes:
        sequence: its place in the root's sequence.
        epoch: epoch of the publisher that wrote it.
        version: the caller's number, such as a step.
        parent: version that the delta is applied to; None if there is no delta.
        leaves: checksum of the record of the leaves.
        fingerprints: fingerprint of each leaf.
        deltas: the delta of each share, None where no bit changed; none without a parent.
        changed: number of words whose bits changed.
    """

    sequence: int
    epoch: int
    version: int
    parent: ParentVersion | None
    leaves: str
    fingerprints: tuple[int, ...]
    deltas: tuple[Stored | None, ...]
    changed: int

    @property
    def delta_bytes(self) -> int:
        """Bytes of the deltas of all shares."""
        return sum(each.nbytes for each in self.deltas if each is not None)


@dataclass(frozen=True, slots=True)
class Base(Record):
    """All weights of one version.

    Attributes:
        sequence: sequence number of the version.
        epoch: epoch of the publisher that wrote it.
        of: checksum of the version's record.
        parts: of each share the parts of its bytes, one after another.
    """

    sequence: int
    epoch: int
    of: str
    parts: tuple[tuple[Stored, ...], ...]


def sealed(record: _T, where: object) -> tuple[bytes, _T]:
    """Bytes of a record's file, and the record as a reader has it, with its checksum.

    Raises:
        FormatError: followers would refuse them.
    """
    kind = type(record)
    return manifest_json.read_back(
        _RECORD, lambda: encode(record), lambda data: decode(data, kind, where), where
    )


def encode(record: Record) -> bytes:
    """Bytes of a record's file."""
    body, kind = dataclasses.asdict(record), type(record).__name__.lower()
    del body["checksum"]
    if isinstance(record, Version):
        body["fingerprints"] = "".join(f"{each:016x}" for each in record.fingerprints)
    elif isinstance(record, Leaves):
        body["leaves"] = [
            {"path": x.path, "shape": x.shape, "dtype": x.dtype}
            | {"grid": {"cuts": x.cuts, "owners": x.owners}}
            for x in record.leaves
        ]
    return manifest_json.checksummed({"format": FORMAT_VERSION, "kind": kind, **body})


def decode(data: bytes, kind: type[_T], where: object) -> _T:
    """A record, with its checksum.

    Raises:
        FormatError: the bytes are no such record.
        IntegrityError: they were changed since they were written.
    """

    def read(_: int, body: dict[str, Any]) -> _T:
        if body["kind"] != kind.__name__.lower():
            raise ValueError(f"expected a {kind.__name__.lower()}")
        if kind is Version:
            letters = text(body["fingerprints"])
            body["fingerprints"] = [letters[at : at + 16] for at in range(0, len(letters), 16)]
        elif kind is Leaves:
            body["leaves"] = [*tuple_of(_leaf_fields, body["leaves"])]
        record = manifest_records.record(kind, body)
        _check(record)
        return record

    return manifest_json.checked(data, _RECORD, read, where)


def _leaf_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Fields of a :class:`~adacheck_jax.format.manifest.Leaf`, of those in a record."""
    sizes = {"itemsize_bytes": ITEMSIZES_BYTES[body["dtype"]], "key_type": None}
    return {**body, **sizes, "cuts": body["grid"]["cuts"], "owners": body["grid"]["owners"]}


def _check(record: Record) -> None:
    """Refuse a record that is not consistent in itself."""
    for name in {"epoch", "first", "sequence"} & {each.name for each in dataclasses.fields(record)}:
        natural(getattr(record, name), MAX_NUMBER)
    if isinstance(record, Leaves):
        _check_leaves(record)
    elif isinstance(record, Version):
        _check_version(record)
    elif isinstance(record, Base):
        digits(record.of, 64)
        for part in itertools.chain.from_iterable(record.parts):
            _check_stored(part, PART_BYTES)


def _check_leaves(found: Leaves) -> None:
    natural(found.shares, _MAX_SHARES)
    if any(max(each.owners) >= found.shares for each in found.leaves):
        raise ValueError(f"boxes of more than {found.shares} shares")
    paths = [each.path for each in found.leaves]
    if paths != sorted(set(paths)):
        raise ValueError("paths that do not ascend")
    if found.nbytes > MAX_STATE_BYTES:
        raise ValueError(f"{found.nbytes} bytes of leaves")


def _check_version(found: Version) -> None:
    digits(found.leaves, 64)
    if len(found.fingerprints) > _MAX_FINGERPRINTS:
        raise ValueError(f"{len(found.fingerprints)} fingerprints")
    if found.parent is not None:
        digits(found.parent.checksum, 64)
        if found.parent.sequence >= found.sequence:
            raise ValueError("a parent that is not before it")
    if found.deltas and found.parent is None:
        raise ValueError("deltas without a parent")
    for each in found.deltas:
        if each is not None:
            _check_stored(each, MAX_STATE_BYTES)
    natural(found.changed, MAX_STATE_BYTES)


def _check_stored(stored: Stored, most_bytes: int) -> None:
    natural(stored.nbytes, most_bytes)
    digits(stored.digest, 32)
