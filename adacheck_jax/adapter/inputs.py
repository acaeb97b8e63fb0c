"""Arguments of a save, checked before anything of it is written."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

import jax
import jax.core
import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import FormatError, MismatchError

_MAX_STEP = 2**63 - 1
_NO_NUMBERS = frozenset("OUSmM")
"""Kinds of numpy arrays of objects, texts and dates."""
_NOT_STORABLE = frozenset(
    {"int1", "uint1", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"}
)  # in which tensorstore 0.1.86 stores no array


def step_number(step: Any) -> int | None:
    """A caller's step number as a Python integer; None stays None.

    Args:
        step: an integer of Python, numpy or JAX.

    Raises:
        ValueError: it is none, or negative, or needs more than 63 bits.
    """
    if step is None:
        return None
    try:
        number = None if isinstance(step, bool | np.bool_) else operator.index(step)
    except TypeError:
        number = None
    if number is None or not 0 <= number <= _MAX_STEP:
        raise ValueError(
            f"expected a step number, an integer from 0 to 2**63 - 1, found {step!r}. Nothing was "
            "saved; leave the step out to take it from the directory's name."
        )
    return number


def checked_state(state: PyTree, save_args: PyTree | None = None) -> PyTree:
    """Refuses what no base can hold: what ``StandardSave`` refuses, and what it loses.

    Args:
        state: the state to save.
        save_args: as for ``StandardSave``.

    Returns:
        The state; of leaves that are no arrays but can be seen as one (``__array__``) the arrays.

    Raises:
        MismatchError: the state is no pytree of arrays and numbers, or is being traced.
        FormatError: a leaf has a data type that cannot be stored.
    """
    if state is None or isinstance(state, jax.Array | np.ndarray | int | float):
        raise MismatchError(
            f"expected a pytree with arrays in it, found {type(state).__name__}. Nothing was "
            "saved; save a dictionary that holds it."
        )
    is_named = not (isinstance(state, Mapping) and "" in state)
    kinds = {(type(leaf), getattr(leaf, "dtype", None)) for leaf in jax.tree.leaves(state)}
    if save_args is None and is_named and all(_is_storable(*kind) for kind in kinds):
        return state  # as nearly always, without a look at every path
    leaves, treedef = trees.flatten(state)
    args = [None] * len(leaves)
    if save_args is not None:
        args = treedef.flatten_up_to(save_args)
    alike = {path: np.asarray(leaf) for path, leaf in leaves.items() if _is_like_an_array(leaf)}
    for (path, leaf), arg in zip(leaves.items(), args, strict=True):
        _check_leaf(path, alike.get(path, leaf))
        if arg is not None and arg.aggregate:
            raise MismatchError(f"leaf {path}: SaveArgs(aggregate=True) is not supported here.")
    return trees.unflatten(treedef, (leaves | alike).values()) if alike else state


def _is_like_an_array(leaf: Any) -> bool:
    known = isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array)
    return not known and hasattr(leaf, "__array__")


@functools.lru_cache(maxsize=1024)
def _is_storable(kind: type, dtype: Any) -> bool:
    """Whether :func:`_check_leaf` lets a leaf of a type pass under any name."""
    known = issubclass(kind, int | float | np.ndarray | np.generic | jax.Array)
    is_number = getattr(dtype, "kind", "") not in _NO_NUMBERS and str(dtype) not in _NOT_STORABLE
    return known and is_number and not issubclass(kind, jax.core.Tracer)


def _check_leaf(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise MismatchError(
            f"leaf {path}: expected an array, found a tracer: the state is being traced by jit, "
            "grad, vmap or scan, and has no values yet. Nothing was saved; save what the traced "
            "function returns."
        )
    is_text = getattr(getattr(leaf, "dtype", None), "kind", "") in _NO_NUMBERS
    if is_text or not isinstance(leaf, int | float | np.ndarray | np.generic | jax.Array):
        kind = f"an array of {leaf.dtype}" if is_text else type(leaf).__name__
        raise MismatchError(
            f"Unsupported type: leaf {path}: expected an array or a number, found {kind}. Nothing "
            "was saved; save it as another item beside the state, or leave it out."
        )
    if not path:
        raise MismatchError(
            'expected keys with names, found a leaf under the key "" at the top, which Orbax '
            "stores under no name. Nothing was saved; rename the key."
        )
    dtype = str(trees.dtype_of(leaf))
    if dtype in _NOT_STORABLE:
        raise FormatError(
            f"leaf {path}: expected a data type that arrays are stored in, found {dtype}, which "
            "tensorstore does not know. Nothing was saved; cast it (to float8_e4m3fn, int2 or "
            "float16), or save its bits: jax.lax.bitcast_convert_type(leaf, jax.numpy.uint8)."
        )
