"""The params that are published: their leaves, and the boxes that each process publishes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.device.fingerprint import accounted
from adacheck_jax.device.ownership import share_out
from adacheck_jax.device.primary import grid_of
from adacheck_jax.device.sharding import distinct_boxes, layout_of_array
from adacheck_jax.device.transfer import Pick
from adacheck_jax.device.transfer import picks_of as _picks
from adacheck_jax.errors import MismatchError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Grid
from adacheck_jax.publish.records import Leaves, PublishedLeaf

Picks: TypeAlias = dict[int, tuple[Pick, ...]]
"""Boxes to take of each array, by leaf index."""


def params_of(state: Any, params_path: str | None) -> dict[str, Any]:
    """The params of a state by leaf path, in the order of the paths."""
    named = trees.flatten(state)[0]
    if params_path is not None:
        start = f"{params_path}/"
        inside = {x.removeprefix(start): y for x, y in named.items() if x.startswith(start)}
        if not inside:
            raise MismatchError(
                f"params_path: expected leaves below {start}, found none among {len(named)}: "
                f"{', '.join([*named][:5])}. Give the leaf path of the params."
            )
        named = inside
    if not named:
        raise MismatchError("expected params, found a tree without leaves.")
    return {path: named[path] for path in sorted(named)}


def _expect_numbers(path: str, array: Any) -> None:
    dtype = str(getattr(array, "dtype", ""))
    if not isinstance(array, jax.Array | np.ndarray) or dtype not in ITEMSIZES_BYTES:
        raise MismatchError(
            f"{path}: expected an array of numbers, found {type(array).__name__} {dtype}. Publish "
            "params alone: no keys, no Python numbers."
        )


def described(params: Mapping[str, Any]) -> Leaves:
    """The leaves in shares, one a process; a process alone publishes whole arrays.

    Raises:
        MismatchError: one is no array of numbers.
    """
    for path, array in params.items():
        _expect_numbers(path, array)
    arrays, count = [*params.values()], jax.process_count()
    if count > 1:
        itemsizes_bytes = [array.dtype.itemsize for array in arrays]
        grids = share_out([*map(layout_of_array, arrays)], itemsizes_bytes, frozenset())
    else:
        shapes = [tuple(array.shape) for array in arrays]
        grids = [Grid(cuts_of([Box.full(shape)], shape), (0,)) for shape in shapes]
    leaves = (
        PublishedLeaf(path, tuple(array.shape), str(array.dtype), each)
        for (path, array), each in zip(params.items(), grids, strict=True)
    )
    return Leaves(tuple(leaves), count)


def picks_of(arrays: Mapping[int, Any], leaves: Leaves, share: int) -> tuple[Picks, Picks]:
    """The boxes that a process copies, and the whole shards that it fingerprints on devices."""
    ranks = grid_of(arrays.values()).ranks(0)  # of all leaves the same replica
    own: dict[int, list[Box]] = {i: [] for i in arrays}
    for i, box in leaves.boxes[share]:
        own[i].append(box)
    picks, whole_picks = Picks(), Picks()
    for i, array in arrays.items():
        if leaves.shares == 1:
            picks[i] = whole_picks[i] = _picks(array, distinct_boxes(array), ranks)
            continue
        picks[i] = whole_picks[i] = _picks(array, own[i], ranks)
        if leaves.leaves[i].grid.cuts != layout_of_array(array).cuts:
            whole_picks[i] = _picks(array, accounted(array, share), ranks)
    return picks, whole_picks
