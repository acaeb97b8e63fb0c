"""Terms of the interface of a storage, which is that of a location: values by key."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from adacheck_jax.errors import FormatError, StorageError

Stamp = tuple[Any, ...]
"""Identity of one written value: another one under the same key has another stamp."""
Kind = Literal["value", "folder", ""]
"""A key's meaning: a value, a beginning of other keys, or nothing."""


class NotPlainError(FormatError, OSError):
    """A key stands for something that a storage does not follow: a link, a pipe, a device.

    No save writes such entries: one that is there leads to other files.

    Args:
        key: the key.
        kind: noun for the message.
    """

    def __init__(self, key: str, kind: str) -> None:
        super().__init__(
            f"{key}: expected plain files and directories in a step's directory, found {kind}, "
            "which is not followed: it may lead anywhere. Put what it stands for in its place, or "
            "restore another step."
        )
        self.strerror = f"found {kind}, which is not followed"


def refuse_misread(path: str, misread: str) -> None:
    """Refuse a path that a part of those who read and write it would take for another one.

    Args:
        path: the path, or the URL.
        misread: characters of which a path has none, as a class of a regular expression.

    Raises:
        StorageError: it has one of them.
    """
    if found := re.search(misread, path):
        raise StorageError(
            f"{path!r}: expected a path that all who read and write it take for the same, found "
            f"{found[0]!r} in it, which some cannot take, or take for another character. Nothing "
            "was read or written; give a path without it, or rename what has it."
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """One value, without its bytes.

    Attributes:
        stamp: identity of the value.
        size_bytes: length of the value; 0 in a store, which tells it with the bytes alone.
        link_count: number of keys that share the value.
    """

    stamp: Stamp
    size_bytes: int = 0
    link_count: int = 1
