"""Hard links that make a delta complete in itself: to every file of its lineage."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator

from adacheck_jax.errors import LineageError
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.lineage import LINEAGE, Lineage, LineageStep
from adacheck_jax.store.steps.roots import TMP_SUFFIX
from adacheck_jax.store.storage.location import AnyPath, Location, at

PROBE_PREFIX = ".adacheck-"
"""Beginning of the name of a directory that exists for a moment, to try a hard link in it."""


def can_link(directory: AnyPath) -> bool:
    """True if the file system of an existing directory has hard links.

    Raises:
        OSError: an error that may pass.
    """
    # A name that Orbax knows: an opening manager removes it if a crash left it behind.
    folder = at(directory) / f"{PROBE_PREFIX}{uuid.uuid4().hex}{TMP_SUFFIX}"
    probe = folder / "probe"
    try:
        probe.write(b"", if_absent=True)
        return folder.adopt({"link": probe.key})
    finally:
        folder.delete()


def files_of(entry: LineageStep) -> frozenset[str]:
    """Names of future links to every file of a step and to the files that are linked into it.

    Args:
        entry: a whole step in its own directory: just committed, or just restored.
    """
    try:
        return frozenset(name for name, _ in _files_of(entry))
    except FileNotFoundError:  # it is being deleted; linking to it will fail
        return frozenset()


def link_ancestors(
    lineage: Lineage, item_directory: AnyPath, expected: frozenset[str] = frozenset()
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
                _link(_files_of(entry), at(item_directory / LINEAGE), made)
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


def _link(files: Iterator[tuple[str, str]], top: Location, made: set[str]) -> None:
    """Links files.

    Args:
        files: names of links and keys of files, from :func:`_files_of`.
        top: directory for the links.
        made: names of existing links; changed.
    """
    new = {name: key for name, key in files if name not in made}
    if not top.adopt(new):
        raise OSError(errno.ENOTSUP, "hard links cannot be made any more", str(top))
    made.update(new)


def _files_of(entry: LineageStep) -> Iterator[tuple[str, str]]:
    """Files of a step in its own directory, and files that are linked into it.

    Yields:
        The name of a link to a file, and the file's key.

    Raises:
        FileNotFoundError: the step is being deleted.
    """
    assert not entry.is_link
    item, step = at(entry.holder), entry.manifest.step
    if isinstance(entry.manifest, BaseManifest):
        yield from _below(item, f"{step}/")
        return
    yield from _below(item / manifest_file.DIRECTORY, f"{step}.", deep=False)
    yield from _below(item / LINEAGE, "")


def _below(folder: Location, start: str, *, deep: bool = True) -> Iterator[tuple[str, str]]:
    # Keys, not locations: a save lists every file of its lineage.
    for key in folder.storage.list(folder.key, deep=deep):
        yield f"{start}{key.removeprefix(folder.key).lstrip('/')}", key
