"""Tensorstore's key-value stores as a storage: ``gs://``, ``s3://``, ``memory://``."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any

import tensorstore as ts

from adacheck_jax.errors import first_line
from adacheck_jax.store.storage.interface import Entry, Kind

_NO_VALUE = b"\x02"
"""Generation of a key that has no value, by which a write is made conditional."""


class KvStore:
    """Values below a URL; see :class:`~adacheck_jax.store.storage.interface.Storage`.

    There are no links and no locks; a value is durable when its write returns. Folders are found by
    listing all keys below them.

    Args:
        url: URL of a key-value store.
        context: context with the connections, and with the values of ``memory://``.
    """

    def __init__(self, url: str, context: ts.Context | None = None) -> None:
        self.context = context or ts.Context()
        self._url = f"{url.rstrip('/')}/"
        self._store = ts.KvStore.open(self._url, context=self.context).result()

    def shown(self, key: str) -> str:
        """The URL."""
        return f"{self._url}{key}"

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Reads bytes of a value; the whole of it if it is shorter than the range."""
        with self._named(key):
            if stop is None and not start:
                return self._value(self._store.read(key), key)
            try:
                return self._value(self._store.read(key, byte_range=slice(start, stop)), key)
            except ValueError as error:
                if "OUT_OF_RANGE" not in str(error):
                    raise
                return self._value(self._store.read(key), key)[start:stop]

    def _value(self, reading: ts.Future[ts.KvStore.ReadResult], key: str) -> bytes:
        found = reading.result()
        if found.state != "value":
            raise FileNotFoundError(errno.ENOENT, "no such value", self.shown(key))
        return found.value

    def write(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        """Writes a value, under the condition that there is none if it must be absent."""
        condition = _NO_VALUE if if_absent else None
        with self._named(key):
            written = self._store.write(key, data, if_equal=condition).result()
        if not written.generation:
            raise FileExistsError(errno.EEXIST, "expected no value", self.shown(key))

    def kind(self, key: str) -> Kind:
        """Looks for a value, then for keys below."""
        with self._named(key):
            if self._store.read(key, byte_range=slice(0, 0)).result().state == "value":
                return "value"
        return "folder" if any(True for _ in self.list(key)) else ""

    def stat(self, key: str) -> Entry:
        """Describes a value by its generation."""
        with self._named(key):
            reading = self._store.read(key, byte_range=slice(0, 0))
            self._value(reading, key)
            return Entry((reading.result().stamp.generation,))

    def list(self, prefix: str, *, deep: bool = True) -> Iterator[str]:
        """Lists the keys that begin with a folder's."""
        start = f"{prefix}/" if prefix else ""
        with self._named(prefix):
            found = self._store.list(_below(start)).result()
        for each in found:
            key = each.decode()
            if deep or "/" not in key[len(start) :]:
                yield key

    def folders(self, prefix: str) -> list[str]:
        """Names before a slash in the keys of a folder."""
        start = len(prefix) + 1 if prefix else 0
        names = [key[start:].partition("/") for key in self.list(prefix)]
        return [*dict.fromkeys(name for name, slash, _ in names if slash)]

    def check_plain(self, prefix: str) -> None:
        """Does nothing: there are values alone."""

    def delete(self, key: str) -> None:
        """Deletes a value, and the keys that begin with a folder's."""
        with self._named(key):
            self._store.write(key, None).result()
            self._store.delete_range(_below(f"{key}/")).result()

    def adopt(self, source: str, key: str) -> bool:
        """Does nothing: there are no links."""
        return False

    def sync(self, *keys: str, deep: bool = False) -> None:
        """Does nothing: what was written is durable."""

    def lock(self, key: str) -> contextlib.AbstractContextManager[None]:
        """Waits for nobody: there are no locks."""
        return contextlib.nullcontext()

    def watched(self, prefix: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Tells of no other folder: none can take another's place."""
        return contextlib.nullcontext(lambda: True)

    def physical(self, key: str) -> str:
        """The key: there are no links."""
        return key

    def spec(self, prefix: str) -> dict[str, Any]:
        """Tensorstore's specification; it finds the values of ``memory://`` by the context."""
        spec: dict[str, Any] = self._store.spec().to_json()
        return {**spec, "path": f"{spec.get('path', '')}{prefix}"}

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Raises tensorstore's errors as those of a system."""
        try:
            yield
        except ValueError as error:
            raise OSError(errno.EREMOTEIO, first_line(error), self.shown(key)) from error


def _below(start: str) -> ts.KvStore.KeyRange:
    """Range of the keys that begin with a text."""
    return ts.KvStore.KeyRange(start, f"{start[:-1]}{chr(ord(start[-1]) + 1)}" if start else "")
