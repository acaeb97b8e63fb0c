"""A report as the JSON in its page: columns instead of records, six digits, bytes for shares.

A page of ten thousand steps stays a few megabytes so, and every browser parses it: JSON has no NaN
and no infinity, which become texts.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

from adacheck_jax.tools.report.facts import KINDS, Changes, LeafBytes, Report, StepFacts

MOST_LEAVES = 1000
_UNKNOWN = 255


def payload(report: Report, watch_s: int | None = None) -> dict[str, Any]:
    """The values that the page draws.

    Args:
        report: the report.
        watch_s: seconds after which the page loads itself again; None if it does not.
    """
    steps = report.steps
    items = [row.item.rpartition("/")[2] for row in steps if row.item and "/" in row.item]
    item = max(set(items), key=items.count) if items else ""
    return {
        "made_at": report.made_at,
        "watch": watch_s,
        "update": report.update,
        "kinds": KINDS,
        "item": item,
        "summary": {
            "saved": report.saved_count,
            "recorded": report.recorded_count,
            "newest": report.newest,
            "disk": report.disk_bytes,
            "leaves": report.leaf_count,
        },
        "restored": report.restored_count,
        "norms_note": report.norms_note,
        "steps": _steps(steps, item),
        "savings": None if report.savings is None else dataclasses.asdict(report.savings),
        "leaves": _leaves(report.leaves),
        "changes": None if report.changes is None else _changes(report.changes, report.leaves),
        "verification": dataclasses.asdict(report.verification),
    }


def script_safe(value: Any) -> str:
    """JSON that may stand in a script element: no text in it can end the element.

    Args:
        value: plain values.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def number(value: float | None, digits: int = 6) -> float | int | str | None:
    """A number as JSON has it.

    Args:
        value: the number.
        digits: significant digits that are kept.
    """
    if value is None:
        return None
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _steps(steps: Sequence[StepFacts], item: str) -> dict[str, Any]:
    def column(of: Callable[[StepFacts], Any]) -> list[Any] | None:
        found = [of(row) for row in steps]
        return None if all(each is None for each in found) else found

    def few(of: Callable[[StepFacts], Any]) -> dict[int, Any]:
        return {n: found for n, row in enumerate(steps) if (found := of(row)) is not None}

    names = dict.fromkeys(name for row in steps for name in row.metrics)
    return {
        "step": [row.step for row in steps],
        "kind": [KINDS.index(row.kind) for row in steps],
        "at": column(lambda row: _milliseconds(row.saved_at)),
        "wait": column(lambda row: number(row.waited_s)),
        "parent": column(lambda row: row.parent),
        "depth": column(lambda row: row.depth),
        "check": column(lambda row: row.checked),
        "new": column(lambda row: row.new_bytes),
        "size": column(lambda row: row.size_bytes),
        "changed": [row.changed_count for row in steps],
        "gradient": column(lambda row: number(row.gradient_norm)),
        "update": column(lambda row: number(row.update_norm)),
        "params": column(lambda row: number(row.params_norm)),
        "rate": column(lambda row: number(row.learning_rate)),
        "metrics": {name: [number(row.metrics.get(name)) for row in steps] for name in names},
        "held": few(lambda row: row.held_by),
        "recorded": few(lambda row: len(row.recorded) or None),
        "item": few(lambda row: row.item if row.item != f"{row.step}/{item}" else None),
        "error": few(lambda row: row.error),
    }


def _milliseconds(text: str | None) -> int | None:
    return None if text is None else round(datetime.fromisoformat(text).timestamp() * 1000)


def _leaves(leaves: Sequence[LeafBytes]) -> dict[str, Any]:
    largest = sorted(leaves, key=lambda leaf: -leaf.leaf_bytes)[:MOST_LEAVES]
    return {
        "rows": [
            (leaf.path, leaf.description, leaf.role, leaf.leaf_bytes, [*_values(leaf.ways)])
            for leaf in largest
        ],
        "left_out": len(leaves) - len(largest),
    }


def _values(record: Any) -> Iterable[Any]:
    return (getattr(record, each.name) for each in dataclasses.fields(record))


def _changes(changes: Changes, leaves: Sequence[LeafBytes]) -> dict[str, Any]:
    sizes = {leaf.path: leaf.leaf_bytes for leaf in leaves}
    shares = bytes(
        _UNKNOWN if share is None else round(share * (_UNKNOWN - 1))
        for row in changes.shares
        for share in row
    )
    return {
        "paths": changes.paths,
        "roles": changes.roles,
        "sizes": [sizes[path] for path in changes.paths],
        "left_out": changes.left_out,
        "columns": changes.columns,
        "shares": base64.b64encode(shares).decode(),
        "norm_steps": changes.norm_steps,
        "norms": [[number(each, 3) for each in row] for row in changes.norms],
    }
