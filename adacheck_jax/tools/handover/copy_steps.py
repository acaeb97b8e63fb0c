"""Copies of step directories from one root into another.

On a file system a step is copied under a name that Orbax takes for temporary, and renamed last.
In an object store, where nothing is linked or renamed, what makes a step exist is written last: its
manifests, then Orbax's marks; nobody's value is written over.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    LineageError,
    StepDeletedError,
    StorageError,
)
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store import links
from adacheck_jax.store.steps import lookup, manifest_file, marks
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.roots import PROBE_PREFIX, TMP_SUFFIX
from adacheck_jax.store.storage.interface import Entry, NotPlainError, Stamp
from adacheck_jax.store.storage.location import Location, at
from adacheck_jax.tools.steps import undeleted

COPIED, THERE, REFUSED, DELETED = "copied", "there", "refused", "deleted meanwhile"
THREADS = 4
"""Files in memory at a time: whole ones, where a store is read or written."""
_ANOTHER = "the destination has another step of this name"
_HALF = f"{_ANOTHER}, or a part of one, which adacheck repair --force removes"
_REMEMBERED = 8
"""Number of lineages that are not read again: a step may have several items."""
_NO_LINKS = "it has a part of what it builds on, and the destination cannot link the rest"
_CHANGED = "it was changed meanwhile (a base now?): copy it again"
Lineages = Mapping[str, Lineage]
"""Lineages of a step's deltas, by the items' paths below the root."""


@dataclass(frozen=True, slots=True)
class CopiedStep:
    """A step directory.

    Attributes:
        name: its name under the root.
        result: ``copied``, ``there`` if the copy has it already, ``refused``, or ``deleted
            meanwhile`` if it was before it could be copied.
        why: reason why it was refused; else None.
        written_bytes: bytes of its files that were written: no links, and nothing that was there.
    """

    name: str
    result: str
    why: str | None = None
    written_bytes: int = 0


class _Original:
    """A step directory to copy, as it was found: its files, and manifests, by paths below it."""

    def __init__(self, place: Location, lineages: Lineages) -> None:
        place.check_plain()
        self.place, self.lineages, self.files = place, lineages, _files_of(place)
        self.manifests = _manifests_of(place, self.files)

    def check_unchanged(self) -> None:
        """Refuse what was copied of a step that is another one by now.

        Raises:
            IntegrityError: it has other files, or other manifests.
        """
        found = _Original(self.place, self.lineages)
        stamps = [{path: x.stamp for path, x in each.files.items()} for each in (found, self)]
        if stamps[0] != stamps[1] or found.manifests != self.manifests:
            raise IntegrityError(_CHANGED)


class Copier:
    """Copies step directories of one root into another.

    On a file system hard links stay hard links, and a delta from a store, which refers to other
    steps, gets links to all that it builds on, as a save makes them. In a store a delta refers to
    its ancestors: of its links to them those are left out that lead to what the copy has as steps.

    Args:
        root: the root to copy from.
        destination: the root to copy to; neither lies in the other.
    """

    def __init__(self, root: Location, destination: Location) -> None:
        self._root, self._destination = root, destination
        self._copies: dict[Stamp, Location] = {}
        """Copies that are in their places, of files with several links."""
        self._likely: dict[Stamp, Location] = {}
        """Files of copies of an earlier call, not yet compared with the original."""
        self._known: list[Lineage] = []
        """Lineages in the copy that were looked at last."""
        if destination.on_file_system:
            os.makedirs(destination.key, exist_ok=True)

    def copied(self, name: str, lineages: Lineages) -> CopiedStep:
        """Copies one step, if nothing speaks against it.

        Args:
            name: name of its directory.
            lineages: those of its deltas.

        Raises:
            OSError: a store does not answer any more.
        """
        source, target = self._root / name, self._destination / name
        turn = self._destination / f"{PROBE_PREFIX}{name}.copy{TMP_SUFFIX}"
        try:
            with undeleted(source), turn.lock():
                step = _Original(source, lineages)
                is_whole = target.on_file_system or (target / marks.COMMIT_MARK).exists
                if not step.manifests:
                    raise FileNotFoundError(errno.ENOENT, "no manifest", str(source))
                if is_whole and step.manifests == _manifests_of(target, step.manifests):
                    self._likely |= _linked(step.files, target)
                    return CopiedStep(name, THERE)
                copy = self._to_disk if target.on_file_system else self._to_store
                return CopiedStep(name, COPIED, written_bytes=copy(step, target))
        except StepDeletedError:
            return CopiedStep(name, DELETED)
        except FileNotFoundError:
            return CopiedStep(name, REFUSED, _CHANGED)
        except (AdaCheckError, OSError) as error:
            # An answer of a store, or none: the other steps would wait for it, too.
            if isinstance(error, OSError) and error.errno == errno.EREMOTEIO:
                raise
            return CopiedStep(name, REFUSED, " ".join(str(error).split()))

    def _to_disk(self, step: _Original, target: Location) -> int:
        if target.exists:
            raise StorageError(_ANOTHER)
        work = target.with_name(f"{target.name}{TMP_SUFFIX}-copy")
        work.delete()  # what a killed copy left
        try:
            _make_folders(work, step)
            written_bytes = self._fill(step.place, work, step.files)
            for item, lineage in () if self._root.on_file_system else step.lineages.items():
                self._link(work, item, lineage)
            work.sync(deep=True)
            step.check_unchanged()
            work.move(target)  # only a whole copy has the step's name
            target.parent.sync()
        except BaseException:
            work.delete()
            raise
        self._copies |= _linked(step.files, target)
        return written_bytes

    def _fill(self, source: Location, work: Location, files: Mapping[str, Entry]) -> int:
        """Copies or links all files into a directory; returns the bytes that were written."""
        linked: dict[str, Location] = {}
        made: dict[Stamp, Location] = {}
        for path, entry in files.items():
            if entry.link_count > 1:
                if other := made.get(entry.stamp) or self._copy_of(source / path, entry.stamp):
                    linked[path] = other
                else:
                    made[entry.stamp] = work / path

        def copy(path: str) -> int:
            return copy_file(source / path, work / path)

        with ThreadPoolExecutor(THREADS) as threads:
            written = sum(threads.map(copy, (path for path in files if path not in linked)))
        return written + sum(copy(n) for n, other in linked.items() if not _adopts(work, n, other))

    def _copy_of(self, file: Location, stamp: Stamp) -> Location | None:
        """A copy, in its place, of a file that has several links."""
        likely = self._likely.pop(stamp, None)
        if likely and likely.exists and _digest(likely) == _digest(file):
            self._copies.setdefault(stamp, likely)
        return self._copies.get(stamp)

    def _link(self, work: Location, item: str, lineage: Lineage) -> None:
        """Links all that a delta in a store refers to into its item directory."""
        own, directory = (self._root / item).key, work / item.partition("/")[2]
        parent = next((x for x in reversed(lineage.entries[:-1]) if at(x.holder).key != own), None)
        if parent is None:
            return
        if links.can_link(self._destination):
            place = self._destination / at(parent.holder).below(self._root)
            links.link_ancestors(lookup.resolve(place), directory)  # and all that lies before it
        elif (directory / LINEAGE).is_folder:
            raise LineageError(_NO_LINKS)

    def _to_store(self, step: _Original, target: Location) -> int:
        there = _files_of(target).keys()
        parents, left_out = self._left_out(step.lineages, step.files, there)
        wanted = [path for path in step.files if not path.startswith(left_out)]
        made = _missing_marks(wanted, step.manifests)
        if there - {*wanted} - made:
            raise StorageError(_HALF)

        def put(path: str) -> int:
            """Writes a value, or compares what is there; returns the bytes that were written."""
            if path in made:
                text = f"Checkpoint commit was successful to {target}".encode()
                (target / path).write(text)
                return len(text)
            if path not in there:
                return copy_file(step.place / path, target / path)
            if _digest(target / path) != _digest(step.place / path):
                raise StorageError(_HALF)
            return 0

        ranked: list[list[str]] = [[], [], []]  # data, manifests, and Orbax's marks of items
        for path in {*wanted, *made} - {marks.COMMIT_MARK}:
            is_mark = path.partition("/")[2] == marks.COMMIT_MARK or path.endswith(marks.FINALIZED)
            ranked[1 if path in step.manifests else 2 if is_mark else 0].append(path)
        with ThreadPoolExecutor(THREADS) as threads:
            written_bytes = sum(threads.map(put, ranked[0]))
            step.check_unchanged()
            written_bytes += sum(threads.map(put, ranked[1]))
            for item, parent in parents.items():
                links.check_ancestors(parent, None, self._destination / item)
            written_bytes += sum(threads.map(put, ranked[2]))
        return written_bytes + put(marks.COMMIT_MARK)  # that of the step comes last

    def _left_out(
        self, lineages: Lineages, files: Iterable[str], there: Iterable[str]
    ) -> tuple[dict[str, Lineage], tuple[str, ...]]:
        """Steps in the copy that the items refer to, and beginnings of the links to them."""
        parents: dict[str, Lineage] = {}
        left_out: list[str] = []
        for item, lineage in lineages.items():
            names = [links.start_of(each) for each in lineage.entries[:-1]]
            folder = f"{item}/{LINEAGE}/".partition("/")[2]
            for delta, _ in reversed(lineage.saves):
                if found := self._there(item, delta):
                    starts = [f"{folder}{name}" for name in names]
                    # Else an earlier call had to write them, and they stay.
                    if not any(path.startswith((*starts,)) for path in there):
                        parents[item] = found
                        left_out += starts
                    break
                names.pop()
            else:
                if not any(path.startswith(folder) for path in files):
                    lost = lineage.saves[-1][0].parent.step
                    raise LineageError(f"it builds on step {lost}, which the destination lacks")
        return parents, (*left_out,)

    def _there(self, item: str, delta: DeltaManifest) -> Lineage | None:
        """The lineage of a delta's parent in the copy, if it is a step there."""
        place = at(lookup.referred(self._destination / item, delta.parent.reference))
        try:
            found = lookup.follow(self._known, place)
        except StorageError:
            raise
        except AdaCheckError:
            return None
        self._known = [found, *self._known[: _REMEMBERED - 1]]
        return found if found.manifest.saved_checksum == delta.parent.checksum else None


def copy_file(source: Location, target: Location) -> int:
    """Copies a file, makes it durable, and reads it back.

    Args:
        source: the file.
        target: its place: on a file system in a directory that exists, in a store without a value.

    Returns:
        Length in bytes.

    Raises:
        IntegrityError: what is read back is not what was copied.
    """
    if source.on_file_system and target.on_file_system:
        shutil.copy2(source.key, target.key)
        expected = _digest(source)
    else:
        data = source.read()
        expected = len(data), xxhash.xxh3_128_hexdigest(data)
        if target.on_file_system:
            Path(target.key).write_bytes(data)
        else:
            target.write(data, if_absent=True)  # a value of somebody else's stays
        del data  # before it is read back: they are large, and several at a time
    if target.on_file_system:
        with open(target.key, "r+b") as written:
            os.fsync(written.fileno())
            if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the page cache
                os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if _digest(target) != expected:
        raise IntegrityError(
            f"{target}: expected the bytes of {source}, found others. Look after the disk, and "
            "copy again."
        )
    return expected[0]


def _digest(file: Location) -> tuple[int, str]:
    """Length of a file in bytes, and the digest of these."""
    if not file.on_file_system:
        data = file.read()
        return len(data), xxhash.xxh3_128_hexdigest(data)
    with open(file.key, "rb") as opened:
        found = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
        return opened.tell(), found


def _files_of(folder: Location) -> dict[str, Entry]:
    """Files below a folder by their paths, in order; a store tells nothing but the paths."""
    if folder.on_file_system:
        return dict(sorted(folder.described()))
    return {path: Entry(()) for path in sorted(each.below(folder) for each in folder.list())}


def _make_folders(work: Location, step: _Original) -> None:
    """Makes the folders of a step on a file system, from a file system the empty ones, too."""
    found = {path.rpartition("/")[0] for path in step.files}
    if step.place.on_file_system:
        top = step.place.key
        found |= {each.removeprefix(top).lstrip("/") for each, *_ in os.walk(top)}
    for each in {"", *found}:
        os.makedirs(f"{work.key}/{each}", exist_ok=True)


def _manifests_of(step: Location, paths: Iterable[str]) -> dict[str, bytes]:
    """Manifests of a step's items, of the paths below it; without those that go meanwhile."""
    found = {}
    for path in paths:
        if manifest_file.FILE in (path, path.partition("/")[2]):
            with contextlib.suppress(FileNotFoundError, NotPlainError):
                found[path] = (step / path).read()
    return found


def _linked(files: Mapping[str, Entry], copy: Location) -> dict[Stamp, Location]:
    """Copies of the files that have several links, by the stamps of these."""
    return {x.stamp: copy / path for path, x in files.items() if x.link_count > 1}


def _adopts(folder: Location, name: str, other: Location) -> bool:
    """True if a hard link to another file could be made."""
    try:
        return folder.adopt({name: other.key})
    except OSError as error:  # too many links, or somebody deleted the copy
        if error.errno not in (errno.EMLINK, errno.ENOENT):
            raise
        return False


def _missing_marks(paths: Iterable[str], manifests: Mapping[str, bytes]) -> set[str]:
    """Paths of the marks of Orbax that a store needs, and a step lacks."""
    paths, items = {*paths}, {""}
    if manifest_file.FILE not in manifests:  # else the step is its only item
        items |= {f"{path.partition('/')[0]}/" for path in paths if "/" in path}
    return {f"{each}{marks.COMMIT_MARK}" for each in items} - paths
