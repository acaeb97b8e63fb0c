"""Pytrees, leaf paths, and data types of leaves.

A *leaf path* is the slash-joined key of one leaf: ``params/layer_0/kernel``, ``opt_state/1/mu``.
It does not depend on the container's type, so the path of a leaf in a ``TrainState`` equals its
path in the nested dictionary that Orbax returns when it is asked for no particular structure.
"""

from __future__ import annotations

import collections
import fnmatch
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.errors import MismatchError, listed

PyTree = Any
TreeDef = Any
"""A ``jax.tree_util.PyTreeDef``, which type checkers do not accept as a type."""


def leaf_path(key_path: Sequence[Any]) -> str:
    """Joins the keys of one JAX key path with slashes."""
    return "/".join(_key_name(key) for key in key_path)


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        value = getattr(key, attribute, None)
        if value is not None:
            return str(value)
    return str(key)


def matches(path: str, pattern: str) -> bool:
    """True if a leaf, or a node that it lies below, has a path that a pattern of the shell fits.

    In the pattern ``*`` stands for any text, slashes included.
    """
    parts = path.split("/")
    starts = ("/".join(parts[: n + 1]) for n in range(len(parts)))
    return any(fnmatch.fnmatchcase(each, pattern) for each in starts)


def flatten(tree: PyTree) -> tuple[dict[str, Any], TreeDef]:
    """Flattens a pytree into ``{leaf path: leaf}``, in tree order.

    Returns:
        The leaves by leaf path, and the treedef that :func:`unflatten` takes.

    Raises:
        MismatchError: two leaves have the same leaf path (``{"a/b": x, "a": {"b": y}}``).
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {leaf_path(key_path): leaf for key_path, leaf in pairs}
    if len(leaves) != len(pairs):
        counts = collections.Counter(leaf_path(key_path) for key_path, _ in pairs)
        doubled = sorted(path for path, count in counts.items() if count > 1)
        raise MismatchError(
            f"{len(doubled)} leaf paths occur twice: {listed(doubled)}. Expected unique paths; "
            "rename the keys that contain a slash."
        )
    return leaves, treedef


def unflatten(treedef: TreeDef, leaves: Iterable[Any]) -> PyTree:
    """Rebuilds the pytree that :func:`flatten` took apart, from leaves in the same order."""
    return jax.tree_util.tree_unflatten(treedef, list(leaves))


def nothing_under(params_path: str, leaves: Iterable[str]) -> str:
    """The message where a state has no params at their leaf path: it tells the paths there are."""
    count = params_path.count("/") + 1
    there = listed(sorted({"/".join(each.split("/")[:count]) for each in leaves}), 6)
    return f"expected the params under params_path, {params_path!r}, found none. There: {there}."


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries of leaves, a level for each name in their paths.

    No leaf may lie below another one.
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, name = path.split("/")
        level = root
        for each in above:
            level = level.setdefault(each, {})
        level[name] = leaf
    return root


def dtype_of(leaf: Any) -> Any:
    """Data type of an array, abstract array or Python number, in this machine's byte order."""
    dtype = getattr(leaf, "dtype", None)
    return native(np.asarray(leaf).dtype if dtype is None else dtype)


def native(dtype: Any) -> Any:
    """A data type in this machine's byte order; the same object if it is."""
    return dtype if getattr(dtype, "isnative", True) else dtype.newbyteorder("=")


def is_same_kind(a: str, b: str) -> bool:
    """True if a cast between two data types changes precision or range alone, as Orbax's casts."""
    try:
        pair = jnp.dtype(a), jnp.dtype(b)
    except TypeError:  # of typed PRNG keys, or of another library
        return a == b
    kinds = (jnp.floating, jnp.complexfloating, jnp.bool_)
    return are_integers(*pair) or any(all(jnp.issubdtype(x, k) for x in pair) for k in kinds)


def are_integers(*dtypes: Any) -> bool:
    """True if all of some data types are of integers."""
    return all(jnp.issubdtype(each, jnp.integer) for each in dtypes)


def loses(dtype: Any, other: Any) -> bool:
    """True if a data type has numbers that another one of its kind does not have."""
    a, b = _info(dtype), _info(other)
    if a is None or are_integers(dtype):
        return a is not None and (a.min < b.min or a.max > b.max)
    is_finer = float(a.smallest_subnormal) < float(b.smallest_subnormal)
    return is_finer or a.nmant > b.nmant or float(a.max) > float(b.max)


def _info(dtype: Any) -> Any:
    """Limits of a data type's numbers; None for booleans."""
    if are_integers(dtype):
        return jnp.iinfo(dtype)
    return jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.inexact) else None


@functools.cache
def is_narrow(dtype: Any) -> bool:
    """True if elements have less than a byte."""
    info = _info(dtype)
    return info is not None and info.bits < 8


def check_same_leaves(
    expected: Mapping[str, str],
    found: Mapping[str, str],
    *,
    where: str,
    remedy: str,
    words: tuple[str, str] = ("expected", "found"),
) -> None:
    """Compares two descriptions of a tree and reports every difference at once, in these words.

    Raises:
        MismatchError: lists missing, extra and differing leaves.
    """
    first, second = words
    differences = {
        f"{first}, not {second}": [path for path in expected if path not in found],
        f"{second}, not {first}": [path for path in found if path not in expected],
        "different": [
            f"{path}: {first} {expected[path]}, {second} {found[path]}"
            for path in expected
            if path in found and expected[path] != found[path]
        ],
    }
    count = sum(map(len, differences.values()))
    if count:
        lists = [f"{k} ({len(x)}): {listed(x)}." for k, x in differences.items() if x]
        differ = "1 leaf differs" if count == 1 else f"{count} leaves differ"
        raise MismatchError("\n  ".join([f"{where}: {differ}.", *lists, remedy]))
