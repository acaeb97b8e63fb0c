"""The params that are published: their leaves, and the boxes that each process publishes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import numpy as np

from adacheck_jax.device import trees
from adacheck_jax.device.fingerprint import accounted
from adacheck_jax.device.ownership import share_out
from adacheck_jax.device.primary import grid_of
from adacheck_jax.device.replicas import ReplicaCheck, comparison_of, replicated_sites
from adacheck_jax.device.sharding import distinct_boxes, layout_of_array
from adacheck_jax.device.transfer import Pick, picks_of
from adacheck_jax.errors import MismatchError
from adacheck_jax.format.boxes import Box, cuts_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Grid, Leaf
from adacheck_jax.publish.records import Leaves

Kind = tuple[str, tuple[int, ...], str, Any]
"""Path, shape, data type and sharding of a leaf."""
Picks: TypeAlias = dict[int, tuple[Pick, ...]]
"""Boxes to take of each array, by leaf index."""


@dataclass(frozen=True, slots=True)
class PublishedShare:
    """The part that a process publishes of params of some kinds.

    Attributes:
        kinds: the kinds.
        leaves: the leaves, in shares.
        picks: the boxes that it copies.
        whole_picks: the whole shards that it fingerprints on devices.
        replicas: compares the replicas of all boxes, since one of each is published.
    """

    kinds: Sequence[Kind]
    leaves: Leaves
    picks: Picks
    whole_picks: Picks
    replicas: ReplicaCheck


def params_of(state: Any, params_path: str | None) -> dict[str, Any]:
    """The params of a state by leaf path, in the order of the paths."""
    named = trees.flatten(state)[0]
    if params_path is not None:
        start = f"{params_path}/"
        inside = {x.removeprefix(start): y for x, y in named.items() if x.startswith(start)}
        if not inside:
            raise MismatchError(trees.nothing_under(start[:-1], named))
        named = inside
    if not named:
        raise MismatchError("expected params, found a tree without leaves.")
    return {path: named[path] for path in sorted(named)}


def kinds_of(params: Mapping[str, Any]) -> list[Kind]:
    """The kinds of all leaves.

    Raises:
        MismatchError: one is no array of numbers.
    """
    found = list[Kind]()
    for path, array in params.items():
        dtype = str(getattr(array, "dtype", ""))
        if not isinstance(array, jax.Array | np.ndarray) or dtype not in ITEMSIZES_BYTES:
            raise MismatchError(
                f"{path}: expected an array of numbers, found {type(array).__name__} {dtype}. "
                "Publish params alone: no keys, no Python numbers."
            )
        found.append((path, tuple(array.shape), dtype, getattr(array, "sharding", None)))
    return found


def share_of(kinds: Sequence[Kind], arrays: Sequence[Any], process: int) -> PublishedShare:
    """The share of a process; one that is alone publishes whole arrays."""
    layouts, count = [*map(layout_of_array, arrays)], jax.process_count()
    grids = [Grid(cuts_of([Box.full(shape)], shape), (0,)) for _, shape, _, _ in kinds]
    if count > 1:
        itemsizes_bytes = [array.dtype.itemsize for array in arrays]
        grids = share_out(layouts, itemsizes_bytes, frozenset())
    leaves = tuple(
        Leaf(path, shape, dtype, ITEMSIZES_BYTES[dtype], None, grid.cuts, grid.owners)
        for (path, shape, dtype, _), grid in zip(kinds, grids, strict=True)
    )
    ranks = grid_of(arrays).ranks(0)  # of all leaves the same replica
    picks, whole_picks = Picks(), Picks()
    for i, array in enumerate(arrays):
        boxes = leaves[i].boxes_of(process) if count > 1 else distinct_boxes(array)
        picks[i] = whole_picks[i] = picks_of(array, boxes, ranks)
        if count > 1 and grids[i].cuts != layouts[i].cuts:
            whole_picks[i] = picks_of(array, accounted(array, process), ranks)
    compared = comparison_of(replicated_sites([path for path, *_ in kinds], arrays))
    return PublishedShare(kinds, Leaves(leaves, count), picks, whole_picks, compared)
