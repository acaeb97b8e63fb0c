"""Claims: files of two handlers that save the same step at once are never mixed.

Orbax gives both handlers the same temporary directory: the later one removes the directory of the
earlier one, which goes on writing to its path. So a writer holds a lock beside that directory, and
leaves a claim in it; a writer that does not find its own claim afterwards has lost the step.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from adacheck_jax.errors import StorageError
from adacheck_jax.store.links import PROBE_PREFIX
from adacheck_jax.store.steps import manifest_file, roots

_PREFIX = ".claim."


def new_token() -> str:
    """Unique name of one handler's line of steps."""
    return uuid.uuid4().hex


@contextlib.contextmanager
def writing(directory: Path, process: int, token: str) -> Iterator[None]:
    """Claims a directory while it is written, and checks the claim afterwards.

    Waits for another handler that is writing the same step.

    Args:
        directory: the item's temporary directory.
        process: index of this process, which has a claim of its own.
        token: the handler's token.

    Raises:
        StorageError: another handler saves the same step.
    """
    with _turn(directory, process):
        _take(directory, process, token)
        try:
            yield
        except Exception as error:
            if not _is_held(directory, process, token):
                raise _lost(directory) from error
            with contextlib.suppress(OSError):  # the first error is the one to raise
                _claim(directory, process).unlink()
            raise
        if not _is_held(directory, process, token):
            raise _lost(directory)


@contextlib.contextmanager
def committing(directory: Path, process: int, token: str) -> Iterator[None]:
    """Holds a step's lock during the commit, and checks that the claim held while it was written.

    Args:
        directory: the item's temporary directory.
        process: index of the process that commits.
        token: the handler's token.

    Raises:
        StorageError: another handler saves, or has saved, the same step.
    """
    with _turn(directory, process):
        final = roots.committed_path(directory)
        if not _is_held(directory, process, token) or (final != directory and final.exists()):
            raise _lost(directory)
        descriptor = os.open(directory, os.O_RDONLY)  # keeps its inode from being reused
        try:
            yield
        except Exception as error:
            if not _is_same(directory, descriptor):
                raise _lost(directory) from error
            raise
        else:
            if not _is_same(directory, descriptor):  # its maker waits for the lock
                (directory / manifest_file.FILE).unlink(missing_ok=True)
                raise _lost(directory)
        finally:
            os.close(descriptor)


def remove(directory: Path) -> None:
    """Removes the claims of all processes; called before the manifest is written."""
    for path in (directory / manifest_file.DIRECTORY).glob(f"{_PREFIX}*"):
        path.unlink()


def _claim(directory: Path, process: int) -> Path:
    return directory / manifest_file.DIRECTORY / f"{_PREFIX}{process}"


def _take(directory: Path, process: int, token: str) -> None:
    if not (roots.is_written_in_place(directory) or directory.is_dir()):
        raise _lost(directory)
    path = _claim(directory, process)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(path, "x") as file:
            file.write(token)
    except FileExistsError:  # by an earlier attempt of this handler, or by another handler
        if not _is_held(directory, process, token):
            raise _lost(directory) from None


def _is_held(directory: Path, process: int, token: str) -> bool:
    try:
        return _claim(directory, process).read_text() == token
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_same(path: Path, descriptor: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    return False


def _lost(directory: Path) -> StorageError:
    return StorageError(
        f"{roots.committed_path(directory)}: expected one writer, found that another handler or "
        "process saves the same step into the same root at the same time, or has removed the "
        "directory that it is written into. What this one wrote of the step is not saved, and no "
        "file of it is in the other's. Give each training run a root of its own, and let one "
        "manager save each step; training may go on: the next save will be a base."
    )


@contextlib.contextmanager
def _turn(directory: Path, process: int) -> Iterator[None]:
    """Holds the lock of a step: a locked empty file, which a killed process leaves unlocked."""
    root, final = roots.place_of(directory).line[0], roots.committed_path(directory)
    name = ".".join(final.relative_to(root).parts)
    path = root / f"{PROBE_PREFIX}{name}.{process}{roots.TMP_SUFFIX}"
    descriptor = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _locked(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
        # On file systems without locks the claims alone decide.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_same(path, descriptor):
            return descriptor  # else the last holder of the lock has just removed the file
        os.close(descriptor)
