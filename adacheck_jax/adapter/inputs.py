"""Checks of a caller's arguments, before anything of a save is written."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import MismatchError

_MAX_STEP = 2**63 - 1
_KNOWN = int | float | np.ndarray | np.generic | jax.Array
"""Types of leaves that Orbax stores."""
_LOSING = (jax.core.Tracer, np.ma.MaskedArray)
"""Those of them that would lose something: all values, or the mask."""


def step_number(
    step: Any, remedy: str = "leave the step out to take it from the directory's name"
) -> int | None:
    """A caller's step number as a Python integer; None stays None.

    Raises:
        ValueError: it is not an integer, or negative, or needs more than 63 bits.
    """
    return None if step is None else expected_step(step, remedy)


def expected_step(step: Any, remedy: str) -> int:
    """As :func:`step_number`, of a step that has to be given."""
    try:
        number = None if isinstance(step, bool | np.bool_) else operator.index(step)
    except TypeError:
        number = None
    if number is None or not 0 <= number <= _MAX_STEP:
        found = repr(step) if np.isscalar(step) else f"a {type(step).__name__}"
        raise ValueError(
            f"expected a step number, an integer from 0 to 2**63 - 1, found {found}. Nothing was "
            f"saved; {remedy}."
        )
    return number


def expect_not_swapped(state: PyTree, step: Any) -> None:
    """Raises ValueError where ``record_step`` is given the step and the state the other way."""
    if isinstance(state, int | np.integer) and not isinstance(step, int | np.integer | None):
        raise ValueError(
            f"expected record_step(state, step), found record_step({state!r}, a "
            f"{type(step).__name__}). Nothing was recorded; give the state first."
        )


def file_bytes(size: Any) -> int | None:
    """A caller's size of data files, in bytes; None stays None.

    Raises:
        ValueError: it is not an integer, or negative, or needs more than 63 bits.
    """
    if size is None or (type(size) is int and 0 <= size <= _MAX_STEP):
        return size
    raise ValueError(
        f"expected ocdbt_target_data_file_size, an integer from 0 to 2**63 - 1, found {size!r}. "
        "Nothing was saved; 0 sets no limit."
    )


def expect_tree(state: PyTree) -> None:
    """Raises MismatchError where arguments of a save or a restore are given as a state."""
    if isinstance(state, ocp.args.CheckpointArgs):
        raise MismatchError(
            f"expected a state, found {type(state).__name__}. Nothing was saved or restored; give "
            "the state itself, abstract or not, without arguments around it."
        )


def described(state: PyTree) -> Mapping[str, str]:
    """Data type and shape of each leaf that a caller asks for, by leaf path."""
    expect_tree(state)
    return {
        path: f"{getattr(leaf, 'dtype', type(leaf).__name__)}{[*getattr(leaf, 'shape', ())]}"
        for path, leaf in trees.flatten(state)[0].items()
    }


def expect_same(states: Sequence[Mapping[str, str]], where: str) -> None:
    """Raises MismatchError unless all processes ask for the same, as :func:`described`."""
    for process, each in enumerate(states):
        trees.check_same_leaves(
            states[0],
            each,
            where=f"{where}: expected the same abstract state in all processes",
            remedy="Nothing was restored; build it by the same code in all of them.",
            words=("in process 0", f"in process {process}"),
        )


def checked_state(state: PyTree) -> PyTree:
    """Refuse a state that no base can hold: leaves that ``StandardSave`` refuses or loses.

    Returns:
        The state, with an array in place of each leaf that only has ``__array__``, and one of this
        machine's byte order in place of each leaf of the other: Orbax restores it as such, too.

    Raises:
        MismatchError: the state is not a pytree of arrays and numbers, or is being traced, or a
            leaf has a data type that cannot be stored.
    """
    expect_tree(state)
    if state is None or isinstance(state, jax.Array | np.ndarray | int | float):
        raise MismatchError(
            f"expected a pytree with arrays in it, found {type(state).__name__}. Nothing was "
            "saved; save a dictionary that holds it."
        )
    is_named = not (isinstance(state, Mapping) and "" in state)
    kinds = {(type(leaf), getattr(leaf, "dtype", None)) for leaf in jax.tree.leaves(state)}
    if is_named and all(_is_storable(*kind) for kind in kinds):
        return state  # the usual case, without the cost of leaf paths
    leaves, treedef = trees.flatten(state)
    alike = {
        path: array.astype(trees.native(array.dtype), copy=False)
        for path, leaf in leaves.items()
        if (not isinstance(leaf, _KNOWN) and hasattr(leaf, "__array__"))
        or not getattr(getattr(leaf, "dtype", None), "isnative", True)
        for array in (np.asanyarray(leaf),)
    }
    for path, leaf in leaves.items():
        _check_leaf(path, alike.get(path, leaf))
    return trees.unflatten(treedef, (leaves | alike).values()) if alike else state


def json_copy(metadata: Any) -> Any:
    """A copy that the caller cannot change, in the form that reading it from a file gives.

    Raises:
        MismatchError: it is not JSON.
    """
    try:
        return json.loads(json.dumps(metadata))
    except (TypeError, ValueError) as error:
        raise MismatchError(
            f"custom_metadata: expected JSON, found {error}. Nothing was saved; pass numbers, "
            "texts, lists and dictionaries."
        ) from error


def apply_casts(state: PyTree, save_args: PyTree | None) -> tuple[PyTree, PyTree, frozenset[str]]:
    """Apply the casts of ``save_args``.

    Args:
        state: the state to save.
        save_args: tree of ``ocp.SaveArgs`` like the state, None for no casts.

    Returns:
        The state to be stored, ``save_args`` without the casts, and the leaf paths of the leaves
        that were cast.

    Raises:
        MismatchError: a data type cannot be stored, or an integer does not fit into it; or an
            argument asks for what a base does not have.
    """
    if save_args is None:
        return state, None, frozenset()
    leaves, treedef = trees.flatten(state)
    rest, casts = [], dict[str, tuple[Any, Any]]()
    for (path, leaf), arg in zip(leaves.items(), treedef.flatten_up_to(save_args), strict=True):
        if arg is not None and arg.aggregate:
            raise MismatchError(f"leaf {path}: SaveArgs(aggregate=True) is not supported here.")
        if arg is not None and getattr(arg, "shard_axes", ()):
            raise MismatchError(
                f"leaf {path}: SaveArgs(shard_axes={arg.shard_axes}) is not supported here: "
                "chunks are cut within the boxes of the sharding. Nothing was saved; leave it out."
            )
        dtype = None if arg is None or arg.dtype is None else trees.native(np.dtype(arg.dtype))
        if dtype is not None and dtype != trees.dtype_of(leaf):
            if transfer.is_key(leaf):
                raise MismatchError(
                    f"leaf {path}: expected SaveArgs without dtype for a typed PRNG key, found "
                    f"{dtype}. Nothing was saved; leave it out for this leaf."
                )
            if not transfer.is_storable(dtype):
                raise transfer.unsupported(path, jax.ShapeDtypeStruct((), dtype))
            casts[path] = leaf if hasattr(leaf, "astype") else np.asarray(leaf), dtype
        rest.append(None if arg is None else dataclasses.replace(arg, dtype=None))
    transfer.expect_fitting(casts, "save_args")
    cast = {path: transfer.cast(*each) for path, each in casts.items()}
    stored = trees.unflatten(treedef, (leaves | cast).values())
    return stored, trees.unflatten(treedef, rest), frozenset(cast)


@functools.lru_cache(maxsize=1024)
def _is_storable(kind: type, dtype: Any) -> bool:
    """True if :func:`_check_leaf` accepts a leaf of this type under any name."""
    is_known = issubclass(kind, _KNOWN) and (dtype is None or transfer.is_storable(dtype))
    return is_known and trees.native(dtype) is dtype and not issubclass(kind, _LOSING)


def _check_leaf(path: str, leaf: Any) -> None:
    if isinstance(leaf, jax.core.Tracer):
        raise MismatchError(
            f"leaf {path}: expected an array, found a tracer: the state is being traced by jit, "
            "grad, vmap or scan, and has no values yet. Nothing was saved; save what the traced "
            "function returns."
        )
    if not _is_storable(type(leaf), getattr(leaf, "dtype", None)):
        raise transfer.unsupported(path, leaf)
    if not path:
        raise MismatchError(
            'expected keys with names, found a leaf under the key "" at the top, which Orbax '
            "stores under no name. Nothing was saved; rename the key."
        )
