"""Repair of a checkpoint root: steps that cannot be restored, and leftovers, are removed.

A step is removed only if it fails verification, an attempt to restore it failed, and no step that
can be restored builds on it. A step that this machine cannot judge stays.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from etils import epath

from adacheck_jax.errors import AdaCheckError, StorageError, first_line
from adacheck_jax.format import manifest_json
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps import identity, lookup, manifest_file, roots
from adacheck_jax.store.steps.lineage import Lineage, shown_steps
from adacheck_jax.store.steps.marks import COMMIT_MARK
from adacheck_jax.store.steps.roots import TMP_SUFFIX
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools import audit
from adacheck_jax.tools.audit import Leftover, StepReport, ToldDirectory
from adacheck_jax.tools.recompute import reason_to_keep, restorable_part
from adacheck_jax.tools.steps import InputError, Progress, quiet
from adacheck_jax.tools.verification import unreadable_file

_YOUNG_S = 60.0
"""A temporary directory that changed within this time may belong to a running save."""
_METRICS = "metrics"
"""Name of the item that Orbax's manager itself adds to a step."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The output of ``adacheck repair``.

    Attributes:
        root: the checkpoint root.
        is_dry_run: True if nothing was removed.
        removals: directories that were removed, or would be.
        kept: damaged or left-over directories that stay.
        cleared: paths of the steps that lost what an interrupted compaction left in them, or would.
        step_count: number of steps that are left.
        not_looked_at: parts that were not checked, described for people.
    """

    root: str
    is_dry_run: bool
    removals: tuple[ToldDirectory, ...]
    kept: tuple[ToldDirectory, ...]
    cleared: tuple[str, ...]
    step_count: int
    not_looked_at: tuple[str, ...] = ()


def repair(
    root: AnyPath,
    *,
    read_data: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = quiet,
) -> RepairReport:
    """Remove steps that cannot be restored, and leftovers.

    With ``force`` it goes on although a manager may be saving.

    Raises:
        InputError: there is no such root, Orbax cannot read it, or a manager may be saving into it.
    """
    root = at(root).resolve()
    report = audit.verify_root(root, read_data=read_data, progress=progress)
    _check_readable(root)
    if not (force or dry_run):
        _check_quiet(root, report.leftovers)
    plan, kept = _plan(root, report.steps, report.leftovers)
    removals = [*plan]
    if not dry_run:
        removals = [each for each, judged in plan.items() if _is_removed(root / each.path, judged)]
        changed = [each.path for each in plan if each not in removals]
        kept += [ToldDirectory(path, "it changed meanwhile") for path in changed]
    gone = {each.path for each in removals}
    left = [x for x in report.steps if gone.isdisjoint((x.item, x.item.rpartition("/")[0]))]
    halves = audit.half_compacted(root / step.item for step in left)
    for each in () if dry_run else halves:
        in_place.clear(each)
    return RepairReport(
        root=str(root),
        is_dry_run=dry_run,
        removals=tuple(removals),
        kept=tuple(kept),
        cleared=tuple(each.below(root) for each in halves),
        step_count=len(left),
        not_looked_at=report.not_looked_at,
    )


def _check_readable(root: Location) -> None:
    """Refuse a root that Orbax, which reads bases, does not find: every step would look lost."""
    try:
        problem = "" if epath.Path(str(root)).exists() else "it finds nothing there"
    except Exception as error:  # it knows no such paths, or lacks the package that reads them
        problem = f"{type(error).__name__}: {first_line(error)}"
    if problem:
        raise InputError(
            f"{root}: expected a checkpoint root that Orbax can read, found that it cannot "
            f"({problem}). Nothing was removed; install what Orbax needs there, or repair a copy."
        )


def _check_quiet(root: Location, found: Iterable[Leftover]) -> None:
    for each in found:
        if not each.is_temporary:
            continue
        changed_s = (root / each.path).changed_s()
        age_s = None if changed_s is None else time.time() - changed_s
        if age_s is None:
            shown = "a step without Orbax's mark, of which a store does not tell the age"
            remedy = "make sure that no training run saves here"
        elif age_s < _YOUNG_S:
            shown = f"a temporary directory that changed {max(0, round(age_s))} seconds ago"
            remedy = "stop the training run, and wait a minute"
        else:
            continue
        raise InputError(
            f"{root / each.path}: expected no save under way, found {shown}. Nothing was removed; "
            f"{remedy}, or pass --force if nothing is saving."
        )


def _plan(
    root: Location, steps: Sequence[StepReport], found: Sequence[Leftover]
) -> tuple[dict[ToldDirectory, str], list[ToldDirectory]]:
    """The directories to remove, with identities of the judged files; and those that stay."""
    lost: dict[Location, str] = {}
    kept: list[ToldDirectory] = []
    for step in steps:
        if not step.damage:
            continue
        is_lost, why = _judge(root, step)
        if is_lost:
            lost[root / step.item] = why
        else:
            kept.append(ToldDirectory(step.item, why))
    sound: list[Lineage] = []
    for directory in (root / step.item for step in steps):
        if directory not in lost:
            with contextlib.suppress(AdaCheckError):
                sound.append(lookup.resolve(directory))
    needed = _alone(sound, lost)
    for each in sound:
        for path in {at(entry.holder).resolve() for entry in each.entries} & lost.keys():
            needed.setdefault(path, f"step {each.manifest.step} builds on it")
    for path, why in needed.items():
        kept.append(ToldDirectory(path.below(root), why))
        del lost[path]
    temporary = [each for each in found if each.is_temporary]
    plain = [each for each in temporary if _is_plain(root / each.path)]
    why = "it is a symbolic link, which is not followed"
    kept += [ToldDirectory(each.path, why) for each in temporary if each not in plain]
    chosen = [*((root / each.path, each.why) for each in plain), *_widened(root, lost)]
    plan = {ToldDirectory(x.below(root), why): identity.of_directory(x) for x, why in chosen}
    return plan, kept


def _judge(root: Location, step: StepReport) -> tuple[bool, str]:
    """The judgement of a damaged step: True if it is lost, and the reason."""
    directory = root / step.item
    if not _is_plain(directory):
        return False, "it lies behind a symbolic link, which is not followed"
    own = at(directory / manifest_file.FILE)
    for manifest in (own, *lookup.linked_manifests(directory)):
        found = _format(manifest)
        if found is not None and found != manifest_json.FORMAT_VERSION:
            return False, f"its format version is {found}: another release may read it"
    problem = unreadable_file(directory)
    if problem is not None:
        return False, f"it cannot be judged: {problem}"
    first = step.damage[0]
    try:
        lineage = lookup.resolve(directory)
    except StorageError as error:
        return False, f"it cannot be judged: {error}"
    except AdaCheckError:
        return True, f"{first.file}: {first.message}"
    why = reason_to_keep(lineage)
    hindering = [each for each in step.damage if each.hinders is None]
    if hindering and not why:
        return True, f"{hindering[0].leaf or hindering[0].file}: {hindering[0].message}"
    return False, why or "replaying it on this machine is not exact"


def _format(manifest: Location) -> object:
    """The format version in a manifest; None without a readable manifest."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads(manifest.read())
        return body.get("format") if isinstance(body, dict) else None
    return None


def _alone(sound: Iterable[Lineage], lost: Iterable[Location]) -> dict[Location, str]:
    """Lost steps whose directories alone hold earlier steps, each with a reason to keep it."""
    known: dict[tuple[AnyPath, str | None], set[int]] = {}
    for each in sound:
        known.setdefault(roots.place_of(each.entries[-1].holder).line, set()).update(each.steps)
    found: dict[Location, str] = {}
    for directory in lost:
        with contextlib.suppress(AdaCheckError):
            part = restorable_part(lookup.held(directory))
            others = known.setdefault(roots.place_of(directory).line, set())
            steps = [] if part is None else [each for each in part.steps if each not in others]
            if steps:
                others.update(steps)
                shown = shown_steps(steps)
                found[directory] = f"it alone holds steps {shown}: RestoreArgs(step={steps[-1]})"
    return found


def _widened(root: Location, lost: dict[Location, str]) -> list[tuple[Location, str]]:
    """The directories to remove: a whole step if all its items are lost, else the lost items."""
    chosen: dict[Location, str] = {}
    for path, why in sorted(lost.items(), key=lambda each: each[0].key):
        items = {path.parent / name for name in path.parent.folders()} - {path.parent / _METRICS}
        is_whole = path.parent != root and items <= lost.keys()
        chosen.setdefault(path.parent if is_whole else path, why)
    return [*chosen.items()]


def _is_removed(path: Location, judged: str) -> bool:
    """Remove a directory; False if its files are not the judged ones any more, or it is gone."""
    if not _is_plain(path) or identity.of_directory(path) != judged:
        return False
    if TMP_SUFFIX not in path.name:  # ended midway, no manager takes the rest for a step
        name = f"{path.name}{TMP_SUFFIX}-{uuid.uuid4().hex}"
        try:
            is_renamed = path.move(path.with_name(name))
        except FileNotFoundError:
            return False
        if is_renamed:
            path = path.with_name(name)
        else:  # where nothing is renamed, a step counts by its mark
            (path / COMMIT_MARK).delete()
    while True:
        with contextlib.suppress(FileNotFoundError):  # a manager may be deleting the same files
            path.delete()
            return True


def _is_plain(path: Location) -> bool:
    """True if no part of a path below the root, which is resolved, is a symbolic link."""
    return path.resolve() == path
