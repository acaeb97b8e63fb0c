"""Copies of a checkpoint root, or of some of its steps with all that they build on.

Reads manifests, and no array: a copy has the bytes of its original, sound or not. Hard links stay
hard links, and every file is read back. A step is copied under a name that Orbax takes for
temporary, and renamed last.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from adacheck_jax.errors import AdaCheckError, IntegrityError, StepDeletedError
from adacheck_jax.store.steps import deletion, identity, manifest_file, marks, roots
from adacheck_jax.store.storage.location import at
from adacheck_jax.tools.steps import InputError, deleted, resolved, steps_under, undeleted

COPIED, THERE, REFUSED, DELETED = "copied", "there", "refused", "deleted meanwhile"
_CHANGED = "it was changed meanwhile (compacted?): copy it again"
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
"""Errors of file systems without hard links, or with too many of one file."""

_Inode = tuple[int, int]
"""Device and inode: equal for hard links to one file."""


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step directory.

    Attributes:
        name: its name under the root.
        result: ``copied``, ``there`` if the copy has it already, ``refused``, or ``deleted
            meanwhile`` if it was before it could be copied.
        why: reason why it was refused; else None.
        is_added: True if it was not asked for, and another step builds on it.
        written_bytes: bytes of its files that are no hard links to files of the copy.
        plain_bytes: bytes that a copy of every link as a file of its own would have taken.
    """

    name: str
    result: str
    why: str | None = None
    is_added: bool = False
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
    planned, needs = _plan(root, names)
    is_new = not destination.exists()
    destination.mkdir(exist_ok=True)
    copier = _Copier(root, destination)
    for each in planned:  # of earlier calls, so that what they share is linked
        copier.expect(each.name)
    rows: dict[str, CopiedStep] = {}
    for each in planned:
        lost = sorted(n for n in needs.get(each.name, ()) if rows[n].result not in (COPIED, THERE))
        if lost and not each.result:
            why = f"it builds on {lost[0]}, which was not copied"
            rows[each.name] = replace(each, result=REFUSED, why=why)
        else:
            rows[each.name] = each if each.result else copier.copied(each)
    if is_new and not any(destination.iterdir()):
        destination.rmdir()
    done = [row for row in rows.values() if row.result == COPIED]
    others = (each.name for each in root.iterdir() if roots.TMP_SUFFIX not in each.name)
    return CopyReport(
        root=str(root),
        destination=str(destination),
        steps=tuple(rows.values()),
        written_bytes=sum(row.written_bytes for row in done),
        plain_bytes=sum(row.plain_bytes for row in done),
        not_copied=() if names else tuple(sorted({*others} - rows.keys())),
    )


def _local(text: str) -> Path:
    if "://" in text:
        raise InputError(
            f"{text}: expected a local path, found a URL: in a bucket nothing is linked. Copy it "
            "with the bucket's own tools."
        )
    return Path(os.path.abspath(text))


def _asked(sources: Sequence[str]) -> tuple[Path, list[str]]:
    """The root that paths name, and the step directories; none of these for all."""
    paths = [_local(text) for text in sources]
    traces = (marks.STEP_METADATA, manifest_file.DIRECTORY, roots.TREE_METADATA)
    found = {p.parent if any((p / each).exists() for each in traces) else p for p in paths}
    if len(found) > 1:
        shown = ", ".join(sorted(map(str, found)))
        raise InputError(f"expected steps of one root, found {shown}. Copy one after another.")
    root = found.pop()
    for path in paths:
        if not path.exists():
            known = ", ".join(sorted(_step_names(path.parent)))
            raise InputError(
                f"{path}: expected a checkpoint root or a step in one, found nothing there."
                + (f" Steps there: {known}." if known else "")
            )
    try:
        steps_under(root)
    except InputError:
        if roots.place_of(root, in_step=False).step is not None and deletion.is_deleted(root):
            raise deleted(root) from None  # it is a step
        raise
    return root, [] if root in paths else list(dict.fromkeys(path.name for path in paths))


def _step_names(root: Path) -> set[str]:
    """Names of step directories, of any kind; none if a path is no directory."""
    if not root.is_dir():
        return set()
    others = (path for paths in roots.stock_steps(root).values() for path in paths)
    return {_name(root, each) for each in (*roots.items_of(root), *others)}


def _name(root: Path, item: object) -> str:
    """Name of the step directory of an item."""
    return Path(str(item)).relative_to(root).parts[0]


def _destination(target: str, root: Path) -> Path:
    path = _local(target)
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: expected a directory or nothing, found a file.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    place, top = path.resolve(), root.resolve()
    if place == top or top in place.parents or place in top.parents:
        raise InputError(
            f"{path}: expected a place apart from the checkpoint root {root}. Give another path."
        )
    return path


def _plan(root: Path, names: Sequence[str]) -> tuple[list[CopiedStep], dict[str, set[str]]]:
    """Step directories in the order of their numbers, and the names that each builds on.

    The result of one that can be copied is empty.
    """
    rows: dict[str, CopiedStep] = {}
    needs: dict[str, set[str]] = {}
    for step, lineage in resolved(steps_under(root)):
        name = _name(root, step.directory)
        rows.setdefault(name, CopiedStep(name, ""))
        if isinstance(lineage, StepDeletedError):
            rows[name] = CopiedStep(name, DELETED)
        elif isinstance(lineage, AdaCheckError):
            rows[name] = CopiedStep(name, REFUSED, _one_line(lineage))
        else:
            holders = {_name(root, each.holder) for each in lineage.entries}
            needs.setdefault(name, set()).update(holders - {name})
    for places in roots.stock_steps(root).values():
        name = _name(root, places[0])
        rows[name] = CopiedStep(name, REFUSED, "stock Orbax saved it: copy it with cp -r")
    for name in names:
        if name not in rows:
            is_deleted = deletion.is_deleted(root / name)
            found = CopiedStep(name, REFUSED, "found no committed step there")
            rows[name] = CopiedStep(name, DELETED) if is_deleted else found
    chosen, waiting = set[str](), [*(names or rows)]
    while waiting:
        chosen.add(name := waiting.pop())
        waiting += needs.get(name, set()) - chosen
    numbers = {name: roots.place_of(root / name, in_step=False).step or 0 for name in chosen}
    ordered = sorted(chosen, key=lambda name: (numbers[name], name))
    return [replace(rows[n], is_added=bool(names) and n not in names) for n in ordered], needs


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Copier:
    """Copies step directories; files with several links by the inode of the original.

    Args:
        root: the root to copy from.
        destination: the root to copy to.
    """

    def __init__(self, root: Path, destination: Path) -> None:
        self._root, self._destination = root, destination
        self._copies: dict[_Inode, Path] = {}
        """Copies that are in their places."""
        self._likely: dict[_Inode, Path] = {}
        """Files of copies of an earlier call, not yet compared with the original."""

    def expect(self, name: str) -> None:
        """Note the files of a step that was copied before."""
        if self._is_there(name):
            for path in _files(self._root / name):
                status, other = path.stat(), self._destination / path.relative_to(self._root)
                if status.st_nlink > 1 and other.is_file():
                    self._likely.setdefault(_inode(status), other)

    def copied(self, row: CopiedStep) -> CopiedStep:
        """Copy one step, if nothing speaks against it."""
        source, target = self._root / row.name, self._destination / row.name
        if self._is_there(row.name):
            return replace(row, result=THERE)
        if os.path.lexists(target):
            why = "the destination has another step of this name"
            return replace(row, result=REFUSED, why=why)
        try:
            with undeleted(source):
                written, plain = self._copy(source, target)
        except StepDeletedError:
            return replace(row, result=DELETED)
        except FileNotFoundError:
            return replace(row, result=REFUSED, why=_CHANGED)
        except (AdaCheckError, OSError) as error:
            return replace(row, result=REFUSED, why=_one_line(error))
        return replace(row, result=COPIED, written_bytes=written, plain_bytes=plain)

    def _is_there(self, name: str) -> bool:
        """True if the copy's step has the manifests of the original."""
        found = _manifests(self._root / name)
        return bool(found) and found == _manifests(self._destination / name)

    def _copy(self, source: Path, target: Path) -> tuple[int, int]:
        """Copy a directory, or nothing; the bytes of its files that were written, and of all."""
        at(source).check_plain()
        before = identity.of_directory(source)
        work = target.with_name(f"{target.name}{roots.TMP_SUFFIX}-{uuid.uuid4().hex}")
        made: dict[_Inode, Path] = {}
        written = plain = 0
        try:
            for folder, _, _ in os.walk(source):
                (work / Path(folder).relative_to(source)).mkdir()
            for path in _files(source):
                status, copy_path = path.stat(), work / path.relative_to(source)
                plain += status.st_size
                other = self._copy_of(path, status, made)
                if other is not None and _is_linked(other, copy_path):
                    continue
                _copy_file(path, copy_path)
                written += status.st_size
                if status.st_nlink > 1:
                    made[_inode(status)] = copy_path
            at(work).sync(deep=True)
            if identity.of_directory(source) != before:
                raise IntegrityError(_CHANGED)
            work.rename(target)  # only a whole copy has the step's name
            at(target.parent).sync()
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._copies |= {key: target / each.relative_to(work) for key, each in made.items()}
        return written, plain

    def _copy_of(self, path: Path, status: os.stat_result, made: dict[_Inode, Path]) -> Path | None:
        """A copy of a file that has several links."""
        if status.st_nlink == 1:
            return None
        key = _inode(status)
        likely = self._likely.pop(key, None)
        if likely is not None and _digest(likely) == _digest(path):
            self._copies.setdefault(key, likely)
        return made.get(key) or self._copies.get(key)


def _manifests(step: Path) -> dict[str, bytes]:
    """Manifests in a step directory's items, by path below it; none if it is being deleted."""
    try:
        places = [step, *(each for each in step.iterdir() if each.is_dir())]
        paths = [each / manifest_file.FILE for each in places]
        return {str(x.relative_to(step)): x.read_bytes() for x in paths if x.is_file()}
    except FileNotFoundError:
        return {}


def _inode(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _files(folder: Path) -> Iterable[Path]:
    """Files below a directory, in order."""
    return sorted(Path(top) / name for top, _, names in os.walk(folder) for name in names)


def _is_linked(source: Path, target: Path) -> bool:
    """True if a hard link could be made."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:  # somebody deleted the copy
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, make it durable, and read it back.

    Raises:
        IntegrityError: what is read back is not what was copied.
    """
    shutil.copy2(source, target)
    with target.open("r+b") as written:
        os.fsync(written.fileno())
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the page cache
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _digest(target) != _digest(source):
        raise IntegrityError(
            f"{target}: expected the bytes of {source}, found others. Look after the disk, and "
            "copy again."
        )


def _digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).digest()
