"""Bases: full states read and written as stock Orbax PyTree checkpoints.

A base is read by Orbax, here and by anyone who has no more than Orbax. Orbax also writes its
metadata and what is not an array; the arrays themselves are written by
:mod:`~adacheck_jax.store.volumes`, into the files where Orbax would have them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.device import jax_settings, sharding, transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import AdaCheckError, IntegrityError, MismatchError, first_line, unreadable
from adacheck_jax.format import durable
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.manifest import BaseManifest, Leaf
from adacheck_jax.restore import base_reader
from adacheck_jax.store import volumes


@dataclass(frozen=True, slots=True)
class Entry:
    """How Orbax knows one array of a base.

    Attributes:
        name: of the array in the checkpoint's database.
        sharding: as Orbax serializes it, None for a host value.
        key_impl: of a typed PRNG key, else None.
        chunk_bytes: largest chunk that the caller wants, None for no wish.
    """

    name: str
    sharding: str | None
    key_impl: str | None
    chunk_bytes: int | None


class _Noted(ocp.type_handlers.TypeHandler):
    """Notes the arrays that Orbax would write, by leaf path, and leaves the writing to us."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[Path, dict[str, Entry]] = {}

    def take(self, directory: Path) -> dict[str, Entry]:
        """What was noted of the save into a directory; it is forgotten."""
        return self._entries.pop(directory, {})

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[ocp.Future]:
        """Called by Orbax on the caller's thread, once a save."""
        pairs = zip(values, infos, args or [None] * len(values), strict=True)
        noted = {trees.leaf_path(info.keypath): _entry(v, info, a) for v, info, a in pairs}
        # Orbax saves the items of a step at once, and a handler may have several of them.
        self._entries[Path(infos[0].parent_dir)] = noted
        return []


class _NotedArrays(_Noted, ocp.type_handlers.ArrayHandler):
    pass


class _NotedNumpy(_Noted, ocp.type_handlers.NumpyHandler):
    pass


class _DescribedArrays(ocp.type_handlers.ArrayHandler):
    """Describes our arrays at once; Orbax opens each, and for each the file of shardings too."""

    async def metadata(self, infos: Sequence[Any]) -> Sequence[ocp.metadata.ArrayMetadata]:
        """Called by Orbax for all arrays of a checkpoint."""
        if not infos[0].use_zarr3:  # not one of ours
            return await super().metadata(infos)
        directory = Path(infos[0].parent_dir)
        shardings: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):  # its digest is held against the manifest
            shardings = json.loads((directory / manifests.SHARDINGS).read_bytes())
        found = volumes.described(directory, [info.name for info in infos])
        return [
            ocp.metadata.ArrayMetadata(
                name=info.name,
                directory=info.parent_dir,
                shape=shape,
                dtype=jnp.dtype(dtype),
                sharding=_deserialized(shardings.get(_sharding_key(info.name))),
                storage=ocp.metadata.StorageMetadata(chunk_shape=chunk_shape),
            )
            for info, (shape, dtype, chunk_shape) in zip(infos, found, strict=True)
        ]


def _sharding_key(name: str) -> str:
    """Under which Orbax keeps an array's sharding."""
    return base64.urlsafe_b64encode(name.encode()).decode()


_KNOWN_SHARDINGS = {
    "NamedSharding": ocp.metadata.NamedShardingMetadata,
    "SingleDeviceSharding": ocp.metadata.SingleDeviceShardingMetadata,
}


@functools.lru_cache(maxsize=1024)
def _deserialized(text: str | None) -> Any:
    """A sharding as :func:`_serialized` wrote it; None for one that was not written."""
    try:
        body = json.loads(text or "{}")
        return _KNOWN_SHARDINGS[body["sharding_type"]].from_deserialized_dict(body)
    except (LookupError, TypeError, ValueError, AttributeError):
        return None


def _entry(value: Any, info: Any, arg: Any) -> Entry:
    return Entry(
        name=info.name,
        sharding=_serialized(getattr(value, "sharding", None)),
        key_impl=str(jax.random.key_impl(value)) if transfer.is_key(value) else None,
        chunk_bytes=getattr(arg, "chunk_byte_size", None),
    )


def _serialized(sharding: Any) -> str | None:
    """A sharding as Orbax writes it into a checkpoint; None for one that Orbax does not know."""
    known = {
        jax.sharding.NamedSharding: ocp.metadata.NamedShardingMetadata,
        jax.sharding.SingleDeviceSharding: ocp.metadata.SingleDeviceShardingMetadata,
    }
    metadata = known.get(type(sharding))
    return None if metadata is None else metadata.from_jax_sharding(sharding).to_serialized_string()


class StockCheckpoints:
    """Reads and writes full states as stock Orbax PyTree checkpoints."""

    def __init__(self) -> None:
        types = ocp.type_handlers
        self._noted = _NotedNumpy(), _NotedArrays()
        scalars = [(t, types.get_type_handler(t)) for t in (int, float)]
        arrays = zip((np.ndarray, jax.Array), self._noted, strict=True)
        registry = types.create_type_handler_registry(*scalars, *arrays)
        self._writer = ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
        self._reader = ocp.PyTreeCheckpointHandler()
        described = (jax.Array, _DescribedArrays()), (np.ndarray, types.NumpyHandler())
        self._describer = ocp.PyTreeCheckpointHandler(
            type_handler_registry=types.create_type_handler_registry(*scalars, *described)
        )

    async def write(
        self, directory: epath.Path, state: PyTree, save_args: PyTree, custom_metadata: Any
    ) -> tuple[list[ocp.Future], dict[str, Entry]]:
        """Starts writing all of a state but its arrays.

        Returns:
            Futures that complete when that is durable, and by leaf path what is left to be written;
            :meth:`finalize` takes it. Arrays without elements are not among them: Orbax takes none,
            and the manifest alone tells of those.

        Raises:
            MismatchError: Orbax would store two leaves in one array.
        """
        if save_args is not None:
            save_args = jax.tree.map(lambda x, a: None if _is_empty(x) else a, state, save_args)
        with jax_settings.own():
            state = jax.tree.map(lambda x: None if _is_empty(x) else _storable(x), state)
        args = ocp.args.PyTreeSave(state, save_args, custom_metadata=custom_metadata)
        entries: dict[str, Entry] = {}
        try:
            futures = list(await self._writer.async_save(directory, args=args) or [])
        finally:
            for handler in self._noted:
                entries |= handler.take(Path(directory))
        names: dict[str, str] = {}
        for path, entry in entries.items():
            other = names.setdefault(entry.name, path)
            if other != path:
                raise MismatchError(
                    f"leaves {other} and {path}: Orbax stores both as {entry.name!r}, so one would "
                    "overwrite the other. Nothing was saved; rename the keys that contain a dot."
                )
        return futures, entries

    def finalize(
        self,
        directory: epath.Path,
        entries: Mapping[str, Entry],
        chunk_shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, str]:
        """Merges what Orbax wrote, and describes the arrays as it would; called on one process.

        Args:
            directory: of the checkpoint.
            entries: as :meth:`write` gave them.
            chunk_shapes: of the arrays, by leaf path.

        Returns:
            Digests of the files that describe the arrays, by their names.
        """
        if any(
            Path(directory).glob("ocdbt.process_*")
        ):  # else there is nothing of its own to merge
            self._writer.finalize(directory)
        shardings = {
            _sharding_key(entry.name): entry.sharding
            for entry in entries.values()
            if entry.sharding is not None
        }
        arrays = [
            {
                "array_metadata": {
                    "param_name": entry.name,
                    "write_shape": chunk_shapes[path],
                    "chunk_shape": chunk_shapes[path],
                    "ext_metadata": entry.key_impl and {"random_key_impl": entry.key_impl},
                }
            }
            for path, entry in entries.items()
        ]
        top = Path(directory)
        durable.write(top / manifests.SHARDINGS, json.dumps(shardings).encode())
        durable.write(
            top / "array_metadatas/process_0", json.dumps({"array_metadatas": arrays}).encode()
        )
        durable.sync(top / "_METADATA")  # written by Orbax, which leaves it in the page cache
        return {name: _digest(top / name) for name in manifests.DESCRIPTIONS}

    def metadata(self, directory: Path) -> Any:
        """Orbax's metadata of a state: its tree with shapes, data types and shardings.

        Raises:
            IntegrityError: Orbax cannot read it.
            StorageError: it cannot be read now.
        """
        with _damage_named(directory):
            return self._reader.metadata(epath.Path(directory))

    def described(self, directory: Path) -> PyTree:
        """The tree of :meth:`metadata`, of a base of ours, with less about each array.

        Raises:
            IntegrityError: it cannot be read.
            StorageError: it cannot be read now.
        """
        with _damage_named(directory):
            return self._describer.metadata(epath.Path(directory)).tree

    def read(
        self,
        directory: Path,
        wanted: Mapping[str, Any],
        leaves: Mapping[str, Leaf],
        metadata_tree: PyTree,
    ) -> dict[str, Any]:
        """Reads a state, each process only the boxes that its devices need.

        Args:
            directory: of the base.
            wanted: for each leaf path a sharding, ``np.ndarray``, or None to leave the leaf out.
                Python scalars come back as such whatever is asked for. Arrays without elements are
                not among them.
            leaves: what the manifest says of every leaf.
            metadata_tree: what Orbax says of them (see :meth:`described`).

        Returns:
            Leaves by leaf path; None for those left out.

        Raises:
            IntegrityError: Orbax cannot read it, or it has other leaves than expected, or one of
                another shape or type; before anything is allocated for them.
            StorageError: it cannot be read now.
        """
        found, _ = trees.flatten(metadata_tree)
        if found.keys() != wanted.keys():
            raise IntegrityError(
                f"{directory}: expected a base with {len(wanted)} leaves, found "
                f"{len(found)}; they differ in {sorted(found.keys() ^ wanted.keys())[:5]}. The "
                "step is damaged; restore another one."
            )
        for path, leaf in found.items():
            _check_described(directory, leaves[path], leaf)

        direct = [
            path for path, leaf in found.items() if _is_plain(wanted[path], leaves[path], leaf)
        ]
        arrays = [
            base_reader.ReadRequest(
                found[path].name,
                leaves[path].shape,
                leaves[path].itemsize_bytes,
                None if wanted[path] is np.ndarray else wanted[path],
            )
            for path in direct
        ]
        with _damage_named(directory):
            read = dict(zip(direct, base_reader.read(directory, arrays), strict=True))
        rest = {path: None if path in read else wanted[path] for path in wanted}
        if any(each is not None for each in rest.values()):
            read |= {
                path: leaf
                for path, leaf in self._read_by_orbax(directory, rest, metadata_tree).items()
                if path not in read
            }
        return {
            path: None if read.get(path) is None else _as_saved(read[path], leaves[path].dtype)
            for path in wanted
        }

    def _read_by_orbax(
        self, directory: Path, wanted: Mapping[str, Any], metadata_tree: PyTree
    ) -> dict[str, Any]:
        """Reads some leaves, of any type; None for the others."""

        def argument(key_path: Any, leaf: Any) -> Any:
            return _restore_args(wanted[trees.leaf_path(key_path)], leaf)

        def item(key_path: Any, leaf: Any) -> Any:
            return ocp.PLACEHOLDER if wanted[trees.leaf_path(key_path)] is None else leaf

        args = ocp.args.PyTreeRestore(
            item=jax.tree_util.tree_map_with_path(item, metadata_tree),
            restore_args=jax.tree_util.tree_map_with_path(argument, metadata_tree),
        )
        with _damage_named(directory):
            tree = self._reader.restore(epath.Path(directory), args=args)
        read, _ = trees.flatten(tree)
        return {path: None if leaf is ocp.PLACEHOLDER else leaf for path, leaf in read.items()}

    def close(self) -> None:
        """Releases what the handlers hold."""
        self._writer.close()
        self._reader.close()
        self._describer.close()


def damaged_descriptions(directory: Path, base: BaseManifest) -> dict[str, AdaCheckError]:
    """The files that describe a base's arrays and are not what they were, by their names.

    Args:
        directory: of the base.
        base: its manifest.
    """
    found: dict[str, AdaCheckError] = {}
    for name, digest in sorted(base.described.items()):
        path = directory / name
        try:
            is_whole = _digest(path) == digest
            what = "other bytes"
        except OSError as error:
            if refused := unreadable(path, error):
                found[name] = refused
                continue
            is_whole, what = False, f"none ({error.strerror})"
        if not is_whole:
            found[name] = IntegrityError(
                f"{path}: expected the file that was written with the base, found {what}. Restore "
                "another step."
            )
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.size == 0


_WIDENED = {"uint2": "uint8", "uint4": "uint8"}
"""Data types that tensorstore does not know, and what a base stores in their place."""


def stored_dtype(dtype: str) -> str:
    """The data type in which a base stores elements of another one."""
    return _WIDENED.get(dtype, dtype)


def _storable(leaf: Any) -> Any:
    """A leaf as Orbax is to describe it; of arrays it looks at nothing but the description."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    elif sharding.is_local(leaf):  # Orbax takes no array that each process has for itself
        leaf = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    wide = _WIDENED.get(str(getattr(leaf, "dtype", "")))
    return leaf if wide is None else leaf.astype(wide)


def _check_described(directory: Path, expected: Leaf, found: Any) -> None:
    """Holds an array's own description against the manifest's, and its chunks against the array.

    Raises:
        IntegrityError: they differ.
    """
    shape, dtype = tuple(found.shape), str(found.dtype)
    is_scalar = isinstance(found, ocp.metadata.ScalarMetadata)
    chunk = getattr(getattr(found, "storage", None), "chunk_shape", None) or ()
    # A chunk is read whole; one that is larger than its array was not written by us.
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


def _as_saved(leaf: Any, dtype: str) -> Any:
    return leaf.astype(jnp.dtype(dtype)) if dtype in _WIDENED else leaf


def _is_plain(wanted: Any, leaf: Leaf, found: Any) -> bool:
    """Whether what is wanted is an array as it is stored: no Python scalar, and no key."""
    is_scalar = isinstance(found, ocp.metadata.ScalarMetadata)
    return wanted is not None and not is_scalar and leaf.key_type is None


def _restore_args(wanted: Any, leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, ocp.metadata.ScalarMetadata) or wanted is None:
        return ocp.RestoreArgs()
    if wanted is np.ndarray:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=wanted)


@contextlib.contextmanager
def _damage_named(directory: Path) -> Iterator[None]:
    """Damaged files are reported in many ways, down to a bare ``Exception``; all mean this."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # too little memory, not damage
    except Exception as error:
        if refused := unreadable(directory, error):
            raise refused from error
        reason = first_line(error)
        raise IntegrityError(
            f"{directory}: the base cannot be read ({type(error).__name__}: {reason}). The step is "
            "damaged; restore another one."
        ) from error
