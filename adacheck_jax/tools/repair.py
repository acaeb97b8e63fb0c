"""Repair of a checkpoint root: steps that cannot be restored, and leftovers, are removed.

A step is removed only if it fails verification, an attempt to restore it failed, and no step that
can be restored builds on it. A step that this machine cannot judge stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adacheck_jax.errors import AdaCheckError, StorageError
from adacheck_jax.format import manifest_json
from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.steps.lineage import identity
from adacheck_jax.store.steps.roots import TMP_SUFFIX
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools import audit
from adacheck_jax.tools.audit import Leftover, Progress, StepReport, Thoroughness
from adacheck_jax.tools.recompute import try_to_restore
from adacheck_jax.tools.steps import InputError
from adacheck_jax.tools.verification import Verifier, unreadable_file, whole_part

_YOUNG_S = 60.0
"""A temporary directory that changed within this time may belong to a running save."""
_METRICS = "metrics"
"""Name of the item that Orbax's manager itself adds to a step."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One directory to remove.

    Attributes:
        path: path relative to the root.
        why: the reason why it is of no use.
        freed_bytes: bytes of its files that have no hard link elsewhere.
        identity: identity of the judged files; a directory with other files is not removed.
    """

    path: str
    why: str
    freed_bytes: int
    identity: str


@dataclass(frozen=True, slots=True)
class KeptDirectory:
    """A damaged or left-over directory that stays.

    Attributes:
        path: path relative to the root.
        why: the reason why it stays.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The output of ``adacheck repair``.

    Attributes:
        root: the checkpoint root.
        is_dry_run: True if nothing was removed.
        removals: directories that were removed, or would be.
        kept: damaged or left-over directories that stay.
        freed_bytes: bytes that all removals free.
        step_count: number of steps that are left.
    """

    root: str
    is_dry_run: bool
    removals: tuple[Removal, ...]
    kept: tuple[KeptDirectory, ...]
    freed_bytes: int
    step_count: int


def repair(
    root: Path,
    *,
    read_data: bool = False,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> RepairReport:
    """Remove steps that cannot be restored, and leftovers.

    Args:
        root: the directory given to the checkpoint manager.
        read_data: True to look for damage in every stored byte, not in the structure alone.
        dry_run: True to remove nothing.
        force: True to go on although a manager may be saving.
        progress: callback before each step is verified.

    Raises:
        InputError: there is no such root, or a manager may be saving into it.
    """
    root = root.resolve()
    report = audit.verify_root(root, thoroughness=Thoroughness(read_data), progress=progress)
    if not force:
        _check_quiet(root, report.leftovers)
    removals, kept = _plan(root, report.steps, report.leftovers)
    if not dry_run:
        removals, changed = _execute(root, removals)
        kept += changed
    left = report.steps
    gone = {each.path for each in removals}
    left = [s for s in left if not gone.intersection((s.item, str(Path(s.item).parent)))]
    freed_bytes = sum(each.freed_bytes for each in removals)
    return RepairReport(str(root), dry_run, tuple(removals), tuple(kept), freed_bytes, len(left))


def _check_quiet(root: Path, found: Iterable[Leftover]) -> None:
    for each in found:
        age_s = time.time() - _changed_s(root / each.path)
        if each.is_temporary and age_s < _YOUNG_S:
            raise InputError(
                f"{root / each.path}: expected no save under way, found a temporary directory that "
                f"changed {max(0, round(age_s))} seconds ago. Nothing was removed; stop the "
                "training run, wait a minute, or pass --force if nothing is saving."
            )


def _changed_s(directory: Path) -> float:
    """Time of the last change in a directory, in seconds since the epoch; 0 if it is gone."""
    return max((stat.st_mtime for stat in _stats(directory)), default=0.0)


def _stats(directory: Path) -> Iterator[os.stat_result]:
    """The file status of a directory and of all in it; symbolic links are not followed."""
    with contextlib.suppress(OSError):
        yield os.stat(directory, follow_symlinks=False)
    for path, names, files in os.walk(directory):
        for name in (*names, *files):
            with contextlib.suppress(OSError):
                yield os.stat(Path(path, name), follow_symlinks=False)


def _plan(
    root: Path, steps: Sequence[StepReport], found: Sequence[Leftover]
) -> tuple[list[Removal], list[KeptDirectory]]:
    lost: dict[Path, str] = {}
    kept: list[KeptDirectory] = []
    for step in steps:
        if not step.damage:
            continue
        is_lost, why = _judge(root, step)
        if is_lost:
            lost[root / step.item] = why
        else:
            kept.append(KeptDirectory(step.item, why))
    sound = [root / step.item for step in steps if root / step.item not in lost]
    for path, why in _alone(sound, lost).items():
        kept.append(KeptDirectory(str(path.relative_to(root)), why))
        del lost[path]
    needed = _needed(sound)
    for path in sorted(lost.keys() & needed.keys()):
        kept.append(KeptDirectory(str(path.relative_to(root)), f"{needed[path]} builds on it"))
        del lost[path]
    chosen: list[tuple[Path, str]] = []
    for each in found:
        if not each.is_temporary:
            continue
        if _is_inside(root, root / each.path):
            chosen.append((root / each.path, each.why))
        else:
            kept.append(KeptDirectory(each.path, "it is a symbolic link, which is not followed"))
    chosen += _widened(root, lost)
    links: dict[tuple[int, int], int] = {}
    removals = [
        Removal(str(path.relative_to(root)), why, _freed_bytes(path, links), identity(path))
        for path, why in chosen
    ]
    return removals, kept


def _judge(root: Path, step: StepReport) -> tuple[bool, str]:
    """The judgement of a damaged step: True if it is lost, and the reason."""
    directory = root / step.item
    if not _is_inside(root, directory):
        return False, "it lies behind a symbolic link, which is not followed"
    own = at(directory / manifest_file.FILE)
    for manifest in (own, *lineages.linked_manifests(directory)):
        found = _format(manifest)
        if found is not None and found != manifest_json.FORMAT_VERSION:
            return False, f"its format version is {found}: another release may read it"
    problem = unreadable_file(directory)
    if problem is not None:
        return False, f"it cannot be judged: {problem}"
    first = step.damage[0]
    try:
        lineage = lineages.resolve(directory)
    except StorageError as error:
        return False, f"it cannot be judged: {error}"
    except AdaCheckError:
        return True, f"{first.file}: {first.message}"
    can, why = try_to_restore(lineage)
    hindering = [each for each in step.damage if each.hinders is None]
    if can is False and hindering:
        return True, f"{hindering[0].leaf or hindering[0].file}: {hindering[0].message}"
    return False, why if can is not False else "replaying it on this machine is not exact"


def _format(manifest: Location) -> object:
    """The format version in a manifest; None without a readable manifest."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        body = json.loads(manifest.read())
        return body.get("format") if isinstance(body, dict) else None
    return None


def _needed(directories: Iterable[Path]) -> dict[Path, str]:
    """The directories that steps need, each with the name of such a step."""
    found = {}
    for directory in directories:
        try:
            lineage = lineages.resolve(directory)
        except AdaCheckError:
            continue
        for entry in lineage.entries:
            found.setdefault(entry.holder.resolve(), f"step {lineage.manifest.step}")
    return found


def _alone(sound: Iterable[Path], lost: Iterable[Path]) -> dict[Path, str]:
    """Lost steps whose directories alone hold earlier steps, each with a reason to keep it."""
    known: dict[tuple[AnyPath, str | None], set[int]] = {}
    for directory in sound:
        with contextlib.suppress(AdaCheckError):
            steps = lineages.resolve(directory).steps
            known.setdefault(roots.place_of(directory).line, set()).update(steps)
    found, verifier = {}, Verifier()
    for directory in lost:
        with contextlib.suppress(AdaCheckError):
            part = whole_part(lineages.held(directory), read_data=True, verifier=verifier)
            others = known.setdefault(roots.place_of(directory).line, set())
            steps = [] if part is None else [each for each in part.steps if each not in others]
            if steps:
                others.update(steps)
                shown = lineages.shown_steps(steps)
                found[directory] = f"it alone holds steps {shown}: RestoreArgs(step={steps[-1]})"
    return found


def _widened(root: Path, lost: dict[Path, str]) -> list[tuple[Path, str]]:
    """The directories to remove: a whole step if all its items are lost, else the lost items."""
    chosen = []
    for path, why in sorted(lost.items()):
        if path.parent == root:
            chosen.append((path, why))
            continue
        items = {each for each in path.parent.iterdir() if each.is_dir()}
        if items - {path.parent / _METRICS} <= lost.keys():
            chosen.append((path.parent, why))
        else:
            chosen.append((path, why))
    return list({path: (path, why) for path, why in reversed(chosen)}.values())[::-1]


def _freed_bytes(path: Path, links: dict[tuple[int, int], int]) -> int:
    """Bytes of files whose last link is in a directory; ``links`` counts links removed so far."""
    freed_bytes = 0
    for stat in _stats(path):
        key = (stat.st_dev, stat.st_ino)
        links[key] = links.get(key, 0) + 1
        if links[key] == stat.st_nlink:
            freed_bytes += stat.st_size
    return freed_bytes


def _is_inside(root: Path, path: Path) -> bool:
    """True if a path lies under the root and passes no symbolic link."""
    return path != root and path.is_relative_to(root) and path.resolve() == path


def _execute(root: Path, removals: Sequence[Removal]) -> tuple[list[Removal], list[KeptDirectory]]:
    """Remove the directories whose files are still the judged ones."""
    done, kept = [], []
    for each in removals:
        path = root / each.path
        if not _is_inside(root, path) or identity(path) != each.identity:
            kept.append(KeptDirectory(each.path, "it changed meanwhile"))
            continue
        if TMP_SUFFIX not in path.name:
            # Renamed first: even if this process ends midway, no manager takes it for a step.
            path = path.rename(path.with_name(f"{path.name}{TMP_SUFFIX}-{os.getpid()}"))
        shutil.rmtree(path)
        done.append(each)
    return done, kept
