"""Differences of two states of the same leaves, leaf by leaf and element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
        norm: Euclidean norm of the difference; None where elements are no numbers, or no number
            is finite.
        relative: that norm divided by the one of the first state's leaf; None if this is zero.
        largest: largest absolute difference; None likewise.
        cosine: cosine of the angle between the leaves; None likewise, or if one is zero.
        first: the first element that differs, in row-major order.
    """

    path: str
    role: str
    changed_count: int
    changed_share: float
    norm: float | None
    relative: float | None
    largest: float | None
    cosine: float | None
    first: Element


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


def difference(
    before: np.ndarray, after: np.ndarray, leaf: Leaf, role: str
) -> LeafDifference | None:
    """Compare a leaf of two states.

    Args:
        before: its elements.
        after: others, of the same shape and data type.
        leaf: its description.
        role: one of :func:`roles_of`.

    Returns:
        None if every bit is the same.
    """
    old, new = np.ascontiguousarray(before).reshape(-1), np.ascontiguousarray(after).reshape(-1)
    changed, first, sums = 0, None, _Sums()
    for start in range(0, old.size, _BLOCK):
        a, b = old[start : start + _BLOCK], new[start : start + _BLOCK]
        unequal = (_words(a) != _words(b)).any(axis=1)
        count = int(np.count_nonzero(unequal))
        if count and first is None:
            first = start + int(np.argmax(unequal))
        changed += count
        sums.add(a, b)
    if first is None:
        return None
    index = tuple(map(int, np.unravel_index(first, before.shape))) if before.shape else ()
    element = Element(
        index,
        shown(old[first]),
        shown(new[first]),
        _bit_count(old[first : first + 1], new[first : first + 1]),
        process_of(leaf, index),
    )
    share = changed / max(old.size, 1)
    return LeafDifference(leaf.path, role, changed, share, *sums.found(), element)


class _Sums:
    """Sums over the elements of two arrays that are numbers."""

    def __init__(self) -> None:
        self._old = self._new = self._both = self._between = self._largest = 0.0
        self._is_number = True

    def add(self, old: np.ndarray, new: np.ndarray) -> None:
        """Add some elements of each."""
        if old.dtype.kind == "b" or not self._is_number:
            self._is_number = False
            return
        kind = np.complex128 if old.dtype.kind == "c" else np.float64
        a, b = old.astype(kind), new.astype(kind)
        with np.errstate(all="ignore"):
            between = np.abs(b - a)
            self._old += float(np.sum(np.abs(a) ** 2))
            self._new += float(np.sum(np.abs(b) ** 2))
            self._both += float(np.sum((np.conj(a) * b).real))
            self._between += float(np.sum(between**2))
            self._largest = max(self._largest, float(np.max(between, initial=0.0)))

    def found(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Norm of the difference, the same relative to the first array, largest, cosine."""
        if not (self._is_number and math.isfinite(self._between)):
            return None, None, None, None
        norm = math.sqrt(self._between)
        relative = norm / math.sqrt(self._old) if self._old else None
        both = math.sqrt(self._old * self._new)
        return norm, relative, self._largest, self._both / both if both else None


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Euclidean norm of several arrays together; NaN or infinite if an element is."""
    total = 0.0
    with np.errstate(all="ignore"):
        for array in arrays:
            flat = array.reshape(-1)
            kind = np.complex128 if flat.dtype.kind == "c" else np.float64
            for start in range(0, flat.size, _BLOCK):
                total += float(np.sum(np.abs(flat[start : start + _BLOCK].astype(kind)) ** 2))
    return math.sqrt(total) if total >= 0 else math.nan


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


def _bit_count(old: np.ndarray, new: np.ndarray) -> int:
    other: np.ndarray = np.bitwise_xor(_words(old), _words(new))
    return sum(int(byte).bit_count() for byte in other.reshape(-1))
