"""Bases: full states read and written through Orbax's own PyTree handlers.

A base is a stock Orbax checkpoint, so that anyone can read it without this library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax import trees
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
        args = ocp.args.StandardSave(state, save_args, custom_metadata)
        return list(await self._writer.async_save(directory, args=args) or [])

    def finalize(self, directory: epath.Path) -> None:
        """Merges what the processes wrote; called on one process after all futures."""
        self._writer.finalize(directory)

    def metadata(self, directory: Path) -> Any:
        """Orbax's metadata of a state: its tree with shapes, data types and shardings."""
        return self._reader.metadata(epath.Path(directory))

    def read(self, directory: Path, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Reads a state, each process only the boxes that its devices need.

        Args:
            directory: of the base.
            wanted: for each leaf path a sharding, ``np.ndarray``, or None to leave the leaf out.
                Python scalars come back as such whatever is asked for.

        Returns:
            Leaves by leaf path; None for those left out.
        """
        metadata_tree = self.metadata(directory).tree

        def argument(key_path: Any, leaf: Any) -> Any:
            return _restore_args(wanted[trees.leaf_path(key_path)], leaf)

        def item(key_path: Any, leaf: Any) -> Any:
            return ocp.PLACEHOLDER if wanted[trees.leaf_path(key_path)] is None else leaf

        tree = self._reader.restore(
            epath.Path(directory),
            args=ocp.args.PyTreeRestore(
                item=jax.tree_util.tree_map_with_path(item, metadata_tree),
                restore_args=jax.tree_util.tree_map_with_path(argument, metadata_tree),
            ),
        )
        leaves, _ = trees.flatten(tree)
        return {path: None if leaf is ocp.PLACEHOLDER else leaf for path, leaf in leaves.items()}

    def close(self) -> None:
        """Releases what the handlers hold."""
        self._writer.close()
        self._reader.close()


def _restore_args(wanted: Any, leaf: Any) -> ocp.RestoreArgs:
    if isinstance(leaf, ocp.metadata.ScalarMetadata) or wanted is None:
        return ocp.RestoreArgs()
    if wanted is np.ndarray:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=wanted)
