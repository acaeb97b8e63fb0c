"""The steps under a checkpoint root, with dates and sizes, from manifests and directories alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from adacheck_jax.format.manifest import BaseManifest, DeltaManifest, Manifest
from adacheck_jax.store.steps import folders, marks, roots
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.interface import Entry, Stamp
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools.steps import no_steps, settled_steps

STOCK, FOREIGN = "stock", "foreign"


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One row of ``adacheck ls``.

    Attributes:
        step: step number, None if neither manifest nor directory name has it.
        item: path of the item directory, relative to the root.
        kind: ``base`` or ``delta``; ``stock`` for a step that stock Orbax saved, which can be
            restored and which nothing can verify; ``foreign`` for a directory with a step's name
            that holds neither; None if the manifest cannot be read.
        saved_at: time when Orbax committed the step, in ISO 8601; None if it left no note.
        metrics: numbers that were given with the save, by name.
        update_count: number of updates so far, of all recorders; None without a recorder or
            manifest.
        parent: for a delta the step that it builds on, else None.
        depth: number of deltas since the base, 0 for a base, None if that is not to be found.
        recorded: deferred steps that were saved with it, and can be restored from it.
        checked: the comparison of its deltas with the state when they were saved: ``full``,
            ``sample``, ``identity``, ``stored`` or ``not checked``, several joined by ``+``; None
            for a base, and without a manifest.
        new_bytes: bytes that this step added: its files without the links to earlier steps; None in
            an object store, as the next two.
        size_bytes: bytes of all files in its directory, those of earlier steps included: what a
            restore of it has to read at most.
        unique_bytes: bytes that deleting it would free: files that no other step is linked to.
        error: the reason why the step cannot be restored, None if base and deltas are all there.
            Array data is not read.
    """

    step: int | None
    item: str
    kind: str | None
    saved_at: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    update_count: int | None = None
    parent: int | None = None
    depth: int | None = None
    recorded: tuple[int, ...] = ()
    checked: str | None = None
    new_bytes: int | None = None
    size_bytes: int | None = None
    unique_bytes: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RootSummary:
    """The table of ``adacheck ls``.

    Attributes:
        root: the checkpoint root.
        disk_bytes: bytes of all files under it, each hard-linked file counted once; None in
            an object store.
        step_count: number of steps under the root; ``steps`` may be the last of them.
        damaged_count: number of all steps that cannot be restored.
        steps: rows, by ascending step number.
        stock_steps: numbers of the steps that stock Orbax saved, ascending.
    """

    root: str
    disk_bytes: int | None
    step_count: int
    damaged_count: int
    steps: tuple[StepSummary, ...]
    stock_steps: tuple[int, ...] = ()


def summarize_root(root: AnyPath, last: int | None = None) -> RootSummary:
    """List the steps under a checkpoint root.

    Args:
        root: the directory given to the checkpoint manager.
        last: number of the newest rows to return; None for all.

    Returns:
        Every step that :class:`~adacheck_jax.AdaCheckHandler` or stock Orbax saved, damaged ones
        included, and directories of other things with a step's name.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step.
    """
    steps = settled_steps(root)
    others = _others(root, steps)
    if not steps and not others:
        raise no_steps(root)
    rows = [_described(step, root) for step in steps] + others
    rows.sort(key=lambda row: (-1 if row.step is None else row.step, row.item))
    damaged = sum(row.error is not None for row in rows)
    total, sizes = _sizes(root, [row.item for row in rows])
    shown = rows if last is None else rows[max(len(rows) - last, 0) :]
    shown = [_dated(replace(row, **sizes.get(row.item, {})), root) for row in shown]
    stock_steps = tuple(row.step for row in rows if row.kind == STOCK and row.step is not None)
    return RootSummary(str(root), total, len(rows), damaged, tuple(shown), stock_steps)


def saved_at(row: StepSummary) -> datetime | None:
    """Time when a step was saved."""
    return None if row.saved_at is None else datetime.fromisoformat(row.saved_at)


def _described(step: Step, root: AnyPath) -> StepSummary:
    manifest = step.manifest
    row = StepSummary(
        step=None if step.step < 0 else step.step,
        item=at(step.directory).below(at(root)),
        kind=kind_of(manifest) if manifest else None,
        depth=None if step.lineage is None else step.lineage.delta_count,
        error=None if step.error is None else " ".join(str(step.error).split()),
    )
    if manifest is None:
        return row
    return replace(
        row,
        update_count=sum(manifest.counts) if manifest.counts else None,
        parent=parent_of(manifest),
        recorded=recorded_with(manifest),
        checked=_checked(manifest),
    )


def kind_of(manifest: Manifest) -> str:
    """``base`` or ``delta``."""
    return "base" if isinstance(manifest, BaseManifest) else "delta"


def parent_of(manifest: Manifest) -> int | None:
    """The step that a delta builds on."""
    return manifest.parent.step if isinstance(manifest, DeltaManifest) else None


def recorded_with(manifest: Manifest) -> tuple[int, ...]:
    """Deferred steps that were saved with a step."""
    if isinstance(manifest, BaseManifest):
        return ()
    return tuple(delta.step for delta in manifest.recorded)


def _checked(manifest: Manifest) -> str | None:
    if isinstance(manifest, BaseManifest):
        return None
    kinds = dict.fromkeys(delta.checked for delta in manifest.deltas)
    return " + ".join(kind or "not checked" for kind in kinds)


def _others(root: AnyPath, steps: Sequence[Step]) -> list[StepSummary]:
    """Directories with a step's name in which none of our steps lies."""
    ours = {at(step.directory).below(at(root)).partition("/")[0] for step in steps}
    known = roots.stock_steps(root)
    rows = [
        StepSummary(number, at(path).below(at(root)), STOCK)
        for number, paths in known.items()
        for path in paths
    ]
    for name in at(root).folders():
        number = roots.place_of(root / name, in_step=False).step
        if number is None or name in ours or number in known or roots.TMP_SUFFIX in name:
            continue
        if at(root).on_file_system:  # in a store it may be a save that is under way
            rows.append(StepSummary(number, name, FOREIGN))
    return rows


def _dated(row: StepSummary, root: AnyPath) -> StepSummary:
    when, metrics = note_of(root / row.item.partition("/")[0])
    text = None if when is None else when.isoformat(timespec="milliseconds")
    return replace(row, saved_at=text, metrics=metrics)


def _sizes(root: AnyPath, items: Iterable[str]) -> tuple[int | None, dict[str, dict[str, int]]]:
    """Bytes of all files under a root, and sizes of each item, by its path relative to the root."""
    if not at(root).on_file_system:
        return None, {}
    every: dict[Stamp, int] = {}
    files: dict[str, list[tuple[str, Entry]]] = {item: [] for item in items}
    for path, entry in at(root).described():
        every[entry.stamp] = entry.size_bytes
        step, _, rest = path.partition("/")
        item = f"{step}/{rest.partition('/')[0]}"
        files.get(item, files.get(step, [])).append((path, entry))
    return sum(every.values()), {item: _sizes_of(found) for item, found in files.items()}


def _sizes_of(files: Sequence[tuple[str, Entry]]) -> dict[str, int]:
    """Sizes of an item's files, by the names of a row's attributes."""
    links = Counter(entry.stamp for _, entry in files)
    entries = {entry.stamp: entry for _, entry in files}.values()
    return {
        "new_bytes": sum(entry.size_bytes for path, entry in files if not folders.is_link(path)),
        "size_bytes": sum(entry.size_bytes for entry in entries),
        "unique_bytes": sum(x.size_bytes for x in entries if x.link_count <= links[x.stamp]),
    }


_METRICS = "metrics/metrics"


def note_of(step_directory: AnyPath) -> tuple[datetime | None, dict[str, float]]:
    """Read Orbax's note of a step; one that is missing or damaged tells nothing and hurts nothing.

    Returns:
        Time of the commit, or of the beginning where there is none; None if no note tells. And the
        numbers that the caller gave with the save, by name.
    """
    found = _json(step_directory, marks.STEP_METADATA)
    nanoseconds = found.get("commit_timestamp_nsecs") or found.get("init_timestamp_nsecs")
    saved_at = None
    if isinstance(nanoseconds, int) and 0 < nanoseconds < 1 << 62:
        saved_at = datetime.fromtimestamp(nanoseconds / 1e9, UTC)
    metrics = found.get("metrics") or _json(step_directory, _METRICS)
    return saved_at, _numbers(metrics)


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
