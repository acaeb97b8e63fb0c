"""Records: gradients as an update consumes them, and the extra arguments that go with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import RecorderError


def record_of(gradients: PyTree, dtype: Any) -> PyTree:
    """The record of gradients.

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


def in_place_of(before: PyTree, record: PyTree) -> PyTree:
    """The record, for the memory of the one before it, of which it takes no bit.

    ``jax.jit`` drops an argument that nothing reads, and gives the donated arrays to results of
    their shapes in order: without the record before it each moment would go into the memory of
    another one, or of a param, and XLA would copy them all first.
    """
    olds = dict(jax.tree_util.tree_leaves_with_path(before))

    def placed(path: Any, new: Any) -> Any:
        if not isinstance(new, jax.core.Tracer):  # which the optimizer's state may have too
            return jnp.copy(new)
        old: Any = olds.get(path)
        if not isinstance(old, jax.core.Tracer) or jax.typeof(old) != jax.typeof(new):
            return new
        return jax.lax.select(np.False_, old, new)  # compilers know it, jax.jit does not

    return jax.tree_util.tree_map_with_path(placed, record)


def widened(record: PyTree, known: Iterable[PyTree]) -> PyTree:
    """A record cast to the params' data type, where that has more digits.

    Of several trees of params the first one with the record's shapes counts.
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
    """A tree with its Python numbers made arrays; refuses what is neither."""

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


@dataclass(frozen=True, slots=True)
class ExtraArguments:
    """The extra arguments that a recorder knows of.

    Attributes:
        declared: shapes and data types of those that are recorded, by name.
        takes_others: True if the wrapped transformation could consume others.
    """

    declared: dict[str, jax.ShapeDtypeStruct]
    takes_others: bool

    def zeros(self) -> dict[str, jax.Array]:
        """Recorded ones before the first update."""
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in self.declared.items()}

    def recorded(self, received: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The declared ones of the extra arguments that an update receives.

        Returns:
            The arguments by name, and the reason why the update cannot be replayed, if there is
            one.

        Raises:
            RecorderError: a declared one is missing, or has another shape; or an undeclared one is
                an array that the wrapped transformation could consume.
        """
        extra, problem = {}, None
        has_function = any(map(callable, received.values()))
        for name, value in received.items():
            if name in self.declared:
                extra[name] = _as_declared(name, value, self.declared[name])
            elif self.takes_others:
                problem = _problem_of(name, value, has_function)
        if missing := sorted(self.declared.keys() - extra.keys()):
            raise RecorderError(
                f"expected update() to receive the declared extra arguments {missing}, found "
                f"{sorted(received)}. Pass them to every update, or do not declare them."
            )
        return extra, problem


def _as_declared(name: str, value: Any, declared: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.shape(value) != declared.shape:
        raise RecorderError(
            f"expected the extra argument {name!r} in the declared shape {declared.shape}, found "
            f"{jnp.shape(value)}. Declare the shape that update() receives."
        )
    return jnp.asarray(value, declared.dtype)


def _problem_of(name: str, value: Any, has_function: bool) -> str:
    """The reason why an update with an undeclared argument cannot be replayed."""
    if has_function:
        return (
            f"update() received the extra argument {name!r} and a function, as line searches "
            "take it (optax.lbfgs). An update that evaluates the model cannot be replayed: leave "
            "the Recorder out, and save differences with AdaCheckHandler(delta='bits')"
        )
    if isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise RecorderError(
            f"update() received the extra argument {name!r} "
            f"({jnp.result_type(value)}{list(jnp.shape(value))}), which the Recorder does not "
            f"know. Expected every array that the wrapped transformation may consume to be "
            f"declared: Recorder(tx, extra_args={{{name!r}: jnp.zeros({jnp.shape(value)})}})."
        )
    return (
        f"update() received the extra argument {name!r} of type {type(value).__name__}, which "
        "cannot be recorded"
    )
