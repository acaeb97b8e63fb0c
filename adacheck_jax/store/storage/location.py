"""Locations: a value or a folder in a storage, with the arithmetic of paths.

A storage holds values by key, as a key-value store does; a slash in a key separates names. Its
class has the methods of :class:`Location`, of which each takes a key first: the file system's is
:class:`~adacheck_jax.store.storage.posix.Posix`.
"""

from __future__ import annotations

import functools
import importlib.util
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from adacheck_jax import schemes
from adacheck_jax.errors import StorageError
from adacheck_jax.store.storage.interface import Entry, Stamp, refuse_misread
from adacheck_jax.store.storage.posix import Posix

if TYPE_CHECKING:  # which load tensorstore
    import tensorstore as ts

    from adacheck_jax.store.storage.kvstore import KvStore

Storage: TypeAlias = "Posix | KvStore"

_POSIX = Posix()


@dataclass(frozen=True, slots=True)
class Location:
    """A key of a storage: what can be done with a value, or a folder.

    A *folder* is a beginning of keys, up to a slash: there is one wherever there is a value below.
    Methods raise ``OSError``: ``FileNotFoundError`` for a value that is not there.

    Attributes:
        storage: the storage.
        key: names with slashes between them; empty for all that the storage holds.
    """

    storage: Storage
    key: str

    def __str__(self) -> str:
        return self.storage.shown(self.key)

    def __truediv__(self, name: str) -> Location:
        return Location(self.storage, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last name."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Location:
        """The folder that it lies in; itself at the top."""
        return Location(self.storage, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Location:
        """Another location in the same folder."""
        return self.parent / name

    @property
    def on_file_system(self) -> bool:
        """True if there are hard links, locks, and folders that can be renamed."""
        return self.storage.is_file_system

    @property
    def looks_cost(self) -> bool:
        """True if each look for a key is a request to a store."""
        return self.storage.looks_cost

    @property
    def exists(self) -> bool:
        """True if there is a value or a folder."""
        return bool(self.storage.kind(self.key))

    @property
    def is_folder(self) -> bool:
        """True if there is something in it."""
        return self.storage.kind(self.key) == "folder"

    def check_answers(self) -> None:
        """Asks a store for a value, whether it is there or not, and waits for some seconds at most.

        All other methods try again for minutes where a store does not answer. A file system is not
        asked.

        Raises:
            OSError: there is no answer, or it is a refusal.
        """
        self.storage.check_answers(self.key)

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Reads bytes of a value; fewer if it ends before.

        Args:
            start: position of the first byte.
            stop: position after the last one, None for the value's end.

        Raises:
            NotPlainError: the key stands for no plain value.
        """
        return self.storage.read(self.key, start, stop)

    def write(
        self, data: bytes, *, if_absent: bool = False, replacing: Stamp | None = None
    ) -> Stamp:
        """Writes a value; a reader finds all of it, or what was there before.

        Args:
            data: bytes of the value.
            if_absent: True to raise ``FileExistsError`` if there is a value: of several writers one
                succeeds, and a reader may find the value before its bytes.
            replacing: identity of the only value that may be replaced; ``FileExistsError`` if there
                is another one, or none. A file system looks before it writes, a store while.

        Returns:
            Identity of the written value.
        """
        return self.storage.write(self.key, data, if_absent=if_absent, replacing=replacing)

    def stat(self) -> Entry:
        """Describes a value without reading it; a link is described and not followed."""
        return self.storage.stat(self.key)

    @property
    def stamp(self) -> Stamp:
        """Identity of a value."""
        return self.stat().stamp

    def list(self, *, deep: bool = True) -> Iterator[Location]:
        """Lists the values in a folder, in no particular order; none if there is no such folder.

        Args:
            deep: False for the values directly in it.

        Raises:
            FileNotFoundError: a folder in it vanished meanwhile; at the end, after all others.
        """
        return (Location(self.storage, key) for key in self.storage.list(self.key, deep=deep))

    def described(self) -> Iterator[tuple[str, Entry]]:
        """Lists the values below a folder: the part of each key below it, and the description.

        Values that vanish meanwhile are left out.
        """
        start = len(self.key)
        return ((key[start:].lstrip("/"), each) for key, each in self.storage.described(self.key))

    def listed(self, names: tuple[str, str] | None = None) -> Location:
        """The same folder in a view for many looks; where a look costs much, all at once.

        Args:
            names: first and last name in the folder that is looked for, by the order of their
                characters; None for all names.
        """
        return Location(self.storage.listed(self.key, names), self.key)

    def folders(self) -> list[str]:
        """Names of the folders directly in a folder, in no particular order."""
        return self.storage.folders(self.key)

    def below(self, folder: Location) -> str:
        """The part of the key below that of a folder."""
        return self.key[len(folder.key) :].lstrip("/")

    def check_plain(self) -> None:
        """Looks for what is no plain value below; a store of values alone has none.

        The folder itself and those above it may be links: they are the user's.

        Raises:
            NotPlainError: names the first one.
        """
        self.storage.check_plain(self.key)

    def delete(self) -> None:
        """Deletes a value, or a folder and all below it; nothing happens if there is none."""
        self.storage.delete(self.key)

    def adopt(self, values: Mapping[str, str]) -> bool:
        """Gives values other keys in this folder without a copy, so that they outlive their first.

        Args:
            values: keys of values of the same storage, by their new names.

        Returns:
            False if the storage cannot do this (it has no hard links).
        """
        start = (self / "").key
        return self.storage.adopt({f"{start}{name}": key for name, key in values.items()})

    def move(self, target: Location) -> bool:
        """Gives a value or a folder another key; a reader finds it under one of the two.

        Args:
            target: the new place, in a folder that exists. A value that is there is replaced; of a
                folder nothing may be there.

        Returns:
            False if the storage cannot do this at once; then nothing has changed.
        """
        return self.storage.rename(self.key, target.key)

    def changed_s(self) -> float | None:
        """Time of the last change in a folder, in seconds since the epoch.

        Returns:
            None if the storage does not tell times; else 0 if there is no such folder.
        """
        return self.storage.changed_s(self.key)

    def sync(self, *values: Location, deep: bool = False) -> None:
        """Makes bytes of values, and names in folders, durable; a storage may do so by itself.

        Args:
            values: values and folders beside this one.
            deep: True for the names in the folders below, too.
        """
        self.storage.sync(self.key, *(each.key for each in values), deep=deep)

    def lock(self, *, waits: bool = True) -> AbstractContextManager[bool]:
        """Holds a lock, as far as the storage has locks; it is left with its holder.

        Nothing else may lie at the key. It yields False where another one holds it and this one
        does not wait.
        """
        return self.storage.lock(self.key, waits=waits)

    def watched(self) -> AbstractContextManager[Callable[[], bool]]:
        """Yields a function that tells if a folder is still there and has not been replaced."""
        return self.storage.watched(self.key)

    def absolute(self) -> Location:
        """Itself: no location depends on a working directory."""
        return self

    def resolve(self) -> Location:
        """The same place, by the key that the storage knows it by without following links."""
        return Location(self.storage, self.storage.physical(self.key))

    def spec(self, end: str = "/") -> dict[str, Any]:
        """Tensorstore's specification of a folder, or of all keys that begin alike.

        Args:
            end: text between this key and the rest of the keys.
        """
        return self.storage.spec(f"{self.key}{end}" if self.key else "")

    def context(self, **settings: Any) -> ts.Context:
        """A new context of tensorstore, with settings of its own, for the specification."""
        import tensorstore as ts  # which commands that read no array do not load

        return ts.Context(settings, self.storage.context)


AnyPath = Path | Location
"""Path of a local file or directory, or a location in another storage: all that reads and writes
checkpoints takes both, and begins with :func:`at`."""


@functools.cache
def _bucket(url: str) -> Storage:
    """The storage of a URL: one for all locations in a process, with its connections."""
    from adacheck_jax.store.storage.kvstore import KvStore  # which loads tensorstore

    return KvStore(url)


def located(named: AnyPath | str) -> AnyPath:
    """The absolute path, or the location in an object store, that a user names.

    Args:
        named: a local path, or the URL of a bucket: ``gs://bucket/...``.

    Raises:
        StorageError: a URL of another kind; or a path that is read otherwise in some places.
    """
    if isinstance(named, Location):
        refuse_misread(str(named), named.storage.misread)
        return named
    scheme, mark, rest = (text := str(named)).partition("://")
    if not mark:
        path = Path(text).absolute()
        refuse_misread(str(path), _POSIX.misread)
        return path
    bucket, _, key = rest.partition("/")
    if scheme not in schemes.SCHEMES or not bucket:
        found = "one without a bucket" if scheme in schemes.SCHEMES else "another URL"
        raise StorageError(
            f"{text}: expected a local path, {schemes.shown('BUCKET/...')}, found {found}. "
            "Mount it, or name another root; nothing was read or written."
        )
    storage = _bucket(f"{scheme}://{bucket}")
    refuse_misread(text, storage.misread)
    return Location(storage, posixpath.normpath(f"/{key.lstrip('/')}")[1:])  # as Orbax reads it


def expect_client(named: object) -> None:
    """Looks for the package by which Orbax reaches the object store of a URL; nothing elsewhere.

    Raises:
        StorageError: it is not installed; the message names the extra that has it.
    """
    scheme = schemes.scheme_of(named)
    if scheme is not None and importlib.util.find_spec(scheme.client) is None:
        raise StorageError(
            f"{named}: expected the package {scheme.client}, by which Orbax reaches it, found none."
            f" Nothing was made or read; install adacheck-jax[{str(named).partition(':')[0]}]."
        )


def at(path: AnyPath) -> Location:
    """The location that a path stands for."""
    return path if isinstance(path, Location) else Location(_POSIX, str(path.absolute()))
