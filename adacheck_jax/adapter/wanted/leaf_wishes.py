"""Orbax's restore arguments of single leaves, made part of the abstract state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.layout import Format

from adacheck_jax.device.trees import PyTree


def merged(abstract_state: PyTree, restore_args: PyTree) -> PyTree:
    """An abstract state in which the restore arguments of a leaf come first.

    Args:
        abstract_state: tree of arrays, ``jax.ShapeDtypeStruct``, numbers or placeholders.
        restore_args: tree of ``ocp.RestoreArgs`` (or None) like it, as for ``PyTreeRestore``.

    Raises:
        ValueError: the trees differ, or an argument asks for what the whole restore decides.
    """
    leaves, treedef = jax.tree.flatten(_tree(abstract_state))
    args = treedef.flatten_up_to(_tree(restore_args))
    return treedef.unflatten(map(_wanted, leaves, args))


def leaf_arguments(restore_args: PyTree) -> list[Any]:
    """The arguments of all leaves."""
    return jax.tree.leaves(_tree(restore_args))


def has_layout(arg: Any) -> bool:
    """True if a leaf is wanted in a layout."""
    return isinstance(getattr(arg, "sharding", None), Format)


def _tree(described: PyTree) -> PyTree:
    """The tree itself, of which ``metadata()`` gives a description."""
    return described.tree if hasattr(described, "custom_metadata") else described


def _wanted(leaf: Any, arg: ocp.RestoreArgs | None) -> Any:
    """The abstract leaf that says what a leaf and its restore arguments say together."""
    if leaf is ocp.PLACEHOLDER or not isinstance(arg, ocp.RestoreArgs):
        return leaf
    kind = arg.restore_type
    if kind in (int, float) and not np.shape(leaf):
        return kind(0)
    dtype = arg.dtype if arg.dtype is not None else getattr(leaf, "dtype", None)
    if dtype is None or kind not in (jax.Array, np.ndarray):
        return leaf
    if kind is np.ndarray:
        is_key = jnp.issubdtype(dtype, jax.dtypes.extended)
        return leaf if is_key else np.broadcast_to(np.zeros((), dtype), np.shape(leaf))
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=getattr(leaf, "sharding", None))
    if not arg.strict:
        raise ValueError(
            "restore_args: expected strict=True, found ArrayRestoreArgs(strict=False). Nothing was "
            "restored; truncate and pad with RestoreArgs(strict=False), for all leaves."
        )
    shape = np.shape(leaf) if arg.global_shape is None else arg.global_shape
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(leaf, arg))


def _sharding(leaf: Any, arg: ocp.ArrayRestoreArgs) -> Any:
    found: Any = arg.sharding
    if found is None and arg.mesh is not None and arg.mesh_axes is not None:
        return jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    if found is None:
        return getattr(leaf, "sharding", None)
    return found.to_jax_sharding() if hasattr(found, "to_jax_sharding") else found
