"""Records come back as they were written, and whatever else is in their files is refused."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from adacheck_jax.errors import FormatError
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.format.manifest_json import checksum_of
from adacheck_jax.publish import records
from adacheck_jax.publish.records import Base, Claim, Leaves, ParentVersion, Stored, Version
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
DIGESTS = (
    *("86db73a9abc4fe59", "cddd0af3362df104", "7ac1adafae1482de", "87c789e9cc6300c8"),
    "b1d290ffca06de3c",
)
"""Beginnings of the SHA-256 of their files: other bytes would be another format version."""


@pytest.mark.parametrize(("record", "digest"), [*zip(RECORDS, DIGESTS, strict=True)])
def test_a_record_comes_back(record, digest):
    data, made = records.sealed(record, "here")
    assert hashlib.sha256(data).hexdigest()[:16] == digest
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
        (0, {"token": "\ud800"}),
        (0, {"kind": "base"}),
        (0, {"format": 2}),
        (0, {"format": 4}),
        (1, {"leaves": [leaf([3], "object")]}),
        (1, {"leaves": [leaf([2**40, 2**40, 0], "int8")]}),
        (1, {"leaves": [leaf([2**58], "int64"), leaf([2**58], "int64") | {"path": "b"}]}),
        (1, {"leaves": [leaf([], "int8")] * 2}),
        (1, {"leaves": {}}),
        (1, {"leaves": [leaf([4], "int8") | {"shape": [5]}]}),
        (1, {"leaves": [leaf([4], "int8", owner=2)]}),
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
        (4, {"parts": None}),
    ],
)
def test_fields_without_a_meaning_are_refused(number, fields):
    record = RECORDS[number]
    with pytest.raises(FormatError, match=r"has the wrong type|expected format version 3, found"):
        records.decode(changed(record, lambda body: body.update(fields)), type(record), "here")


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
