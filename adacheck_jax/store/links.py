"""Hard links that make a delta complete in itself: to every file of its lineage."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from adacheck_jax.errors import LineageError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import LINEAGE, Lineage, LineageStep
from adacheck_jax.store.steps.roots import TMP_SUFFIX

PROBE_PREFIX = ".adacheck-"
"""Beginning of the name of a directory that exists for a moment, to try a hard link in it."""

_TROUBLE = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Errors of a hard link that may pass; other errors come from file systems without hard links."""


def can_link(directory: Path) -> bool:
    """True if the file system of an existing directory has hard links.

    Raises:
        OSError: an error that may pass.
    """
    # A name that Orbax knows: an opening manager removes it if a crash left it behind.
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
    """Names of future links to every file of a step and to the files that are linked into it.

    Args:
        entry: a whole step in its own directory: just committed, or just restored.
    """
    # A step that is being deleted gives no names; linking to it will fail.
    with contextlib.suppress(FileNotFoundError):
        return frozenset(name for name, _ in _files_of(entry))
    return frozenset()


def link_ancestors(
    lineage: Lineage, item_directory: Path, expected: frozenset[str] = frozenset()
) -> None:
    """Hard-links every file of a lineage into the directory of the step that follows it.

    Args:
        lineage: the parent's lineage.
        item_directory: item directory of the new delta.
        expected: names from :func:`files_of` while the parent was whole.

    Raises:
        LineageError: the parent is being deleted.
        OSError: a link cannot be made.
    """
    made: set[str] = set()
    try:
        for entry in lineage.entries:
            if not entry.is_link:  # links are found in the directory that has them
                _link(_files_of(entry), os.fspath(item_directory / LINEAGE), made)
        # A deletion may have begun before the files were listed, and not be done yet.
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
    """Links files, and makes the directories of the links.

    Args:
        files: names of links and paths of files, from :func:`_files_of`.
        top: directory for the links.
        made: names of existing links; changed.
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
    """Files of a step in its own directory, and files that are linked into it.

    Yields:
        The name of a link to a file, and the file's path.

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
