"""Bases: full states read and written as stock Orbax PyTree checkpoints.

Orbax alone can read a base. It writes the metadata of a base; :mod:`~adacheck_jax.store.volumes`
writes arrays and numbers, into the files where Orbax expects them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.adapter.stock import descriptions
from adacheck_jax.adapter.stock.descriptions import (
    ArrayEntry,
    check_described,
    digest_of,
    is_number,
    sharding_key,
    stored_dtype,
)
from adacheck_jax.device import jax_settings, sharding, transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    MismatchError,
    StorageError,
    first_line,
    unreadable,
)
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.restore import base_reader
from adacheck_jax.restore.agreed import ALONE, Agreed
from adacheck_jax.restore.shared_reads import ReadOnce
from adacheck_jax.restore.working_set import abstract_leaf
from adacheck_jax.schemes import SCHEMES, scheme_of
from adacheck_jax.store.storage.location import AnyPath, at, expect_client, located


class StockCheckpoints:
    """Reader and writer of full states as stock Orbax PyTree checkpoints."""

    def __init__(self) -> None:
        types = ocp.type_handlers
        kinds = (int, float, np.ndarray, jax.Array)
        number = descriptions.NotedScalars()
        arrays = descriptions.NotedArrays()
        noted = number, number, descriptions.NotedNumpy(), arrays
        self._noted = noted[1:]
        registry = types.create_type_handler_registry(
            *zip(kinds, noted, strict=True), (jax.ShapeDtypeStruct, arrays)
        )
        self._writer = ocp.PyTreeCheckpointHandler(use_zarr3=True, type_handler_registry=registry)
        self._reader = ocp.PyTreeCheckpointHandler()
        numbers = descriptions.DescribedScalars()
        described = numbers, numbers, descriptions.DescribedNumpy(), descriptions.DescribedArrays()
        self._describer = ocp.PyTreeCheckpointHandler(
            type_handler_registry=types.create_type_handler_registry(
                *zip(kinds, described, strict=True)
            )
        )

    async def write(
        self, directory: epath.Path, state: PyTree, save_args: PyTree, custom_metadata: Any
    ) -> tuple[list[ocp.Future], dict[str, ArrayEntry]]:
        """Start to write a state without its arrays.

        Returns:
            Futures that complete when that is durable, and the arrays left to be written, by leaf
            path; :meth:`finalize` takes them. Arrays without elements are not among them: Orbax
            takes none, and only the manifest describes those.

        Raises:
            MismatchError: Orbax would store two leaves in one array.
        """
        if save_args is not None:
            save_args = jax.tree.map(lambda x, a: None if _is_empty(x) else a, state, save_args)
        with jax_settings.own():
            state = jax.tree.map(lambda x: None if _is_empty(x) else _storable(x), state)
        args = ocp.args.PyTreeSave(state, save_args, custom_metadata=custom_metadata)
        entries: dict[str, ArrayEntry] = {}
        try:
            futures = list(await self._writer.async_save(directory, args=args) or [])
        finally:
            for handler in self._noted:
                entries |= handler.take(str(directory))
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
        entries: Mapping[str, ArrayEntry],
        chunk_shapes: Mapping[str, tuple[int, ...]],
    ) -> dict[str, str]:
        """Merge the files that Orbax wrote, and describe the arrays as it would; for one process.

        Returns:
            SHA-256 digests of the files that describe the arrays, by file name.
        """
        if any(n.startswith("ocdbt.process_") for n in at(located(str(directory))).folders()):
            self._writer.finalize(directory)
        shardings = {
            sharding_key(entry.name): entry.sharding
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
        top = at(located(str(directory)))
        sharded, described = top / manifests.SHARDINGS, top / "array_metadatas/process_0"
        sharded.write(json.dumps(shardings).encode())
        described.write(json.dumps({"array_metadatas": arrays}).encode())
        sharded.sync(described, top / "_METADATA")  # Orbax leaves its own in the page cache
        return {name: digest_of(top / name) for name in manifests.DESCRIPTIONS}

    def metadata(self, directory: AnyPath) -> Any:
        """Orbax's metadata of a base: its tree with shapes, data types and shardings.

        Raises:
            IntegrityError: Orbax cannot read it.
            StorageError: it cannot be read now.
        """
        orbax = self._reader if _is_reachable(directory) else self._describer
        with _damage_named(directory):
            return orbax.metadata(epath.Path(str(directory)))

    def described(self, directory: AnyPath) -> PyTree:
        """The tree of :meth:`metadata` for a base of this library, with less about each array.

        Raises:
            IntegrityError: it cannot be read.
            StorageError: it cannot be read now.
        """
        with _damage_named(directory):
            return self._describer.metadata(epath.Path(str(directory))).tree

    def read(
        self,
        directory: AnyPath,
        leaves: Sequence[Leaf],
        wanted: Mapping[str, Any],
        metadata_tree: PyTree,
        read_once: ReadOnce = None,
        agreed: Agreed = ALONE,
        *,
        is_donated: bool = False,
    ) -> dict[str, Any]:
        """Read a state, in each process only the boxes that its devices need.

        Args:
            directory: directory of the base.
            leaves: the manifest's record of every leaf.
            wanted: sharding of each leaf, by leaf path; ``np.ndarray`` for a host array, None to
                leave the leaf out. Python scalars stay Python scalars.
            metadata_tree: Orbax's tree of them (see :meth:`described`).
            read_once: as for :func:`base_reader.read`; collective.
            agreed: agreement of the processes.
            is_donated: True if an update is to be given the leaves' memory.

        Returns:
            Leaves by leaf path; None for a leaf left out.

        Raises:
            IntegrityError: it is damaged, or its leaves, or the shape or type of one, are not the
                expected ones; raised before memory is allocated for them.
            StorageError: it cannot be read now.
        """
        stored = {leaf.path: leaf for leaf in leaves if leaf.nbytes}
        found = _described(directory, stored, metadata_tree)
        read = {leaf.path: _empty(leaf, wanted[leaf.path]) for leaf in leaves if not leaf.nbytes}
        asked = {path: each for path, each in wanted.items() if path in found and each is not None}
        arrays = {
            found[path].name: abstract_leaf(stored[path], None if is_number(found[path]) else each)
            for path, each in asked.items()
        }
        with _damage_named(directory):
            found_arrays = base_reader.read(
                directory, arrays, read_once, agreed, is_donated=is_donated
            )
            for path, data in zip(asked, found_arrays, strict=True):
                key = stored[path].key_type
                leaf = transfer.keys_of(data, key) if key else data
                read[path] = data.item() if is_number(found[path]) else leaf
        return {
            leaf.path: None
            if (value := read.get(leaf.path)) is None
            else _as_saved(value, leaf.dtype)
            for leaf in leaves
        }

    def read_by_orbax(
        self, directory: AnyPath, wanted: Mapping[str, Any], metadata_tree: PyTree
    ) -> dict[str, Any]:
        """Read the wanted leaves of a checkpoint of stock Orbax.

        Args:
            directory: directory of the checkpoint.
            wanted: as for :meth:`read`; a leaf that is not named is left out.
            metadata_tree: the tree of :meth:`metadata`.

        Raises:
            IntegrityError: Orbax cannot read it.
            StorageError: it cannot be read now, or not from a store of this kind.
        """
        readable = {path: _readable(sharding) for path, sharding in wanted.items()}
        if not _is_reachable(directory):
            others = " or ".join(f"{x}://" for x, each in SCHEMES.items() if each.orbax_reads)
            raise StorageError(
                f"{directory}: no release of Orbax up to "
                f"{importlib.metadata.version('orbax-checkpoint')} reaches arrays there: it takes "
                f"the URL for a relative path. Copy the root to {others}, or to a file system."
            )

        def argument(key_path: Any, leaf: Any) -> Any:
            return _restore_args(readable.get(trees.leaf_path(key_path)), leaf)

        def item(key_path: Any, leaf: Any) -> Any:
            return ocp.PLACEHOLDER if readable.get(trees.leaf_path(key_path)) is None else leaf

        args = ocp.args.PyTreeRestore(
            item=jax.tree_util.tree_map_with_path(item, metadata_tree),
            restore_args=jax.tree_util.tree_map_with_path(argument, metadata_tree),
        )
        with _damage_named(directory):
            tree = self._reader.restore(epath.Path(str(directory)), args=args)
        read, _ = trees.flatten(tree)
        return {
            path: leaf if readable[path] is wanted[path] else transfer.moved(leaf, wanted[path])
            for path, leaf in read.items()
            if leaf is not ocp.PLACEHOLDER
        }

    def close(self) -> None:
        """Release the resources of Orbax's handlers."""
        self._writer.close()
        self._reader.close()
        self._describer.close()


def described(state: PyTree) -> PyTree:
    """A state without elements of arrays: :meth:`StockCheckpoints.write` describes it as well."""

    def hollow(leaf: Any) -> Any:
        if _is_empty(leaf) or (isinstance(leaf, jax.Array) and transfer.is_key(leaf)):
            return leaf
        if isinstance(stored := _storable(leaf), jax.Array):
            return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=stored.sharding)
        if not isinstance(stored, np.ndarray):
            return stored
        return np.broadcast_to(np.zeros((), stored.dtype), stored.shape)

    return jax.tree.map(hollow, state)


def _is_reachable(directory: AnyPath) -> bool:
    """True if Orbax can read arrays there."""
    return (scheme := scheme_of(directory)) is None or scheme.orbax_reads


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.size == 0


def _storable(leaf: Any) -> Any:
    """A leaf as Orbax is to describe it; Orbax reads no element of an array."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
    elif sharding.is_local(leaf):  # Orbax takes no array that each process has for itself
        leaf = np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)
    dtype = str(getattr(leaf, "dtype", ""))
    return leaf if stored_dtype(dtype) == dtype else leaf.astype(stored_dtype(dtype))


def _described(directory: AnyPath, stored: Mapping[str, Leaf], tree: PyTree) -> dict[str, Any]:
    """Orbax's descriptions of the stored leaves, by leaf path, compared with the manifest's."""
    found, _ = trees.flatten(tree)
    if found.keys() != stored.keys():
        raise IntegrityError(
            f"{directory}: expected a base with {len(stored)} leaves, found "
            f"{len(found)}; they differ in {sorted(found.keys() ^ stored.keys())[:5]}. The "
            "step is damaged; restore another one."
        )
    for path, described in found.items():
        check_described(directory, stored[path], described)
    return found


def _as_saved(leaf: Any, dtype: str) -> Any:
    return leaf if stored_dtype(dtype) == dtype else leaf.astype(jnp.dtype(dtype))


def _empty(leaf: Leaf, wanted: Any) -> Any:
    """An array without elements, which no base stores; None if it is not wanted."""
    if wanted is None:
        return None
    array: Any = np.empty(leaf.shape, jnp.dtype(leaf.dtype))
    if wanted is not np.ndarray:
        abstract = jax.ShapeDtypeStruct(leaf.shape, array.dtype, sharding=wanted)
        array = transfer.place(abstract, lambda box: array[box.slices])
    return transfer.keys_of(array, leaf.key_type) if leaf.key_type else array


def _readable(wanted: Any) -> Any:
    """A placement that Orbax can read onto: it makes no array without a shard in this process."""
    is_elsewhere = isinstance(wanted, jax.sharding.Sharding) and not wanted.addressable_devices
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if is_elsewhere else wanted


def _restore_args(wanted: Any, leaf: Any) -> ocp.RestoreArgs:
    is_array = isinstance(leaf, ocp.metadata.ArrayMetadata) and not is_number(leaf)
    if wanted is None or not is_array:
        return ocp.RestoreArgs()
    if wanted is np.ndarray:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=wanted)


@contextlib.contextmanager
def _damage_named(directory: AnyPath) -> Iterator[None]:
    """Raise ``IntegrityError`` for the many errors that reading damaged files raises."""
    expect_client(directory)
    try:
        yield
    except (MemoryError, ImportError, jax.errors.JaxRuntimeError, AdaCheckError):
        raise  # too little memory or no module, not damage; or named already
    except Exception as error:
        if refused := unreadable(directory, error):
            raise refused from error
        reason = first_line(error)
        state = "damaged" if at(directory).on_file_system else "damaged, or is being deleted"
        raise IntegrityError(
            f"{directory}: stock Orbax cannot read this checkpoint ({type(error).__name__}: "
            f"{reason}). It is {state}; take another one."
        ) from error
