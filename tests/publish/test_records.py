"""Records come back as they were written, and whatever else is in their files is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.format.manifest_json import MAX_CONTAINERS, checksum_of
from adacheck_jax.publish import records
from adacheck_jax.publish.records import (
    Base,
    Claim,
    Leaves,
    ParentVersion,
    Stored,
    Version,
)
from adacheck_jax.publish.root import VERSIONS, Root

STORED = Stored(12, "0" * 32)
RECORDS = [
    Claim(3, 17, "text"),
    Leaves(
        (
            Leaf("a", (3, 0), "bfloat16", 2, None, ((0, 2, 3), (0,)), (0, 1)),
            Leaf("b/c", (), "float32", 4, None, (), (1,)),
        ),
        2,
    ),
    Version(4, 3, 17, ParentVersion(2, "a" * 64), "b" * 64, (1, 2**64 - 1), (None, STORED), 5),
    Version(4, 3, 17, None, "b" * 64, (), (), 0),
    Base(4, 3, "c" * 64, ((STORED, STORED), ())),
]


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back(record):
    data, made = records.sealed(record, "here")
    assert made.checksum == json.loads(data)["checksum"]
    assert made == record
    assert records.decode(data, type(record), "here") == made


def test_a_record_that_no_follower_could_read_is_not_written(tmp_path):
    root = Root(tmp_path / "weights")
    made = Version(4, 3, -17, None, "b" * 64, (), None, 0)
    with pytest.raises(FormatError, match="expected a record that can be read back"):
        root.write(VERSIONS, made)
    assert root.numbers(VERSIONS) == []


def changed(record: Any, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file of a record with another body, and a checksum that fits it."""
    body = json.loads(records.encode(record))
    del body["checksum"]
    change(body)
    return json.dumps({**body, "checksum": checksum_of(body)}).encode()


def leaf(shape: list[int], dtype: str, owner: int = 0) -> dict[str, Any]:
    grid = {"cuts": [[0, n] if n else [0] for n in shape], "owners": [owner]}
    return {"path": "a", "shape": shape, "dtype": dtype, "grid": grid}


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"epoch": -1}),
        (0, {"epoch": 10**12}),
        (0, {"first": 1.0}),
        (0, {"token": 3}),
        (0, {"token": "\ud800"}),
        (0, {"kind": "base"}),
        (1, {"leaves": [leaf([3], "object")]}),
        (1, {"leaves": [leaf([2**40, 2**40], "int8")]}),
        (1, {"leaves": [leaf([2**40, 2**40, 0], "int8")]}),
        (1, {"leaves": [leaf([1] * 33, "int8")]}),
        (1, {"leaves": [leaf([], "int8")] * 2}),
        (1, {"leaves": {}}),
        (1, {"leaves": [leaf([4], "int8") | {"shape": [5]}]}),
        (1, {"leaves": [leaf([4], "int8", owner=2)]}),
        (1, {"leaves": [leaf([4], "int8") | {"grid": {"cuts": [[0, 4]], "owners": []}}]}),
        (1, {"shares": 0}),
        (1, {"shares": 2**40}),
        (2, {"fingerprints": "0" * 17}),
        (2, {"fingerprints": ["0" * 16]}),
        (2, {"leaves": "../" * 21 + "b"}),
        (2, {"parent": None}),
        (2, {"parent": {"sequence": 4, "checksum": "a" * 64}}),
        (2, {"parent": {"sequence": 3, "checksum": "a"}}),
        (2, {"deltas": [{"nbytes": 2**61, "digest": "0" * 32}]}),
        (2, {"deltas": [{"nbytes": 1, "digest": "/" * 32}]}),
        (2, {"changed": True}),
        (4, {"parts": [[{"nbytes": 2**27, "digest": "0" * 32}]]}),
        (4, {"parts": [{"nbytes": 1, "digest": "0" * 32}]}),
        (4, {"parts": None}),
    ],
)
def test_fields_without_a_meaning_are_refused(number, fields):
    record = RECORDS[number]
    with pytest.raises(FormatError, match="missing or has the wrong"):
        records.decode(changed(record, lambda body: body.update(fields)), type(record), "here")


def test_other_versions_and_changed_bytes_are_told_apart():
    record = RECORDS[2]
    other = changed(record, lambda body: body.update({"format": 1}))
    with pytest.raises(FormatError, match="format version 3, found 1"):
        records.decode(other, Version, "here")
    data = records.encode(record).replace(b'"version":17', b'"version":18')
    with pytest.raises(IntegrityError, match="checksum"):
        records.decode(data, Version, "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"checksum": 1}',
        b'{"format": 3, "format": 3, "checksum": ""}',
        b"[" * 100_000,
        b"\xff\xfe",
        b"[" * (MAX_CONTAINERS + 1),
    ],
)
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(FormatError):
        records.decode(data, Version, "here")


def test_mutated_records_are_refused_or_consistent():
    rng = random.Random(0)
    values = [None, -1, 0, 2**70, "", "0" * 16, [], {}, [[]], 1.5, True]
    for _ in range(2000):
        record = rng.choice(RECORDS)

        def mutate(body: dict[str, Any]) -> None:
            key = rng.choice([*body])
            if rng.random() < 0.2:
                del body[key]
            else:
                body[key] = rng.choice(values)

        try:
            found = records.decode(changed(record, mutate), type(record), "here")
        except FormatError:
            continue
        assert records.decode(records.encode(found), type(record), "here") == found
