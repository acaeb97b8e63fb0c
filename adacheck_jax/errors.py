"""The exception tree.

::

    AdaCheckError
    ├── RecorderError    the Recorder is absent, doubled, or cannot tell what its update consumes
    ├── MismatchError    the state that was asked for is not the state that was saved, or that
    │                    is to be saved cannot be; also a ValueError
    ├── LineageError     a step, or a step that it builds on, is not there
    │   └── StepDeletedError   it was deleted while it was read; also a FileNotFoundError
    ├── IntegrityError   stored bits are not the bits that were saved
    ├── ReplicaError     replicas that are declared equal are not
    ├── DifferingCallsError  processes did not call alike
    ├── ReplayError      replaying an update does not give the state that was trained
    ├── FormatError      a file is not what this version of the library can read
    └── StorageError     a place cannot be written, or not be read; what is there may be whole

Every message says what was expected, what was found, where, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Self

from adacheck_jax.schemes import SCHEMES

_log = logging.getLogger(__name__)

__all__ = [
    "AdaCheckError",
    "DifferingCallsError",
    "FormatError",
    "IntegrityError",
    "LineageError",
    "MismatchError",
    "RecorderError",
    "ReplayError",
    "ReplicaError",
    "StepDeletedError",
    "StorageError",
    "TakenOverError",
]


class AdaCheckError(Exception):
    """Base class of this library's own errors."""


class RecorderError(AdaCheckError):
    """The recorder is absent, appears twice, or its update cannot be tied to the state."""


class MismatchError(AdaCheckError, ValueError):
    """A state is not what can be saved, or not what was saved: other paths, shapes or types.

    A ``ValueError`` too, as stock Orbax raises it.
    """


class DifferingCallsError(AdaCheckError):
    """Processes of one job did not make the same calls: neither was done."""


class LineageError(AdaCheckError):
    """A step cannot be reproduced, because it or a step that it builds on is missing."""


class StepDeletedError(LineageError, FileNotFoundError):
    """A step was deleted before or while it was read, as retention does: it is gone, not damaged.

    A ``FileNotFoundError`` too, as stock Orbax raises it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.ENOENT


class IntegrityError(AdaCheckError):
    """Stored or restored bits differ from the bits that were saved."""


class ReplicaError(AdaCheckError):
    """Devices that are declared to hold the same bits hold different ones; nothing was saved."""


class ReplayError(AdaCheckError):
    """Replaying an update does not give the state that was trained; the step was not saved."""


class FormatError(AdaCheckError):
    """A file is missing, truncated, or written in a format that cannot be read here."""


class StorageError(AdaCheckError):
    """The checkpoint root cannot be written, or not be read: no space, no permission, no disk."""

    _is_refusal = True


class TakenOverError(StorageError):
    """Another publisher has the root now, or it was deleted."""

    _is_refusal = False


def is_refusal(error: BaseException | None) -> bool:
    """True if storage refused something: the same may be written when it does not."""
    if isinstance(error, AdaCheckError):
        return isinstance(error, StorageError) and error._is_refusal
    module = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or any(module in each.raises for each in SCHEMES.values())


_TELLS_OF_FILES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL),
    errno.EIO,  # what a bad sector gives, after the kernel has tried again
}
"""Errors that tell that a file is not as it was written, not that it cannot be had now."""


_REFUSALS = {
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "UNAVAILABLE": errno.EREMOTEIO,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "RESOURCE_EXHAUSTED": errno.EAGAIN,
}
"""Answers of an object store that say nothing about its values, as tensorstore names them."""


def system_error(error: BaseException) -> OSError | None:
    """The operating system's error behind an exception, if there is one.

    Args:
        error: an ``OSError``, or one of tensorstore, which puts the number, or what an object store
            answered, into its text.
    """
    if isinstance(error, OSError):
        return error
    if found := re.search(r"os_error_code='(\d+)'", str(error)):
        return OSError(int(found[1]), os.strerror(int(found[1])))
    found = re.search(rf"\b({'|'.join(_REFUSALS)}): ", str(error))
    return OSError(_REFUSALS[found[1]], os.strerror(_REFUSALS[found[1]])) if found else None


def unreadable(where: object, error: BaseException) -> StorageError | None:
    """The error of a file that may be whole, but cannot be read now; None if it is not whole.

    Args:
        where: the file or directory.
        error: that reading it raised.
    """
    system = system_error(error)
    if system is None or system.errno is None or system.errno in _TELLS_OF_FILES:
        return None
    return StorageError(
        f"{where}: expected to read it, found that it cannot be read now ({system.strerror}). It "
        "may be whole: look after permissions, mounts and limits, and try again."
    )


_READ_NOTHING = re.compile(
    r"(Not enough data: expected at least (\d+) or \2 more"
    r"|Input size of 0 is less than digest size of \d+"
    r"|Truncated Zstd-compressed stream); at (uncompressed )?byte 0\b"
)
"""Errors of tensorstore's codecs that are given no byte at all. A database whose file of values is
gone reads that from it, where one that is cut off says which range it lacks."""


def tells_of_absence(error: BaseException) -> bool:
    """True if an error goes back to a file that is not there.

    Args:
        error: of this library, raised from one of the operating system or of tensorstore.
    """
    cause = error.__cause__
    if cause is None:
        return False
    system = system_error(cause)
    is_missing = isinstance(system, FileNotFoundError | NotADirectoryError)  # Orbax gives no errno
    is_missing |= system is not None and system.errno == errno.ESTALE
    # Of a description in a file that is just going tensorstore reads nothing, which is no JSON.
    is_missing |= any(each in str(cause) for each in ("NOT_FOUND: ", "Invalid JSON"))
    is_missing |= _READ_NOTHING.search(str(cause)) is not None
    return is_missing or tells_of_absence(cause)


def first_line(error: BaseException) -> str:
    """As much of another library's error as fits into a message of ours."""
    end = r"\n| \[(?:tensorstore_spec|http_response_)"
    return re.split(end, str(error), maxsplit=1)[0][:300].rstrip(".")


def expect_callable(given: object, wanted: str, method: str = "__call__") -> None:
    """Raises TypeError for an argument without the method by which it is called, or a class."""
    is_class = isinstance(given, type) and method != "__call__"
    if is_class or not callable(getattr(given, method, None)):
        raise TypeError(f"expected {wanted}, found {given!r}.")


def listed(given: Iterable[str], most: int = 20) -> str:
    """The first of some names, and the count of the others."""
    names = [*given]
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextlib.contextmanager
def storage_named(where: object) -> Iterator[None]:
    """Tells what the operating system refused while a step was written as a StorageError.

    Args:
        where: the step's item directory.

    Raises:
        StorageError: in place of an ``OSError``, or tensorstore's form of one.
    """
    try:
        yield
    except AdaCheckError:  # some are one of these, too
        raise
    except (OSError, ValueError) as error:
        system = system_error(error)
        if system is None:
            raise
        found = system.strerror or first_line(error)
        raise StorageError(
            f"{where}: expected to write it, found: {found}. Earlier steps are as they were. Make "
            "room or mend the disk; training may go on."
        ) from error


class Closing:
    """A part of a class that is closed: no error under which that is done is hidden by another one.

    An error that leaves a ``with`` block is raised as it is, and one of closing is its note.
    """

    _around: int | None = None
    """Identity of the error that was being handled where the block began."""

    def __enter__(self) -> Self:
        self._around = id(sys.exception())
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._around = None
        with noted_by(error):
            self.close()

    def close(self) -> None:
        """Closes it, in :meth:`closing`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def closing(self) -> Iterator[bool]:
        """Gives True if an error is under way: nothing is waited for long, and it stays visible.

        Called where an error is handled, ``close`` cannot know if that leaves: it raises its own,
        and a traceback shows the other one before it.
        """
        first = sys.exception()
        if first is None or id(first) == self._around:
            yield False
            return
        try:
            yield True
        except Exception as error:
            _show_before(first, error)
            raise


@contextlib.contextmanager
def noted_by(first: BaseException | None) -> Iterator[None]:
    """Makes an error a note of an earlier one, which is raised, and logs it."""
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        if error is not first:
            text = "".join(traceback.format_exception_only(error)).strip()
            first.add_note(f"While it was closed: {text}")
            _log.error("%s ended a block; while it was closed: %s", type(first).__name__, text)


def _show_before(first: BaseException, error: BaseException) -> None:
    """Has the traceback of an error show an earlier one, also if it was raised from others."""
    shown = [*_chain(first)]
    if error in shown:
        return
    last = [each for each in _chain(error) if each not in shown][-1]
    last.__cause__, last.__context__, last.__suppress_context__ = None, first, False
    error.__suppress_context__ = False


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that its traceback shows before it, the latest one first."""
    seen = list[BaseException]()
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        hidden = None if error.__suppress_context__ else error.__context__
        error = hidden if error.__cause__ is None else error.__cause__
