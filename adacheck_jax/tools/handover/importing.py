"""A checkpoint of a run that knew no Recorder, put into a state that has one.

The state of the optimizer that a Recorder wraps is found where it was before it was wrapped: what
lies at ``opt_state/1/0/mu`` in the checkpoint goes to ``opt_state/1/adacheck_inner/0/mu``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.stock.descriptions import is_number
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import MismatchError
from adacheck_jax.store.steps import manifest_file, marks
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.steps import InputError
from adacheck_jax.update.recorder_state import INNER_FIELD, consumed_leaf, find_nodes, is_result


def import_checkpoint(source: str | os.PathLike[str], abstract_state: PyTree) -> PyTree:
    """Read a checkpoint of stock Orbax into a state with a Recorder.

    The returned state is saved as usual, and the first save is a base::

        state = adacheck.tools.import_checkpoint("old_run/1200/default", abstract_state)
        manager.save(1200, args=adacheck.SaveArgs(state))

    Everything in the checkpoint has to have a place in the state, and the other way round; only the
    Recorder's own leaves are made: its record and counter are zero. Nothing can verify what stock
    Orbax saved.

    Args:
        source: a checkpoint's directory, or that of a step with one item.
        abstract_state: the state to fill, as a tree of ``jax.ShapeDtypeStruct`` or of arrays, built
            with the Recorder. A leaf goes onto its sharding, or onto one device if it has none; for
            a numpy array it is one.

    Returns:
        The state.

    Raises:
        MismatchError: lists every leaf of another path, shape or data type.
        InputError: there is no such checkpoint.
        AdaCheckError: the checkpoint cannot be read.
    """
    wanted, treedef = trees.flatten(abstract_state)
    values = _from_orbax(_checkpoint_in(located(os.fspath(source))), wanted)
    return trees.unflatten(treedef, [values[each] for each in wanted])


def _checkpoint_in(path: AnyPath) -> AnyPath:
    """The directory of a stock checkpoint: the path itself, or that of its only item."""
    if not at(path).is_folder:
        raise InputError(f"{path}: expected a checkpoint's directory, found none. Check the path.")
    places = [path, *(path / name for name in sorted(at(path).folders()))]
    if ours := [each for each in places if at(each / manifest_file.DIRECTORY).exists]:
        raise InputError(
            f"{ours[0]}: expected a checkpoint of stock Orbax, found a step saved by "
            "AdaCheckHandler. Restore it with adacheck.RestoreArgs."
        )
    found = [each for each in places if at(each / marks.TREE_METADATA).exists]
    if len(found) == 1 or (found and found[0] == path):
        return found[0]
    names = ", ".join(each.name for each in found or places[1:]) or "nothing"
    raise InputError(
        f"{path}: expected a checkpoint of stock Orbax ({marks.TREE_METADATA} in it, or in one "
        f"directory in it), found {names}. Give the directory of one step, or of one of its items."
    )


def _from_orbax(directory: AnyPath, wanted: Mapping[str, Any]) -> dict[str, Any]:
    with contextlib.closing(StockCheckpoints()) as checkpoints:
        tree = checkpoints.metadata(directory).tree
        found, _ = trees.flatten(tree)
        places = _places(wanted, found)
        leaves = {place: wanted[path] for path, place in places.items() if place is not None}
        trees.check_same_leaves(
            {place: _type_of(leaf) for place, leaf in leaves.items()},
            {place: _stored_type(each, leaves.get(place)) for place, each in found.items()},
            where=f"{directory}: the checkpoint does not fit the abstract state, without its "
            "Recorder",
            remedy="Build the abstract state from the code of the run that saved it, with the "
            "Recorder around the same transformation. Nothing was read.",
            words=("asked for", "saved"),
        )
        placements = {place: _placement(leaves[place]) for place in found}
        read = checkpoints.read_by_orbax(directory, placements, tree)
    values = {path: None if place is None else read[place] for path, place in places.items()}
    return _finished(directory, wanted, values)


def _places(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str | None]:
    """Path in a checkpoint of each leaf that is wanted; None for a leaf that it need not have.

    Without Recorders a checkpoint has no leaves of their own, and those of a wrapped state are
    where they were before it was wrapped.
    """
    places: dict[str, str | None] = {path: path for path in wanted}
    for node in find_nodes([*wanted]):
        places |= dict.fromkeys((node.count, *node.record.values(), *node.extra.values()))
        inner = {path: consumed_leaf(path) for path in node.passed.values()}
        for path in (*inner, *node.inner.values()):
            below = inner.get(path, path).removeprefix(node.prefix).removeprefix("/")
            below = below.removeprefix(INNER_FIELD)
            places[path] = f"{node.prefix}{below}" if node.prefix else below.removeprefix("/")
    own = [path for path, place in places.items() if place != path]
    if own and all(path in found for path in own):  # it was saved with a Recorder
        places = {path: path for path in wanted}
    places |= {path: None for path in wanted if is_result(path) and path not in found}
    empty = (path for path, leaf in wanted.items() if 0 in np.shape(leaf))
    return places | dict.fromkeys(path for path in empty if places[path] not in found)


def _type_of(leaf: Any) -> str:
    return f"{trees.dtype_of(leaf)}{[*np.shape(leaf)]}"


def _stored_type(metadata: Any, wanted: Any) -> str:
    """Data type and shape of a leaf in a checkpoint, in the words of the leaf that is wanted.

    A Python number fits a 0-d array of its kind, and an array of key data a key: Orbax describes
    keys so.
    """
    shape, dtype = tuple(metadata.shape or ()), str(metadata.dtype)
    if wanted is None:
        return f"{dtype}{[*shape]}"
    numbers = is_number(metadata) or isinstance(wanted, int | float)
    if numbers and not np.shape(wanted) and _kind(dtype) == _kind(str(trees.dtype_of(wanted))):
        return _type_of(wanted)
    if transfer.is_key(wanted) and dtype == "uint32" and shape[:-1] == np.shape(wanted):
        return _type_of(wanted)
    return f"{dtype}{[*shape]}"


def _kind(dtype: str) -> str:
    kinds = {"integer": jnp.integer, "float": jnp.floating}
    if dtype.startswith("key"):
        return dtype
    return next((k for k, x in kinds.items() if jnp.issubdtype(jnp.dtype(dtype), x)), dtype)


def _placement(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        return np.ndarray
    sharding = getattr(leaf, "sharding", None)
    return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _finished(where: AnyPath, wanted: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of the wanted types; zeros for None, and no array twice, which could be donated.

    Raises:
        MismatchError: jax makes no arrays of a wanted type.
    """
    values, seen = {}, set[int]()
    for path, leaf in wanted.items():
        value = _finish(leaf, read[path])
        if id(value) in seen and isinstance(value, jax.Array):
            value = jnp.copy(value)
        seen.add(id(value))
        if str(trees.dtype_of(value)) != str(trees.dtype_of(leaf)):
            raise MismatchError(
                f"{where}: leaf {path}: expected {_type_of(leaf)}, found that jax makes "
                f"{_type_of(value)} of it. Set jax_enable_x64, or build the state without it."
            )
        values[path] = value
    return values


def _finish(leaf: Any, value: Any) -> Any:
    if isinstance(leaf, int | float) and not isinstance(leaf, np.generic):
        return type(leaf)(0 if value is None else value)
    placement = _placement(leaf)
    if value is None:
        value = np.zeros(np.shape(leaf), trees.dtype_of(leaf))
    if placement is np.ndarray:
        return np.asarray(value)
    if isinstance(value, jax.Array):
        return value
    value = np.asarray(value, trees.dtype_of(leaf))
    # A copy for each device: jax may take memory of the host as it is, and the state be donated.
    return jax.make_array_from_callback(
        value.shape, placement, lambda index: np.array(value[index])
    )
