"""Hard links that make a delta complete in itself: to every file of all that it builds on."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from adacheck_jax.errors import LineageError
from adacheck_jax.format import manifest_file
from adacheck_jax.format.lineage import LINEAGE, Lineage, LineageStep
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.format.roots import TMP_SUFFIX

PROBE_PREFIX = ".adacheck-"
"""Of a directory that exists for a moment, to see whether there are hard links."""

_TROUBLE = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Refusals of a hard link that pass; others are of file systems that have none."""


def can_link(directory: Path) -> bool:
    """Whether the file system of an existing directory has hard links.

    Raises:
        OSError: that cannot be told now.
    """
    # A name that Orbax knows, so that what a crash leaves behind is gone when a manager is opened.
    with tempfile.TemporaryDirectory(TMP_SUFFIX, PROBE_PREFIX, directory) as name:
        probe = Path(name) / "probe"
        probe.touch()
        try:
            os.link(probe, probe.with_name("link"))
        except OSError as error:
            if error.errno in _TROUBLE:
                raise
            return False
    return True


def files_of(entry: LineageStep) -> frozenset[str]:
    """Every file of a step, and of what is linked into it, as links to them will be named.

    Args:
        entry: a step in its own directory, and whole: just committed, or just restored.
    """
    # What is being deleted meanwhile is not there: whoever needs it will say so.
    with contextlib.suppress(FileNotFoundError):
        return frozenset(name for name, _ in _files_of(entry))
    return frozenset()


def link_ancestors(
    lineage: Lineage, item_directory: Path, expected: frozenset[str] = frozenset()
) -> None:
    """Hard-links every file of a lineage into the directory of the step that follows it.

    Args:
        lineage: of the parent.
        item_directory: of the new delta.
        expected: the parent's files while it was whole, as :func:`files_of` told them.

    Raises:
        LineageError: the parent was being deleted.
        OSError: a link cannot be made.
    """
    made: set[str] = set()
    try:
        for entry in lineage.entries:
            if not entry.is_link:  # those are found where they are linked into
                _link(_files_of(entry), os.fspath(item_directory / LINEAGE), made)
        # Whoever deletes a step may have begun before, and not be done yet.
        every = {f"{each.step}.{manifest_file.NAME}" for each, _ in lineage.saves}
        every |= expected | {f"{lineage.base.step}/{manifest_file.FILE}"}
        lost = min(every - made, default=None)
    except FileNotFoundError as error:
        lost = error.filename
    if lost is not None:
        parent = lineage.entries[-1]
        raise LineageError(
            f"{item_directory}: step {parent.manifest.step}, which this one builds on, was deleted "
            f"while this one was saved: {lost} is missing. This step is not saved, the next one "
            "will be a base. Keep the latest step (a preservation policy with LatestN(1)), or do "
            "not delete in the background."
        )


def _link(files: Iterator[tuple[str, str]], top: str, made: set[str]) -> None:
    """Links files, and makes the directories that they lie in.

    Args:
        files: as :func:`_files_of` tells them.
        top: where the links go.
        made: names of links that are there; added to.
    """
    folders = set[str]()
    for name, path in files:
        if name in made:
            continue
        folder = name.rpartition("/")[0]
        if folder not in folders:
            os.makedirs(f"{top}/{folder}", exist_ok=True)
            folders.add(folder)
        os.link(path, f"{top}/{name}", follow_symlinks=False)
        made.add(name)


def _files_of(entry: LineageStep) -> Iterator[tuple[str, str]]:
    """The files of a step in its own directory, and of what is linked into it.

    Yields:
        How a link to a file is named, and the file's path.

    Raises:
        FileNotFoundError: the step is being deleted.
    """
    assert not entry.is_link
    item, step = os.fspath(entry.holder), entry.manifest.step
    if isinstance(entry.manifest, BaseManifest):
        yield from _below(item, f"{step}/")
        return
    with os.scandir(f"{item}/{manifest_file.DIRECTORY}") as found:
        for each in found:
            if not each.is_dir(follow_symlinks=False):
                yield f"{step}.{each.name}", each.path
    if os.path.isdir(f"{item}/{LINEAGE}"):
        yield from _below(f"{item}/{LINEAGE}", "")


def _below(directory: str, prefix: str) -> Iterator[tuple[str, str]]:
    with os.scandir(directory) as found:
        for each in found:
            if each.is_dir(follow_symlinks=False):
                yield from _below(each.path, f"{prefix}{each.name}/")
            else:
                yield f"{prefix}{each.name}", each.path
