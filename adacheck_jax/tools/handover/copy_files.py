"""Copies of files between storages, each made durable, read back and compared."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

from adacheck_jax.errors import IntegrityError
from adacheck_jax.store.storage.interface import Entry
from adacheck_jax.store.storage.location import Location


def files_of(folder: Location) -> dict[str, Entry]:
    """Files below a folder by their paths, in order; a store tells nothing but the paths."""
    if folder.on_file_system:
        return dict(sorted(folder.described()))
    return {path: Entry(()) for path in sorted(each.below(folder) for each in folder.list())}


def copy_file(source: Location, target: Location) -> int:
    """Copies a file, makes it durable, and reads it back.

    Args:
        source: the file.
        target: its place: on a file system in a directory that exists, in a store without a value.

    Returns:
        Length in bytes.

    Raises:
        IntegrityError: what is read back is not what was copied.
    """
    if source.on_file_system and target.on_file_system:
        shutil.copy2(source.key, target.key)
        expected = digest(source)
    else:
        data = source.read()
        expected = len(data), xxhash.xxh3_128_hexdigest(data)
        if target.on_file_system:
            Path(target.key).write_bytes(data)
        else:
            target.write(data, if_absent=True)  # a value of somebody else's stays
        del data  # before it is read back: they are large, and several at a time
    if target.on_file_system:
        with open(target.key, "r+b") as written:
            os.fsync(written.fileno())
            if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the page cache
                os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if digest(target) != expected:
        raise IntegrityError(
            f"{target}: expected the bytes of {source}, found others. Look after the disk, and "
            "copy again."
        )
    return expected[0]


def digest(file: Location) -> tuple[int, str]:
    """Length of a file in bytes, and the digest of these."""
    if not file.on_file_system:
        data = file.read()
        return len(data), xxhash.xxh3_128_hexdigest(data)
    with open(file.key, "rb") as opened:
        found = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
        return opened.tell(), found


def make_folders(top: Location, names: Iterable[str] = ("",)) -> None:
    """Makes a directory on a file system, or some below it."""
    for each in names:
        os.makedirs(f"{top.key}/{each}", exist_ok=True)


def folders_of(step: Location, paths: Iterable[str]) -> set[str]:
    """Folders of files, by their paths; of a file system the empty ones, too."""
    found = {path.rpartition("/")[0] for path in paths}
    if step.on_file_system:
        found |= {each.removeprefix(step.key).lstrip("/") for each, *_ in os.walk(step.key)}
    return found
