"""What a step is made of: frozen records and their JSON form.

The manifest is the file that makes a saved step exist. It is written last, after every byte that
it speaks of, and it carries a checksum of itself. A base's manifest describes the leaves; a delta's
manifest names its parent and does not repeat what the base says, so its size does not grow with
the lineage.

This module knows neither JAX nor Orbax.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from adacheck_jax.boxes import Box, Cuts, grid
from adacheck_jax.errors import FormatError, IntegrityError

FORMAT_VERSION = 3
DIRECTORY = "adacheck"
"""Name of our folder inside an item's directory."""
FILE = f"{DIRECTORY}/manifest.json"
MAX_MANIFEST_BYTES = 256 * 2**20

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
        owners: the process that writes each box, in :func:`~adacheck_jax.boxes.grid` order.
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
        params, inner, record, extra: indices into the base's leaves, in argument order.
        count: index of the recorder's update counter.
        reducing: indices of the computed leaves whose bits depend on the order of a sum: they are
            exact where the update runs as its own program on the mesh that it was saved on.
        passed: indices of the computed leaves that the update returns as it took them.
        placement: for an update with reducing leaves, a digest of where they all lay: the devices,
            the mesh and how each leaf was cut; empty for any other.
        problem: why no update is replayed onto this base; empty where updates are.
        programs: for each platform the digest of its serialized program; none with a problem.
        jax_version: the jax that exported it.
    """

    params: tuple[int, ...]
    inner: tuple[int, ...]
    record: tuple[int, ...]
    extra: tuple[int, ...]
    count: int
    reducing: tuple[int, ...]
    passed: tuple[int, ...]
    placement: str
    problem: str
    programs: Mapping[str, str]
    jax_version: str

    @property
    def explained(self) -> frozenset[int]:
        """The leaves that replay computes."""
        return frozenset(self.params + self.inner)

    @property
    def consumed(self) -> tuple[int, ...]:
        """The leaves that a delta stores because the update consumed them."""
        return self.record + self.extra


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
    """What one process wrote for a delta.

    Attributes:
        encodings: one :class:`Encoding` letter for each stored leaf.
        aliases: pairs of extents, counted in the order of the plan: the first has the bytes of the
            second, an earlier one, and no place of its own.
        raw_bytes, compressed_bytes: sizes of its two arrays, zero runs included.
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
class BaseManifest:
    """A full state at one step.

    Attributes:
        step: step number.
        count: the recorder's update counter, None without a recorder.
        leaves: every leaf of the state, in tree order.
        fingerprints: one 64-bit digest a leaf.
        update: the update program; None without a recorder, and where leaves were cast.
        reason: why this step is a base.
        aliases: pairs of leaves: the data of the first is that of the second, stored once.
        kept: pairs of a leaf and a step: the base of that step wrote the leaf's data, and this one
            holds hard links to it.
        process_count: how many processes wrote it.
        versions: package versions at save time.
        checksum: of this manifest; empty until it is encoded.
    """

    step: int
    count: int | None
    leaves: tuple[Leaf, ...]
    fingerprints: tuple[int, ...]
    update: Update | None
    reason: str
    aliases: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    process_count: int
    versions: Mapping[str, str]
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """What reproduces one step from the step before it.

    Attributes:
        step: step number.
        count: the recorder's update counter, None without a recorder.
        has_update: whether one update is to be replayed.
        parent: the step that this one builds on.
        depth: number of deltas between the base and this step, this one included.
        stored: indices of the leaves that this delta holds something of, ascending. A leaf that the
            update passes through is put in place before the update, any other one after it.
        packs: what each process wrote.
        fingerprints: one 64-bit digest for every leaf of the state after this step.
        problem: what speaks against replaying further updates; empty where nothing does.
        custom_metadata: the caller's own JSON, kept for ``metadata()``.
        checksum: of this manifest; empty until it is encoded.
    """

    step: int
    count: int | None
    has_update: bool
    parent: Link
    depth: int
    stored: tuple[int, ...]
    packs: tuple[Pack, ...]
    fingerprints: tuple[int, ...]
    problem: str = ""
    custom_metadata: Any = None
    checksum: str = ""


Manifest = BaseManifest | DeltaManifest


def encode(manifest: Manifest) -> bytes:
    """Turns a manifest into the bytes of its file, checksum included."""
    body = dataclasses.asdict(manifest)
    del body["checksum"]
    body["fingerprints"] = [f"{value:016x}" for value in manifest.fingerprints]
    kind = "base" if isinstance(manifest, BaseManifest) else "delta"
    # Through JSON once, so that the checksum is of what a reader will see ({1: ...} has text keys).
    body = json.loads(json.dumps({"format": FORMAT_VERSION, "kind": kind, **body}))
    return _json_bytes({**body, "checksum": checksum_of(body)})


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
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a JSON manifest, found {len(data)} bytes that are not "
            f"({error}). The file is truncated or overwritten; restore another step."
        ) from error
    if not isinstance(body, dict) or "format" not in body:
        raise FormatError(
            f"{where}: expected an adacheck manifest, found other JSON. Restore another step."
        )
    if body["format"] != FORMAT_VERSION:
        raise FormatError(
            f"{where}: expected format version {FORMAT_VERSION}, found {body['format']!r}. "
            "Install the adacheck-jax release that wrote this checkpoint."
        )
    checksum = body.pop("checksum", None)
    if checksum != checksum_of(body):
        raise IntegrityError(
            f"{where}: the manifest does not match its own checksum (found {checksum!r}): the "
            "file was changed after it was written. Restore another step."
        )
    try:
        return _from_body(body, checksum)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: a field of the manifest is missing or has the wrong type ({error!r}). "
            "Restore another step."
        ) from error


def _from_body(body: dict[str, Any], checksum: str) -> Manifest:
    fingerprints = _tuple_of(_fingerprint, body["fingerprints"])
    if body["kind"] == "base":
        leaves = _tuple_of(_leaf, body["leaves"])
        if len(leaves) != len(fingerprints):
            raise ValueError(f"{len(leaves)} leaves but {len(fingerprints)} fingerprints")
        if any(owner >= body["process_count"] for leaf in leaves for owner in leaf.owners):
            raise ValueError("a box is owned by a process that does not exist")
        return BaseManifest(
            step=_natural(body["step"]),
            count=_count(body["count"]),
            leaves=leaves,
            fingerprints=fingerprints,
            update=None if body["update"] is None else _update(body["update"], len(leaves)),
            reason=str(body["reason"]),
            aliases=_pairs(body["aliases"], len(leaves), len(leaves)),
            kept=_pairs(body["kept"], len(leaves), None),
            process_count=_natural(body["process_count"]),
            versions={str(k): str(v) for k, v in body["versions"].items()},
            checksum=checksum,
        )
    if body["kind"] != "delta":
        raise ValueError(f"kind {body['kind']!r}")
    return DeltaManifest(
        step=_natural(body["step"]),
        count=_count(body["count"]),
        has_update=bool(body["has_update"]),
        parent=Link(
            step=_natural(body["parent"]["step"]),
            reference=str(body["parent"]["reference"]),
            checksum=str(body["parent"]["checksum"]),
        ),
        depth=_natural(body["depth"]),
        stored=(stored := _ascending(body["stored"])),
        packs=_tuple_of(lambda pack: _pack(pack, len(stored)), body["packs"]),
        fingerprints=fingerprints,
        problem=str(body["problem"]),
        custom_metadata=body["custom_metadata"],
        checksum=checksum,
    )


def _pack(body: dict[str, Any], stored_count: int) -> Pack:
    pack = Pack(
        encodings="".join(Encoding(letter) for letter in body["encodings"]),
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


def _ranges(body: Any) -> tuple[tuple[int, int], ...]:
    ranges = _tuple_of(_range, body)
    borders = [border for each in ranges for border in each]
    if any(a >= b for a, b in itertools.pairwise(borders)):  # adjoining ranges would be one
        raise ValueError(f"ranges that do not ascend: {ranges[:4]}")
    return ranges


def _range(body: Any) -> tuple[int, int]:
    start, stop = _tuple_of(_natural, body)
    return start, stop


def _pairs(body: Any, first_end: int, second_end: int | None) -> tuple[tuple[int, int], ...]:
    pairs = _tuple_of(_range, body)
    for first, second in pairs:
        if first >= first_end or (second_end is not None and second >= second_end):
            raise ValueError(f"a pair of leaves lies outside the state: {(first, second)}")
    return pairs


def _ascending(body: Any) -> tuple[int, ...]:
    values = _tuple_of(_natural, body)
    if list(values) != sorted(set(values)):
        raise ValueError("the stored leaves do not ascend")
    return values


def _count(value: Any) -> int | None:
    return None if value is None else _natural(value)


def _leaf(body: dict[str, Any]) -> Leaf:
    leaf = Leaf(
        path=str(body["path"]),
        shape=_tuple_of(_natural, body["shape"]),
        dtype=str(body["dtype"]),
        itemsize_bytes=_natural(body["itemsize_bytes"]),
        key_type=None if body["key_type"] is None else str(body["key_type"]),
        cuts=_tuple_of(lambda axis: _tuple_of(_natural, axis), body["cuts"]),
        owners=_tuple_of(_natural, body["owners"]),
    )
    lengths = tuple(points[-1] for points in leaf.cuts)
    count = math.prod(max(1, len(points) - 1) for points in leaf.cuts)
    ascending = all(points[0] == 0 and list(points) == sorted(set(points)) for points in leaf.cuts)
    if lengths != leaf.shape or count != len(leaf.owners) or not ascending:
        raise ValueError(f"leaf {leaf.path}: cuts {leaf.cuts} do not fit shape {leaf.shape}")
    return leaf


def _update(body: dict[str, Any], leaf_count: int) -> Update:
    update = Update(
        params=_tuple_of(_natural, body["params"]),
        inner=_tuple_of(_natural, body["inner"]),
        record=_tuple_of(_natural, body["record"]),
        extra=_tuple_of(_natural, body["extra"]),
        count=_natural(body["count"]),
        reducing=_tuple_of(_natural, body["reducing"]),
        passed=_tuple_of(_natural, body["passed"]),
        placement=str(body["placement"]),
        problem=str(body["problem"]),
        programs={_platform(name): str(digest) for name, digest in body["programs"].items()},
        jax_version=str(body["jax_version"]),
    )
    indices = [*update.params, *update.inner, *update.consumed, update.count]
    if len(set(indices)) != len(indices) or max(indices) >= leaf_count:
        raise ValueError("the update's leaf indices repeat or lie outside the state")
    if not update.explained.issuperset(update.reducing + update.passed):
        raise ValueError("a leaf is reducing or passed through, but not computed by the update")
    return update


def _tuple_of(read: Callable[[Any], _T], items: Any) -> tuple[_T, ...]:
    if not isinstance(items, list):
        raise TypeError(f"expected a list, found {type(items).__name__}")
    return tuple(read(item) for item in items)


def _platform(name: str) -> str:
    if not re.fullmatch("[a-z0-9]{1,16}", name):  # it becomes part of a file's name
        raise ValueError(f"expected the name of a platform, found {name!r}")
    return name


def _fingerprint(text: Any) -> int:
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{16}", text):
        raise ValueError(f"expected 16 hexadecimal digits, found {text!r}")
    return int(text, 16)


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a number >= 0, found {value!r}")
    return value


def update_file(platform: str) -> str:
    """Where, in a base's item directory, the update program of a platform lies."""
    return f"{DIRECTORY}/update.{platform}.stablehlo"


def read(item_directory: Path) -> Manifest:
    """Reads the manifest of an item directory.

    Raises:
        FormatError: there is none, or it cannot be read.
        IntegrityError: it does not match its checksum.
    """
    path = item_directory / FILE
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_MANIFEST_BYTES:
            raise FormatError(
                f"{path}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, found "
                f"{size_bytes}. The file is not a manifest; restore another step."
            )
        data = path.read_bytes()
    except OSError as error:
        raise FormatError(
            f"{path}: expected the manifest of a step saved by AdaCheckHandler, found none "
            f"({error.strerror}). A step that stock Orbax saved is read with "
            "ocp.StandardCheckpointer; a step that lost its manifest cannot be verified."
        ) from error
    return decode(data, where=str(path))


def write(item_directory: Path, manifest: Manifest) -> None:
    """Writes the manifest; whatever it speaks of must be durable already."""
    write_durably(item_directory / FILE, encode(manifest))


def write_durably(path: Path, data: bytes) -> None:
    """Writes a small file so that after a crash it is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
