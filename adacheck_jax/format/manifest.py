"""What a step is made of: frozen records and their JSON form.

The manifest is the file that makes a saved step exist. It is written last, after every byte that
it speaks of, and it carries a checksum of itself. A base's manifest describes the leaves; a delta's
manifest names its parent and does not repeat what the base says, so its size does not grow with
the lineage.

A manifest is untrusted input: whoever writes a file can write a checksum that fits it. What
:func:`decode` returns is bounded in size and consistent in itself; what it says of other files is
checked where these are read.

This module knows neither JAX nor Orbax.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import re
import reprlib
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from adacheck_jax.errors import FormatError, IntegrityError, unreadable
from adacheck_jax.format import durable
from adacheck_jax.format.boxes import Box, Cuts, grid

FORMAT_VERSION = 7
OLDEST_VERSION = 6
"""The oldest format version that is read."""
DIRECTORY = "adacheck"
"""Name of our folder inside an item's directory."""
NAME = "manifest.json"
FILE = f"{DIRECTORY}/{NAME}"
SHARDINGS = "_sharding"
DESCRIPTIONS = frozenset({"_METADATA", SHARDINGS, "array_metadatas/process_0"})
"""What stock Orbax reads of a base beside the arrays. Nobody changes it after the manifest."""
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_CONTAINERS = 2**22
"""Lists and objects in a manifest, which take many times more memory than room in a file."""
MAX_VALUES = 2**25
"""Members of all lists and objects, about."""
MAX_BOXES = 2**23
"""Boxes of all leaves of a base."""
MAX_AXES = 32
"""Axes of a leaf: more than tensorstore takes."""
MAX_STATE_BYTES = 2**60
"""Bytes of all leaves of a base, so that sums of offsets fit into 64 bits."""
_MAX_NUMBER = 2**63 - 1

ITEMSIZES_BYTES = {
    **dict.fromkeys(("bool", "int1", "int2", "int4", "int8"), 1),
    **dict.fromkeys(("uint1", "uint2", "uint4", "uint8"), 1),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), 1),
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""The data types that a leaf may have: those of JAX, and bytes of one element in memory.

Other names are refused here: numpy takes many (``object``, ``V8``), and tensorstore ends the
process on some (``r16``).
"""

_T = TypeVar("_T")


class Encoding(StrEnum):
    """How one process stores its boxes of one leaf in a delta.

    Attributes:
        RAW: as they are.
        EXPONENTS: split into planes of bytes, of which the highest is compressed.
        PLANES: split into planes of bytes, all of them compressed.
        XOR, SUBTRACT: as a bit-pattern difference from the parent step, in compressed planes.
        SAME: not at all. They are what they are without this delta: what the update computes, or
            else the parent's.
    """

    RAW = "r"
    EXPONENTS = "e"
    PLANES = "p"
    XOR = "x"
    SUBTRACT = "s"
    SAME = "="

    @property
    def is_difference(self) -> bool:
        """Whether the elements are to be known from the parent's."""
        return self in (Encoding.XOR, Encoding.SUBTRACT)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the saved state.

    Attributes:
        path: leaf path.
        shape: global shape of the stored words (for a typed PRNG key, of its key data).
        dtype: numpy name of the stored elements' type.
        itemsize_bytes: bytes of one stored element.
        key_type: for a typed PRNG key its data type (``key<fry>``), else None.
        cuts: how the leaf was cut into boxes when it was saved.
        owners: the process that writes each box, in :func:`~adacheck_jax.format.boxes.grid` order.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    itemsize_bytes: int
    key_type: str | None
    cuts: Cuts
    owners: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole leaf."""
        return math.prod(self.shape) * self.itemsize_bytes

    @property
    def word_bytes(self) -> int:
        """Width of the words that elements are split into planes by: complex ones have two."""
        is_complex = self.dtype.startswith("complex")
        return self.itemsize_bytes // 2 if is_complex else self.itemsize_bytes

    @property
    def boxes(self) -> list[Box]:
        """The distinct boxes, in the order of ``owners``."""
        return grid(self.cuts)

    def boxes_of(self, process: int) -> list[Box]:
        """The boxes that one process writes."""
        pairs = zip(self.boxes, self.owners, strict=True)
        return [box for box, owner in pairs if owner == process]

    @property
    def description(self) -> str:
        """Data type and logical shape, for people and for comparisons."""
        if self.key_type is not None:
            return f"{self.key_type}{list(self.shape[:-1])}"
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Update:
    """The exported update program, and which leaves it takes and returns.

    The program maps ``(params, inner, record, extra)`` to ``(params, inner)``.

    Attributes:
        params, inner, record, extra: indices into the base's leaves, in argument order; those of
            several recorders one after another.
        counts: index of each recorder's update counter.
        parts: how many leaves of each of the four lists belong to each recorder.
        reducing: indices of the computed leaves whose bits depend on the order of a sum: they are
            exact where the update runs as its own program on the mesh that it was saved on.
        passed: indices of the computed leaves that the update returns as it took them.
        placement: for an update with reducing leaves, a digest of where they all lay: the devices,
            the mesh and how each leaf was cut; empty for any other.
        problem: why no update is replayed onto this base; empty where updates are.
        programs: for each platform the digest of its serialized program; none with a problem.
        jax_version: the jax that exported it.
        pinned: whether every rounding of it is fixed, so that any program computes the same bits.
    """

    params: tuple[int, ...]
    inner: tuple[int, ...]
    record: tuple[int, ...]
    extra: tuple[int, ...]
    counts: tuple[int, ...]
    parts: tuple[tuple[int, int, int, int], ...]
    reducing: tuple[int, ...]
    passed: tuple[int, ...]
    placement: str
    problem: str
    programs: Mapping[str, str]
    jax_version: str
    pinned: bool

    @property
    def explained(self) -> frozenset[int]:
        """The leaves that replay computes."""
        return frozenset(self.params + self.inner)

    @property
    def consumed(self) -> tuple[int, ...]:
        """The leaves that a delta stores because the update consumed them."""
        return self.record + self.extra

    def computed_by(self, updates: Collection[int]) -> frozenset[int]:
        """The leaves that some recorders' updates compute."""
        return self._of(updates, (0, 1))

    def consumed_by(self, updates: Collection[int]) -> frozenset[int]:
        """The leaves that some recorders' updates consume."""
        return self._of(updates, (2, 3))

    def _of(self, updates: Collection[int], which: Sequence[int]) -> frozenset[int]:
        lists, found = (self.params, self.inner, self.record, self.extra), set[int]()
        for n in which:
            start = 0
            for k, sizes in enumerate(self.parts):
                if k in updates:
                    found.update(lists[n][start : start + sizes[n]])
                start += sizes[n]
        return frozenset(found)


@dataclass(frozen=True, slots=True)
class Link:
    """The step that a delta builds on.

    Attributes:
        step: its step number.
        reference: its item directory, relative to the delta's own item directory.
        checksum: the checksum of its manifest.
    """

    step: int
    reference: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Pack:
    """What one process wrote for a delta: its part of the arrays in that process's database.

    Attributes:
        encodings: one :class:`Encoding` letter for each stored leaf.
        aliases: pairs of extents, counted in the order of the plan: the first has the bytes of the
            second, an earlier one, and no place of its own.
        raw_bytes, compressed_bytes: sizes of its part of either array, zero runs included.
        raw_zeros, compressed_zeros: half-open ranges of blocks that are all zero and were not
            stored. Whatever else is missing is lost.
    """

    encodings: str
    aliases: tuple[tuple[int, int], ...]
    raw_bytes: int
    compressed_bytes: int
    raw_zeros: tuple[tuple[int, int], ...]
    compressed_zeros: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Caution:
    """What checks found in a run so far, so that it is remembered after a restart.

    Attributes:
        reason: why saves are checked before they return; empty while they need not be.
        distrusted: indices of the leaves that replay gets wrong in a few elements, so that a check
            of a sample may miss it: they are stored, and not replayed.
    """

    reason: str = ""
    distrusted: tuple[int, ...] = ()


NO_CAUTION = Caution()
CHECKS = frozenset({"full", "sample", "identity", "stored", ""})
"""How the replay of a delta was compared with the state, before it was saved.

``full``: all of it. ``sample``: small leaves whole, and blocks of the others. ``identity``: the
arrays that were saved are those that the replayed program had returned. ``stored``: nothing is
replayed. Empty: not at all, by a release before 0.2.
"""


@dataclass(frozen=True, slots=True)
class BaseManifest:
    """A full state at one step.

    Attributes:
        step: step number.
        counts: each recorder's update counter; none without a recorder.
        leaves: every leaf of the state, in tree order.
        fingerprints: one 64-bit digest a leaf.
        update: the update program; None without a recorder, and where leaves were cast.
        reason: why this step is a base.
        aliases: pairs of leaves: the data of the first is that of the second, stored once.
        kept: pairs of a leaf and a step: the base of that step wrote the leaf's data, and this one
            holds hard links to it.
        process_count: how many processes wrote it.
        versions: package versions at save time.
        environment: settings that arithmetic may depend on: compiler flags, 64-bit types.
        described: digests of the files that describe the arrays, by their names.
        directory_step: the number in the name of the directory that it was saved in; None if there
            was none. ``step`` may be another: the caller's.
        caution: what made the run cautious, of what is said in :class:`Caution`.
        checksum: of this manifest; empty until it is encoded.
    """

    step: int
    counts: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    fingerprints: tuple[int, ...]
    update: Update | None
    reason: str
    aliases: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    process_count: int
    versions: Mapping[str, str]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    described: Mapping[str, str] = dataclasses.field(default_factory=dict)
    directory_step: int | None = None
    caution: Caution = NO_CAUTION
    checksum: str = ""

    @property
    def depth(self) -> int:
        """Number of deltas between the base and this step: it is the base."""
        return 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What reproduces one step from the step before it.

    Attributes:
        step: step number.
        counts: each recorder's update counter; none without a recorder.
        updates: positions of the recorders whose update is to be replayed.
        stored: indices of the leaves that this delta holds something of, ascending. A leaf that the
            update passes through is put in place before the update, any other one after it.
        unreplayed: indices of the leaves that the update computes, but not as they were trained:
            they are the parent's, changed by what is stored of them.
        packs: what each process wrote.
        fingerprints: one 64-bit digest for every leaf of the state after this step.
        checked: how its replay was compared with the state, one of :data:`CHECKS`.
    """

    step: int
    counts: tuple[int, ...]
    updates: tuple[int, ...]
    stored: tuple[int, ...]
    unreplayed: tuple[int, ...]
    packs: tuple[Pack, ...]
    fingerprints: tuple[int, ...]
    checked: str

    @property
    def has_update(self) -> bool:
        """Whether an update is to be replayed."""
        return bool(self.updates)


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """The delta of a saved step, and those of the steps that were recorded before it.

    Attributes:
        step, counts, updates, stored, unreplayed, packs, fingerprints, checked: as of
            :class:`Delta`.
        parent: the saved step that this one builds on.
        depth: number of deltas between the base and this step, its own included.
        recorded: the deltas between the parent and this one, oldest first: of steps that were
            recorded and not saved by themselves. In the packs they lie one after another.
        problem: what speaks against replaying further updates: of a release before 0.2, which
            did not check every delta.
        custom_metadata: the caller's own JSON, kept for ``metadata()``.
        directory_step: the number in the name of the directory that it was saved in; None if there
            was none. ``step`` may be another: the caller's.
        caution: what checks found so far.
        checksum: of this manifest; empty until it is encoded.
    """

    step: int
    counts: tuple[int, ...]
    updates: tuple[int, ...]
    parent: Link
    depth: int
    stored: tuple[int, ...]
    unreplayed: tuple[int, ...]
    packs: tuple[Pack, ...]
    fingerprints: tuple[int, ...]
    checked: str
    problem: str = ""
    custom_metadata: Any = None
    directory_step: int | None = None
    recorded: tuple[Delta, ...] = ()
    caution: Caution = NO_CAUTION
    checksum: str = ""

    @property
    def has_update(self) -> bool:
        """Whether the saved step's own delta replays an update."""
        return bool(self.updates)

    @property
    def deltas(self) -> tuple[Delta, ...]:
        """All deltas since the parent, oldest first."""
        own = Delta(
            self.step,
            self.counts,
            self.updates,
            self.stored,
            self.unreplayed,
            self.packs,
            self.fingerprints,
            self.checked,
        )
        return (*self.recorded, own)


Manifest = BaseManifest | DeltaManifest


def encode(manifest: Manifest) -> bytes:
    """Turns a manifest into the bytes of its file, checksum included."""
    return _encoded(manifest)[0]


def _encoded(manifest: Manifest) -> tuple[bytes, str]:
    """The bytes of a manifest's file, and its checksum."""
    body, kind = _fields(manifest), "base"
    del body["checksum"]
    if isinstance(manifest, DeltaManifest):
        kind = "delta"
        body["recorded"] = [_fields(each) for each in manifest.recorded]
    # Through JSON once, so that the checksum is of what a reader will see ({1: ...} has text keys).
    body = json.loads(json.dumps({"format": FORMAT_VERSION, "kind": kind, **body}))
    checksum = checksum_of(body)
    return _json_bytes({**body, "checksum": checksum}), checksum


def _fields(described: Manifest | Delta) -> dict[str, Any]:
    """The fields of a manifest or of a recorded delta, but for the deltas in it."""
    # Without the fingerprints, of which asdict would copy each.
    bare: dict[str, Any] = {"fingerprints": ()}
    if isinstance(described, DeltaManifest):
        bare["recorded"] = ()
    body = dataclasses.asdict(dataclasses.replace(described, **bare))
    body["fingerprints"] = [f"{value:016x}" for value in described.fingerprints]
    return body


def checksum_of(body: Mapping[str, Any]) -> str:
    """Digest of a manifest's JSON body without its checksum field."""
    return hashlib.sha256(_json_bytes(body)).hexdigest()


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes, *, where: str) -> Manifest:
    """Reads and checks the bytes of a manifest file.

    Args:
        data: the file's bytes.
        where: the file's path, for error messages.

    Raises:
        FormatError: not a manifest, or of a format version that this library does not know.
        IntegrityError: the checksum does not match.
    """
    _check_counts(data, where)
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
    except RecursionError as error:  # json writes less deep than it reads
        raise FormatError(
            f"{where}: the manifest is nested too deep ({error}). Restore another step."
        ) from error
    if checksum != expected:
        raise IntegrityError(
            f"{where}: the manifest does not match its own checksum (found {_shown(checksum)}): "
            "the file was changed after it was written. Restore another step."
        )
    try:
        return _from_body(_upgraded(body) if version == OLDEST_VERSION else body, expected)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: a field of the manifest is missing or has the wrong type ({error!r}). "
            "Restore another step."
        ) from error


def _check_counts(data: bytes, where: str) -> None:
    """Refuses what would take too much memory as Python objects, before it is parsed."""
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
    if len(found) != len(pairs):  # two readers could take either
        raise ValueError("a key appears twice in an object")
    return found


def _shown(value: Any) -> str:
    """A value for a message: never more than a line of it."""
    return reprlib.repr(value)


def _upgraded(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a manifest of format version 6, as one of version 7."""

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


def _from_body(body: dict[str, Any], checksum: str) -> Manifest:
    if body["kind"] == "base":
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
            checksum=checksum,
        )
    if body["kind"] != "delta":
        raise ValueError(f"kind {_shown(body['kind'])}")
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
        checksum=checksum,
    )


def _delta(body: dict[str, Any]) -> Delta:
    stored = _ascending(body["stored"])
    counts, updates = _tuple_of(_natural, body["counts"]), _ascending(body["updates"])
    if updates and updates[-1] >= len(counts):
        raise ValueError(f"updates of {len(counts)} recorders: {_shown(updates)}")
    if body["checked"] not in CHECKS:
        raise ValueError(f"expected one of {sorted(CHECKS)}, found {_shown(body['checked'])}")
    return Delta(
        step=_natural(body["step"]),
        counts=counts,
        updates=updates,
        stored=stored,
        unreplayed=_ascending(body["unreplayed"]),
        packs=_tuple_of(lambda pack: _pack(pack, len(stored)), body["packs"]),
        fingerprints=_tuple_of(_fingerprint, body["fingerprints"]),
        checked=body["checked"],
    )


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
    if math.prod(filter(None, leaf.shape)) * leaf.itemsize_bytes > MAX_STATE_BYTES:  # empty or not
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
    indices = [*update.params, *update.inner, *update.consumed, *update.counts]
    if len(set(indices)) != len(indices) or max(indices) >= leaf_count:
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
    if name not in DESCRIPTIONS:  # it is read
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
    """A text that can be printed: no half of a character."""
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {_shown(value)}")
    if not value.isascii():
        value.encode()  # of a lone surrogate a ValueError
    return value


def update_file(platform: str) -> str:
    """Where, in a base's item directory, the update program of a platform lies."""
    return f"{DIRECTORY}/update.{platform}.stablehlo"


def read(item_directory: Path) -> Manifest:
    """Reads the manifest of an item directory.

    Raises:
        FormatError: there is none, or it is not a manifest.
        IntegrityError: it does not match its checksum.
        StorageError: it cannot be read now.
    """
    return read_file(item_directory / FILE)


def read_file(path: Path) -> Manifest:
    """As :func:`read`, of the file itself."""
    try:
        data = _read_file(path)
    except OSError as error:
        if refused := unreadable(path, error):
            raise refused from error
        raise FormatError(
            f"{path}: expected the manifest of a step saved by AdaCheckHandler, found none "
            f"({error.strerror}). A step that stock Orbax saved is read with "
            "ocp.StandardCheckpointer; a step that lost its manifest cannot be verified."
        ) from error
    return decode(data, where=str(path))


def stamp(item_directory: Path) -> tuple[int, int, int]:
    """What tells, without reading it, that a manifest is the file that it was.

    Raises:
        OSError: there is none.
    """
    found = os.stat(item_directory / FILE, follow_symlinks=False)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _read_file(path: Path) -> bytes:
    """The bytes of a manifest, which is a plain file in a plain folder, and not too large."""
    if path.parent.is_symlink():
        raise not_plain(path.parent, "a symbolic link")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise not_plain(path, "a symbolic link") from error
        raise
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise not_plain(path, "no file")
        if status.st_size > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{path}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found "
                f"{status.st_size}. The file is not a manifest; restore another step."
            )
        return file.read(status.st_size)


def not_plain(path: Path, found: str) -> FormatError:
    """The error of what lies in a step's directory and is neither a file nor a directory."""
    return FormatError(
        f"{path}: expected plain files and directories in a step's directory, found {found}, which "
        "is not followed: it may lead anywhere. Put what it stands for in its place, or restore "
        "another step."
    )


def write(item_directory: Path, manifest: Manifest) -> Manifest:
    """Writes the manifest; to make it durable is left to the caller.

    Returns:
        The manifest, with its checksum.

    Raises:
        FormatError: it is so large that no reader would take it.
    """
    data, checksum = _encoded(manifest)
    _check_counts(data, str(item_directory / FILE))
    path = item_directory / FILE
    durable.place(path, data)
    return dataclasses.replace(manifest, checksum=checksum)
