"""Differences of two states of the same leaves, leaf by leaf and element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from adacheck_jax.format.manifest import Leaf, Update

_BLOCK = 1 << 20
"""Elements that are compared at once, so that nothing of a leaf's size is made."""


@dataclass(frozen=True, slots=True)
class Element:
    """One element that differs.

    Attributes:
        index: its place in the leaf.
        before, after: its values as people read them.
        bits: number of bits that differ.
        process: the process that wrote it, when the step was saved; None where that is not known.
    """

    index: tuple[int, ...]
    before: str
    after: str
    bits: int
    process: int | None = None


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """Difference of one leaf.

    Attributes:
        path: leaf path.
        role: ``params``, ``optimizer state``, ``record`` (the gradients that the update took), or
            ``other``.
        changed_count: number of elements whose bits differ.
        changed_share: their share of all elements.
        first: the first element that differs, in row-major order.
        norm: Euclidean norm of the difference; None where elements are no numbers, or no number
            is finite.
        relative: that norm divided by the one of the first state's leaf; None if this is zero.
        largest: largest absolute difference; None likewise.
        cosine: cosine of the angle between the leaves; None likewise, or if one is zero.
    """

    path: str
    role: str
    changed_count: int
    changed_share: float
    first: Element
    norm: float | None = None
    relative: float | None = None
    largest: float | None = None
    cosine: float | None = None


def roles_of(leaf_count: int, update: Update | None) -> list[str]:
    """Role of each leaf in the recorded update, by its index."""
    roles = ["other"] * leaf_count
    if update is not None:
        for name, indices in (
            ("params", update.params),
            ("optimizer state", update.inner),
            ("record", update.consumed),
        ):
            for index in indices:
                roles[index] = name
    return roles


def params_of(leaves: Sequence[Leaf], update: Update | None) -> list[int]:
    """Indices of the leaves that the recorded update trains; without one of those under params."""
    if update is not None and update.params:
        return sorted({*update.params})
    return [i for i, leaf in enumerate(leaves) if leaf.path.split("/")[0] == "params"]


def difference(
    before: np.ndarray, after: np.ndarray, leaf: Leaf, role: str
) -> LeafDifference | None:
    """Compare a leaf of two states.

    Returns:
        None if every bit is the same.
    """
    old, new = np.ascontiguousarray(before).reshape(-1), np.ascontiguousarray(after).reshape(-1)
    changed, first, sums, largest = 0, None, np.zeros(4), 0.0
    for start in range(0, old.size, _BLOCK):
        a, b = old[start : start + _BLOCK], new[start : start + _BLOCK]
        unequal = (_words(a) != _words(b)).any(axis=1)
        if first is None and unequal.any():
            first = start + int(np.argmax(unequal))
        changed += int(np.count_nonzero(unequal))
        if old.dtype.kind != "b":
            a, b = wide(a), wide(b)
            with np.errstate(all="ignore"):
                sums += [dot(x, y) for x, y in ((a, a), (b, b), (a, b), (b - a, b - a))]
                largest = max(largest, float(np.max(np.abs(b - a))))
    if first is None:
        return None
    index = tuple(map(int, np.unravel_index(first, before.shape))) if before.shape else ()
    one, other = old[first : first + 1], new[first : first + 1]
    bits = sum(int(byte).bit_count() for byte in (_words(one) ^ _words(other)).reshape(-1))
    element = Element(index, shown(one[0]), shown(other[0]), bits, process_of(leaf, index))
    found = LeafDifference(leaf.path, role, changed, changed / old.size, element)
    of_old, of_new, both, between = map(float, sums)
    if old.dtype.kind == "b" or not math.isfinite(between):
        return found
    return replace(
        found,
        norm=math.sqrt(between),
        relative=math.sqrt(between / of_old) if of_old else None,
        largest=largest,
        cosine=both / math.sqrt(of_old * of_new) if of_old and of_new else None,
    )


def wide(array: np.ndarray) -> np.ndarray:
    """Elements in the widest type of their kind, in which they are added up."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Real part of an inner product, by one thread: those of a BLAS wait for busy processors."""
    return float(np.einsum("i,i", a.conj(), b).real)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Euclidean norm of several arrays together; NaN or infinite if an element is."""
    total = 0.0
    with np.errstate(all="ignore"):
        for array in arrays:
            flat = array.reshape(-1)
            for start in range(0, flat.size, _BLOCK):
                block = wide(flat[start : start + _BLOCK])
                total += dot(block, block)
    return math.sqrt(total) if total >= 0 else math.nan


def relative_change(before: np.ndarray, after: np.ndarray) -> float:
    """Norm of the change of an array of numbers, relative to it before; infinite from zero."""
    with np.errstate(all="ignore"):
        change, size = norm([wide(after) - wide(before)]), norm([before])
    return change / size if size else (math.inf if change else 0.0)


def shown(value: np.generic) -> str:
    """An element as people read it, with as many digits as tell it from its neighbours."""
    return str(value.item() if value.dtype.kind in "biu" else value)


def process_of(leaf: Leaf, index: tuple[int, ...]) -> int | None:
    """The process that wrote an element; None if the leaf has no boxes."""
    for box, owner in zip(leaf.boxes, leaf.owners, strict=True):
        inside = zip(index, box.start, box.stop, strict=True)
        if all(start <= at < stop for at, start, stop in inside):
            return owner
    return None


def _words(array: np.ndarray) -> np.ndarray:
    """The bytes of each element, a row an element."""
    return array.view(np.uint8).reshape(array.size, -1)
