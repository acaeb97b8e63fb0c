"""The run-time proof: does replaying the recorded update give the state that was trained?

A delta is only as good as the assumption that the train step applied the update that will be
replayed: compiled as one program, with nothing after the recorder, and params changed by nothing
else. The first delta after a base (and after a restore) is therefore replayed in the background,
from host copies of the state before it, and compared bit by bit with the state after it.

An element-wise update does not care where an element lies. So every leaf is taken as a string of
elements and pushed through the update piece by piece, a piece of each leaf at a time: device memory
is bounded however large the state is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.fingerprint import words_of
from adacheck_jax.replay import UpdateFunction
from adacheck_jax.staging import Blocks

PIECES_BYTES = 64 * 2**20
"""Device memory for one piece of every leaf, about."""


def mismatches(
    function: UpdateFunction,
    arguments: Sequence[Sequence[int]],
    before: Mapping[int, Blocks],
    after: Mapping[int, Blocks],
    shapes: Mapping[int, tuple[int, ...]],
) -> list[int]:
    """Replays one element-wise update and compares it with what was trained.

    Args:
        function: the update over flat leaves.
        arguments: leaf indices of params, inner state, record and extra arguments.
        before: blocks of every argument: the state before the update, the record it consumed.
        after: blocks of params and inner state after the update.
        shapes: global shape of every leaf.

    Returns:
        Indices of the params and inner leaves whose bits differ, ascending.
    """
    old = {i: _whole(before[i], shapes[i]) for indices in arguments for i in indices}
    results = [*arguments[0], *arguments[1]]
    new = {i: _whole(after[i], shapes[i]) for i in results}
    extra = frozenset(arguments[3])
    try:
        return sorted(_in_pieces(function, arguments, old, new, extra))
    except (TypeError, ValueError):
        # The update looks at shapes (a mask of its own, a value a row): give it whole leaves.
        outputs = jax.jit(function)(*[[old[i] for i in indices] for indices in arguments])
        pairs = zip(results, jax.tree.leaves(outputs), strict=True)
        return sorted(i for i, output in pairs if not _same_bits(np.asarray(output), new[i]))


def _in_pieces(
    function: UpdateFunction,
    arguments: Sequence[Sequence[int]],
    old: Mapping[int, np.ndarray],
    new: Mapping[int, np.ndarray],
    extra: frozenset[int],
) -> set[int]:
    element_bytes = sum(array.itemsize for array in old.values())
    longest = max((array.size for i, array in old.items() if i not in extra), default=1)
    length = max(1, min(longest, PIECES_BYTES // element_bytes))
    jitted: Any = jax.jit(function)
    wrong: set[int] = set()
    for start in range(0, longest, length):
        pieces = [
            [old[i] if i in extra else _piece(old[i], start, length) for i in indices]
            for indices in arguments
        ]
        outputs = jax.tree.leaves(jitted(*pieces))
        for i, output in zip([*arguments[0], *arguments[1]], outputs, strict=True):
            expected = _piece(new[i], start, length)
            if output.shape != expected.shape or output.dtype != expected.dtype:
                raise ValueError(f"the update gives {output.shape} for pieces of {expected.shape}")
            count = max(0, min(length, new[i].size - start)) if new[i].ndim else 1
            if not _same_bits(np.asarray(output).reshape(-1)[:count], expected.reshape(-1)[:count]):
                wrong.add(i)
    return wrong


def _whole(blocks: Blocks, shape: tuple[int, ...]) -> np.ndarray:
    if len(blocks) == 1:
        return next(iter(blocks.values())).reshape(shape)
    whole = np.empty(shape, next(iter(blocks.values())).dtype)
    for box, block in blocks.items():
        whole[box.slices] = block
    return whole


def _piece(array: np.ndarray, start: int, length: int) -> np.ndarray:
    """Elements from ``start``, filled up with zeros; scalars stay what they are."""
    if not array.ndim:
        return array
    part = array.reshape(-1)[start : start + length]
    if part.size == length:
        return part
    return np.concatenate([part, np.zeros(length - part.size, array.dtype)])


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and np.array_equal(words_of(a), words_of(b))
