"""Export of a recorded step, or a published version, in a format of others.

What was written is read back, and compared with the fingerprints taken when the step was saved.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from adacheck_jax.adapter.stock import plain
from adacheck_jax.device import trees
from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.publish.root import VERSIONS
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.handover import formats, sources
from adacheck_jax.tools.handover.formats import ExportedLeaf, Format
from adacheck_jax.tools.handover.sources import Source
from adacheck_jax.tools.steps import InputError, refuse_inside


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The output of ``adacheck export``.

    Attributes:
        root: the checkpoint root.
        step: number of the step, or of the published version.
        item: path of the item directory that the step was read from, relative to the root; empty
            for a version.
        kind: ``base``, ``delta``, ``deferred`` for a step that was saved with a later one, or
            ``version``.
        replayed_count: number of updates that were replayed.
        format: ``orbax`` or ``safetensors``.
        destination: path of the export.
        params_only: True if the params alone were exported.
        leaf_count: number of leaves in the export; each was read back and compared.
        leaf_bytes: bytes of their elements.
        empty: leaf paths of arrays without elements, which Orbax does not store.
        files: size of each file in bytes, by its path below the destination.
    """

    root: str
    step: int
    item: str
    kind: str
    replayed_count: int
    format: str
    destination: str
    params_only: bool
    leaf_count: int
    leaf_bytes: int
    empty: tuple[str, ...]
    files: dict[str, int]


def export(
    root: str | AnyPath,
    number: int | None,
    target: str,
    wanted: Format = Format.SAFETENSORS,
    *,
    params_only: bool = True,
    item: str | None = None,
) -> ExportReport:
    """Write one recorded step, or published version, in another format, read it back and compare.

    Nothing may lie at the target yet; the root may be one of published weights.

    Raises:
        InputError: there is no such step, or nothing can be written there.
        MismatchError: the format cannot hold some leaves.
        AdaCheckError: the step is damaged, or cannot be restored exactly here. Whatever is raised,
            nothing is left at the destination.
    """
    root = located(root)
    path = free_place(target, root)
    if wanted is Format.SAFETENSORS:
        formats.check_safetensors()
    if (at(root) / VERSIONS).is_folder:
        opened = sources.version_source(root, number)
    else:
        opened = sources.step_source(root, number, item)
    with written_beside(path) as made:
        with opened as source:
            indices = source.params if params_only else range(len(source.leaves))
            if not indices:
                raise InputError(
                    f"{at(root) / source.item}: expected params, found a step without a Recorder "
                    "and no leaf under params. Export all leaves with --all."
                )
            leaves = formats.planned(source.leaves, indices, wanted)
            _write(made, source, leaves, wanted)
        _compare(_read_back(made, leaves, wanted), source.fingerprints, leaves, path)
        files = {name: each.size_bytes for name, each in sorted(at(made).described())}
    kept = {each.index for each in leaves}
    return ExportReport(
        root=str(root),
        step=source.number,
        item=source.item,
        kind=source.kind,
        replayed_count=source.replayed_count,
        format=str(wanted),
        destination=str(path),
        params_only=params_only,
        leaf_count=len(leaves),
        leaf_bytes=sum(each.leaf.nbytes for each in leaves),
        empty=tuple(source.leaves[i].path for i in indices if i not in kept),
        files=files,
    )


def _write(made: Path, source: Source, leaves: Sequence[ExportedLeaf], wanted: Format) -> None:
    if wanted is Format.SAFETENSORS:
        # Hugging Face's loaders want to be told a framework, whose name says nothing of the bytes.
        number = {"step" if source.item else "version": str(source.number)}
        formats.write_safetensors(made, leaves, source.read, {"format": "pt", **number})
        return
    described, _ = trees.flatten(source.tree)
    by_path = {each.leaf.path: each for each in leaves}

    def value(path: str) -> object:
        each = by_path[path]
        return plain.stored(source.read(each.index), each.leaf, described[path])

    plain.write(made, plain.tree_of(source.tree, by_path.keys(), value))


def _read_back(
    made: Path, leaves: Sequence[ExportedLeaf], wanted: Format
) -> Iterator[tuple[int, np.ndarray]]:
    if wanted is Format.SAFETENSORS:
        return formats.read_safetensors(made, leaves)
    found = plain.read(made)
    return ((each.index, found[each.leaf.path]) for each in leaves)


def _compare(
    found: Iterator[tuple[int, np.ndarray]],
    fingerprints: Sequence[int],
    leaves: Sequence[ExportedLeaf],
    path: Path,
) -> None:
    """Compare what was written with the fingerprints.

    Raises:
        IntegrityError: names the leaves that differ.
    """
    expected = {each.index: each.leaf for each in leaves}
    wrong, seen = [], 0
    for index, elements in found:
        leaf, seen = expected[index], seen + 1
        words = elements.astype(np.dtype(leaf.dtype), copy=False)
        if words.shape != leaf.shape or fingerprint_of(words) != fingerprints[index]:
            wrong.append(leaf.path)
        del elements, words  # or two leaves would be in memory at once
    if wrong or seen != len(leaves):
        raise IntegrityError(
            f"{path}: expected the saved bits in what was written, found others in "
            f"{len(wrong)} of {len(leaves)} leaves ({', '.join(wrong[:5])}). Nothing was kept; "
            "look after the disk, and export again."
        )


def free_place(text: str, root: AnyPath) -> Path:
    """The destination that a user names, if something can be written there.

    Raises:
        InputError: it exists, lies under the root, has no parent, or is a URL.
    """
    if "://" in text:
        raise InputError(
            f"{text}: expected a local path, found a URL. Export to a local path, and copy that."
        )
    path = Path(str(located(os.path.abspath(text))))
    if os.path.lexists(path):
        raise InputError(f"{path}: expected nothing there, found something. Give another path.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    refuse_inside(path, root)
    return path


@contextlib.contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """A path beside a destination to write to; it becomes the destination if nothing fails.

    Waits for another process that writes the same destination. What a killed one left is removed.

    Yields:
        A path of the same name in a directory of its own, which a failure takes with it.

    Raises:
        InputError: there is something at the destination when its turn comes, or at the end.
    """
    work = path.with_name(f".{path.name}.adacheck-export")
    with at(path.with_name(f"{work.name}-lock")).lock():
        _refuse_taken(path)
        if work.exists():  # of a process that is gone, since the lock is held
            shutil.rmtree(work)
        work.mkdir(mode=0o700)
        try:
            made = work / path.name
            yield made
            at(made).sync(*at(made).list(), deep=True)
            # Last: only a whole export has the name that was asked for.
            _refuse_taken(path)
            made.rename(path)
            at(path.parent).sync()
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise InputError(f"{path}: expected nothing there, found that something was put there.")
