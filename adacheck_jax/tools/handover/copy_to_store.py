"""Copies of step directories into an object store, where nothing is linked or renamed.

What an earlier call left of a step is compared, and nobody's value is written over. What makes a
step exist is written last: its manifests, then Orbax's marks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from adacheck_jax.errors import LineageError, StorageError
from adacheck_jax.store import links
from adacheck_jax.store.steps import lookup, manifest_file, marks
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.interface import Entry
from adacheck_jax.store.storage.location import at
from adacheck_jax.tools.handover.copy_files import copy_file, digest, files_of
from adacheck_jax.tools.handover.copy_steps import (
    ANOTHER,
    LACKS,
    THREADS,
    CopiedStep,
    Copier,
    Lineages,
    deltas_of,
    manifests_of,
    name_of,
)

_HALF = f"{ANOTHER}, or a part of one, which adacheck repair --force removes"
_DATA, _MANIFEST, _MARK, _LAST = range(4)
"""Ranks of a step's files: data, manifests, Orbax's marks of items, and that of the step."""


class ToStore(Copier):
    """Copies into an object store.

    A delta refers to its ancestors there: of its links to them those are left out that lead to what
    the copy has as steps.
    """

    def _copy(self, row: CopiedStep, lineages: Lineages, files: Mapping[str, Entry]) -> CopiedStep:
        source, target = self._root / row.name, self._destination / row.name
        there = files_of(self._seen / row.name).keys()
        parents, left_out = self._left_out(lineages, files, there)
        wanted = {path: entry for path, entry in files.items() if not path.startswith(left_out)}
        manifests = manifests_of(source, files)
        made = _missing_marks(wanted, manifests)
        if there - wanted.keys() - made:
            raise StorageError(_HALF)

        def put(path: str) -> tuple[int, int]:
            """Writes a value, or compares what is there; bytes of either."""
            if path in made:
                text = f"Checkpoint commit was successful to {target}".encode()
                (target / path).write(text)
                return len(text), 0
            new_bytes = old_bytes = 0
            if path in there:
                old_bytes, expected = digest(source / path)
                if digest(target / path) != (old_bytes, expected):
                    raise StorageError(_HALF)
            else:
                new_bytes, _ = copy_file(source / path, target / path)
            self._meter.tell(row.name, wanted[path], new_bytes)
            return new_bytes, old_bytes

        written_bytes = found_bytes = 0
        ranks = {path: _rank(path, manifests) for path in (*wanted, *made)}
        with ThreadPoolExecutor(THREADS) as threads:
            for rank in (_DATA, _MANIFEST, _MARK, _LAST):
                if rank == _MANIFEST:
                    self._check_unchanged(row.name, files, manifests)
                if rank == _MARK:
                    for item, parent in parents.items():
                        links.check_ancestors(parent, None, self._destination / item)
                    lost = {path for path in ranks if ranks[path] < rank} - files_of(target).keys()
                    if lost:
                        raise StorageError(f"{target / min(lost)} was deleted meanwhile")
                paths = [path for path in ranks if ranks[path] == rank]
                for new, old in threads.map(put, paths):
                    written_bytes, found_bytes = written_bytes + new, found_bytes + old
        plain_bytes = sum(entry.size_bytes for entry in files.values())
        return replace(
            row,
            written_bytes=written_bytes,
            found_bytes=found_bytes,
            plain_bytes=max(plain_bytes, written_bytes + found_bytes),
        )

    def _left_out(
        self, lineages: Lineages, files: Iterable[str], there: Iterable[str]
    ) -> tuple[dict[str, Lineage], tuple[str, ...]]:
        """Steps in the copy that the items refer to, and beginnings of paths that are left out."""
        parents: dict[str, Lineage] = {}
        left_out: list[str] = []
        for item, lineage in lineages.items():
            parent, names = self._referred(item, lineage)
            linked = f"{item}/{LINEAGE}/".partition("/")[2]
            if parent is None and not any(path.startswith(linked) for path in files):
                raise LineageError(LACKS.format(deltas_of(lineage)[0].parent.step))
            starts = tuple(f"{linked}{name}" for name in names)
            if parent and not any(path.startswith(starts) for path in there):
                parents[item] = parent
                left_out += starts  # else an earlier call had to write them, and they stay
        return parents, tuple(left_out)

    def _referred(self, item: str, lineage: Lineage) -> tuple[Lineage | None, list[str]]:
        """The last ancestor that the copy has as a step.

        Returns:
            Its lineage in the copy, None if there is none; and beginnings of the names of links to
            it and to those before it.
        """
        deltas, names = deltas_of(lineage), [links.start_of(x) for x in lineage.entries[:-1]]
        for delta, count in zip(deltas, itertools.count(len(names), -1), strict=False):
            place = at(lookup.referred(self._destination / item, delta.parent.reference))
            is_likely = name_of(self._destination, place) in self._names
            if is_likely and (found := self._there(place, delta)) is not None:
                return found, names[:count] if count < len(names) else [""]
        return None, []


def _rank(path: str, manifests: Mapping[str, bytes]) -> int:
    """Place of a file in the order in which those of a step are written."""
    if path in manifests:
        return _MANIFEST
    in_item = path.partition("/")[2]
    is_mark = in_item == marks.COMMIT_MARK or marks.FINALIZED in (path, in_item)
    return _LAST if path == marks.COMMIT_MARK else _MARK if is_mark else _DATA


def _missing_marks(paths: Iterable[str], manifests: Mapping[str, bytes]) -> set[str]:
    """Paths of the marks of Orbax that a store needs, and a step lacks."""
    paths, items = {*paths}, {""}
    if manifest_file.FILE not in manifests:  # else the step is its only item
        items |= {f"{path.partition('/')[0]}/" for path in paths if "/" in path}
    return {f"{each}{marks.COMMIT_MARK}" for each in items} - paths
