"""Operations that move the elements of whole leaves: their inverses give the bits back.

Arrays are those of numpy or of ``jax.numpy``: the functions are passed as ``xp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.layout.kinds import (
    Arrays,
    Kind,
    Operation,
    SameAxes,
    one_along,
    position,
    with_length,
    without_axis,
)


@dataclass(frozen=True, slots=True)
class Keep(SameAxes):
    """The leaf as it is, under another path."""

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        return list(taken)

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        del xp
        return list(arrays)

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        del taken
        return self


@dataclass(frozen=True, slots=True)
class Stack:
    """Equal leaves become one with an axis more.

    Attributes:
        axis: position of the new axis in the result.
    """

    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        first = _same_kind(taken, "stack")
        axis = position(self.axis, len(first.shape) + 1)
        shape = (*first.shape[:axis], len(taken), *first.shape[axis:])
        return [Kind(shape, first.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [xp.stack(arrays, axis=self.axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Unstack(len(taken), self.axis)

    def source_axes(self, axes: int) -> list[int | None]:
        axis = position(self.axis, axes + 1)
        return [*range(axis), *range(axis + 1, axes + 1)]


@dataclass(frozen=True, slots=True)
class Unstack:
    """A leaf becomes one for each index of an axis.

    Attributes:
        count: length of the axis.
        axis: its position.
    """

    count: int
    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = one_along(taken, self.axis)
        if only.shape[axis] != self.count:
            raise ValueError(f"expected {self.count} along axis {axis}, found {only.shape[axis]}")
        return [Kind(without_axis(only.shape, axis), only.dtype)] * self.count

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        return [xp.take(only, k, axis=self.axis) for k in range(self.count)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Stack(self.axis)

    def source_axes(self, axes: int) -> list[int | None]:
        axis = position(self.axis, axes)
        return [*range(axis), None, *range(axis, axes - 1)]


@dataclass(frozen=True, slots=True)
class Fuse(SameAxes):
    """Leaves are joined along an axis, whole or group by group.

    With two groups, q, k and v become ``q0 k0 v0 q1 k1 v1``: the first half of each, then the
    second.

    Attributes:
        axis: the axis.
        groups: number of groups.
    """

    axis: int
    groups: int = 1

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        axis = position(self.axis, len(taken[0].shape))
        _same_kind(taken, "fuse", but=axis)
        for kind in taken:
            _check_groups(self.groups, kind.shape[axis], axis)
        total = sum(kind.shape[axis] for kind in taken)
        return [Kind(with_length(taken[0].shape, axis, total), taken[0].dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        axis = position(self.axis, arrays[0].ndim)
        parts = [_grouped(each, axis, self.groups) for each in arrays]
        return [_ungrouped(xp.concatenate(parts, axis=axis + 1), axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        axis = position(self.axis, len(taken[0].shape))
        return Split(axis, tuple(kind.shape[axis] for kind in taken), self.groups)


@dataclass(frozen=True, slots=True)
class Split(SameAxes):
    """A leaf is cut along an axis: the inverse of :class:`Fuse`.

    Attributes:
        axis: the axis.
        sizes: lengths of the parts.
        groups: number of groups.
    """

    axis: int
    sizes: tuple[int, ...]
    groups: int = 1

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = one_along(taken, self.axis)
        if sum(self.sizes) != only.shape[axis] or min(self.sizes) < 0:
            raise ValueError(
                f"expected sizes that add up to {only.shape[axis]}, the length of axis {axis}, "
                f"found {list(self.sizes)}"
            )
        for size in self.sizes:
            _check_groups(self.groups, size, axis)
        return [Kind(with_length(only.shape, axis, size), only.dtype) for size in self.sizes]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        del xp
        (only,) = arrays
        axis = position(self.axis, only.ndim)
        grouped = _grouped(only, axis, self.groups)
        results, start = [], 0
        for size in self.sizes:
            stop = start + size // self.groups
            here = (slice(None),) * (axis + 1)
            results.append(_ungrouped(grouped[(*here, slice(start, stop))], axis))
            start = stop
        return results

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Fuse(self.axis, self.groups)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Axes in another order.

    Attributes:
        axes: for each axis of the result the axis of the leaf.
    """

    axes: tuple[int, ...]

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        (only,) = taken
        if sorted(self.axes) != [*range(len(only.shape))]:
            raise ValueError(
                f"expected the axes 0 to {len(only.shape) - 1} in some order, "
                f"found {list(self.axes)}"
            )
        return [Kind(tuple(only.shape[k] for k in self.axes), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [xp.transpose(arrays[0], self.axes)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        del taken
        return Transpose(tuple(self.axes.index(k) for k in range(len(self.axes))))

    def source_axes(self, axes: int) -> list[int | None]:
        return [self.axes.index(k) for k in range(axes)]


def _same_kind(taken: Sequence[Kind], name: str, but: int | None = None) -> Kind:
    """The kind of all leaves; refuses leaves of several, but for the length of one axis.

    Raises:
        ValueError: two leaves differ; it names them, and the operation.
    """

    def compared(kind: Kind) -> tuple[object, ...]:
        shape = kind.shape if but is None else without_axis(kind.shape, but)
        return shape, len(kind.shape), kind.dtype

    for kind in taken:
        if compared(kind) != compared(taken[0]):
            along = "" if but is None else f", but along axis {but},"
            raise ValueError(
                f"expected leaves of one shape{along} and type to {name}, found "
                f"{taken[0].dtype}{list(taken[0].shape)} and {kind.dtype}{list(kind.shape)}"
            )
    return taken[0]


def _check_groups(groups: int, length: int, axis: int) -> None:
    """Refuse groups that do not divide an axis."""
    if groups < 1 or length % groups:
        raise ValueError(f"expected groups that divide {length} along axis {axis}, found {groups}")


def _grouped(array: Any, axis: int, groups: int) -> Any:
    """An array with an axis cut into groups, which become an axis before it."""
    shape = array.shape
    return array.reshape(*shape[:axis], groups, shape[axis] // groups, *shape[axis + 1 :])


def _ungrouped(array: Any, axis: int) -> Any:
    """The inverse of :func:`_grouped`."""
    shape = array.shape
    return array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
