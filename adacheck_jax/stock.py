"""Bases: full states read and written through Orbax's own PyTree handlers.

A base is a stock Orbax checkpoint, so that anyone can read it without this library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax import trees
from adacheck_jax.errors import IntegrityError
from adacheck_jax.trees import PyTree


class StockCheckpoints:
    """Reads and writes full states as stock Orbax PyTree checkpoints."""

    def __init__(self) -> None:
        self._writer = ocp.StandardCheckpointHandler()
        self._reader = ocp.PyTreeCheckpointHandler()

    async def write(
        self, directory: epath.Path, state: PyTree, save_args: PyTree, custom_metadata: Any
    ) -> list[ocp.Future]:
        """Starts writing a state; the futures complete when its data is durable."""
        # Orbax takes no array without elements; the manifest alone tells of those.
        if save_args is not None:
            save_args = jax.tree.map(lambda x, a: None if _is_empty(x) else a, state, save_args)
        state = jax.tree.map(lambda x: None if _is_empty(x) else _storable(x), state)
        args = ocp.args.StandardSave(state, save_args, custom_metadata)
        return list(await self._writer.async_save(directory, args=args) or [])

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote; called on one process after all futures."""
        self._writer.finalize(directory)

    def metadata(self, directory: Path) -> Any:
        """Orbax's metadata of a state: its tree with shapes, data types and shardings.

        Raises:
            IntegrityError: Orbax cannot read it.
        """
        with _damage_named(directory):
            return self._reader.metadata(epath.Path(directory))

    def read(
        self, directory: Path, wanted: Mapping[str, Any], dtypes: Mapping[str, str]
    ) -> dict[str, Any]:
        """Reads a state, each process only the boxes that its devices need.

        Args:
            directory: of the base.
            wanted: for each leaf path a sharding, ``np.ndarray``, or None to leave the leaf out.
                Python scalars come back as such whatever is asked for. Arrays without elements are
                not among them.
            dtypes: data type of every leaf.

        Returns:
            Leaves by leaf path; None for those left out.

        Raises:
            IntegrityError: Orbax cannot read it, or it has other leaves than expected.
        """
        metadata_tree = self.metadata(directory).tree
        found, _ = trees.flatten(metadata_tree)
        if found.keys() != wanted.keys():
            raise IntegrityError(
                f"{directory}: expected a base with {len(wanted)} leaves, found "
                f"{len(found)}; they differ in {sorted(found.keys() ^ wanted.keys())[:5]}. The "
                "step is damaged; restore another one."
            )

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
        leaves, _ = trees.flatten(tree)
        return {
            path: None if leaf is ocp.PLACEHOLDER else _as_saved(leaf, dtypes[path])
            for path, leaf in leaves.items()
        }

    def close(self) -> None:
        """Releases what the handlers hold."""
        self._writer.close()
        self._reader.close()


def _is_empty(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.size == 0


_WIDENED = {"uint2": "uint8", "uint4": "uint8"}
"""Data types that tensorstore does not know, and what a base stores in their place."""


def _storable(leaf: Any) -> Any:
    wide = _WIDENED.get(str(getattr(leaf, "dtype", "")))
    return leaf if wide is None else leaf.astype(wide)


def _as_saved(leaf: Any, dtype: str) -> Any:
    return leaf.astype(jnp.dtype(dtype)) if dtype in _WIDENED else leaf


def _restore_args(wanted: Any, leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, ocp.metadata.ScalarMetadata) or wanted is None:
        return ocp.RestoreArgs()
    if wanted is np.ndarray:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=wanted)


@contextlib.contextmanager
def _damage_named(directory: Path) -> Iterator[None]:
    """Orbax reports damaged files in many ways, down to a bare ``Exception``; all mean this."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # too little memory, not damage
    except Exception as error:
        reason = str(error).split("\n", maxsplit=1)[0][:300]
        raise IntegrityError(
            f"{directory}: Orbax cannot read the base ({type(error).__name__}: {reason}). The step "
            "is damaged; restore another one."
        ) from error
