"""Writes that are on the disk, and not only in the page cache, when a call returns."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
"""Concurrent syncs share one write of the file system's journal."""


def write(path: Path, data: bytes) -> None:
    """Writes a small file so that after a crash it is whole or absent.

    The names of new directories above it become durable by :func:`sync_tree`.
    """
    _replace(path, data, syncs=True)


def place(path: Path, data: bytes) -> None:
    """Writes a small file so that every reader finds all of it; nothing is made durable."""
    _replace(path, data, syncs=False)


def _replace(path: Path, data: bytes, *, syncs: bool) -> None:
    # Not the directory above: another writer may have removed it, and make it again.
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        if syncs:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def sync(path: Path | str) -> None:
    """Makes a file's bytes, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path | str]) -> None:
    """Makes many files or directories durable at once.

    Raises:
        OSError: from the file system.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(sync, paths):
            pass


def sync_tree(top: Path, *files: Path) -> None:
    """Makes the names of all files, hard links and directories below one durable.

    Args:
        top: a directory; its own name is not included.
        files: files whose bytes are made durable too.

    Raises:
        OSError: from the file system.
    """
    sync_all([*files, *_directories(os.fspath(top))])


def _directories(top: str) -> Iterator[str]:
    yield top
    with os.scandir(top) as found:
        inner = [each.path for each in found if each.is_dir(follow_symlinks=False)]
    for each in inner:
        yield from _directories(each)
