"""Tensorstore's key-value stores as a storage: buckets, and ``memory://``."""

from __future__ import annotations

import bisect
import contextlib
import copy
import errno
import os
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorstore as ts

from adacheck_jax.errors import StorageError, first_line
from adacheck_jax.schemes import scheme_of
from adacheck_jax.store.storage.interface import Entry, Kind, Stamp

_NO_VALUE = b"\x02"
"""Generation of a key that has no value, by which a write is made conditional."""
_PATIENCE = {"max_retries": 4, "initial_delay": "500ms", "max_delay": "4s"}
"""Retries of a first look alone: reads and writes keep tensorstore's own, about 15 minutes."""
_ANSWER_S = 15.0
"""Time within which a store answers, where a first look is all that is wanted."""
Span = tuple[str, str]
"""A range of keys: the first, and the one after the last, which is empty for all that follow."""


class KvStore:
    """Values below a URL; see :class:`~adacheck_jax.store.storage.location.Location`.

    There are no links and no locks; a value is durable when its write returns. Folders are found by
    listing all keys below them.

    A *view* is the store as it was listed at one moment: no key in a range comes or goes, and to
    look for one costs no request more. Values are read from the store. It equals the store, so that
    locations in both are equal.

    Args:
        url: URL of a key-value store.
    """

    is_file_system = False
    misread = r"[\0-\x1f\x7f\ud800-\udfff]"  # stores advise against these, and some hang

    def __init__(self, url: str) -> None:
        self._url = f"{url.rstrip('/')}/"
        self._spec = _spec_of(self._url)
        scheme = scheme_of(url)
        # Else none: tensorstore remembers databases in a context, also those deleted meanwhile.
        self.context = ts.Context() if scheme is None else None
        self._lists_spans = scheme is None or scheme.lists_spans
        try:
            self._store = ts.KvStore.open(self._spec, context=self.context).result()
        except ValueError as error:
            raise StorageError(
                f"{url}: expected a URL of a bucket, found {first_line(error)}. Mend the URL."
            ) from error
        self._view: tuple[Span, list[str]] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KvStore) and self._store is other._store

    def __hash__(self) -> int:
        return hash(self._url)

    @property
    def looks_cost(self) -> bool:
        return self._view is None

    def shown(self, key: str) -> str:
        return f"{self._url}{key}"

    def check_answers(self, key: str) -> None:
        """Reads a value by a store that has less patience."""
        scheme = scheme_of(self._url)
        retries = {} if scheme is None else {f"{scheme.driver}_request_retries": _PATIENCE}
        with self._named(key):
            store = ts.KvStore.open(self._spec, context=ts.Context(retries)).result()
            reading = store.read(key or "any", byte_range=slice(0, 0))
            try:
                reading.result(timeout=_ANSWER_S)
            except TimeoutError as error:
                reading.cancel()
                text = f"no answer within {_ANSWER_S:.0f} seconds"
                raise OSError(errno.ETIMEDOUT, text, self.shown(key)) from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Reads bytes of a value; the whole of it if it is shorter than the range."""
        if self._is_listed(key) is False:
            raise self._absent(key)
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
            raise self._absent(key)
        return found.value

    def _absent(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "no such value", self.shown(key))

    def write(
        self, key: str, data: bytes, *, if_absent: bool = False, replacing: Stamp | None = None
    ) -> Stamp:
        condition = _NO_VALUE if if_absent else replacing[0] if replacing else None
        with self._named(key):
            generation = self._store.write(key, data, if_equal=condition).result().generation
            if not generation:
                found = self._store.read(key).result()
                # Tensorstore tries again where an answer is lost, and then finds its own value.
                if found.state != "value" or found.value != data:
                    what = "no value" if if_absent else "another value"
                    raise FileExistsError(errno.EEXIST, f"expected {what}", self.shown(key))
                generation = found.stamp.generation
        return (generation,)

    def kind(self, key: str) -> Kind:
        is_value = self._is_listed(key)
        if is_value is None and key:
            with self._named(key):
                found = self._store.read(key, byte_range=slice(0, 0)).result()
                is_value = found.state == "value"
        if is_value:
            return "value"
        return "folder" if any(True for _ in self.list(key)) else ""

    def stat(self, key: str) -> Entry:
        with self._named(key):
            reading = self._store.read(key, byte_range=slice(0, 0))
            self._value(reading, key)
            return Entry((reading.result().stamp.generation,))

    def list(self, prefix: str, *, deep: bool = True) -> Iterator[str]:
        start = f"{prefix}/" if prefix else ""
        keys = self._keys(_below(start), prefix)
        return (key for key in keys if deep or "/" not in key[len(start) :])

    def _keys(self, span: Span, prefix: str) -> list[str]:
        """Sorted keys in a range, by the view as far as it tells."""
        if self._view is not None and self._sees(span):
            keys = self._view[1]
            first, stop = (bisect.bisect_left(keys, each) for each in span)
            return keys[first : stop if span[1] else None]
        with self._named(prefix):
            found = self._store.list(ts.KvStore.KeyRange(*span)).result()
        return sorted(key.decode() for key in found)

    def _sees(self, span: Span) -> bool:
        """True if the view tells of all keys in a range."""
        first, last = self._view[0] if self._view is not None else ("", "")
        return self._view is not None and first <= span[0] and (not last or "" < span[1] <= last)

    def _is_listed(self, key: str) -> bool | None:
        """True if the view has a value, None if it does not tell."""
        if not self._sees((key, _below(f"{key}/")[1])):
            return None
        return bool(self._keys((key, f"{key}\0"), key))

    def described(self, prefix: str) -> Iterator[tuple[str, Entry]]:
        for key in self.list(prefix):
            with contextlib.suppress(FileNotFoundError):
                yield key, self.stat(key)

    def listed(self, prefix: str, names: tuple[str, str] | None = None) -> KvStore:
        start = f"{prefix}/" if prefix else ""
        span = _below(start)
        if self._sees(span):
            return self
        if names is not None and self._lists_spans:
            span = f"{start}{names[0]}", _below(f"{start}{names[1]}/")[1]
        view = copy.copy(self)
        view._view = span, self._keys(span, prefix)
        return view

    def folders(self, prefix: str) -> list[str]:
        start = len(prefix) + 1 if prefix else 0
        names = [key[start:].partition("/") for key in self.list(prefix)]
        return [*dict.fromkeys(name for name, slash, _ in names if slash)]

    def check_plain(self, prefix: str) -> None:
        """Does nothing: there are values alone."""

    def delete(self, key: str) -> None:
        with self._named(key):
            if key:
                self._store.write(key, None).result()
            self._store.delete_range(
                ts.KvStore.KeyRange(*_below(f"{key}/" if key else ""))
            ).result()

    def adopt(self, values: Mapping[str, str]) -> bool:
        return False

    def rename(self, source: str, key: str) -> bool:
        return False

    def changed_s(self, prefix: str) -> None:
        """Does not tell."""

    def sync(self, *keys: str, deep: bool = False) -> None:
        """Does nothing: what was written is durable."""

    def lock(self, key: str, *, waits: bool) -> contextlib.AbstractContextManager[bool]:
        return contextlib.nullcontext(True)

    def watched(self, prefix: str) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """Tells of no other folder: none can take another's place."""
        return contextlib.nullcontext(lambda: True)

    def physical(self, key: str) -> str:
        return key

    def spec(self, prefix: str) -> dict[str, Any]:
        """Tensorstore's specification; it finds the values of ``memory://`` by the context."""
        return {**self._spec, "path": f"{self._spec['path']}{prefix}"}

    @contextlib.contextmanager
    def _named(self, key: str) -> Iterator[None]:
        """Raises tensorstore's errors as those of a system."""
        try:
            yield
        except ValueError as error:
            raise OSError(errno.EREMOTEIO, first_line(error), self.shown(key)) from error


def _spec_of(url: str) -> dict[str, Any]:
    """Tensorstore's specification of a store; its own ``to_json`` never frees what it returns."""
    name, _, rest = url.partition("://")
    rest = urllib.parse.unquote(rest)
    if (scheme := scheme_of(url)) is None:  # memory://, which tests use
        return {"driver": name, "path": rest}
    bucket, _, path = rest.partition("/")
    found = {key: os.environ[x] for key, x in scheme.variables.items() if x in os.environ}
    return {"driver": scheme.driver, "bucket": bucket, "path": path, **found}


def _below(start: str) -> Span:
    """The keys that begin with a text."""
    return start, f"{start[:-1]}{chr(ord(start[-1]) + 1)}" if start else ""
