"""A plain checkpoint of stock Orbax, read leaf by leaf onto the shardings that a caller wants."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, StorageError, first_line, unreadable
from adacheck_jax.store.storage.location import AnyPath


def described(directory: AnyPath) -> PyTree:
    """Orbax's metadata tree of a checkpoint; a typed PRNG key has the type of its key data.

    Args:
        directory: the directory with the checkpoint's ``_METADATA``.

    Raises:
        IntegrityError: Orbax cannot read it.
        StorageError: it cannot be read now.
    """
    with _named(directory), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        return handler.metadata(epath.Path(str(directory))).tree


def is_number(metadata: Any) -> bool:
    """True for the metadata of a Python number.

    Args:
        metadata: a leaf of :func:`described`.
    """
    return isinstance(metadata, ocp.metadata.ScalarMetadata)


def load(directory: AnyPath, tree: PyTree, placements: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by leaf path; each process reads what its devices need.

    Args:
        directory: the directory with the checkpoint's ``_METADATA``.
        tree: the tree of :func:`described`.
        placements: sharding of each leaf by leaf path, ``np.ndarray`` for a host array; numbers are
            not among them.

    Raises:
        IntegrityError: Orbax cannot read it.
        StorageError: it cannot be read now.
    """

    def argument(key_path: Any, _: Any) -> ocp.RestoreArgs:
        placement = placements.get(trees.leaf_path(key_path))
        if placement is None:
            return ocp.RestoreArgs()
        if placement is np.ndarray:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=placement)

    arguments = jax.tree_util.tree_map_with_path(argument, tree)
    args = ocp.args.PyTreeRestore(item=tree, restore_args=arguments)
    with _named(directory), contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
        found, _ = trees.flatten(handler.restore(epath.Path(str(directory)), args=args))
    return found


@contextlib.contextmanager
def _named(directory: AnyPath) -> Iterator[None]:
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise
    except ImportError as error:
        raise StorageError(f"{directory}: Orbax cannot reach it ({first_line(error)}).") from error
    except Exception as error:
        if refused := unreadable(directory, error):
            raise refused from error
        raise IntegrityError(
            f"{directory}: stock Orbax cannot read this checkpoint ({type(error).__name__}: "
            f"{first_line(error)}). Nothing was returned; take another one."
        ) from error
