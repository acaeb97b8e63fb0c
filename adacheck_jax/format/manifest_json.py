"""JSON form of manifests: format versions, limits, checksums, and what is refused.

A manifest is untrusted input: whoever writes a file can write a checksum that fits it. Manifests
that :func:`decode` returns are bounded in size and consistent in themselves; statements about other
files are checked where those files are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format.manifest import (
    CHECKS,
    DESCRIPTIONS,
    ITEMSIZES_BYTES,
    BaseManifest,
    Caution,
    Delta,
    DeltaManifest,
    Encoding,
    Leaf,
    Link,
    Manifest,
    Pack,
    Replaced,
    Update,
)

FORMAT_VERSION = 8
OLDEST_VERSION = 6
"""The oldest format version that is read."""
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_CONTAINERS = 2**22
"""Lists and objects in a manifest; in memory they take many times their bytes in a file."""
MAX_VALUES = 2**25
"""Members of all lists and objects, about."""
MAX_BOXES = 2**23
"""Boxes of all leaves of a base."""
MAX_AXES = 32
"""Axes of a leaf: more than tensorstore takes."""
MAX_STATE_BYTES = 2**60
"""Bytes of all leaves of a base, so that sums of offsets fit into 64 bits."""
_MAX_NUMBER = 2**63 - 1

_T = TypeVar("_T")


def encode(manifest: Manifest) -> bytes:
    """Bytes of a manifest's file, checksum included."""
    return encoded(manifest)[0]


def encoded(manifest: Manifest) -> tuple[bytes, str]:
    """Bytes of a manifest's file, and the checksum in it."""
    body, kind = _fields(manifest), "base"
    del body["checksum"]
    if isinstance(manifest, DeltaManifest):
        kind = "delta"
        body["recorded"] = [_fields(each) for each in manifest.recorded]
    # Through JSON once: the checksum is of what a reader sees ({1: ...} gets text keys).
    body = json.loads(json.dumps({"format": FORMAT_VERSION, "kind": kind, **body}))
    checksum = checksum_of(body)
    return _json_bytes({**body, "checksum": checksum}), checksum


def _fields(described: Manifest | Delta) -> dict[str, Any]:
    """JSON fields of a manifest or of one delta, without the recorded deltas in it."""
    # asdict would copy every fingerprint.
    bare: dict[str, Any] = {"fingerprints": ()}
    if isinstance(described, DeltaManifest):
        bare["recorded"] = ()
    body = dataclasses.asdict(dataclasses.replace(described, **bare))
    body["fingerprints"] = [f"{value:016x}" for value in described.fingerprints]
    if body.get("replaces", "") is None:  # of a base that was saved as one nothing is said
        del body["replaces"]
    return body


def checksum_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's JSON body without its checksum field."""
    return hashlib.sha256(_json_bytes(body)).hexdigest()


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes, *, where: str) -> Manifest:
    """Checks and decodes the bytes of a manifest file.

    Args:
        data: the file's bytes.
        where: the file's path, for error messages.

    Raises:
        FormatError: the bytes are no manifest, or have an unknown format version.
        IntegrityError: the checksum does not match.
    """
    check_counts(data, where)
    try:
        body = json.loads(data, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a JSON manifest, found {len(data)} bytes that are not "
            f"({error}). The file is truncated or overwritten; restore another step."
        ) from error
    if not isinstance(body, dict) or "format" not in body:
        raise FormatError(
            f"{where}: expected an adacheck manifest, found other JSON. Restore another step."
        )
    version = body["format"]
    if type(version) is not int or not OLDEST_VERSION <= version <= FORMAT_VERSION:
        raise FormatError(
            f"{where}: expected format version {OLDEST_VERSION} to {FORMAT_VERSION}, found "
            f"{_shown(version)}. Install the adacheck-jax release that wrote this checkpoint."
        )
    checksum = body.pop("checksum", None)
    try:
        expected = checksum_of(body)
    except RecursionError as error:  # json reads deeper nesting than it writes
        raise FormatError(
            f"{where}: the manifest is nested too deep ({error}). Restore another step."
        ) from error
    if checksum != expected:
        raise IntegrityError(
            f"{where}: the manifest does not match its own checksum (found {_shown(checksum)}): "
            "the file was changed after it was written. Restore another step."
        )
    try:
        for older in range(version, FORMAT_VERSION):
            body = _UPGRADES[older](body)
        return _from_body(body, expected)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: a field of the manifest is missing or has the wrong type ({error!r}). "
            "Restore another step."
        ) from error


def check_counts(data: bytes, where: str) -> None:
    """Refuses, before parsing, JSON that would take too much memory as Python objects.

    Raises:
        FormatError: it has too many bytes, lists, objects or values.
    """
    containers = data.count(b"[") + data.count(b"{")
    values = containers + data.count(b",")
    if len(data) > MAX_MANIFEST_BYTES or containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise FormatError(
            f"{where}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes with "
            f"{MAX_CONTAINERS} lists and {MAX_VALUES} values, found {len(data)} bytes with about "
            f"{containers} and {values}. Restore another step."
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # two readers could take different values
        raise ValueError("a key appears twice in an object")
    return found


def _shown(value: Any) -> str:
    """A value for a message, shortened to a line."""
    return reprlib.repr(value)


def _upgraded_6(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a manifest of format version 6, as of version 7."""

    def counted(own: dict[str, Any]) -> dict[str, Any]:
        return {**own, "counts": [] if own["count"] is None else [own["count"]]}

    def delta(own: dict[str, Any]) -> dict[str, Any]:
        updates = [0] if _truth(own["has_update"]) else []
        return {**counted(own), "updates": updates, "unreplayed": [], "checked": ""}

    caution = {"reason": "", "distrusted": []}
    if body["kind"] == "base":
        update = body["update"]
        if update is not None:
            sizes = [len(update[each]) for each in ("params", "inner", "record", "extra")]
            old = {"counts": [update["count"]], "parts": [sizes], "pinned": False}
            update = {**update, **old}
        return {**counted(body), "update": update, "environment": {}, "caution": caution}
    recorded = [delta(each) for each in body["recorded"]]
    return {**delta(body), "recorded": recorded, "caution": caution}


def _upgraded_7(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a manifest of format version 7, as of version 8."""

    def delta(own: dict[str, Any]) -> dict[str, Any]:
        return {**own, "packs": [{**pack, "coded": []} for pack in own["packs"]], "stale": []}

    if body["kind"] == "base":
        return {**body, "stale": []}
    return {**delta(body), "recorded": [delta(each) for each in body["recorded"]]}


_UPGRADES = {6: _upgraded_6, 7: _upgraded_7}


def _from_body(body: dict[str, Any], checksum: str) -> Manifest:
    if body["kind"] == "base":
        return _base_manifest(body, checksum)
    if body["kind"] == "delta":
        return _delta_manifest(body, checksum)
    raise ValueError(f"kind {_shown(body['kind'])}")


def _base_manifest(body: dict[str, Any], checksum: str) -> BaseManifest:
    fingerprints = _tuple_of(_fingerprint, body["fingerprints"])
    leaves = _tuple_of(_leaf, body["leaves"])
    if len(leaves) != len(fingerprints):
        raise ValueError(f"{len(leaves)} leaves but {len(fingerprints)} fingerprints")
    process_count = _natural(body["process_count"])
    if any(leaf.owners and max(leaf.owners) >= process_count for leaf in leaves):
        raise ValueError("a box is owned by a process that does not exist")
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError("two leaves have the same path")
    if sum(len(leaf.owners) for leaf in leaves) > MAX_BOXES:
        raise ValueError(f"more than {MAX_BOXES} boxes")
    if sum(leaf.nbytes for leaf in leaves) > MAX_STATE_BYTES:
        raise ValueError(f"more than {MAX_STATE_BYTES} bytes of leaves")
    return BaseManifest(
        step=_natural(body["step"]),
        counts=_tuple_of(_natural, body["counts"]),
        leaves=leaves,
        fingerprints=fingerprints,
        update=None if body["update"] is None else _update(body["update"], len(leaves)),
        reason=_text(body["reason"]),
        aliases=_pairs(body["aliases"], len(leaves), len(leaves)),
        kept=_pairs(body["kept"], len(leaves), None),
        process_count=process_count,
        versions={_text(k): _text(v) for k, v in body["versions"].items()},
        environment={_text(k): _text(v) for k, v in body["environment"].items()},
        described={_description(k): _text(v) for k, v in body["described"].items()},
        directory_step=_optional(body["directory_step"]),
        caution=_caution(body["caution"], len(leaves)),
        replaces=_replaced(body.get("replaces")),
        stale=_stale(body, len(leaves)),
        checksum=checksum,
    )


def _replaced(body: dict[str, Any] | None) -> Replaced | None:
    if body is None:
        return None
    return Replaced(
        checksum=_text(body["checksum"]),
        depth=_natural(body["depth"]),
        files=_tuple_of(_text, body["files"]),
    )


def _delta_manifest(body: dict[str, Any], checksum: str) -> DeltaManifest:
    own, recorded = _delta(body), _tuple_of(_delta, body["recorded"])
    shapes = {(len(each.packs), len(each.fingerprints)) for each in (*recorded, own)}
    if len(shapes) != 1:
        raise ValueError(f"deltas with different numbers of packs or fingerprints: {shapes}")
    steps = [each.step for each in (*recorded, own)]
    if any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"recorded steps that do not ascend: {_shown(steps)}")
    depth = _natural(body["depth"])
    if depth <= len(recorded):
        raise ValueError(f"delta number {depth} of its lineage with {len(recorded)} before it")
    return DeltaManifest(
        step=own.step,
        counts=own.counts,
        updates=own.updates,
        parent=Link(
            step=_natural(body["parent"]["step"]),
            reference=_text(body["parent"]["reference"]),
            checksum=_text(body["parent"]["checksum"]),
        ),
        depth=depth,
        stored=own.stored,
        unreplayed=own.unreplayed,
        packs=own.packs,
        fingerprints=own.fingerprints,
        checked=own.checked,
        problem=_text(body["problem"]),
        custom_metadata=body["custom_metadata"],
        directory_step=_optional(body["directory_step"]),
        recorded=recorded,
        caution=_caution(body["caution"], len(own.fingerprints)),
        stale=own.stale,
        checksum=checksum,
    )


def _delta(body: dict[str, Any]) -> Delta:
    stored = _ascending(body["stored"])
    counts, updates = _tuple_of(_natural, body["counts"]), _ascending(body["updates"])
    if updates and updates[-1] >= len(counts):
        raise ValueError(f"updates of {len(counts)} recorders: {_shown(updates)}")
    if body["checked"] not in CHECKS:
        raise ValueError(f"expected one of {sorted(CHECKS)}, found {_shown(body['checked'])}")
    fingerprints = _tuple_of(_fingerprint, body["fingerprints"])
    stale = _stale(body, len(fingerprints))
    if not {i for i, _ in stale}.isdisjoint(stored):
        raise ValueError(f"a leaf is stored and stale: {_shown(stale)}")
    return Delta(
        step=_natural(body["step"]),
        counts=counts,
        updates=updates,
        stored=stored,
        unreplayed=_ascending(body["unreplayed"]),
        packs=_tuple_of(lambda pack: _pack(pack, len(stored)), body["packs"]),
        fingerprints=fingerprints,
        checked=body["checked"],
        stale=stale,
    )


def _stale(body: dict[str, Any], leaf_count: int) -> tuple[tuple[int, int], ...]:
    pairs = _pairs(body["stale"], leaf_count, _natural(body["step"]))
    if any(a[0] >= b[0] for a, b in itertools.pairwise(pairs)):
        raise ValueError(f"stale leaves that do not ascend: {_shown(pairs)}")
    return pairs


def _caution(body: dict[str, Any], leaf_count: int) -> Caution:
    distrusted = _ascending(body["distrusted"])
    if distrusted and distrusted[-1] >= leaf_count:
        raise ValueError(f"leaves that are not there are distrusted: {_shown(distrusted)}")
    return Caution(_text(body["reason"]), distrusted)


def _pack(body: dict[str, Any], stored_count: int) -> Pack:
    pack = Pack(
        encodings=_encodings(body["encodings"]),
        aliases=_tuple_of(_range, body["aliases"]),
        raw_bytes=_natural(body["raw_bytes"]),
        compressed_bytes=_natural(body["compressed_bytes"]),
        raw_zeros=_ranges(body["raw_zeros"]),
        compressed_zeros=_ranges(body["compressed_zeros"]),
        coded=_tuple_of(_range, body["coded"]),
    )
    if len(pack.encodings) != stored_count:
        raise ValueError(f"{len(pack.encodings)} encodings of {stored_count} stored leaves")
    targets = [first for first, _ in pack.aliases]
    if targets != sorted(set(targets)) or any(a <= b for a, b in pack.aliases):
        raise ValueError(f"aliases that do not ascend, or of later extents: {pack.aliases[:4]}")
    if not set(targets).isdisjoint(second for _, second in pack.aliases):
        raise ValueError("an alias of an alias")
    return pack


def _encodings(value: Any) -> str:
    letters = _text(value)
    if not frozenset(Encoding).issuperset(letters):
        raise ValueError(f"unknown encodings in {_shown(letters)}")
    return letters


def _ranges(body: Any) -> tuple[tuple[int, int], ...]:
    ranges = _tuple_of(_range, body)
    borders = [border for each in ranges for border in each]
    if any(a >= b for a, b in itertools.pairwise(borders)):  # adjoining ranges would be one
        raise ValueError(f"ranges that do not ascend: {ranges[:4]}")
    return ranges


def _range(body: Any) -> tuple[int, int]:
    if not isinstance(body, list) or len(body) != 2:
        raise TypeError(f"expected two numbers, found {_shown(body)}")
    return _natural(body[0]), _natural(body[1])


def _pairs(body: Any, first_end: int, second_end: int | None) -> tuple[tuple[int, int], ...]:
    pairs = _tuple_of(_range, body)
    for first, second in pairs:
        if first >= first_end or (second_end is not None and second >= second_end):
            raise ValueError(f"a pair of leaves lies outside the state: {(first, second)}")
    return pairs


def _ascending(body: Any) -> tuple[int, ...]:
    values = _tuple_of(_natural, body)
    if list(values) != sorted(set(values)):
        raise ValueError(f"numbers that do not ascend: {_shown(values)}")
    return values


def _optional(value: Any) -> int | None:
    return None if value is None else _natural(value)


def _leaf(body: dict[str, Any]) -> Leaf:
    leaf = Leaf(
        path=_text(body["path"]),
        shape=_tuple_of(_natural, body["shape"]),
        dtype=_text(body["dtype"]),
        itemsize_bytes=_natural(body["itemsize_bytes"]),
        key_type=None if body["key_type"] is None else _text(body["key_type"]),
        cuts=_tuple_of(lambda axis: _tuple_of(_natural, axis), body["cuts"]),
        owners=_tuple_of(_natural, body["owners"]),
    )
    if leaf.itemsize_bytes != ITEMSIZES_BYTES.get(leaf.dtype):
        raise ValueError(
            f"leaf {_shown(leaf.path)}: no elements of {_shown(leaf.dtype)} have "
            f"{leaf.itemsize_bytes} bytes"
        )
    if leaf.key_type is not None and not (
        re.fullmatch("key<[^<>]{1,64}>", leaf.key_type) and leaf.dtype == "uint32" and leaf.shape
    ):
        raise ValueError(
            f"leaf {_shown(leaf.path)}: no keys of type {_shown(leaf.key_type)} consist of "
            f"{leaf.dtype}{list(leaf.shape[:MAX_AXES])}"
        )
    if max(len(leaf.shape), len(leaf.cuts)) > MAX_AXES:
        raise ValueError(f"leaf {_shown(leaf.path)}: {len(leaf.shape)} axes")
    # Bounded for empty arrays too.
    if math.prod(filter(None, leaf.shape)) * leaf.itemsize_bytes > MAX_STATE_BYTES:
        raise ValueError(f"leaf {_shown(leaf.path)}: an array of shape {leaf.shape}")
    lengths = tuple(points[-1] for points in leaf.cuts)
    count = math.prod(max(1, len(points) - 1) for points in leaf.cuts)
    ascending = all(points[0] == 0 and list(points) == sorted(set(points)) for points in leaf.cuts)
    if lengths != leaf.shape or count != len(leaf.owners) or not ascending:
        raise ValueError(
            f"leaf {_shown(leaf.path)}: cuts {_shown(leaf.cuts)} with {len(leaf.owners)} owners do "
            f"not fit shape {leaf.shape}"
        )
    return leaf


def _update(body: dict[str, Any], leaf_count: int) -> Update:
    update = Update(
        params=_tuple_of(_natural, body["params"]),
        inner=_tuple_of(_natural, body["inner"]),
        record=_tuple_of(_natural, body["record"]),
        extra=_tuple_of(_natural, body["extra"]),
        counts=_tuple_of(_natural, body["counts"]),
        parts=_tuple_of(_sizes, body["parts"]),
        reducing=_tuple_of(_natural, body["reducing"]),
        passed=_tuple_of(_natural, body["passed"]),
        placement=_text(body["placement"]),
        problem=_text(body["problem"]),
        programs={_platform(name): _text(digest) for name, digest in body["programs"].items()},
        jax_version=_text(body["jax_version"]),
        pinned=_truth(body["pinned"]),
    )
    lists = (update.params, update.inner, update.record, update.extra)
    totals = [sum(each[n] for each in update.parts) for n in range(4)]
    if totals != [len(each) for each in lists] or len(update.parts) != len(update.counts):
        raise ValueError(f"parts {_shown(update.parts)} do not make up the update's leaves")
    # An update may consume its counter too.
    counts = set(update.counts).difference(update.extra)
    indices = [*update.params, *update.inner, *update.consumed, *counts]
    is_repeated = len({*indices}) != len(indices) or len({*update.counts}) != len(update.counts)
    if is_repeated or max(indices) >= leaf_count:
        raise ValueError("the update's leaf indices repeat or lie outside the state")
    if not update.explained.issuperset(update.reducing + update.passed):
        raise ValueError("a leaf is reducing or passed through, but not computed by the update")
    return update


def _sizes(body: Any) -> tuple[int, int, int, int]:
    params, inner, record, extra = _tuple_of(_natural, body)
    return params, inner, record, extra


def _tuple_of(read: Callable[[Any], _T], items: Any) -> tuple[_T, ...]:
    if not isinstance(items, list):
        raise TypeError(f"expected a list, found {type(items).__name__}")
    return tuple(read(item) for item in items)


def _description(name: str) -> str:
    if name not in DESCRIPTIONS:  # its path is opened
        raise ValueError(f"expected one of {sorted(DESCRIPTIONS)}, found {_shown(name)}")
    return name


def _platform(name: str) -> str:
    if not re.fullmatch("[a-z0-9]{1,16}", name):  # it becomes part of a file's name
        raise ValueError(f"expected the name of a platform, found {_shown(name)}")
    return name


def _fingerprint(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(f"expected 16 hexadecimal digits, found {_shown(text)}")
    return int(text, 16)


def _natural(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise TypeError(f"expected a number from 0 to {_MAX_NUMBER}, found {_shown(value)}")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected true or false, found {_shown(value)}")
    return value


def _text(value: Any) -> str:
    """A text that can be encoded: no lone surrogate."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {_shown(value)}")
    if not value.isascii():
        value.encode()  # a ValueError for a lone surrogate
    return value
