"""Versions of the form on disk, and bodies of older manifests as of the next version."""

from __future__ import annotations

from typing import Any

from adacheck_jax.format.manifest_body import fields

FORMAT_VERSION = 8
OLDEST_VERSION = 6
"""The oldest format version that is read."""


def _upgraded_6(body: dict[str, Any]) -> dict[str, Any]:
    """Body of a manifest of format version 6, as of version 7."""

    def counted(own: dict[str, Any]) -> dict[str, Any]:
        return {**own, "counts": [] if own["count"] is None else [own["count"]]}

    def delta(own: dict[str, Any]) -> dict[str, Any]:
        updates = [0] if fields.truth(own["has_update"]) else []
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


_UPGRADES = {6: _upgraded_6, 7: _upgraded_7}


def upgraded(body: dict[str, Any], version: int) -> dict[str, Any]:
    """The body of a manifest of an older version, as of the newest."""
    for older in range(version, FORMAT_VERSION):
        body = _UPGRADES[older](body)
    return body
