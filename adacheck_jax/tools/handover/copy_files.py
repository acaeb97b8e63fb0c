"""Copies of files between storages, each made durable, read back and compared."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path

import xxhash

from adacheck_jax.errors import IntegrityError
from adacheck_jax.store.steps.roots import PROBE_PREFIX
from adacheck_jax.store.storage.interface import Entry
from adacheck_jax.store.storage.location import Location

_JOURNAL = f"{PROBE_PREFIX}copied"


def files_of(folder: Location) -> dict[str, Entry]:
    """Files below a folder by their paths, in order; a store tells nothing but the paths."""
    if folder.on_file_system:
        return dict(sorted(folder.described()))
    return {path: Entry(()) for path in sorted(each.below(folder) for each in folder.list())}


def copy_file(source: Location, target: Location) -> tuple[int, str]:
    """Copies a file, makes it durable, and reads it back.

    Args:
        source: the file.
        target: its place: on a file system in a directory that exists, in a store without a value.

    Returns:
        Length in bytes, and digest, as of :func:`digest`.

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
    return expected


def digest(file: Location) -> tuple[int, str]:
    """Length of a file in bytes, and the digest of these."""
    if not file.on_file_system:
        data = file.read()
        return len(data), xxhash.xxh3_128_hexdigest(data)
    with open(file.key, "rb") as opened:
        found = hashlib.file_digest(opened, xxhash.xxh3_128).hexdigest()
        return opened.tell(), found


def folders_of(step: Location, paths: Iterable[str]) -> set[str]:
    """Folders of files, by their paths; of a file system the empty ones, too."""
    found = {path.rpartition("/")[0] for path in paths}
    if step.on_file_system:
        found |= {each.removeprefix(step.key).lstrip("/") for each, *_ in os.walk(step.key)}
    return found


def make_folders(top: Location, names: Iterable[str] = ("",)) -> None:
    """Makes a directory on a file system, or some below it."""
    for each in names:
        os.makedirs(f"{top.key}/{each}", exist_ok=True)


class WholeFiles:
    """Digests of the files in a directory that were copied whole, for who goes on after a kill.

    Args:
        folder: the directory, on a file system.
    """

    def __init__(self, folder: Location) -> None:
        self._file, self._folder, self._lock = folder / _JOURNAL, folder, threading.Lock()

    def whole(self) -> dict[str, int]:
        """Bytes of the files that are as they were copied, by path; removes all others."""
        noted: dict[str, str] = {}
        if self._file.exists:
            for line in self._file.read().decode(errors="replace").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # cut off by a kill
                    noted.update([json.loads(line)])
        found: dict[str, int] = {}
        for path, entry in files_of(self._folder).items():
            if path in noted and digest(self._folder / path)[1] == noted[path]:
                found[path] = entry.size_bytes
            elif path != _JOURNAL:
                (self._folder / path).delete()
        self._file.write("".join(_line(path, noted[path]) for path in found).encode())
        return found

    def note(self, path: str, file_digest: str) -> None:
        """Notes a file that was copied."""
        with self._lock, open(self._file.key, "a") as opened:
            opened.write(_line(path, file_digest))

    def remove(self) -> None:
        """Removes the notes."""
        self._file.delete()


def _line(path: str, file_digest: str) -> str:
    return f"{json.dumps([path, file_digest])}\n"
