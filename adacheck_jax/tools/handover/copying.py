"""Copies of a checkpoint root, or of some of its steps with all that they build on.

Reads manifests, and no array: a copy has the bytes of its original, sound or not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.store.steps import deletion, identity, lookup, manifest_file, marks, roots
from adacheck_jax.tools.handover.file_copies import Copied, FileCopies
from adacheck_jax.tools.steps import InputError, deleted, steps_under, undeleted

COPIED, THERE, REFUSED, DELETED = "copied", "there", "refused", "deleted meanwhile"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Errors after which no other step can be copied either."""


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step directory.

    Attributes:
        name: its name under the root.
        result: ``copied``, ``there`` if the copy has it already, ``refused``, or ``deleted
            meanwhile`` if it was before it could be copied.
        why: reason why it was refused; else None.
        is_added: True if it was not asked for, and another step builds on it.
        file_count: number of its files.
        link_count: number of those that are hard links to files of the copy.
        written_bytes: bytes of the other files.
        plain_bytes: bytes that a copy of every link as a file of its own would have taken.
    """

    name: str
    result: str
    why: str | None = None
    is_added: bool = False
    file_count: int = 0
    link_count: int = 0
    written_bytes: int = 0
    plain_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The output of ``adacheck cp``.

    Attributes:
        root: the checkpoint root.
        destination: root of the copy.
        steps: step directories, in the order in which they were copied.
        written_bytes: bytes that were written.
        plain_bytes: bytes that it would have been with every link as a file of its own.
        not_copied: names of other files and directories under the root, if all of it was copied.
    """

    root: str
    destination: str
    steps: tuple[CopiedStep, ...]
    written_bytes: int
    plain_bytes: int
    not_copied: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A step directory to copy.

    Attributes:
        name: its name under the root.
        needs: names of the step directories that it builds on.
        problem: reason why it is refused; empty if it is not.
        is_added: as in :class:`CopiedStep`.
        is_deleted: True if it was deleted meanwhile.
    """

    name: str
    needs: frozenset[str]
    problem: str
    is_added: bool = False
    is_deleted: bool = False


def copy(sources: Sequence[str], target: str) -> CopyReport:
    """Copy a root, or some of its steps, into another root; hard links stay hard links.

    Each step is copied under a temporary name, and read back. A step that is refused, or cannot be
    copied, is told in its row, and the others are copied.

    Args:
        sources: path of a root, or paths of step directories under one root.
        target: path of the other root; it may exist and hold other steps.

    Raises:
        InputError: a path is not there, or the target lies in the root.
    """
    root, names = _asked(sources)
    destination = _destination(target, root)
    planned = _plan(root, names)
    is_new = not destination.exists()
    destination.mkdir(exist_ok=True)
    copies, rows = FileCopies(), []
    for each in planned:  # of earlier calls, so that what they share is linked
        if (destination / each.name).is_dir() and _is_same(root, destination, each.name):
            copies.expect(root / each.name, destination / each.name)
    lost: dict[str, str] = {}
    for each in planned:
        row = _copied(each, root, destination, copies, lost)
        if row.result in (REFUSED, DELETED):
            lost[each.name] = row.why or row.result
        rows.append(row)
    if is_new and not any(destination.iterdir()):
        destination.rmdir()
    done = [row for row in rows if row.result == COPIED]
    return CopyReport(
        root=str(root),
        destination=str(destination),
        steps=tuple(rows),
        written_bytes=sum(row.written_bytes for row in done),
        plain_bytes=sum(row.plain_bytes for row in done),
        not_copied=() if names else _others(root, planned),
    )


def _asked(sources: Sequence[str]) -> tuple[Path, list[str]]:
    """The root that paths name, and the step directories; none of these for all."""
    paths = []
    for text in sources:
        if "://" in text:
            raise InputError(
                f"{text}: expected a local path, found a URL: in a bucket nothing is linked. Copy "
                "it with the bucket's own tools."
            )
        paths.append(Path(os.path.abspath(text)))
    found = {path.parent if _is_step(path) else path for path in paths}
    if len(found) > 1:
        shown = ", ".join(sorted(map(str, found)))
        raise InputError(f"expected steps of one root, found {shown}. Copy one after another.")
    root = found.pop()
    for path in paths:
        if not path.exists():
            known = ", ".join(sorted(each.name for each in step_directories(path.parent)))
            raise InputError(
                f"{path}: expected a checkpoint root or a step in one, found nothing there."
                + (f" Steps there: {known}." if known else "")
            )
    _check_root(root)
    whole = any(path == root for path in paths)
    return root, [] if whole else list(dict.fromkeys(path.name for path in paths))


def _check_root(path: Path) -> None:
    """Tell what is wrong with a root, which may be a step that was deleted meanwhile."""
    try:
        steps_under(path)
    except InputError:
        if roots.place_of_step(path).step is not None and deletion.is_deleted(path):
            raise deleted(path) from None
        raise


def _is_step(path: Path) -> bool:
    """True for the directory of a step, whoever saved it."""
    own = (marks.STEP_METADATA, manifest_file.DIRECTORY, roots.TREE_METADATA)
    return any((path / name).exists() for name in own)


def step_directories(path: Path) -> set[Path]:
    """Step directories under a path, of any kind; empty if it is no directory.

    Args:
        path: a directory that may be a root.
    """
    if not path.is_dir():
        return set()
    found = {path / _name(path, each) for each in roots.items_of(path)}
    return found | {path / _name(path, x) for xs in roots.stock_steps(path).values() for x in xs}


def _name(root: Path, item: object) -> str:
    """Name of the step directory of an item."""
    return Path(str(item)).relative_to(root).parts[0]


def _destination(target: str, root: Path) -> Path:
    if "://" in target:
        raise InputError(f"{target}: expected a local path, found a URL. Copy to a local path.")
    path = Path(os.path.abspath(target))
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: expected a directory or nothing, found a file.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    place, top = path.parent.resolve() / path.name, root.resolve()
    place = path.resolve() if path.exists() else place
    if place == top or top in place.parents or place in top.parents:
        raise InputError(
            f"{path}: expected a place apart from the checkpoint root {root}. Give another path."
        )
    return path


def _plan(root: Path, names: Sequence[str]) -> list[_Planned]:
    """Step directories in the order of their numbers, and what these build on."""
    every: dict[str, _Planned] = {}
    numbers: dict[str, int] = {}
    for step in steps_under(root):
        name = _name(root, step.directory)
        numbers[name] = max(step.step, numbers.get(name, -1))
        needs, problem = frozenset[str](), "" if step.error is None else _first_line(step.error)
        if step.error is None:
            try:
                with undeleted(step.directory):
                    entries = lookup.resolve(step.directory).entries
            except StepDeletedError:
                every[name] = _Planned(name, frozenset(), "", is_deleted=True)
                continue
            needs = frozenset(_name(root, each.holder) for each in entries) - {name}
        before = every.get(name, _Planned(name, frozenset(), ""))
        every[name] = replace(before, needs=before.needs | needs, problem=before.problem or problem)
    for number, places in roots.stock_steps(root).items():
        name = _name(root, places[0])
        numbers[name] = number
        every[name] = _Planned(name, frozenset(), "stock Orbax saved it: copy it with cp -r")
    chosen = _with_needs(every, names) if names else set(every)
    missing = [name for name in names if name not in every]
    none = _Planned("", frozenset(), "found no committed step there")
    planned = [replace(none, name=n, is_deleted=deletion.is_deleted(root / n)) for n in missing]
    for name in sorted(chosen - {*missing}, key=lambda each: (numbers[each], each)):
        is_added = bool(names) and name not in names
        planned.append(replace(every[name], is_added=is_added))
    return planned


def _with_needs(every: dict[str, _Planned], names: Iterable[str]) -> set[str]:
    chosen: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in chosen:
            chosen.add(name)
            waiting += every[name].needs if name in every else ()
    return chosen


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _copied(
    each: _Planned, root: Path, destination: Path, copies: FileCopies, lost: dict[str, str]
) -> CopiedStep:
    """Copy one step, if nothing speaks against it."""

    def row(result: str, why: str | None, found: Copied | None = None) -> CopiedStep:
        found = found or Copied()
        counts = (found.file_count, found.link_count, found.written_bytes, found.plain_bytes)
        return CopiedStep(each.name, result, why, each.is_added, *counts)

    if each.is_deleted:
        return row(DELETED, None)
    if each.problem:
        return row(REFUSED, each.problem)
    if needed := sorted(each.needs & lost.keys()):
        return row(REFUSED, f"it builds on {needed[0]}, which was not copied")
    if full := next((why for why in lost.values() if why.startswith("no room")), None):
        return row(REFUSED, full)
    source, target = root / each.name, destination / each.name
    if os.path.lexists(target):
        if _is_same(root, destination, each.name):
            return row(THERE, None)
        return row(REFUSED, "the destination has another step of this name")
    before = identity.of_directory(source)
    try:
        with undeleted(source):
            found = copies.copy_directory(source, target)
    except StepDeletedError:
        return row(DELETED, None)
    except AdaCheckError as error:
        return row(REFUSED, _first_line(error))
    except OSError as error:
        start = "no room: " if error.errno in _FULL else ""
        return row(REFUSED, f"{start}{error.strerror} ({error.filename or target})")
    if identity.of_directory(source) != before or not _is_same(root, destination, each.name):
        copies.discard(target)
        if deletion.is_deleted(source):
            return row(DELETED, None)
        return row(REFUSED, "it was changed meanwhile (compacted?): copy it again")
    return row(COPIED, None, found)


def _is_same(root: Path, destination: Path, name: str) -> bool:
    """True if the copy's step has the manifests of the original."""
    found = _manifests(root / name)
    return bool(found) and found == _manifests(destination / name)


def _manifests(step: Path) -> dict[str, bytes]:
    """Manifests in a step directory's items, by path below it; none if it is being deleted."""
    try:
        places = [step, *(each for each in step.iterdir() if each.is_dir())]
        paths = [each / manifest_file.FILE for each in places]
        return {str(x.relative_to(step)): x.read_bytes() for x in paths if x.is_file()}
    except FileNotFoundError:
        return {}


def _others(root: Path, planned: Iterable[_Planned]) -> tuple[str, ...]:
    """Names under a root that are no steps, without what interrupted saves left."""
    names = {each.name for each in planned}
    return tuple(
        sorted(
            each.name
            for each in root.iterdir()
            if each.name not in names and roots.TMP_SUFFIX not in each.name
        )
    )
