"""The file system as a storage: a key is an absolute path."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

from adacheck_jax.format.one_process import OneProcess
from adacheck_jax.store.storage.interface import (
    Entry,
    Kind,
    NotPlainError,
    Stamp,
    refuse_misread,
)

_THREADS = 8
"""Concurrent syncs share one write of the file system's journal."""
_LINK = "a symbolic link"
_TROUBLE = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT, errno.EEXIST, errno.EMLINK),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Errors of a hard link that may pass; other errors come from file systems without hard links."""


class Posix:
    """Files and directories; see :class:`~adacheck_jax.store.storage.location.Location`."""

    is_file_system = True
    looks_cost = False
    context = None
    misread = r"[\\\0\ud800-\udfff]"  # to tensorstore a backslash is a slash, and all is UTF-8

    def shown(self, key: str) -> str:
        return key

    def check_answers(self, key: str) -> None:
        """Does nothing."""

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Reads bytes of a plain file in a plain directory."""
        if os.path.islink(parent := os.path.dirname(key)):
            raise NotPlainError(parent, _LINK)
        try:
            descriptor = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise NotPlainError(key, _LINK) from error
            raise
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise NotPlainError(key, "no file")
            end = status.st_size if stop is None else min(stop, status.st_size)
            if start:
                file.seek(start)
            return file.read(max(0, end - start))

    def write(
        self, key: str, data: bytes, *, if_absent: bool = False, replacing: Stamp | None = None
    ) -> Stamp:
        """Writes a file under another name and renames it; if it must be absent, in place."""
        if replacing is not None and (not self.kind(key) or self.stat(key).stamp != replacing):
            raise FileExistsError(errno.EEXIST, "expected another value", key)
        folder, name = os.path.split(key)
        path, mode = (key, "xb") if if_absent else (f"{folder}/.{name}.tmp", "wb")
        with _made(path, mode) as file:
            file.write(data)
            file.flush()
            stamp = _stamp(os.fstat(file.fileno()))
        if not if_absent:
            os.replace(path, key)
        return stamp

    def kind(self, key: str) -> Kind:
        try:
            return "folder" if stat.S_ISDIR(os.stat(key).st_mode) else "value"
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return ""
            raise

    def stat(self, key: str) -> Entry:
        """Describes a file by device, inode, size and time of change."""
        status = os.stat(key, follow_symlinks=False)
        return Entry(_stamp(status), status.st_size, status.st_nlink)

    def list(self, prefix: str, *, deep: bool = True) -> Iterator[str]:
        """Lists files, and links without following them."""
        return (each.path for each in _entries(prefix, deep=deep))

    def described(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        """Lists files; of those that are hard links to each other the first is looked at."""
        known: dict[int, Entry] = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for each in _entries(prefix):
                if each.inode() not in known:
                    try:
                        known[each.inode()] = self.stat(each.path)
                    except FileNotFoundError:
                        continue
                yield each.path, known[each.inode()]

    def listed(self, prefix: str, names: tuple[str, str] | None = None) -> Posix:
        return self

    def folders(self, prefix: str) -> list[str]:
        """Names of directories, and of links to directories."""
        try:
            with os.scandir(prefix) as found:
                return [each.name for each in found if each.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def check_plain(self, prefix: str) -> None:
        """Refuses symbolic links, pipes and devices anywhere below a directory."""
        try:
            for each in _entries(prefix):
                if not each.is_file(follow_symlinks=False):
                    kind = _LINK if each.is_symlink() else "a pipe or a device"
                    raise NotPlainError(each.path, kind)
        except NotPlainError:
            raise
        except OSError:
            return  # a folder is missing or being deleted, which reading it will report

    def delete(self, key: str) -> None:
        try:
            os.unlink(key)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            if not os.path.isdir(key):
                raise
            shutil.rmtree(key)

    def adopt(self, values: Mapping[str, str]) -> bool:
        """Makes hard links, and each of their directories once."""
        folders = set[str]()
        for key, source in values.items():
            folder = key.rpartition("/")[0]
            try:
                if folder not in folders:
                    os.makedirs(folder, exist_ok=True)
                    folders.add(folder)
                os.link(source, key, follow_symlinks=False)
            except OSError as error:
                if error.errno in _TROUBLE:
                    raise
                return False
        return True

    def rename(self, source: str, key: str) -> bool:
        os.rename(source, key)
        return True

    def changed_s(self, prefix: str) -> float:
        """The latest time of a directory and of all in it; a link is not followed."""
        every = (f"{path}/{x}" for path, *names in os.walk(prefix) for x in itertools.chain(*names))
        return max(map(_changed_s, itertools.chain([prefix], every)))

    def sync(self, *keys: str, deep: bool = False) -> None:
        every = [*keys]
        if deep:
            every += [path for key in keys for path, *_ in os.walk(key) if path != key]
        if len(every) == 1:
            _sync(every[0])
            return
        with ThreadPoolExecutor(_THREADS) as threads:
            for _ in threads.map(_sync, every):
                pass

    @contextlib.contextmanager
    def lock(self, key: str, *, waits: bool) -> Iterator[bool]:
        """Holds a locked empty file, which a killed process leaves unlocked."""
        descriptor, process = _locked(key, waits=waits), OneProcess("a lock")
        if descriptor is None:
            yield False
            return
        process.enter()
        try:
            yield True
        finally:
            try:
                if not process.is_elsewhere:  # a forked child that ends has a copy of this
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(key)
            finally:
                os.close(descriptor)  # lets go of the lock, whatever became of the file

    @contextlib.contextmanager
    def watched(self, prefix: str) -> Iterator[Callable[[], bool]]:
        """Compares the inode of a directory, which is kept open so that no other can get it."""
        descriptor = os.open(prefix, os.O_RDONLY)
        try:
            yield lambda: _is_same(prefix, descriptor)
        finally:
            os.close(descriptor)

    def physical(self, key: str) -> str:
        return os.path.realpath(key)

    def spec(self, prefix: str) -> dict[str, Any]:
        """Tensorstore's specification of files below a directory, or beside each other."""
        folder, _, rest = prefix.rpartition("/")
        path = f"{os.path.realpath(folder or '/')}/{rest}"
        refuse_misread(path, self.misread)  # a link may lead anywhere
        return {"driver": "file", "path": path}


def _stamp(status: os.stat_result) -> Stamp:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _made(path: str, mode: str) -> IO[bytes]:
    """Opens a file to be written, and makes its directory."""
    try:
        return open(path, mode)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, mode)


def _entries(top: str, *, deep: bool = True) -> Iterator[os.DirEntry[str]]:
    """All below a directory that are no directories; a folder's error comes after all others."""
    waiting, failed = [top], None
    while waiting:
        folder = waiting.pop()
        try:
            found = os.scandir(folder)
        except OSError as error:
            is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
            failed = failed if folder == top and is_absent else error
            continue
        with found:
            for each in found:
                if not each.is_dir(follow_symlinks=False):
                    yield each
                elif deep:
                    waiting.append(each.path)
    if failed is not None:
        raise failed


def _changed_s(path: str) -> float:
    """Time of the last change of a file or a directory itself; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return os.stat(path, follow_symlinks=False).st_mtime
    return 0.0


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _locked(path: str, *, waits: bool) -> int | None:
    """The locked file; None if another one has it and this one does not wait."""
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:  # on file systems without locks nobody waits
            pass
        if _is_same(path, descriptor):
            return descriptor  # else the last holder of the lock has just removed the file
        os.close(descriptor)


def _is_same(path: str, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False
