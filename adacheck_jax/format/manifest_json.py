"""JSON form of manifests: bytes, checksum, limits and versions of a file.

A manifest is untrusted input: whoever writes a file can write a checksum that fits it. Manifests
that :func:`decode` returns are bounded in size and consistent in themselves; statements about other
files are checked where those files are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format.manifest import BaseManifest, Delta, DeltaManifest, Manifest
from adacheck_jax.format.manifest_records import LEFT_OUT, record, shown, truth

FORMAT_VERSION = 9
OLDEST_VERSION = 6
"""The oldest format version that is read."""
MAX_MANIFEST_BYTES = 256 * 2**20
MAX_CONTAINERS = 2**22
"""Lists and objects in a manifest; in memory they take many times their bytes in a file."""
MAX_VALUES = 2**25
"""Members of all lists and objects, about."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of JSON files, each with a checksum of all else in it: its versions, and its names.

    Attributes:
        noun, content: name of a file, and of what it tells about, in messages.
        oldest, newest: format versions that are read, and the one that is written.
        remedy: what to do about a file that cannot be read.
    """

    noun: str
    content: str
    oldest: int
    newest: int
    remedy: str


MANIFEST = FileKind(
    "manifest", "checkpoint", OLDEST_VERSION, FORMAT_VERSION, "Restore another step."
)
_KINDS: dict[str, type[Manifest]] = {"base": BaseManifest, "delta": DeltaManifest}


def sealed(manifest: Manifest, *, where: str) -> tuple[bytes, Manifest]:
    """Bytes of a manifest's file, read back: no writer takes them from anywhere else.

    Returns:
        The bytes, and the manifest as a reader has it, with its checksum.

    Raises:
        FormatError: readers would refuse them.
    """
    return read_back(
        MANIFEST, lambda: encode(manifest), lambda data: decode(data, where=where), where
    )


def read_back(
    kind: FileKind, encoded: Callable[[], bytes], decoded: Callable[[bytes], _T], where: object
) -> tuple[bytes, _T]:
    """Bytes of a file of some kind, and what a reader makes of them; raises as :func:`sealed`."""
    try:
        data = encoded()
        return data, decoded(data)
    except (FormatError, IntegrityError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a {kind.noun} that can be read back, found one that cannot, and "
            f"wrote nothing ({error}). Report this with its message."
        ) from error


def encode(manifest: Manifest) -> bytes:
    """Bytes of a manifest's file."""
    body = _fields(manifest)
    del body["checksum"]
    if isinstance(manifest, DeltaManifest):
        body["recorded"] = [_fields(each) for each in manifest.recorded]
    return checksummed({"format": FORMAT_VERSION, "kind": manifest.kind, **body})


def checksummed(body: Mapping[str, Any]) -> bytes:
    """Bytes of a JSON file with a checksum of all else in it."""
    # The checksum is of what a reader sees: keys are texts.
    body = json.loads(json.dumps(body, default=_shallow))
    return _json_bytes({**body, "checksum": checksum_of(body)})


def _fields(described: Manifest | Delta) -> dict[str, Any]:
    """JSON fields of a manifest or of one delta, without the recorded deltas in it."""
    body = _shallow(described)
    body["fingerprints"] = [f"{value:016x}" for value in described.fingerprints]
    return {name: value for name, value in body.items() if value or name not in LEFT_OUT}


def _shallow(described: Any) -> dict[str, Any]:
    """Fields of a record as they are: asdict would copy every number in them."""
    return {each.name: getattr(described, each.name) for each in dataclasses.fields(described)}


def checksum_of(body: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's JSON body without its checksum field."""
    return hashlib.sha256(_json_bytes(body)).hexdigest()


def _json_bytes(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def decode(data: bytes, *, where: str) -> Manifest:
    """Checks and decodes the bytes of a manifest file.

    Raises:
        FormatError: the bytes are no manifest, or have an unknown format version.
        IntegrityError: the checksum does not match.
    """

    def read(version: int, body: dict[str, Any]) -> Manifest:
        for older in range(version, FORMAT_VERSION):
            body = _UPGRADES[older](body)
        return record(_KINDS[body["kind"]], body)

    return checked(data, MANIFEST, read, where)


def checked(
    data: bytes, kind: FileKind, read: Callable[[int, dict[str, Any]], _T], where: object
) -> _T:
    """Checks the bytes of a file of some kind, and decodes them; raises as :func:`decode`.

    Args:
        data: the bytes.
        kind: kind of the file.
        read: function that reads the fields, of the format version that it is given.
        where: the file, for messages.
    """
    try:
        body = parsed(data, str(where))
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: expected a JSON {kind.noun}, found {len(data)} bytes that are not "
            f"({error}). The file is truncated or overwritten. {kind.remedy}"
        ) from error
    if not isinstance(body, dict) or "format" not in body:
        raise FormatError(
            f"{where}: expected an adacheck {kind.noun}, found other JSON. {kind.remedy}"
        )
    version = body["format"]
    if type(version) is not int or not kind.oldest <= version <= kind.newest:
        versions = " to ".join(map(str, sorted({kind.oldest, kind.newest})))
        raise FormatError(
            f"{where}: expected format version {versions}, found {shown(version)}. Install the "
            f"adacheck-jax release that wrote this {kind.content}."
        )
    checksum = body.pop("checksum", None)
    try:
        expected = checksum_of(body)
    except RecursionError as error:  # json reads deeper nesting than it writes
        raise FormatError(
            f"{where}: the {kind.noun} is nested too deep ({error}). {kind.remedy}"
        ) from error
    if checksum != expected:
        raise IntegrityError(
            f"{where}: the {kind.noun} does not match its own checksum (found {shown(checksum)}): "
            f"the file was changed after it was written. {kind.remedy}"
        )
    try:
        return read(version, {**body, "checksum": expected})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(
            f"{where}: a field of the {kind.noun} is missing or has the wrong type ({error!r}). "
            f"{kind.remedy}"
        ) from error


def parsed(data: bytes, where: str) -> Any:
    """JSON of an untrusted file, which is measured before it is parsed.

    Raises:
        FormatError: it would take too much memory as Python objects.
        ValueError: it is no JSON, or a key appears twice in an object.
    """
    containers = data.count(b"[") + data.count(b"{")
    values = containers + data.count(b",")
    if len(data) > MAX_MANIFEST_BYTES or containers > MAX_CONTAINERS or values > MAX_VALUES:
        raise FormatError(
            f"{where}: expected a manifest of at most {MAX_MANIFEST_BYTES} bytes with "
            f"{MAX_CONTAINERS} lists and {MAX_VALUES} values, found {len(data)} bytes with about "
            f"{containers} and {values}. Restore another step."
        )
    return json.loads(data, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):  # two readers could take different values
        raise ValueError("a key appears twice in an object")
    return found


def _upgraded_6(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a manifest of format version 6, as of version 7."""

    def counted(own: dict[str, Any]) -> dict[str, Any]:
        return {**own, "counts": [] if own["count"] is None else [own["count"]]}

    def delta(own: dict[str, Any]) -> dict[str, Any]:
        updates = [0] if truth(own["has_update"]) else []
        return {
            **counted(own),
            "updates": updates,
            "unreplayed": [],
            "checked": "" if updates else "stored",
        }

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


_UPGRADES = {6: _upgraded_6, 7: _upgraded_7, 8: dict}
"""Of version 8 all deltas are cut as their base is."""
