"""The steps under a checkpoint root, with dates and sizes, from manifests and directories alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from adacheck_jax.format.manifest import BaseManifest, Manifest
from adacheck_jax.store.steps import folders, marks, roots
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.interface import Entry, Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.steps import Root, Steps, walked, why_no_step

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
        note: the reason why a foreign directory holds no step, else None.
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
    note: str | None = None


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


def summarize_root(root: Root, last: int | None = None) -> RootSummary:
    """List the steps under a checkpoint root, or so many of the last ones.

    Returns:
        Every step that :class:`~adacheck_jax.AdaCheckHandler` or stock Orbax saved, damaged ones
        included, and directories of other things with a step's name.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step.
    """
    steps = walked(root)
    top = at(steps.root)
    rows = [*(_row_of(step, top) for step in steps.saved), *_others(steps)]
    if not rows:
        raise steps.nothing()
    rows.sort(key=lambda row: (-1 if row.step is None else row.step, row.item))
    total, sizes = _sizes(top, [row.item for row in rows])
    shown = rows if last is None else rows[max(len(rows) - last, 0) :]
    return RootSummary(
        root=str(top),
        disk_bytes=total,
        step_count=len(rows),
        damaged_count=sum(row.error is not None for row in rows),
        steps=tuple(_dated(replace(row, **sizes.get(row.item, {})), top) for row in shown),
        stock_steps=tuple(x.step for x in rows if x.kind == STOCK and x.step is not None),
    )


def saved_at(row: StepSummary) -> datetime | None:
    """Time when a step was saved."""
    return None if row.saved_at is None else datetime.fromisoformat(row.saved_at)


def _row_of(step: Step, root: Location) -> StepSummary:
    manifest, item = step.manifest, at(step.directory).below(root)
    number = None if step.step < 0 else step.step
    error = None if step.error is None else " ".join(str(step.error).split())
    if manifest is None:
        return StepSummary(number, item, None, error=error)
    return StepSummary(
        step=number,
        item=item,
        kind=manifest.kind,
        update_count=sum(manifest.counts) if manifest.counts else None,
        parent=manifest.parent and manifest.parent.step,
        depth=None if step.lineage is None else step.lineage.delta_count,
        recorded=manifest.steps[:-1],
        checked=_checked(manifest),
        error=error,
    )


def _checked(manifest: Manifest) -> str | None:
    if isinstance(manifest, BaseManifest):
        return None
    kinds = dict.fromkeys(delta.checked or "not checked" for delta in manifest.deltas)
    return " + ".join(kinds)


def _others(steps: Steps) -> list[StepSummary]:
    """Directories with a step's name in which none of our steps lies."""
    root, stock = at(steps.root), steps.stock
    rows = [StepSummary(n, at(x).below(root), STOCK) for n, paths in stock.items() for x in paths]
    if not root.on_file_system:  # what else lies there may be a save that is under way
        return rows
    ours = {at(step.directory).below(root).partition("/")[0] for step in steps.saved}
    for name in root.folders():
        number = roots.place_of(root / name, in_step=False).step
        if not (number is None or name in ours or number in stock or roots.TMP_SUFFIX in name):
            rows.append(StepSummary(number, name, FOREIGN, note=why_no_step(root / name)))
    return rows


def _dated(row: StepSummary, root: Location) -> StepSummary:
    when, metrics = note_of(root / row.item.partition("/")[0])
    text = None if when is None else when.isoformat(timespec="milliseconds")
    return replace(row, saved_at=text, metrics=metrics)


def _sizes(root: Location, items: Iterable[str]) -> tuple[int | None, dict[str, dict[str, int]]]:
    """Bytes of all files under a root, and sizes of each item, by its path relative to the root."""
    if not root.on_file_system:
        return None, {}
    every: dict[Stamp, int] = {}
    files: dict[str, list[tuple[str, Entry]]] = {item: [] for item in items}
    for path, entry in root.described():
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
    if not isinstance(metrics, dict):
        return saved_at, {}
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float)}
    return saved_at, {k: float(v) for k, v in numbers.items() if not isinstance(v, bool)}


def _json(directory: AnyPath, name: str) -> dict[str, Any]:
    try:
        found = json.loads(at(directory / name).read())
    except (OSError, ValueError):  # Orbax writes it for itself, and no step depends on it
        return {}
    return found if isinstance(found, dict) else {}
