"""Records: gradients in the data type in which an update consumes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError


def record_of(gradients: PyTree, dtype: Any) -> PyTree:
    """The record of gradients.

    Args:
        gradients: arrays and Python numbers.
        dtype: data type of the record; None for the gradients' own. Integers keep theirs.

    Raises:
        RecorderError: a leaf is neither an array nor a number.
    """
    return jax.tree.map(lambda x: x.astype(_dtype_of(x, dtype)), _arrays(gradients))


def empty_record(params: PyTree, dtype: Any) -> PyTree:
    """The record before the first update: zeros, with the arguments and errors of the others."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_dtype_of(p, dtype)), _arrays(params))


def check_types(record: PyTree, before: PyTree) -> None:
    """Refuse gradients of another data type than the record in the state, which init() assumed.

    Raises:
        RecorderError: a data type differs.
    """
    olds = dict(jax.tree_util.tree_leaves_with_path(before))
    for path, new in jax.tree_util.tree_leaves_with_path(record):
        old = olds.get(path, new)
        if new.dtype != old.dtype:
            raise RecorderError(
                f"expected gradients of the params' data type {old.dtype}, found {new.dtype}. Say "
                f"so, and nothing is rounded: Recorder(tx, dtype=jnp.{new.dtype})."
            )


def widened(record: PyTree, known: Iterable[PyTree]) -> PyTree:
    """A record cast to the params' data type, where that has more digits.

    Args:
        record: the record.
        known: trees of params; the first one with the record's shapes counts.
    """
    paths, treedef = trees.flatten(record)
    for params in known:
        likes = trees.flatten(params)[0]
        shapes = {path: jnp.shape(likes[path]) for path in paths if path in likes}
        if shapes == {path: leaf.shape for path, leaf in paths.items()}:
            return treedef.unflatten(_wide(x, likes[path]) for path, x in paths.items())
    return record


def _wide(leaf: Any, like: Any) -> Any:
    dtype = like.dtype if hasattr(like, "dtype") else jnp.result_type(like)
    both_float = all(jnp.issubdtype(each, jnp.floating) for each in (leaf.dtype, dtype))
    return leaf.astype(dtype) if both_float and dtype.itemsize > leaf.dtype.itemsize else leaf


def _dtype_of(value: Any, dtype: Any) -> Any:
    """Data type of the record of a gradient; integers are recorded as they are."""
    if dtype is None or not jnp.issubdtype(value.dtype, jnp.floating):
        return value.dtype
    return dtype


def _arrays(tree: PyTree) -> PyTree:
    """A tree with its Python numbers made arrays.

    Raises:
        RecorderError: a leaf is neither an array nor a number.
    """

    def as_array(path: Any, leaf: Any) -> Any:
        if hasattr(leaf, "dtype"):
            return leaf
        if isinstance(leaf, bool | int | float | complex):
            return jnp.asarray(leaf)
        raise RecorderError(
            f"leaf {trees.leaf_path(path)}: expected an array, found {type(leaf).__name__}. Give "
            "the optimizer the arrays alone, as equinox.filter(model, equinox.is_inexact_array)."
        )

    return jax.tree_util.tree_map_with_path(as_array, tree)
