"""The interface of a storage: values by key, as a key-value store has them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

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


class Storage(Protocol):
    """A place that holds values by key; a slash in a key separates names.

    A *folder* is a beginning of keys, up to a slash: there is one wherever there is a value below.
    Methods raise ``OSError``: ``FileNotFoundError`` for a value that is not there.
    """

    @property
    def is_file_system(self) -> bool:
        """True if there are hard links, locks, and folders that can be renamed."""
        ...

    @property
    def looks_cost(self) -> bool:
        """True if each look for a key is a request to a store."""
        ...

    @property
    def context(self) -> Any:
        """Tensorstore's context for specifications; None for any."""
        ...

    def shown(self, key: str) -> str:
        """Path or URL of a key, for messages."""
        ...

    def check_answers(self, key: str) -> None:
        """Asks a store for a value, whether it is there or not, and waits for some seconds at most.

        All other methods try again for minutes where a store does not answer. A file system is not
        asked.

        Args:
            key: key of any value.

        Raises:
            OSError: there is no answer, or it is a refusal.
        """
        ...

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Reads bytes of a value; fewer if it ends before.

        Args:
            key: key of a value.
            start: position of the first byte.
            stop: position after the last one, None for the value's end.

        Raises:
            NotPlainError: the key stands for no plain value.
        """
        ...

    def write(
        self, key: str, data: bytes, *, if_absent: bool = False, replacing: Stamp | None = None
    ) -> Stamp:
        """Writes a value; a reader finds all of it, or what was there before.

        Args:
            key: key of the value.
            data: bytes of the value.
            if_absent: True to raise ``FileExistsError`` if there is a value: of several writers one
                succeeds, and a reader may find the value before its bytes.
            replacing: identity of the only value that may be replaced; ``FileExistsError`` if there
                is another one, or none. A file system looks before it writes, a store while.

        Returns:
            Identity of the written value.
        """
        ...

    def kind(self, key: str) -> Kind:
        """The meaning of a key."""
        ...

    def stat(self, key: str) -> Entry:
        """Describes a value without reading it; a link is described and not followed."""
        ...

    def list(self, prefix: str, *, deep: bool = True) -> Iterator[str]:
        """Lists keys in a folder, in no particular order; none if there is no such folder.

        Args:
            prefix: key of a folder.
            deep: False for the values directly in it.

        Raises:
            FileNotFoundError: a folder in it vanished meanwhile; at the end, after all others.
        """
        ...

    def described(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        """Lists the values below a folder with their descriptions, in no particular order.

        Values that vanish meanwhile are left out.

        Args:
            prefix: key of a folder.
        """
        ...

    def listed(self, prefix: str, names: tuple[str, str] | None = None) -> Storage:
        """A view for many looks at the keys of a folder; where a look costs much, all at once.

        Args:
            prefix: key of the folder.
            names: first and last name in the folder that is looked for, by the order of their
                characters; None for all names.
        """
        ...

    def folders(self, prefix: str) -> list[str]:
        """Names of the folders directly in a folder, in no particular order."""
        ...

    def check_plain(self, prefix: str) -> None:
        """Looks for what is no plain value below a prefix; a store of values alone has none.

        Raises:
            NotPlainError: names the first one.
        """
        ...

    def delete(self, key: str) -> None:
        """Deletes a value, or a folder and all below it; nothing happens if there is none."""
        ...

    def adopt(self, values: Mapping[str, str]) -> bool:
        """Gives values other keys without a copy, so that they outlive their first ones.

        Args:
            values: key of each value, by its new key.

        Returns:
            False if the storage cannot do this (it has no hard links).
        """
        ...

    def rename(self, source: str, key: str) -> bool:
        """Gives a value or a folder another key; a reader finds it under one of the two.

        Args:
            source: key of the value or folder.
            key: new key, in a folder that exists. A value that is there is replaced; of a folder
                nothing may be there.

        Returns:
            False if the storage cannot do this at once; then nothing has changed.
        """
        ...

    def changed_s(self, prefix: str) -> float | None:
        """Time of the last change in a folder, in seconds since the epoch.

        Returns:
            None if the storage does not tell times; else 0 if there is no such folder.
        """
        ...

    def sync(self, *keys: str, deep: bool = False) -> None:
        """Makes bytes of values, and names in folders, durable; a storage may do so by itself.

        Args:
            keys: keys of values and folders.
            deep: True for the names in the folders below, too.
        """
        ...

    def lock(self, key: str) -> AbstractContextManager[None]:
        """Waits for a lock on a key, as far as the storage has locks; it is left with its holder.

        Nothing else may lie at the key.
        """
        ...

    def watched(self, prefix: str) -> AbstractContextManager[Callable[[], bool]]:
        """Yields a function that tells if a folder is still there and has not been replaced."""
        ...

    def physical(self, key: str) -> str:
        """The key that the storage knows the same place by without following links."""
        ...

    def spec(self, prefix: str) -> dict[str, Any]:
        """Tensorstore's specification of a key-value store.

        Args:
            prefix: beginning of its keys; that of a folder ends with a slash.
        """
        ...
