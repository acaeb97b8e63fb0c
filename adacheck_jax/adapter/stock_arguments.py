"""Arguments of stock Orbax, taken from code that was written for it and runs unchanged.

New code needs few of them: docs/guide/migrating.md says what to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.device import transfer
from adacheck_jax.device.trees import PyTree


def one_of(name: str, state: PyTree | None, item: PyTree | None) -> PyTree | None:
    """The state, of whose two names one may be used."""
    if state is not None and item is not None:
        raise ValueError(f"expected {name} or item, which are the same, found both.")
    return item if state is None else state


def merged(state: PyTree | None, restore_args: PyTree) -> tuple[PyTree, Sequence[Any]]:
    """An abstract state with what the arguments of its leaves say, which win; and those of each."""
    if state is None:
        raise ValueError(
            "expected an abstract state beside restore_args, found none. Nothing was restored; "
            "pass the result of metadata(), or no restore_args."
        )
    leaves, treedef = jax.tree.flatten(_tree(state))
    args = treedef.flatten_up_to(_tree(restore_args))
    return treedef.unflatten(map(_wanted, leaves, args)), args


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
    is_key = transfer.is_key(leaf)  # of which Orbax tells type and shape of the elements
    dtype = getattr(leaf, "dtype", None) if arg.dtype is None or is_key else arg.dtype
    if dtype is None or kind not in (jax.Array, np.ndarray):
        return leaf
    if kind is np.ndarray:
        return leaf if is_key else np.broadcast_to(np.zeros((), dtype), np.shape(leaf))
    if not isinstance(arg, ocp.ArrayRestoreArgs):
        return jax.ShapeDtypeStruct(np.shape(leaf), dtype, sharding=getattr(leaf, "sharding", None))
    if not arg.strict:
        raise ValueError(
            "restore_args: expected strict=True, found ArrayRestoreArgs(strict=False). Nothing was "
            "restored; truncate and pad with RestoreArgs(strict=False), for all leaves."
        )
    shape = np.shape(leaf) if arg.global_shape is None or is_key else arg.global_shape
    wanted = jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(leaf, arg))
    described = [getattr(leaf, name, None) for name in ("shape", "dtype", "sharding")]
    return leaf if described == [wanted.shape, wanted.dtype, wanted.sharding] else wanted


def _sharding(leaf: Any, arg: ocp.ArrayRestoreArgs) -> Any:
    found: Any = arg.sharding
    if found is None and arg.mesh is not None and arg.mesh_axes is not None:
        return jax.sharding.NamedSharding(arg.mesh, arg.mesh_axes)
    if found is None:
        return getattr(leaf, "sharding", None)
    return found.to_jax_sharding() if hasattr(found, "to_jax_sharding") else found
