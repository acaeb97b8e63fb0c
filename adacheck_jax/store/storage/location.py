"""Locations: a value or a folder in a storage, with the arithmetic of paths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adacheck_jax.store.storage.interface import Entry, Stamp, Storage
from adacheck_jax.store.storage.posix import Posix

if TYPE_CHECKING:
    import tensorstore as ts

_POSIX = Posix()


@dataclass(frozen=True, slots=True)
class Location:
    """A key of a storage; its methods are those of the storage.

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
    def exists(self) -> bool:
        """True if there is a value or a folder."""
        return bool(self.storage.kind(self.key))

    @property
    def is_folder(self) -> bool:
        """True if there is something in it."""
        return self.storage.kind(self.key) == "folder"

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of a value."""
        return self.storage.read(self.key, start, stop)

    def write(self, data: bytes, *, if_absent: bool = False) -> None:
        """Writes a value."""
        self.storage.write(self.key, data, if_absent=if_absent)

    def stat(self) -> Entry:
        """Description of a value."""
        return self.storage.stat(self.key)

    @property
    def stamp(self) -> Stamp:
        """Identity of a value."""
        return self.stat().stamp

    def list(self, *, deep: bool = True) -> Iterator[Location]:
        """Values in a folder."""
        return (Location(self.storage, key) for key in self.storage.list(self.key, deep=deep))

    def folders(self) -> list[str]:
        """Names of the folders in a folder."""
        return self.storage.folders(self.key)

    def below(self, folder: Location) -> str:
        """The part of the key below that of a folder."""
        return self.key[len(folder.key) :].lstrip("/")

    def check_plain(self) -> None:
        """Looks for what is no plain value below."""
        self.storage.check_plain(self.key)

    def delete(self) -> None:
        """Deletes a value or a folder."""
        self.storage.delete(self.key)

    def adopt(self, source: Location) -> bool:
        """Makes a link to a value of the same storage; False if it has no links."""
        return source.storage is self.storage and self.storage.adopt(source.key, self.key)

    def sync(self, *values: Location, deep: bool = False) -> None:
        """Makes this, and values, durable."""
        self.storage.sync(self.key, *(each.key for each in values), deep=deep)

    def lock(self) -> AbstractContextManager[None]:
        """Waits for a lock."""
        return self.storage.lock(self.key)

    def watched(self) -> AbstractContextManager[Callable[[], bool]]:
        """A function that tells if a folder is still the same."""
        return self.storage.watched(self.key)

    def absolute(self) -> Location:
        """Itself: no location depends on a working directory."""
        return self

    def resolve(self) -> Location:
        """The same place without links on the way."""
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


def at(path: AnyPath) -> Location:
    """The location that a path stands for."""
    return path if isinstance(path, Location) else Location(_POSIX, str(path.absolute()))
