"""Terms of the interface of a storage, which is that of a location: values by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from adacheck_jax.errors import FormatError

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
