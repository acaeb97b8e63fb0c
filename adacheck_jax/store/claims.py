"""Claims: files of two handlers that save the same step at once are never mixed.

Orbax gives both handlers the same temporary directory: the later one removes the directory of the
earlier one, which goes on writing to its path. So a writer holds a lock beside that directory, and
leaves a claim in it; a writer that does not find its own claim afterwards has lost the step.

An object store has no locks, but conditions. There the claim of the first process lies where the
manifest will: the manifest is written only in the place of that very claim, and no process writes
over a file of a delta.

A lock is a file's, so that it holds between processes too; the thread that writes or commits a step
holds that of the step, and takes no other meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator

from adacheck_jax.errors import StorageError
from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.steps.folders import BASE, DELTA, KEPT, LINEAGE, STILL
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at

_PREFIX = ".claim."


class TakenError(StorageError):
    """Another writer has taken the step: to write it again would take it from that one."""

    _is_refusal = False


def new_token() -> str:
    """Unique name of one handler's line of steps."""
    return uuid.uuid4().hex


@contextlib.contextmanager
def writing(directory: AnyPath, process: int, token: str) -> Iterator[Stamp | None]:
    """Claims a directory while it is written, and checks the claim afterwards.

    Waits for another handler that is writing the same step, and removes what an earlier attempt has
    left.

    Yields:
        In a store the identity of the claim that the manifest replaces; else None.

    Raises:
        StorageError: another handler saves the same step.
    """
    if not at(directory).on_file_system:
        stamp = None
        if process == 0:  # an earlier attempt of the same handler had the same claim
            claim = json.dumps({"claim": token}).encode()
            try:
                stamp = at(directory / manifest_file.FILE).write(claim, if_absent=True)
            except FileExistsError:
                raise lost(directory) from None
        yield stamp
        return
    with roots.beside(directory, f"{process}").lock():  # waits where there are locks
        _take(directory, process, token)
        try:
            _clear(directory, process)
            yield None
        except Exception as error:
            if not _is_held(directory, process, token):
                raise lost(directory) from error
            with contextlib.suppress(OSError):  # the first error is the one to raise
                at(_claim(directory, process)).delete()
            raise
        if not _is_held(directory, process, token):
            raise lost(directory)


def check(directory: AnyPath, claim: Stamp) -> None:
    """Looks for a claim in a store.

    Raises:
        StorageError: it is not there any more.
    """
    with contextlib.suppress(FileNotFoundError):
        if at(directory / manifest_file.FILE).stamp == claim:
            return
    raise lost(directory)


@contextlib.contextmanager
def committing(directory: AnyPath, process: int, token: str) -> Iterator[None]:
    """Holds a step's lock during the commit, and checks that the claim held while it was written.

    Raises:
        StorageError: another handler saves, or has saved, the same step.
    """
    if not at(directory).on_file_system:
        yield
        return
    with roots.beside(directory, f"{process}").lock():  # waits where there are locks
        final = roots.committed_path(directory)
        if not _is_held(directory, process, token) or (final != directory and at(final).exists):
            raise lost(directory)
        with at(directory).watched() as is_same:
            try:
                yield
            except Exception as error:
                if not is_same():
                    raise lost(directory) from error
                raise
            if not is_same():  # the maker of another one waits for the lock
                at(directory / manifest_file.FILE).delete()
                raise lost(directory)


def remove(directory: AnyPath) -> None:
    """Removes the claims of all processes; called before the manifest is written."""
    if not at(directory).on_file_system:
        return
    for each in at(directory / manifest_file.DIRECTORY).list(deep=False):
        if each.name.startswith(_PREFIX):
            each.delete()


def _claim(directory: AnyPath, process: int) -> AnyPath:
    return directory / manifest_file.DIRECTORY / f"{_PREFIX}{process}"


def _take(directory: AnyPath, process: int, token: str) -> None:
    if not (roots.is_written_in_place(directory) or at(directory).is_folder):
        raise lost(directory)
    try:
        at(_claim(directory, process)).write(token.encode(), if_absent=True)
    except FileExistsError:  # by an earlier attempt of this handler, or by another handler
        if not _is_held(directory, process, token):
            raise lost(directory) from None


def _is_held(directory: AnyPath, process: int, token: str) -> bool:
    try:
        return at(_claim(directory, process)).read() == token.encode()
    except (FileNotFoundError, NotADirectoryError):
        return False


def _clear(directory: AnyPath, process: int) -> None:
    """Removes what an earlier attempt, or another handler, wrote after Orbax had made room."""
    own = (f"{process}", f"{process}{STILL}")
    doomed = [directory / BASE / name for name in at(directory / BASE).folders() if name in own]
    kept = at(directory / KEPT).folders()
    doomed += [directory / KEPT / name for name in kept if name.partition(".")[2] in own]
    begins = (f"{DELTA}.{process}.", *(["update."] if process == 0 else []))
    ours = at(directory / manifest_file.DIRECTORY).list(deep=False)
    doomed += [each for each in ours if each.name.startswith(begins)]
    if process == 0:
        doomed.append(directory / LINEAGE)
    for each in doomed:
        at(each).delete()


def lost(directory: AnyPath) -> TakenError:
    """Error of a writer whose step another one has taken."""
    return TakenError(
        f"{roots.committed_path(directory)}: expected one writer, found that another handler or "
        "process saves the same step into the same root at the same time, or has removed the "
        "directory that it is written into. What this one wrote of the step is not saved, and no "
        "file of it is in the other's. Give each training run a root of its own, and let one "
        "manager save each step; training may go on: the next save will be a base."
    )
