"""Terms of the interface of a storage, which is that of a location: values by key."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Any, Literal

Stamp = tuple[Any, ...]
"""Identity of one written value: another one under the same key has another stamp."""
Kind = Literal["value", "folder", ""]
"""A key's meaning: a value, a beginning of other keys, or nothing."""


class NotPlainError(OSError):
    """A key stands for something that a storage does not follow: a link, a pipe, a device.

    Args:
        key: the key.
        kind: noun for a message.
    """

    def __init__(self, key: str, kind: str) -> None:
        super().__init__(errno.ELOOP, f"found {kind}, which is not followed", key)
        self.key = key
        self.kind = kind


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
