"""Copies of a step's files: hard links stay hard links, and every copy is read back.

A step directory is copied under a name that Orbax takes for temporary, and renamed last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from adacheck_jax.errors import IntegrityError
from adacheck_jax.store.steps.roots import TMP_SUFFIX

_BLOCK_BYTES = 8 << 20
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}
"""Errors of file systems without hard links, or with too many of one file."""

Inode = tuple[int, int]
"""Device and inode: equal for hard links to one file."""


@dataclass(slots=True)
class Copied:
    """Files, links and bytes of one copied directory.

    Attributes:
        file_count: number of files.
        link_count: number of those that became hard links to a copy that was there.
        written_bytes: bytes of the others.
        plain_bytes: bytes that all would have taken as files of their own.
    """

    file_count: int = 0
    link_count: int = 0
    written_bytes: int = 0
    plain_bytes: int = 0


@dataclass(slots=True)
class FileCopies:
    """Copies of files that have several links, by the inode of the original.

    Attributes:
        known: copies that are in their places.
        likely: files that are in a copy of an earlier call, not yet compared with the original.
    """

    known: dict[Inode, Path] = field(default_factory=dict)
    likely: dict[Inode, Path] = field(default_factory=dict)

    def expect(self, source: Path, target: Path) -> None:
        """Note the files of a directory that was copied before.

        Args:
            source: the directory.
            target: its copy.
        """
        for path, status in _files(source):
            other = target / path.relative_to(source)
            if status.st_nlink > 1 and other.is_file() and other.stat().st_size == status.st_size:
                self.likely.setdefault(_inode(status), other)

    def copy_directory(self, source: Path, target: Path) -> Copied:
        """Copy a directory, or nothing.

        Args:
            source: the directory.
            target: path of the copy, where nothing is.

        Raises:
            OSError: a file cannot be read or written, or is no plain file.
            IntegrityError: a copy does not have the bytes that were read.
        """
        work = target.with_name(f"{target.name}{TMP_SUFFIX}-{uuid.uuid4().hex}")
        made: dict[Inode, Path] = {}
        found = Copied()
        try:
            work.mkdir()
            for folder, _, _ in os.walk(source):
                (work / Path(folder).relative_to(source)).mkdir(exist_ok=True)
            for path, status in _files(source):
                below = path.relative_to(source)
                self._copy(path, status, work / below, made, found)
            for folder, _, _ in os.walk(work):
                _sync(folder)
            if target.exists():
                raise FileExistsError(errno.EEXIST, "expected nothing there, found", str(target))
            work.rename(target)  # only a whole copy has the step's name
            _sync(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self.known |= {key: target / each.relative_to(work) for key, each in made.items()}
        return found

    def discard(self, target: Path) -> None:
        """Delete a copy again, and forget its files.

        Args:
            target: path of the copy.
        """
        for each in (self.known, self.likely):
            for key in [k for k, path in each.items() if path.is_relative_to(target)]:
                del each[key]
        shutil.rmtree(target)

    def _copy(
        self,
        path: Path,
        status: os.stat_result,
        target: Path,
        made: dict[Inode, Path],
        found: Copied,
    ) -> None:
        """Copy one file, or link it to a copy of the same file."""
        key = _inode(status)
        found.file_count += 1
        found.plain_bytes += status.st_size
        other = self._copy_of(path, key, made) if status.st_nlink > 1 else None
        if other is not None and _is_linked(other, target):
            found.link_count += 1
            return
        _copy_file(path, target)
        found.written_bytes += status.st_size
        if status.st_nlink > 1:
            made[key] = target

    def _copy_of(self, path: Path, key: Inode, made: dict[Inode, Path]) -> Path | None:
        """A copy of a file that has several links."""
        likely = self.likely.pop(key, None)
        if likely is not None and _digest(likely) == _digest(path):
            self.known.setdefault(key, likely)
        return made.get(key) or self.known.get(key)


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Plain files below a directory, in order, and their descriptions.

    Raises:
        OSError: something there is neither a file nor a directory.
    """
    for each in sorted(folder.iterdir()):
        status = each.lstat()
        if stat.S_ISDIR(status.st_mode):
            yield from _files(each)
        elif stat.S_ISREG(status.st_mode):
            yield each, status
        else:
            raise OSError(errno.ELOOP, "expected plain files and directories, found", str(each))


def _is_linked(source: Path, target: Path) -> bool:
    """True if a hard link could be made."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:  # somebody deleted the copy
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, make it durable, and read it back.

    Raises:
        IntegrityError: what is read back is not what was written.
    """
    digest = xxhash.xxh3_128()
    with source.open("rb") as read, target.open("xb") as written:
        while block := read.read(_BLOCK_BYTES):
            digest.update(block)
            written.write(block)
        written.flush()
        os.fsync(written.fileno())
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the page cache
            os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    shutil.copystat(source, target)
    if _digest(target) != digest.digest():
        raise IntegrityError(
            f"{target}: expected the bytes of {source}, found others. Look after the disk, and "
            "copy again."
        )


def _digest(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.digest()


def _sync(folder: str | Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems sync no directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
