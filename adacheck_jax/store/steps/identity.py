"""Digests of the files of steps: equal if and only if they are still the same files."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.store.steps.folders import DELTA
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.location import AnyPath, Location, at


def of_directory(directory: AnyPath) -> str:
    """Digest of the names and inodes of all files under a directory; empty if there are none.

    Two directories with hard links to the same files under the same names have the same digest.
    """
    return _digest(at(directory).list(), at(directory).key)


def of_step(entry: LineageStep) -> str:
    """Digest of one step's files, as :func:`of_directory`, without its links to earlier steps."""
    if isinstance(entry.manifest, BaseManifest):
        return of_directory(entry.directory)
    start = at(entry.path(DELTA)).key.removesuffix(DELTA)
    files = at(entry.path(DELTA)).parent.list(deep=False)
    return _digest((each for each in files if each.key.startswith(start)), start)


def of_lineage(lineage: Lineage) -> tuple[str, ...]:
    """Digests of the files that a step is restored from, as of :func:`of_step`."""
    return (*map(of_step, lineage.entries), str(lineage.left_out))


def _digest(files: Iterable[Location], start: str) -> str:
    found = []
    with contextlib.suppress(OSError):  # a folder vanished while it was listed
        for each in files:
            with contextlib.suppress(OSError):
                found.append((each.key.removeprefix(start), *each.stamp))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""
