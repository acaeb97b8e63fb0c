"""Bytes of a state, by which all processes decide alike."""

from __future__ import annotations

from collections.abc import Sequence

from adacheck_jax.schedule.line import Sizes
from adacheck_jax.state.snapshot import Structure

_LEAST_BYTES = 256 * 2**20
"""Host memory that deferred steps may take in any case."""


def sizes_of(structure: Structure) -> Sizes:
    """Sizes of a state, the same in all processes."""
    base_bytes = bytes_of(structure, range(len(structure.leaves)))
    delta_bytes = bytes_of(structure, [*structure.consumed])
    return Sizes(base_bytes, delta_bytes or base_bytes, most_bytes(structure))


def most_bytes(structure: Structure) -> int:
    """Host memory that deferred steps may take in a process: as much as a base does.

    All processes give the same number, since all have to answer alike.
    """
    return max(_LEAST_BYTES, bytes_of(structure, range(len(structure.leaves))))


def bytes_of(structure: Structure, stored: Sequence[int]) -> int:
    """Bytes of some leaves in the process that owns most of them."""
    held: dict[int, int] = {}
    for index in stored:
        leaf = structure.leaves[index]
        for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
            held[owner] = held.get(owner, 0) + box.size * leaf.itemsize_bytes
    return max(held.values(), default=0)
