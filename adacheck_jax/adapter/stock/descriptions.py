"""Descriptions of a base's arrays: names, shapes, shardings and chunks, as Orbax keeps them."""

# Threads: Orbax saves the items of a step at the same time, each on a thread of its own; what one
# noted is kept by directory, in single operations of a dict.

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from adacheck_jax.device import transfer, trees
from adacheck_jax.errors import AdaCheckError, IntegrityError
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.manifest import BaseManifest, Leaf
from adacheck_jax.store import volume_reader, zarr
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.storage.location import AnyPath, at, located


@dataclass(frozen=True, slots=True)
class ArrayEntry:
    """Orbax's description of one array of a base.

    Attributes:
        name: name of the array in the checkpoint's database.
        sharding: sharding as Orbax serializes it, None for a host value.
        key_impl: implementation of a typed PRNG key, None for another array.
        chunk_bytes: size limit of a chunk in bytes, None for no limit by the caller.
    """

    name: str
    sharding: str | None
    key_impl: str | None
    chunk_bytes: int | None


class _Noted(ocp.type_handlers.TypeHandler):
    """Type handler that notes what Orbax would write, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, dict[str, ArrayEntry]] = {}

    def take(self, directory: str) -> dict[str, ArrayEntry]:
        """Remove and return the arrays noted for a directory, by leaf path."""
        return self._entries.pop(directory, {})

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[ocp.Future]:
        """Note the arrays; Orbax calls this on the caller's thread, once in each save."""
        pairs = zip(values, infos, args or [None] * len(values), strict=True)
        noted = {trees.leaf_path(info.keypath): _entry(v, info, a) for v, info, a in pairs}
        # By directory: Orbax saves the items of a step at the same time.
        self._entries[str(infos[0].parent_dir)] = noted
        return []


class NotedArrays(_Noted, ocp.type_handlers.ArrayHandler):
    """Notes JAX arrays."""


class NotedNumpy(_Noted, ocp.type_handlers.NumpyHandler):
    """Notes numpy arrays."""


class NotedScalars(_Noted, ocp.type_handlers.ScalarHandler):
    """Notes Python numbers."""


class _Described(ocp.type_handlers.TypeHandler):
    """Type handler that describes all arrays of a base with one reading of each file.

    Orbax would open every array, and for each array the file of shardings; and none on ``s3://``.
    """

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        """Describe the arrays; Orbax calls this once for all arrays of a checkpoint."""
        if not infos[0].use_zarr3:  # not written by this library
            return await super().metadata(infos)
        directory = located(str(infos[0].parent_dir))
        shardings: dict[str, Any] = {}
        # Damage of this file is found by its digest in the manifest.
        with contextlib.suppress(OSError, ValueError):
            shardings = json.loads(at(directory / manifests.SHARDINGS).read())
        found = volume_reader.descriptions(zarr.database_in(directory), [x.name for x in infos])
        return [
            ocp.metadata.ArrayMetadata(
                name=info.name,
                directory=info.parent_dir,
                shape=each.shape,
                dtype=jnp.dtype(each.dtype),
                sharding=_deserialized(shardings.get(sharding_key(info.name))),
                storage=ocp.metadata.StorageMetadata(chunk_shape=each.chunk_shape),
            )
            for info, each in zip(infos, found, strict=True)
        ]


class DescribedArrays(_Described, ocp.type_handlers.ArrayHandler):
    """Describes JAX arrays."""


class DescribedNumpy(_Described, ocp.type_handlers.NumpyHandler):
    """Describes numpy arrays."""


class DescribedScalars(_Described, ocp.type_handlers.ScalarHandler):
    """Describes Python numbers."""

    async def metadata(self, infos: Sequence[Any]) -> Sequence[ocp.metadata.ScalarMetadata]:
        """Describe the numbers."""
        return [
            ocp.metadata.ScalarMetadata(each.name, each.directory, dtype=each.dtype)
            for each in await super().metadata(infos)
        ]


def is_number(metadata: Any) -> bool:
    """True for Orbax's metadata of a Python number."""
    return isinstance(metadata, ocp.metadata.ScalarMetadata)


def sharding_key(name: str) -> str:
    """Key of an array's sharding in the file where Orbax keeps them."""
    return base64.urlsafe_b64encode(name.encode()).decode()


_SHARDINGS = {
    "NamedSharding": ocp.metadata.NamedShardingMetadata,
    "SingleDeviceSharding": ocp.metadata.SingleDeviceShardingMetadata,
}
"""Orbax's metadata of the kinds of shardings that it knows."""


@functools.lru_cache(maxsize=1024)
def _deserialized(text: str | None) -> Any:
    """Orbax's metadata of a sharding from the text of :func:`_serialized`, None without one."""
    try:
        body = json.loads(text or "{}")
        return _SHARDINGS[body["sharding_type"]].from_deserialized_dict(body)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _entry(value: Any, info: Any, arg: Any) -> ArrayEntry:
    return ArrayEntry(
        name=info.name,
        sharding=_serialized(getattr(value, "sharding", None)),
        key_impl=str(jax.random.key_impl(value)) if transfer.is_key(value) else None,
        chunk_bytes=getattr(arg, "chunk_byte_size", None),
    )


def _serialized(sharding: Any) -> str | None:
    """A sharding as Orbax writes it into a checkpoint; None for a kind that Orbax does not know."""
    metadata = _SHARDINGS.get(type(sharding).__name__)
    return None if metadata is None else metadata.from_jax_sharding(sharding).to_serialized_string()


_WIDENED = {"uint2": "uint8", "uint4": "uint8"}
"""Data types that tensorstore does not know, and the stored type of each."""


def stored_dtype(dtype: str) -> str:
    """Data type in which a base stores elements of a data type."""
    return _WIDENED.get(dtype, dtype)


def damaged_descriptions(directory: AnyPath, base: BaseManifest) -> dict[str, AdaCheckError]:
    """Errors of the files that describe a base's arrays, by file name; empty if all are whole."""
    found: dict[str, AdaCheckError] = {}
    for name, digest in sorted(base.described.items()):
        try:
            manifest_file.read_other(directory / name, digest)
        except AdaCheckError as error:
            found[name] = error
    return found


def digest_of(path: AnyPath) -> str:
    """SHA-256 digest of a file, in hexadecimal."""
    return hashlib.sha256(at(path).read()).hexdigest()


def check_described(directory: AnyPath, expected: Leaf, found: Any) -> None:
    """Compare Orbax's metadata of an array with the manifest's, and its chunks with its shape.

    Raises:
        IntegrityError: they differ, or a chunk is larger than the array.
    """
    shape, dtype = tuple(found.shape), str(found.dtype)
    is_scalar = is_number(found)
    chunk = getattr(getattr(found, "storage", None), "chunk_shape", None) or ()
    # A chunk is read whole: a false shape in a damaged file could ask for any amount of memory.
    is_large = any(length > max(1, whole) for length, whole in zip(chunk, shape, strict=False))
    if (
        shape != expected.shape
        or is_large
        or (dtype != stored_dtype(expected.dtype) and not is_scalar)
    ):
        raise IntegrityError(
            f"{directory}: expected leaf {expected.path} of shape {expected.shape} and type "
            f"{stored_dtype(expected.dtype)}, found an array of shape {shape} and type {dtype} in "
            f"chunks of {tuple(chunk)}. The step is damaged; restore another one."
        )
