"""Restore of a step that stock Orbax saved, without verification.

The run that saved it may have known no Recorder: then the state of the optimizer that a Recorder
wraps is read from where it was, and what the Recorder keeps for itself is as ``init`` makes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.adapter.wanted.targets import Target
from adacheck_jax.device import transfer, trees
from adacheck_jax.device.trees import PyTree
from adacheck_jax.errors import IntegrityError, MismatchError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.restore import check
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.update.recorder_state import places_without_recorder


def restore(
    directory: AnyPath, args: RestoreArgs, stock: StockCheckpoints
) -> tuple[PyTree, Mapping[str, tuple[str, str]]]:
    """Restore a step that stock Orbax saved; nothing can verify it.

    Returns:
        The state, and data types of the leaves that were converted (:class:`RestoreInfo`).

    Raises:
        IntegrityError: exact bits are wanted, or the step cannot be read.
        MismatchError: the abstract state does not fit.
    """
    if args.require_exact:
        raise IntegrityError(
            f"{directory}: expected exact bits, found a step that stock Orbax saved, without "
            "fingerprints to compare them with. Nothing was returned; do not ask for "
            "require_exact=True."
        )
    tree = stock.metadata(directory).tree
    saved, (asked, treedef) = trees.flatten(tree)[0], trees.flatten(args.abstract_state)
    places = places_without_recorder(asked, saved)
    if has_other := any(path != place for path, place in places.items()):
        named = {place: asked[path] for path, place in places.items() if place is not None}
        args = dataclasses.replace(args, abstract_state=named)
    wanted, _ = trees.flatten(args.abstract_state)
    leaves = [_leaf(x, each, wanted.get(x)) for x, each in saved.items()]
    target = Target(args, leaves, tree, directory)
    read = stock.read_by_orbax(directory, target.placements(), tree)
    for leaf in leaves:
        found: Any = read.get(leaf.path)
        if transfer.is_key(found):
            if leaf.key_type not in (None, str(found.dtype)):
                raise MismatchError(
                    f"{directory}: leaf {leaf.path}: expected keys of the type that was saved, "
                    f"{found.dtype}, found that {leaf.key_type} is asked for. Ask for the former."
                )
        else:
            check.check_types([found], [leaf], directory)
    converted = target.converted(read)
    finished = target.finish(read)
    if has_other:
        taken = set[str]()
        values = [
            _with_recorder(asked[path], place, finished, taken) for path, place in places.items()
        ]
        finished = trees.unflatten(treedef, values)
    return finished, converted


def _with_recorder(
    wanted: Any, place: str | None, leaves: Mapping[str, Any], taken: set[str]
) -> Any:
    """A leaf of a state with Recorders; a copy where it was taken before: both may be donated."""
    if place is not None:
        found, is_taken = leaves[place], place in taken
        taken.add(place)
        return jnp.copy(found) if is_taken and isinstance(found, jax.Array) else found
    if wanted is ocp.PLACEHOLDER or not hasattr(wanted, "dtype"):
        return wanted
    sharding = transfer.placement_of(wanted)
    if sharding is np.ndarray:
        return np.zeros(np.shape(wanted), wanted.dtype)
    zeros = jnp.zeros(np.shape(wanted), wanted.dtype, device=sharding)
    return transfer.like(zeros, wanted)


def _leaf(path: str, described: Any, wanted: Any) -> Leaf:
    """Description of a leaf by Orbax's, which tells nothing of the types of PRNG keys."""
    shape = tuple(getattr(described, "shape", None) or ())
    dtype = np.dtype(getattr(described, "dtype", str))  # a text has none
    is_key = transfer.is_key(wanted) and shape[:-1] == np.shape(wanted) and dtype == np.uint32
    cuts = cuts_of([Box.full(shape)], shape)
    key_type = str(wanted.dtype) if is_key else None
    return Leaf(path, shape, str(dtype), dtype.itemsize, key_type, cuts, (0,))
