"""A checkpoint of a run that knew no Recorder, put into a state that has one.

The state of the optimizer that a Recorder wraps is found where it was before it was wrapped: what
lies at ``opt_state/1/0/mu`` in the checkpoint goes to ``opt_state/1/adacheck_inner/0/mu``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.adapter.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.descriptions import is_number
from adacheck_jax.adapter.single_save import save_base
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import MismatchError
from adacheck_jax.store.steps import manifest_file, stock
from adacheck_jax.store.storage.location import AnyPath, at, located
from adacheck_jax.tools.handover import destination, safetensors_files
from adacheck_jax.tools.handover.formats import name_of
from adacheck_jax.tools.steps import InputError
from adacheck_jax.update.recorder_state import INNER_FIELD, consumed_leaf, find_nodes


def import_checkpoint(source: str | os.PathLike[str], abstract_state: PyTree) -> PyTree:
    """Read a checkpoint of stock Orbax, or safetensors files, into a state with a Recorder.

    The returned state is saved as usual, and the first save is a base::

        state = adacheck.tools.import_checkpoint("old_run/1200/default", abstract_state)
        manager.save(1200, args=adacheck.SaveArgs(state))

    Everything in the checkpoint has to have a place in the state, and the other way round; only the
    Recorder's own leaves are made: its record and counter are zero. Nothing can verify what stock
    Orbax or safetensors saved.

    Args:
        source: a checkpoint's directory, or that of a step with one item; or a safetensors file, or
            a directory of such files, in which the name of a leaf is its path with dots.
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
    path = located(os.fspath(source))
    wanted, treedef = trees.flatten(abstract_state)
    if files := safetensors_files.files_at(path):
        values = _from_safetensors(path, files, wanted)
    else:
        values = _from_orbax(_checkpoint_in(path), wanted)
    return trees.unflatten(treedef, [values[each] for each in wanted])


@dataclass(frozen=True, slots=True)
class ImportReport:
    """The output of ``adacheck import``.

    Attributes:
        source: path of the checkpoint.
        destination: the new root.
        step: step number of the base.
        leaf_count: number of leaves of the state.
        made: leaf paths of the Recorder's own leaves, which no checkpoint has: zeros.
    """

    source: str
    destination: str
    step: int
    leaf_count: int
    made: tuple[str, ...]


def import_base(
    source: str, target: str, step: int, abstract_state: PyTree, recorder: Any
) -> ImportReport:
    """Save a checkpoint of stock Orbax, or safetensors files, as a base under a new root.

    Args:
        source: as for :func:`import_checkpoint`.
        target: path of the root, where nothing is yet.
        step: step number.
        abstract_state: as for :func:`import_checkpoint`.
        recorder: the Recorder of the state; None if it has none.

    Raises:
        InputError: there is no such checkpoint, or something is at the root's path.
        AdaCheckError: leaves do not fit, or the state cannot be read or saved.
    """
    path = destination.checked(target, None)
    wanted, _ = trees.flatten(abstract_state)
    state = import_checkpoint(source, abstract_state)
    with destination.temporary(path) as made:
        save_base(str(made), step, state, recorder)
    new = tuple(each for each, place in places_of(wanted).items() if place is None)
    return ImportReport(source, str(path), step, len(wanted), new)


def places_of(wanted: Mapping[str, Any]) -> dict[str, str | None]:
    """Leaf path in a checkpoint without Recorders for each leaf of a state with them.

    Args:
        wanted: leaves by leaf path.

    Returns:
        None for a leaf that only a Recorder has.
    """
    places: dict[str, str | None] = {path: path for path in wanted}
    for node in find_nodes([*wanted]):
        own = (node.count, *node.record.values(), *node.extra.values())
        places |= dict.fromkeys(own)
        for path in (*node.passed.values(), *node.inner.values()):
            inner = consumed_leaf(path) if path in node.passed.values() else path
            places[path] = _unwrapped(node.prefix, inner)
    return places


def _unwrapped(prefix: str, path: str) -> str:
    """Path of a leaf of the wrapped state before it was wrapped."""
    below = path.removeprefix(prefix).removeprefix("/").removeprefix(INNER_FIELD)
    return f"{prefix}{below}" if prefix else below.removeprefix("/")


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
    found = [each for each in places if at(each / stock.TREE_METADATA).exists]
    if len(found) == 1 or (found and found[0] == path):
        return found[0]
    names = ", ".join(each.name for each in found or places[1:]) or "nothing"
    raise InputError(
        f"{path}: expected a checkpoint of stock Orbax ({stock.TREE_METADATA} in it, or in one "
        f"directory in it) or safetensors files, found {names}. Give the directory of one step, or "
        "of one of its items."
    )


def _from_orbax(directory: AnyPath, wanted: Mapping[str, Any]) -> dict[str, Any]:
    checkpoints = StockCheckpoints()
    tree = checkpoints.metadata(directory).tree
    found, _ = trees.flatten(tree)
    places = _places(wanted, found)
    types = {path: _stored_type(each, _first(wanted, places, path)) for path, each in found.items()}
    _check(directory, wanted, places, types)
    sources = {place: path for path, place in places.items() if place is not None}
    placements = {
        place: _placement(wanted[sources[place]]) if place in sources else None for place in found
    }
    read = checkpoints.read_by_orbax(directory, placements, tree)
    checkpoints.close()
    every = {path: None if place is None else read[place] for path, place in places.items()}
    return _finished(directory, wanted, every)


def _places(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str | None]:
    """Leaf paths in the checkpoint; those of the state itself if it was saved with a Recorder."""
    places = places_of(wanted)
    own = [path for path, place in places.items() if place != path]
    if own and all(path in found for path in own):
        places = {path: path for path in wanted}
    return {
        path: None if place not in found and _is_empty(wanted[path]) else place
        for path, place in places.items()
    }


def _first(wanted: Mapping[str, Any], places: Mapping[str, str | None], place: str) -> Any:
    return next((wanted[path] for path, each in places.items() if each == place), None)


def _is_empty(leaf: Any) -> bool:
    return 0 in np.shape(leaf)


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


def _check(
    where: AnyPath,
    wanted: Mapping[str, Any],
    places: Mapping[str, str | None],
    types: Mapping[str, str],
) -> None:
    """Compare a checkpoint's leaves with those that the state needs.

    Raises:
        MismatchError: lists all that differ.
    """
    expected = {place: _type_of(wanted[path]) for path, place in places.items() if place}
    trees.check_same_leaves(
        expected,
        types,
        where=f"{where}: the checkpoint does not fit the abstract state, without its Recorder",
        remedy="Build the abstract state from the code of the run that saved it, with the Recorder "
        "around the same transformation. Nothing was read.",
    )


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


def _from_safetensors(
    path: AnyPath, files: Mapping[str, Any], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    names = {name_of(each): each for each in wanted}
    if len(names) < len(wanted):
        raise MismatchError(f"{path}: several leaves have one name, with dots in their paths.")
    found = {names.get(name, name): array for name, array in files.items()}
    types = {each: _type_of(array) for each, array in found.items()}
    _check(path, wanted, {each: each for each in wanted}, types)
    return _finished(path, wanted, found)
