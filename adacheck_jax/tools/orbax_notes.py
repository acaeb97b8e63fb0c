"""Orbax's note of each step: when it was saved, and its metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from adacheck_jax.store.storage.location import AnyPath, at

_NOTE = "_CHECKPOINT_METADATA"
_METRICS = "metrics/metrics"


@dataclass(frozen=True, slots=True)
class Note:
    """Note that Orbax made of a step.

    Attributes:
        saved_at: time of the commit, or of the beginning where there is none; None if no note
            tells.
        metrics: numbers that the caller gave with the save, by name.
    """

    saved_at: datetime | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def note_of(step_directory: AnyPath) -> Note:
    """Read the note of a step; a note that is missing or damaged tells nothing, and hurts nothing.

    Args:
        step_directory: the step's own directory, not one of its items.
    """
    found = _json(step_directory, _NOTE)
    nanoseconds = found.get("commit_timestamp_nsecs") or found.get("init_timestamp_nsecs")
    saved_at = None
    if isinstance(nanoseconds, int) and 0 < nanoseconds < 1 << 62:
        saved_at = datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    metrics = found.get("metrics") or _json(step_directory, _METRICS)
    return Note(saved_at, _numbers(metrics))


def _json(directory: AnyPath, name: str) -> dict[str, Any]:
    try:
        found = json.loads(at(directory / name).read())
    except (OSError, ValueError):  # Orbax writes it for itself, and no step depends on it
        return {}
    return found if isinstance(found, dict) else {}


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
