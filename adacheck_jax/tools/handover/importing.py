"""The state of a run that knew no Recorder, put into a state that has one.

The state of the optimizer that a Recorder wraps is found where it was before it was wrapped: what
lay at ``opt_state/1/0/mu`` goes to ``opt_state/1/adacheck_inner/0/mu``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.update.recorder_state import places_without_recorder


def import_state(old: PyTree, state: PyTree) -> PyTree:
    """Put the leaves of a state without Recorders into one that has them.

    The returned state is saved as usual, and the first save is a base::

        old = ocp.StandardCheckpointer().restore(path)  # or read from any other file
        state = adacheck.tools.import_state(old, state)
        manager.save(1200, args=adacheck.SaveArgs(state))

    Everything in the old state has to have a place in the new one, and the other way round; only
    what the Recorders keep for themselves stays as it is, and so does an array without elements
    that the old state lacks, since Orbax stores none.

    Args:
        old: a tree with the same leaf paths but for the Recorders, such as nested dictionaries.
        state: the state as it is initialized with the Recorders. A leaf of the old state goes onto
            the sharding of the leaf that it takes the place of; for a numpy array it is one.

    Returns:
        The state.

    Raises:
        MismatchError: lists leaves of another path, shape or type, or integers that do not fit.
    """
    wanted, treedef = trees.flatten(state)
    found, _ = trees.flatten(old)
    places = places_without_recorder(wanted, found)
    leaves = {place: wanted[path] for path, place in places.items() if place is not None}
    trees.check_same_leaves(
        {place: _type_of(leaf, found.get(place)) for place, leaf in leaves.items()},
        {place: _type_of(leaf, leaves.get(place)) for place, leaf in found.items()},
        where="the old state does not fit the new one, without its Recorder",
        remedy="Build the new state from the code of the run that saved the old one, with the "
        "Recorder around the same transformation.",
        words=("asked for", "saved"),
    )
    values, seen = list[Any](), set[str]()
    for path, leaf in wanted.items():
        place = places[path]
        if place is not None and hasattr(leaf, "dtype"):
            transfer.expect_fitting({path: (found[place], leaf.dtype)}, "the old state")
        values.append(leaf if place is None else _like(leaf, found[place], place in seen))
        seen.update(() if place is None else [place])
    return trees.unflatten(treedef, values)


def _type_of(leaf: Any, other: Any) -> str:
    """Data type and shape of a leaf; of a number beside another one the kind of number."""
    dtype, shape = trees.dtype_of(leaf), np.shape(leaf)
    if any(isinstance(each, int | float) for each in (leaf, other)) and not shape:
        for kind in (jnp.integer, jnp.floating):
            if jnp.issubdtype(dtype, kind):
                return kind.__name__
    return f"{dtype}{[*shape]}"


def _like(leaf: Any, value: Any, is_taken: bool) -> Any:
    """A value in the place of a leaf; a copy of one that is taken, which could be donated twice."""
    if isinstance(leaf, jax.Array) and isinstance(value, jax.Array):
        return jax.device_put(jnp.copy(value) if is_taken else value, leaf.sharding)
    if isinstance(leaf, jax.Array):
        # A copy for each device: jax may take the host's memory as it is, and the state be donated.
        value = np.asarray(value, leaf.dtype)
        return jax.make_array_from_callback(
            value.shape, leaf.sharding, lambda index: np.array(value[index])
        )
    if isinstance(leaf, int | float) and not isinstance(leaf, np.generic):
        return type(leaf)(value)
    return np.array(value)
