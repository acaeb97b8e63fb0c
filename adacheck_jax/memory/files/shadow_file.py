"""The file that a shadow lies in: mapped memory that outlives the process, and what describes it.

A process that is killed loses no store to shared memory, and each of its stores is there only if
those before it are. So whoever writes data, and then the header that says that it is there, needs
no more. A header has a checksum, and two places in turns: half of one is none, and the one before
is still whole. What changes oftener is one word, which is stored at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

SUFFIX = ".adacheck-shadow"
_NO_BEGINNING = "it does not begin as a shadow's file does"
_PAGE = mmap.PAGESIZE
_PEEKED_BYTES = 1 << 16
_CHECKSUM_BYTES, _LENGTH_BYTES = 16, 8
_PLAIN_BYTES = _CHECKSUM_BYTES + _LENGTH_BYTES


class ShadowFileError(Exception):
    """A file cannot be had, or is none that a shadow lies in; the message says why."""


class CutOffError(ShadowFileError):
    """A file is not as long as it was made."""


class ShadowFile:
    """A file, mapped and locked; no other process has it meanwhile.

    It begins with a description, of what is the same for all steps; then come the word, the two
    headers, and the data.
    """

    def __init__(
        self, path: Path, description_bytes: int, header_bytes: int, data_bytes: int
    ) -> None:
        self.path = path
        self._word_at = _pages(description_bytes + _PLAIN_BYTES)
        self._header_bytes = _pages(header_bytes + _PLAIN_BYTES)
        data_at = self._word_at + _PAGE + 2 * self._header_bytes
        self.size_bytes, self._data_at = data_at + _pages(data_bytes), data_at
        self._descriptor = -1
        self._memory = np.zeros(0, np.uint8)

    def create(self, description: Mapping[str, Any], reserved_bytes: int | None = None) -> None:
        """Make the file, or take one that is there for something else.

        Args:
            description: of what is the same for all steps.
            reserved_bytes: bytes of the data that have memory at once, before :meth:`reserve`; None
                for all of them.

        Raises:
            ShadowFileError: it cannot be made, or another process has it.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open(os.O_CREAT)
            if os.fstat(self._descriptor).st_size != self.size_bytes:
                os.ftruncate(self._descriptor, 0)
                os.ftruncate(self._descriptor, self.size_bytes)
            whole = self.size_bytes - self._data_at
            self._reserve(whole if reserved_bytes is None else reserved_bytes)
        except OSError as error:
            self.close(remove=self._descriptor >= 0)
            raise ShadowFileError(f"{self.path}: {error.strerror or error}") from error
        self._map()
        self._memory[: self._data_at] = 0
        _put(self._memory[: self._word_at], description)

    def open(self) -> Mapping[str, Any]:
        """Take the file that another process has left, and give its description.

        Raises:
            ShadowFileError: it is not there or not whole, or another process has it.
        """
        try:
            self._open(0)
            found_bytes = os.fstat(self._descriptor).st_size
        except OSError as error:
            self.close()
            raise ShadowFileError(f"{self.path}: {error.strerror or error}") from error
        description = None
        with contextlib.suppress(OSError):
            description = _found(os.pread(self._descriptor, self._word_at, 0))
        if description is None or found_bytes < self._word_at:
            self.close()
            raise ShadowFileError(f"{self.path}: {_NO_BEGINNING}")
        if found_bytes == self.size_bytes:
            self._map()
        return description

    def reserve(self, stop: int) -> None:
        """Have memory for the data up to some byte.

        Raises:
            ShadowFileError: there is none.
        """
        try:
            self._reserve(stop)
        except OSError as error:
            raise ShadowFileError(f"{self.path}: {error.strerror or error}") from error

    def _reserve(self, stop: int) -> None:
        # Memory that is not there at the first store to it would end the process.
        os.posix_fallocate(self._descriptor, 0, self._data_at + stop)

    @property
    def is_open(self) -> bool:
        """True if the data can be read and written."""
        return bool(self._memory.size)

    @property
    def data(self) -> np.ndarray:
        """The data."""
        return self._memory[self._data_at :]

    @property
    def word(self) -> int:
        """A number of 64 bits."""
        return int(self._words[0])

    @word.setter
    def word(self, value: int) -> None:
        self._words[0] = value

    @property
    def _words(self) -> np.ndarray:
        return self._memory[self._word_at : self._word_at + 8].view(np.uint64)

    def write_header(self, number: int, header: Mapping[str, Any]) -> None:
        """Write a header, in place of the last but one."""
        _put(self._place(number % 2), {"number": number, **header})

    def headers(self) -> list[Mapping[str, Any]]:
        """The headers that are whole, the last one first."""
        found = [_found(bytes(self._place(i))) for i in range(2)]
        return sorted(filter(None, found), key=lambda each: -each["number"])

    def _place(self, number: int) -> np.ndarray:
        start = self._word_at + _PAGE + number * self._header_bytes
        return self._memory[start : start + self._header_bytes]

    def close(self, *, remove: bool = False) -> None:
        """Let go of the file; what was mapped stays until nobody uses it."""
        self._memory = np.zeros(0, np.uint8)
        if self._descriptor < 0:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        # The mapping has a descriptor of its own, which would hold the lock.
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = -1

    def _open(self, flags: int) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        found = os.fstat(self._descriptor)
        problem = "expected a file of this user's, found another's"
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                problem = (
                    "another process that runs, a child of one that ran, or another handler of "
                    "this process has it"
                )
            else:
                return
        os.close(self._descriptor)
        self._descriptor = -1
        raise ShadowFileError(f"{self.path}: {problem}")

    def _map(self) -> None:
        mapped = mmap.mmap(self._descriptor, self.size_bytes)
        self._memory = np.frombuffer(mapped, np.uint8)


def peek(path: Path) -> Mapping[str, Any] | None:
    """The description at the beginning of a file; None if there is none."""
    try:
        with path.open("rb") as file:
            begin = file.read(_PEEKED_BYTES)
            length = int.from_bytes(begin[_CHECKSUM_BYTES:_PLAIN_BYTES], "little")
            more = length + _PLAIN_BYTES - len(begin)
            found = _found(begin + file.read(min(max(more, 0), path.stat().st_size)))
    except OSError:
        return None
    if found is None and any(begin[:_PLAIN_BYTES]):  # else it is being made
        _log.warning("%s: its part of the state is not taken: %s", path, _NO_BEGINNING)
    return found


def remove_unused(path: Path) -> bool:
    """Removes a file, unless a process has it; True if it is gone."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE


def _put(place: np.ndarray, value: Mapping[str, Any]) -> None:
    """Store a value; what is there is none until all of it is."""
    whole = framed(value)
    if len(whole) > len(place):
        raise ShadowFileError(f"expected at most {len(place)} bytes, found {len(whole)}")
    place[: len(whole)] = np.frombuffer(whole, np.uint8)


def framed(value: Mapping[str, Any]) -> bytes:
    """The bytes of a value, which tell their length and if they are whole."""
    data = json.dumps(value).encode()
    length = len(data).to_bytes(_LENGTH_BYTES, "little")
    return _checksum(length + data) + length + data


def unframed(memory: np.ndarray) -> tuple[Mapping[str, Any], int]:
    """The value at the beginning of some memory, and the number of its bytes.

    Raises:
        ShadowFileError: it is not whole.
    """
    length = int.from_bytes(bytes(memory[_CHECKSUM_BYTES:_PLAIN_BYTES]), "little") + _PLAIN_BYTES
    if length > len(memory) or (value := _found(bytes(memory[:length]))) is None:
        raise ShadowFileError("a record is damaged")
    return value, length


def _found(place: bytes) -> Mapping[str, Any] | None:
    """The value that was stored; None if it is not whole."""
    length = int.from_bytes(place[_CHECKSUM_BYTES:_PLAIN_BYTES], "little")
    if not 0 < length <= len(place) - _PLAIN_BYTES:
        return None
    data = place[_CHECKSUM_BYTES : _PLAIN_BYTES + length]
    if _checksum(data) != place[:_CHECKSUM_BYTES]:
        return None
    return json.loads(data[_LENGTH_BYTES:])


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).digest()
