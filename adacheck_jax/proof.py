"""The run-time proof: does replaying the recorded update give the state that was trained?

A delta is only as good as the assumption that the train step applied the update that will be
replayed: compiled as one program, with nothing after the recorder, and params changed by nothing
else. The first delta after a base (and after a restore) is therefore replayed in the background,
from host copies of the state before it, and compared bit by bit with the state after it.

Where elements stay in their places, an update is computed piece by piece, a piece of each leaf at a
time: device memory is bounded however large the state is, and each process proves the boxes that it
owns. Any other update is computed whole, on the shardings of the state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax import replay
from adacheck_jax.boxes import Box, grid
from adacheck_jax.fingerprint import words_of
from adacheck_jax.manifest import Leaf
from adacheck_jax.replay import UpdateFunction
from adacheck_jax.staging import Blocks

Arguments = Sequence[Sequence[int]]
"""Leaf indices of an update's params, inner state, record and extra arguments."""


def sites(leaves: Sequence[Leaf], arguments: Arguments, process: int) -> dict[int, list[Box]]:
    """The boxes on which one process proves an update whose elements stay in their places.

    Leaves of one shape are cut alike, wherever one of them was cut, so that a site is a box of each
    of them. A process proves the sites that lie in a box that it owns, and every scalar.

    Args:
        leaves: of the state.
        arguments: of the update.
        process: index of the process.

    Returns:
        Sites by leaf index, in the same order for all leaves of one shape.
    """
    params, inner, record, extra = arguments
    classes: dict[tuple[int, ...], list[int]] = {}
    for i in (*params, *inner, *record):
        classes.setdefault(leaves[i].shape, []).append(i)
    result = {i: [Box.full(leaves[i].shape)] for i in extra}
    for shape, members in classes.items():
        cuts = tuple(
            tuple(sorted({point for i in members for point in leaves[i].cuts[axis]}))
            for axis in range(len(shape))
        )
        owned = [box for i in members for box in leaves[i].boxes_of(process)]
        here = [site for site in grid(cuts) if any(box.contains(site) for box in owned)]
        if not shape:  # whatever else a process proves takes the scalars: counters, rates
            here = [Box.full(())]
        result |= dict.fromkeys(members, here)
    return result


def in_pieces(
    function: UpdateFunction,
    leaves: Sequence[Leaf],
    arguments: Arguments,
    before: Mapping[int, Blocks],
    after: Mapping[int, Blocks],
    bound_bytes: int,
) -> list[int]:
    """Replays an update whose elements stay in their places, and compares.

    Args:
        function: the update over flat leaves.
        leaves: of the state.
        arguments: leaf indices of what it takes.
        before: for each of them the same sites' blocks: the state before the update, and the
            record that it consumed.
        after: blocks of the params and the inner state after the update.
        bound_bytes: device memory that one piece of every leaf may take, about.

    Returns:
        Indices of the params and inner leaves whose bits differ, ascending.
    """
    results = [*arguments[0], *arguments[1]]
    old = {i: _string(before[i], leaves[i]) for indices in arguments for i in indices}
    new = {i: _string(after[i], leaves[i]) for i in results}
    ranks = {i: len(leaves[i].shape) for i in old}
    jitted: Any = jax.jit(function)
    wrong: set[int] = set()
    for group in _groups({i: old[i].size for i in ranks if i not in arguments[3]}):
        element_bytes = 2 * sum(old[i].itemsize for i in group)
        longest = max(old[i].size for i in group)
        length = max(_MIN_PIECE, min(longest, bound_bytes // element_bytes))
        for start in range(0, longest, length):
            pieces = [
                [
                    _block(before[i])
                    if i in arguments[3]
                    else _piece(old[i], start, length if i in group else 1, ranks[i])
                    for i in indices
                ]
                for indices in arguments
            ]
            outputs = jax.tree.leaves(jitted(*pieces))
            for i, output in zip(results, outputs, strict=True):
                part = new[i][start : start + length] if ranks[i] else new[i]
                if i not in group or not part.size:
                    continue
                if not _same_bits(np.asarray(output).reshape(-1)[: part.size], part):
                    wrong.add(i)
    return sorted(wrong)


_MIN_PIECE = 1024
"""Elements of the shortest piece."""
_GROUP_RANGE = 8


def _groups(sizes: Mapping[int, int]) -> list[frozenset[int]]:
    """Leaves of about one size together, so that the short ones are not filled up to the longest.

    Leaves that an update ties together have one shape, and so fall into one group.
    """
    groups: list[list[int]] = []
    longest = 0
    for i in sorted(sizes, key=lambda i: -sizes[i]):
        if not groups or sizes[i] * _GROUP_RANGE < longest:
            groups.append([])
            longest = sizes[i]
        groups[-1].append(i)
    return [frozenset(group) for group in groups]


def piece_shapes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Shapes of pieces of some leaves: number of axes kept, all elements along the last one."""
    return [(1,) * (len(shape) - 1) + (2,) if shape else () for shape in shapes]


def whole(
    function: UpdateFunction,
    arguments: Arguments,
    before: Mapping[int, Blocks],
    after: Mapping[int, Blocks],
    shardings: Mapping[int, Any],
) -> list[int]:
    """Replays any update on the shardings of its state, and compares; in one process.

    Args:
        function: the update over flat leaves.
        arguments: leaf indices of what it takes.
        before: as for :func:`in_pieces`; the blocks cover each leaf.
        after: likewise.
        shardings: of each leaf; None for one that is not on devices.

    Returns:
        Indices of the params and inner leaves whose bits differ, ascending.
    """
    main = max((s.device_set for s in shardings.values() if s is not None), key=len, default=None)

    def place(i: int) -> Any:
        sharding = shardings[i]
        # What lies on other devices (a counter) stays uncommitted, and goes where the rest is.
        common = sharding if sharding is not None and sharding.device_set == main else None
        return jax.device_put(_whole(before[i]), common)

    params, inner, record, extra = ([place(i) for i in indices] for indices in arguments)
    fold = replay.compile_fold(function, params, inner)
    outputs = jax.tree.leaves(fold(params, inner, record, extra))
    pairs = zip([*arguments[0], *arguments[1]], outputs, strict=True)
    return sorted(i for i, output in pairs if not _same_bits(np.asarray(output), _whole(after[i])))


def whole_bytes(leaves: Sequence[Leaf], arguments: Arguments, shardings: Mapping[int, Any]) -> int:
    """Device memory that :func:`whole` needs on the fullest device, about, in bytes."""
    total = 0
    for position, indices in enumerate(arguments):
        for i in indices:
            shape, sharding = leaves[i].shape, shardings[i]
            held = shape if sharding is None else sharding.shard_shape(shape)
            size_bytes = math.prod(held) * leaves[i].itemsize_bytes
            total += size_bytes * (2 if position < 2 else 1)  # donated, but not by every backend
    return total


def _string(blocks: Blocks, leaf: Leaf) -> np.ndarray:
    """The elements of some sites, one after the other."""
    parts = [block.reshape(-1) for block in blocks.values()]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, jnp.dtype(leaf.dtype))


def _block(blocks: Blocks) -> np.ndarray:
    return next(iter(blocks.values()))


def _piece(string: np.ndarray, start: int, length: int, rank: int) -> np.ndarray:
    """Elements from ``start``, filled up with zeros; scalars stay what they are."""
    if not rank:
        return string.reshape(())
    part = string[start : start + length]
    if part.size < length:
        part = np.concatenate([part, np.zeros(length - part.size, string.dtype)])
    return part.reshape((1,) * (rank - 1) + (length,))


def _whole(blocks: Blocks) -> np.ndarray:
    if len(blocks) == 1:
        return _block(blocks)
    shape = tuple(max(stops) for stops in zip(*(box.stop for box in blocks), strict=True))
    result = np.empty(shape, _block(blocks).dtype)
    for box, block in blocks.items():
        result[box.slices] = block
    return result


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(words_of(a), words_of(b))
