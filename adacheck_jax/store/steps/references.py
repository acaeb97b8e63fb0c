"""References: relative paths from a step to the one that it builds on, as manifests hold them."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath

from adacheck_jax.store.storage.interface import NotPlainError
from adacheck_jax.store.storage.location import AnyPath, at


def reference(from_directory: AnyPath, to_directory: AnyPath) -> str | None:
    """Relative path from one step's item directory to another's; None if they are not siblings."""
    relative = posixpath.relpath(str(to_directory), str(from_directory))
    return relative if _is_reference(relative) else None


def referred(directory: AnyPath, relative: str) -> AnyPath:
    """The directory that a reference names, without a look at it."""
    names = _names(relative)
    for _ in names:  # as many as steps up
        directory = directory.parent
    for name in names:
        directory = directory / name
    return directory


def found(directory: AnyPath, relative: str) -> AnyPath | None:
    """The directory that a reference names, if it is one and there is something.

    Args:
        directory: item directory of the step with the reference.
        relative: text from a manifest, which need not be a reference.

    Raises:
        FormatError: the directory, its step, or something in it is a symbolic link.
    """
    if not _is_reference(relative):
        return None
    path = referred(directory.resolve(), relative)
    for each in (path.parent, path)[-len(_names(relative)) :]:
        if each.resolve() != each:
            raise NotPlainError(str(each), "a symbolic link")
    if not at(path).is_folder:
        return None
    at(path).check_plain()
    return path


def _names(relative: str) -> list[str]:
    return [name for name in PurePosixPath(relative).parts if name != ".."]


def _is_reference(relative: str) -> bool:
    """True if a path names a sibling (``../other``) or a sibling's item (``../../5/state``)."""
    parts = PurePosixPath(relative).parts
    count = len(_names(relative))
    ups = len(parts) - count
    return ups == count <= 2 and parts[:ups] == ("..",) * ups and ups > 0
