"""Body of a base's manifest: its leaves, its update, and how they fit together."""

from __future__ import annotations

import math
import re
from typing import Any

from adacheck_jax.format.manifest import (
    DESCRIPTIONS,
    ITEMSIZES_BYTES,
    BaseManifest,
    Leaf,
    Replaced,
    Update,
)
from adacheck_jax.format.manifest_body import fields

MAX_BOXES = 2**23
"""Boxes of all leaves of a base."""
MAX_AXES = 32
"""Axes of a leaf: more than tensorstore takes."""
MAX_STATE_BYTES = 2**60
"""Bytes of all leaves of a base, so that sums of offsets fit into 64 bits."""


def base_manifest(body: dict[str, Any], checksum: str) -> BaseManifest:
    """The manifest of a base.

    Args:
        body: JSON of the manifest, of the newest version.
        checksum: its checksum.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: a field is missing or wrong.
    """
    fingerprints = fields.tuple_of(fields.fingerprint, body["fingerprints"])
    leaves = fields.tuple_of(_leaf, body["leaves"])
    if len(leaves) != len(fingerprints):
        raise ValueError(f"{len(leaves)} leaves but {len(fingerprints)} fingerprints")
    process_count = fields.natural(body["process_count"])
    if any(leaf.owners and max(leaf.owners) >= process_count for leaf in leaves):
        raise ValueError("a box is owned by a process that does not exist")
    if len({leaf.path for leaf in leaves}) != len(leaves):
        raise ValueError("two leaves have the same path")
    if sum(len(leaf.owners) for leaf in leaves) > MAX_BOXES:
        raise ValueError(f"more than {MAX_BOXES} boxes")
    if sum(leaf.nbytes for leaf in leaves) > MAX_STATE_BYTES:
        raise ValueError(f"more than {MAX_STATE_BYTES} bytes of leaves")
    return BaseManifest(
        step=fields.natural(body["step"]),
        counts=fields.naturals(body["counts"]),
        leaves=leaves,
        fingerprints=fingerprints,
        update=None if body["update"] is None else _update(body["update"], len(leaves)),
        reason=fields.text(body["reason"]),
        aliases=fields.pairs(body["aliases"], len(leaves), len(leaves)),
        kept=fields.pairs(body["kept"], len(leaves), None),
        process_count=process_count,
        versions={fields.text(k): fields.text(v) for k, v in body["versions"].items()},
        environment={fields.text(k): fields.text(v) for k, v in body["environment"].items()},
        described={_description(k): fields.text(v) for k, v in body["described"].items()},
        directory_step=fields.optional(fields.natural, body["directory_step"]),
        caution=fields.caution(body["caution"], len(leaves)),
        replaces=fields.optional(_replaced, body.get("replaces")),
        stale=fields.stale(body, len(leaves)),
        replica=fields.text(body.get("replica", "")),
        checksum=checksum,
    )


def _replaced(body: dict[str, Any]) -> Replaced:
    return Replaced(
        checksum=fields.text(body["checksum"]),
        depth=fields.natural(body["depth"]),
        files=fields.tuple_of(fields.text, body["files"]),
    )


def _leaf(body: dict[str, Any]) -> Leaf:
    leaf = Leaf(
        path=fields.text(body["path"]),
        shape=fields.naturals(body["shape"]),
        dtype=fields.text(body["dtype"]),
        itemsize_bytes=fields.natural(body["itemsize_bytes"]),
        key_type=fields.optional(fields.text, body["key_type"]),
        cuts=fields.tuple_of(fields.naturals, body["cuts"]),
        owners=fields.naturals(body["owners"]),
    )
    if leaf.itemsize_bytes != ITEMSIZES_BYTES.get(leaf.dtype):
        raise _refused(
            leaf, f"no elements of {fields.shown(leaf.dtype)} have {leaf.itemsize_bytes} bytes"
        )
    if leaf.key_type is not None and not (
        re.fullmatch("key<[^<>]{1,64}>", leaf.key_type) and leaf.dtype == "uint32" and leaf.shape
    ):
        raise _refused(
            leaf,
            f"no keys of type {fields.shown(leaf.key_type)} consist of "
            f"{leaf.dtype}{list(leaf.shape[:MAX_AXES])}",
        )
    if max(len(leaf.shape), len(leaf.cuts)) > MAX_AXES:
        raise _refused(leaf, f"{len(leaf.shape)} axes")
    # Bounded for empty arrays too.
    if math.prod(filter(None, leaf.shape)) * leaf.itemsize_bytes > MAX_STATE_BYTES:
        raise _refused(leaf, f"an array of shape {leaf.shape}")
    lengths = tuple(points[-1] for points in leaf.cuts)
    count = math.prod(max(1, len(points) - 1) for points in leaf.cuts)
    ascending = all(points[0] == 0 and list(points) == sorted(set(points)) for points in leaf.cuts)
    if lengths != leaf.shape or count != len(leaf.owners) or not ascending:
        raise _refused(
            leaf,
            f"cuts {fields.shown(leaf.cuts)} with {len(leaf.owners)} owners do not fit "
            f"shape {leaf.shape}",
        )
    return leaf


def _refused(leaf: Leaf, why: str) -> ValueError:
    return ValueError(f"leaf {fields.shown(leaf.path)}: {why}")


def _update(body: dict[str, Any], leaf_count: int) -> Update:
    update = Update(
        params=fields.naturals(body["params"]),
        inner=fields.naturals(body["inner"]),
        record=fields.naturals(body["record"]),
        extra=fields.naturals(body["extra"]),
        counts=fields.naturals(body["counts"]),
        parts=fields.tuple_of(_sizes, body["parts"]),
        reducing=fields.naturals(body["reducing"]),
        passed=fields.naturals(body["passed"]),
        placement=fields.text(body["placement"]),
        problem=fields.text(body["problem"]),
        programs={
            _platform(name): fields.text(digest) for name, digest in body["programs"].items()
        },
        jax_version=fields.text(body["jax_version"]),
        pinned=fields.truth(body["pinned"]),
    )
    lists = (update.params, update.inner, update.record, update.extra)
    totals = [sum(each[n] for each in update.parts) for n in range(4)]
    if totals != [len(each) for each in lists] or len(update.parts) != len(update.counts):
        raise ValueError(f"parts {fields.shown(update.parts)} do not make up the update's leaves")
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
    params, inner, record, extra = fields.naturals(body)
    return params, inner, record, extra


def _description(name: str) -> str:
    if name not in DESCRIPTIONS:  # its path is opened
        raise ValueError(f"expected one of {sorted(DESCRIPTIONS)}, found {fields.shown(name)}")
    return name


def _platform(name: str) -> str:
    if not re.fullmatch("[a-z0-9]{1,16}", name):  # it becomes part of a file's name
        raise ValueError(f"expected the name of a platform, found {fields.shown(name)}")
    return name
