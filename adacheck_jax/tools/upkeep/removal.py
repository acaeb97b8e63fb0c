"""Removal of step directories: only of the files that were judged, and never half seen."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import identity, lookup
from adacheck_jax.store.steps.marks import COMMIT_MARK
from adacheck_jax.store.steps.roots import TMP_SUFFIX
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at


@dataclass(frozen=True, slots=True)
class Removal:
    """One directory to remove.

    Attributes:
        path: path relative to the root.
        why: the reason why it goes.
        freed_bytes: bytes of its files that have no hard link elsewhere; 0 where the storage does
            not tell sizes.
        identity: identity of the judged files; a directory with other files is not removed.
    """

    path: str
    why: str
    freed_bytes: int
    identity: str


def planned(root: Location, chosen: Iterable[tuple[Location, str]]) -> list[Removal]:
    """Removals of some directories, each with the bytes that it frees after those before it.

    Args:
        root: the checkpoint root.
        chosen: directories, each with the reason why it goes.
    """
    links: dict[Stamp, int] = {}
    return [
        Removal(path.below(root), why, _freed_bytes(path, links), identity.of_directory(path))
        for path, why in chosen
    ]


def execute(root: Location, removal: Removal) -> bool:
    """Remove a directory; False if its files are not the judged ones any more, or it is gone.

    Args:
        root: the checkpoint root.
        removal: the removal.
    """
    path = root / removal.path
    if not is_plain(path) or identity.of_directory(path) != removal.identity:
        return False
    if TMP_SUFFIX not in path.name:  # ended midway, no manager takes the rest for a step
        name = f"{path.name}{TMP_SUFFIX}-{uuid.uuid4().hex}"
        try:
            is_renamed = path.move(path.with_name(name))
        except FileNotFoundError:
            return False
        if is_renamed:
            path = path.with_name(name)
        else:  # where nothing is renamed, a step counts by its mark
            (path / COMMIT_MARK).delete()
    while True:
        with contextlib.suppress(FileNotFoundError):  # a manager may be deleting the same files
            path.delete()
            return True


def is_plain(path: Location) -> bool:
    """True if no part of a path below the root, which is resolved, is a symbolic link."""
    return path.resolve() == path


def needed_by(directories: Iterable[AnyPath]) -> dict[Location, str]:
    """The directories that steps need, each with the name of such a step.

    Args:
        directories: item directories of steps; those that cannot be resolved need nothing.
    """
    found: dict[Location, str] = {}
    for directory in directories:
        with contextlib.suppress(AdaCheckError):
            lineage = lookup.resolve(directory)
            for entry in lineage.entries:
                found.setdefault(at(entry.holder).resolve(), f"step {lineage.manifest.step}")
    return found


def _freed_bytes(path: Location, links: dict[Stamp, int]) -> int:
    """Bytes of files whose last link is in a directory; ``links`` counts links removed so far."""
    freed_bytes = 0
    with contextlib.suppress(FileNotFoundError):
        for each in path.list():
            with contextlib.suppress(OSError):
                entry = each.stat()
                links[entry.stamp] = links.get(entry.stamp, 0) + 1
                if links[entry.stamp] == entry.link_count:
                    freed_bytes += entry.size_bytes
    return freed_bytes
