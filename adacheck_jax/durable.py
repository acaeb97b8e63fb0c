"""What is on the disk, and not only in the page cache, when a call returns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 8
"""Syncs that come together cost the file system one write of its journal, not one each."""


def write(path: Path, data: bytes) -> None:
    """Writes a small file so that after a crash it is whole or absent.

    The names of new directories above it are left to :func:`sync_directories`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Makes a file's bytes, or a directory's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directories(top: Path) -> None:
    """Makes the names of all files, hard links and directories below one durable.

    Args:
        top: a directory; its own name is not included.

    Raises:
        OSError: from the file system.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(sync, _directories(top)):
            pass


def _directories(top: Path) -> Iterator[Path]:
    yield top
    with os.scandir(top) as found:
        below = [Path(each.path) for each in found if each.is_dir(follow_symlinks=False)]
    for each in below:
        yield from _directories(each)
