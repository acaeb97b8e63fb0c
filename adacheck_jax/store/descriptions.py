"""Zarr3 metadata of arrays, read from the bytes that are stored.

An open tensorstore has them too; but what its ``to_json`` returns is never freed, and a process
that restores again and again would grow without end.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts


def key_of(name: str) -> str:
    """Key of an array's metadata in its database."""
    return f"{name}/zarr.json"


def read(database: Mapping[str, Any], names: Sequence[str], context: ts.Context) -> list[Any]:
    """Stored metadata of arrays: JSON, which anybody may have written.

    Args:
        database: specification of their database, from :mod:`~adacheck_jax.store.zarr`.
        names: names of the arrays.
        context: context of the storage that the database lies in.

    Raises:
        ValueError: the database cannot be read, or has no metadata of an array.
    """
    store = ts.KvStore.open(dict(database), context=context).result()
    reads = [store.read(key_of(name)) for name in names]
    found = []
    for name, reading in zip(names, reads, strict=True):
        result = reading.result()
        if result.state != "value":
            missing = FileNotFoundError(errno.ENOENT, "no metadata", name)
            raise ValueError(f"there is no array {name}") from missing
        found.append(json.loads(result.value))
    return found
