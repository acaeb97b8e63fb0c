"""Body of a delta's manifest: its own delta, those of deferred steps, and their packs."""

from __future__ import annotations

import itertools
from typing import Any

from adacheck_jax.format.manifest import CHECKS, Delta, DeltaManifest, Encoding, Link, Pack
from adacheck_jax.format.manifest_body import fields


def delta_manifest(body: dict[str, Any], checksum: str) -> DeltaManifest:
    """The manifest of a delta, with the arguments and errors of a base's."""
    own, recorded = _delta(body), fields.tuple_of(_delta, body["recorded"])
    shapes = {(len(each.packs), len(each.fingerprints)) for each in (*recorded, own)}
    if len(shapes) != 1:
        raise ValueError(f"deltas with different numbers of packs or fingerprints: {shapes}")
    steps = [each.step for each in (*recorded, own)]
    if any(a >= b for a, b in itertools.pairwise(steps)):
        raise ValueError(f"recorded steps that do not ascend: {fields.shown(steps)}")
    depth = fields.natural(body["depth"])
    if depth <= len(recorded):
        raise ValueError(f"delta number {depth} of its lineage with {len(recorded)} before it")
    return DeltaManifest(
        step=own.step,
        counts=own.counts,
        updates=own.updates,
        parent=Link(
            step=fields.natural(body["parent"]["step"]),
            reference=fields.text(body["parent"]["reference"]),
            checksum=fields.text(body["parent"]["checksum"]),
        ),
        depth=depth,
        stored=own.stored,
        unreplayed=own.unreplayed,
        packs=own.packs,
        fingerprints=own.fingerprints,
        checked=own.checked,
        problem=fields.text(body["problem"]),
        custom_metadata=body["custom_metadata"],
        directory_step=fields.optional(fields.natural, body["directory_step"]),
        recorded=recorded,
        caution=fields.caution(body["caution"], len(own.fingerprints)),
        stale=own.stale,
        replica=own.replica,
        checksum=checksum,
    )


def _delta(body: dict[str, Any]) -> Delta:
    stored = fields.ascending(body["stored"])
    counts = fields.naturals(body["counts"])
    updates = fields.ascending(body["updates"])
    if updates and updates[-1] >= len(counts):
        raise ValueError(f"updates of {len(counts)} recorders: {fields.shown(updates)}")
    if body["checked"] not in CHECKS:
        raise ValueError(f"expected one of {sorted(CHECKS)}, found {fields.shown(body['checked'])}")
    fingerprints = fields.tuple_of(fields.fingerprint, body["fingerprints"])
    stale = fields.stale(body, len(fingerprints))
    if not {i for i, _ in stale}.isdisjoint(stored):
        raise ValueError(f"a leaf is stored and stale: {fields.shown(stale)}")
    return Delta(
        step=fields.natural(body["step"]),
        counts=counts,
        updates=updates,
        stored=stored,
        unreplayed=fields.ascending(body["unreplayed"]),
        packs=fields.tuple_of(lambda pack: _pack(pack, len(stored)), body["packs"]),
        fingerprints=fingerprints,
        checked=body["checked"],
        stale=stale,
        replica=fields.text(body.get("replica", "")),
    )


def _pack(body: dict[str, Any], stored_count: int) -> Pack:
    pack = Pack(
        encodings=_encodings(body["encodings"]),
        aliases=fields.tuple_of(fields.pair, body["aliases"]),
        raw_bytes=fields.natural(body["raw_bytes"]),
        compressed_bytes=fields.natural(body["compressed_bytes"]),
        raw_zeros=_ranges(body["raw_zeros"]),
        compressed_zeros=_ranges(body["compressed_zeros"]),
        coded=fields.tuple_of(fields.pair, body["coded"]),
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
    letters = fields.text(value)
    if not frozenset(Encoding).issuperset(letters):
        raise ValueError(f"unknown encodings in {fields.shown(letters)}")
    return letters


def _ranges(body: Any) -> tuple[tuple[int, int], ...]:
    ranges = fields.tuple_of(fields.pair, body)
    borders = [border for each in ranges for border in each]
    if any(a >= b for a, b in itertools.pairwise(borders)):  # adjoining ranges would be one
        raise ValueError(f"ranges that do not ascend: {ranges[:4]}")
    return ranges
