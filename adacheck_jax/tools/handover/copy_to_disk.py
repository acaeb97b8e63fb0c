"""Copies of step directories onto a file system, where hard links stay, or are made.

A step is copied under a name that Orbax takes for temporary, with a journal of its whole files, and
renamed last.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import xxhash

from adacheck_jax.errors import AdaCheckError, LineageError, StorageError
from adacheck_jax.store import links
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.interface import Entry, Stamp
from adacheck_jax.store.storage.location import Location, at
from adacheck_jax.tools.handover.copy_files import (
    WholeFiles,
    copy_file,
    digest,
    files_of,
    folders_of,
    make_folders,
)
from adacheck_jax.tools.handover.copy_steps import (
    ANOTHER,
    LACKS,
    THREADS,
    CopiedStep,
    Copier,
    Lineages,
    Meter,
    deltas_of,
    is_of_store,
    manifests_of,
)

_NO_LINKS = "it has a part of what it builds on, and the destination cannot link the rest"


class ToDisk(Copier):
    """Copies into a directory, where hard links stay hard links.

    A delta from a store, which refers to other steps, gets links to all that it builds on, as a
    save makes them.

    Args:
        root: the root to copy from.
        destination: the root to copy to; made if it is not there.
        meter: is told of each file.
        names: step directories that may be there from an earlier call, to link to their files.
    """

    def __init__(
        self, root: Location, destination: Location, meter: Meter, names: Iterable[str]
    ) -> None:
        super().__init__(root, destination, meter)
        make_folders(destination)
        self._makes_links = not root.on_file_system and links.can_link(destination)
        self._copies: dict[Stamp, Location] = {}
        """Copies that are in their places, of files with several links."""
        self._likely: dict[Stamp, Location] = {}
        """Files of copies of an earlier call, not yet compared with the original."""
        for name in names if root.on_file_system else ():
            files = files_of(root / name)
            if self._has(name, files):
                for path, entry in files.items():
                    copy = destination / name / path
                    if entry.link_count > 1 and copy.exists:
                        self._likely.setdefault(entry.stamp, copy)

    def _copy(self, row: CopiedStep, lineages: Lineages, files: Mapping[str, Entry]) -> CopiedStep:
        source, target = self._root / row.name, self._destination / row.name
        if target.exists:
            raise StorageError(ANOTHER)
        manifests = manifests_of(source, files)
        start = f"{row.name}{roots.TMP_SUFFIX}-copy-"
        work = target.with_name(f"{start}{xxhash.xxh3_64_hexdigest(repr(manifests).encode())}")
        for other in self._destination.folders():
            if other.startswith(start) and other != work.name:  # of a step that has changed since
                work.with_name(other).delete()
        try:
            done = self._filled(row, work, files)
            for item, lineage in lineages.items():
                self._link(work, item, lineage)
            work.sync(deep=True)
            self._check_unchanged(row.name, files, manifests)
            WholeFiles(work).remove()
            work.move(target)  # only a whole copy has the step's name
            target.parent.sync()
        except (AdaCheckError, OSError) as error:
            if not is_of_store(error):  # else the next call goes on
                work.delete()
            raise
        linked = [(path, entry) for path, entry in files.items() if entry.link_count > 1]
        self._copies |= {entry.stamp: target / path for path, entry in linked}
        return replace(done, plain_bytes=sum(x.size_bytes for _, x in target.described()))

    def _filled(self, row: CopiedStep, work: Location, files: Mapping[str, Entry]) -> CopiedStep:
        """Copies or links all files into a directory."""
        source, journal = self._root / row.name, WholeFiles(work)
        make_folders(work, folders_of(source, files))
        whole = journal.whole()
        made: dict[Stamp, Location] = {}
        linked: dict[str, Location] = {}
        waiting: list[str] = []
        for path, entry in files.items():
            has_links = entry.link_count > 1
            if path not in whole:
                other = self._copy_of(source / path, entry) if has_links else None
                if other := made.get(entry.stamp, other):
                    linked[path] = other
                    continue
                waiting.append(path)
            if has_links:
                made[entry.stamp] = work / path

        def copy(path: str) -> int:
            written_bytes, found = copy_file(source / path, work / path)
            journal.note(path, found)
            self._meter.tell(row.name, files[path], written_bytes)
            return written_bytes

        with ThreadPoolExecutor(THREADS) as threads:
            written = sum(threads.map(copy, waiting))
        written += sum(copy(n) for n, other in linked.items() if not _is_linked(work, n, other))
        self._meter.skip(files[path] for path in whole)
        return replace(row, written_bytes=written, found_bytes=sum(whole.values()))

    def _copy_of(self, file: Location, entry: Entry) -> Location | None:
        """A copy, in its place, of a file that has several links."""
        likely = self._likely.pop(entry.stamp, None)
        if likely is not None and digest(likely) == digest(file):
            self._copies.setdefault(entry.stamp, likely)
        return self._copies.get(entry.stamp)

    def _link(self, work: Location, item: str, lineage: Lineage) -> None:
        """Links all that a delta in a store refers to into its item directory."""
        own, inner = (self._root / item).key, item.partition("/")[2]
        directory = work / inner if inner else work
        for delta, entry in zip(deltas_of(lineage), reversed(lineage.entries[:-1]), strict=True):
            if at(entry.holder).key == own:
                continue
            if self._makes_links:
                place = self._destination / at(entry.holder).below(self._root)
                if (found := self._there(place, delta)) is None:
                    raise LineageError(LACKS.format(delta.parent.step))
                links.link_ancestors(found, directory)  # and all that lies before it
            elif (directory / LINEAGE).is_folder:
                raise LineageError(_NO_LINKS)
            return


def _is_linked(folder: Location, path: str, other: Location) -> bool:
    """True if a hard link to another file could be made."""
    try:
        return folder.adopt({path: other.key})
    except OSError as error:  # too many links, or somebody deleted the copy
        if error.errno not in (errno.EMLINK, errno.ENOENT):
            raise
        return False
