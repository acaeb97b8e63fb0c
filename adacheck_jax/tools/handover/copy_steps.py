"""Copies of step directories from one root into another: what they have in common everywhere.

A killed copy goes on where it was; what it left is no step to anybody.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rich.filesize import decimal

from adacheck_jax.errors import AdaCheckError, IntegrityError, StepDeletedError, StorageError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import lookup, manifest_file, marks
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.roots import PROBE_PREFIX, TMP_SUFFIX
from adacheck_jax.store.storage.interface import Entry, NotPlainError, Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.handover.copy_files import files_of
from adacheck_jax.tools.steps import Progress, undeleted

COPIED, THERE, REFUSED, DELETED = "copied", "there", "refused", "deleted meanwhile"
THREADS = 4
"""Files in memory at a time: whole ones, where a store is read or written."""
ANOTHER = "the destination has another step of this name"
LACKS = "it builds on step {}, which the destination lacks"
_CHANGED = "it was changed meanwhile (compacted?): copy it again"
_REMEMBERED = 8
"""Number of lineages that are not read again: a step may have several items."""
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
        is_added: True if it was not asked for, and another step builds on it.
        written_bytes: bytes of its files that were written: no links, and nothing that was there.
        found_bytes: bytes that an interrupted copy had written.
        plain_bytes: bytes that a copy of every link as a file of its own would have taken.
    """

    name: str
    result: str
    why: str | None = None
    is_added: bool = False
    written_bytes: int = 0
    found_bytes: int = 0
    plain_bytes: int = 0


class Meter:
    """Tells how far a copy is, and how fast.

    Args:
        progress: callback.
        files: all files that may be copied.
    """

    def __init__(self, progress: Progress, files: Iterable[Entry]) -> None:
        self._progress, self._lock = progress, threading.Lock()
        once = {each.stamp or n: each for n, each in enumerate(files)}  # links share their stamp
        self._total = sum(map(_weight, once.values()))
        self._done = self._bytes = 0
        self._begun_s = time.monotonic()

    def skip(self, files: Iterable[Entry]) -> None:
        """Notes files that need not be copied."""
        self._done += sum(map(_weight, files))

    def tell(self, name: str, entry: Entry, written_bytes: int) -> None:
        """Notes a file of a step that is in its place, and the bytes of it that were written."""
        with self._lock:
            self._done += _weight(entry)
            self._bytes += written_bytes
            rate = int(self._bytes / max(self.seconds, 1e-3))
            told = f"copying {name}: {decimal(self._bytes)}, {decimal(rate)}/s"
            self._progress(min(self._done, self._total), self._total, told)

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.monotonic() - self._begun_s


def _weight(entry: Entry) -> int:
    """Bytes of a file; 1 in a store, which does not tell them."""
    return entry.size_bytes or 1


class Copier:
    """Copies step directories of one root into another.

    Args:
        root: the root to copy from.
        destination: the root to copy to; neither lies in the other.
        meter: is told of each file.
    """

    def __init__(self, root: Location, destination: Location, meter: Meter) -> None:
        self._root, self._destination, self._meter = root, destination, meter
        self._seen = destination.listed()  # by which no look at what earlier calls left costs
        self._names = {*self._seen.folders()}
        """Step directories in the copy, whole or not."""
        self._known: list[Lineage] = []
        """Lineages in the copy that were looked at last."""

    def copied(self, row: CopiedStep, lineages: Lineages) -> CopiedStep:
        """Copies one step, if nothing speaks against it.

        Args:
            row: the step.
            lineages: those of its deltas.

        Raises:
            OSError: a store does not answer any more.
        """
        source = self._root / row.name
        turn = self._destination / f"{PROBE_PREFIX}{row.name}.copy{TMP_SUFFIX}"
        try:
            with undeleted(source), turn.lock():
                source.check_plain()
                files = files_of(source)
                if self._has(row.name, files):
                    self._meter.skip(files.values())
                    return replace(row, result=THERE)
                if not manifests_of(source, files):
                    raise FileNotFoundError(errno.ENOENT, "no manifest", str(source))
                done = self._copy(row, lineages, files)
                self._names.add(row.name)
                return replace(done, result=COPIED)
        except StepDeletedError:
            return replace(row, result=DELETED)
        except FileNotFoundError:
            return replace(row, result=REFUSED, why=_CHANGED)
        except (AdaCheckError, OSError) as error:
            if is_of_store(error):
                raise
            return replace(row, result=REFUSED, why=" ".join(str(error).split()))

    def _copy(self, row: CopiedStep, lineages: Lineages, files: Mapping[str, Entry]) -> CopiedStep:
        """Copies a step, or nothing of it that counts as a step."""
        raise NotImplementedError

    def _has(self, name: str, files: Mapping[str, Entry]) -> bool:
        """True if the copy's step has the manifests of the original, whose files are given."""
        found, copy = manifests_of(self._root / name, files), self._seen / name
        return (
            bool(found)
            and found == manifests_of(copy, files_of(copy))
            and (copy.on_file_system or (copy / marks.COMMIT_MARK).exists)
        )

    def _there(self, place: Location, delta: DeltaManifest) -> Lineage | None:
        """The lineage of a delta's parent at a place in the copy; None if it is not there."""
        try:
            found = lookup.follow(self._known, place)
        except StorageError:
            raise
        except AdaCheckError:
            return None
        self._known = [found, *self._known[: _REMEMBERED - 1]]
        return found if found.manifest.saved_checksum == delta.parent.checksum else None

    def _check_unchanged(
        self, name: str, before: Mapping[str, Entry], manifests: Mapping[str, bytes]
    ) -> None:
        source = self._root / name
        found = files_of(source)
        if _stamps(found) != _stamps(before) or manifests_of(source, found) != manifests:
            raise IntegrityError(_CHANGED)


def is_of_store(error: Exception) -> bool:
    """True for an answer of an object store, or for none: the other steps would wait for it too."""
    return isinstance(error, OSError) and error.errno == errno.EREMOTEIO


def name_of(root: Location, item: AnyPath) -> str:
    """Name of the step directory of an item."""
    return at(item).below(root).partition("/")[0]


def manifests_of(step: Location, paths: Iterable[str]) -> dict[str, bytes]:
    """Manifests of a step's items, of the paths below it; without those that go meanwhile."""
    found = {}
    for path in paths:
        if manifest_file.FILE in (path, path.partition("/")[2]):
            with contextlib.suppress(FileNotFoundError, NotPlainError):
                found[path] = (step / path).read()
    return found


def deltas_of(lineage: Lineage) -> list[DeltaManifest]:
    """Manifests of the deltas of a lineage, newest first."""
    return [delta for delta, _ in reversed(lineage.saves)]


def _stamps(files: Mapping[str, Entry]) -> dict[str, Stamp]:
    return {path: entry.stamp for path, entry in files.items()}
