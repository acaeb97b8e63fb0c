"""Operations on whole leaves: they move, add, drop or round elements, and most have an inverse.

What an inverse gives back has the bits of what was taken, or the operation has lost something.
Arrays are those of numpy or of ``jax.numpy``: the functions are passed as ``xp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Arrays = Sequence[Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Shape and data type of a leaf.

    Attributes:
        shape: global shape.
        dtype: numpy name of the data type; ``key<...>`` for a typed PRNG key.
    """

    shape: Shape
    dtype: str


class Operation:
    """An operation on leaves of known shapes."""

    __slots__ = ()

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        """Shapes and data types of the results.

        Raises:
            ValueError: the operation cannot take these leaves; it says why.
        """
        raise NotImplementedError

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        """The results, computed with the functions of numpy or ``jax.numpy``."""
        raise NotImplementedError

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        """The operation that gives the taken leaves back; None if it loses something."""
        del taken

    def source_axes(self, axes: int) -> list[int | None]:
        """For each axis of a taken leaf the axis of a result that it becomes, None if it has none.

        Args:
            axes: number of axes of the taken leaf.
        """
        return [*range(axes)]


@dataclass(frozen=True, slots=True)
class Stack(Operation):
    """Equal leaves become one with an axis more.

    Attributes:
        axis: position of the new axis in the result.
        copies: number of times that the leaves are taken, one after another.
    """

    axis: int = 0
    copies: int = 1

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        if self.copies < 1:
            raise ValueError(f"expected at least one copy, found {self.copies}")
        first = _same_kind(taken, "stack")
        axis = _position(self.axis, len(first.shape) + 1)
        shape = (*first.shape[:axis], len(taken) * self.copies, *first.shape[axis:])
        return [Kind(shape, first.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [xp.stack([*arrays] * self.copies, axis=self.axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Unstack(len(taken) * self.copies, self.axis, self.copies)

    def source_axes(self, axes: int) -> list[int | None]:
        axis = _position(self.axis, axes + 1)
        return [*range(axis), *range(axis + 1, axes + 1)]


@dataclass(frozen=True, slots=True)
class Unstack(Operation):
    """A leaf becomes one for each index of an axis: the inverse of :class:`Stack`.

    Attributes:
        count: length of the axis.
        axis: its position.
        copies: number of equal parts of the axis, of which the first is taken.
    """

    count: int
    axis: int = 0
    copies: int = 1

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = _one_along(taken, self.axis)
        if only.shape[axis] != self.count:
            raise ValueError(f"expected {self.count} along axis {axis}, found {only.shape[axis]}")
        part = Kind(_without_axis(only.shape, axis), only.dtype)
        return [part] * (self.count // self.copies)

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        return [xp.take(only, k, axis=self.axis) for k in range(self.count // self.copies)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Stack(self.axis, self.copies)

    def source_axes(self, axes: int) -> list[int | None]:
        axis = _position(self.axis, axes)
        return [*range(axis), None, *range(axis, axes - 1)]


@dataclass(frozen=True, slots=True)
class Fuse(Operation):
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
        axis = _position(self.axis, len(taken[0].shape))
        _same_kind(taken, "fuse", but=axis)
        for kind in taken:
            _check_groups(self.groups, kind.shape[axis], axis)
        total = sum(kind.shape[axis] for kind in taken)
        return [Kind(_with_length(taken[0].shape, axis, total), taken[0].dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        axis = _position(self.axis, arrays[0].ndim)
        parts = [_grouped(each, axis, self.groups) for each in arrays]
        return [_ungrouped(xp.concatenate(parts, axis=axis + 1), axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        axis = _position(self.axis, len(taken[0].shape))
        return Split(axis, tuple(kind.shape[axis] for kind in taken), self.groups)


@dataclass(frozen=True, slots=True)
class Split(Operation):
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
        only, axis = _one_along(taken, self.axis)
        if sum(self.sizes) != only.shape[axis] or min(self.sizes) < 0:
            raise ValueError(
                f"expected sizes that add up to {only.shape[axis]}, the length of axis {axis}, "
                f"found {list(self.sizes)}"
            )
        for size in self.sizes:
            _check_groups(self.groups, size, axis)
        return [Kind(_with_length(only.shape, axis, size), only.dtype) for size in self.sizes]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        axis = _position(self.axis, only.ndim)
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
class Transpose(Operation):
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
        return Transpose(tuple(self.axes.index(k) for k in range(len(self.axes))))

    def source_axes(self, axes: int) -> list[int | None]:
        return [self.axes.index(k) for k in range(axes)]


@dataclass(frozen=True, slots=True)
class Resize(Operation):
    """Zeros are added at the end of an axis, or its end is cut off.

    The inverse of a cut gives the bits back if only zeros were there.

    Attributes:
        axis: the axis.
        size: its new length.
        is_longer: True if zeros are added.
        is_lossy: True if other elements than zeros may be lost.
    """

    axis: int
    size: int
    is_longer: bool
    is_lossy: bool = False

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = _one_along(taken, self.axis)
        length = only.shape[axis]
        if self.size < 0 or self.size != (max if self.is_longer else min)(self.size, length):
            limit = "least" if self.is_longer else "most"
            raise ValueError(f"expected a size of at {limit} {length}, found {self.size}")
        return [Kind(_with_length(only.shape, axis, self.size), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        axis = _position(self.axis, only.ndim)
        if not self.is_longer:
            return [only[(*(slice(None),) * axis, slice(0, self.size))]]
        missing = _with_length(only.shape, axis, self.size - only.shape[axis])
        return [xp.concatenate([only, xp.zeros(missing, only.dtype)], axis=axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        axis = _position(self.axis, len(taken[0].shape))
        return None if self.is_lossy else Resize(axis, taken[0].shape[axis], not self.is_longer)


@dataclass(frozen=True, slots=True)
class Average(Operation):
    """The mean along an axis, of copies that drifted apart; to rounding.

    Attributes:
        axis: position of the axis.
    """

    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = _one_along(taken, self.axis)
        if "float" not in only.dtype and "complex" not in only.dtype:
            raise ValueError(f"expected elements that have a mean, found {only.dtype}")
        if not only.shape[axis]:
            raise ValueError(f"expected at least one copy along axis {axis}, found none")
        return [Kind(_without_axis(only.shape, axis), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        # Narrow elements are added up as float32: a sum of bfloat16 loses most of the digits.
        wide = only.astype("float32") if only.dtype.itemsize < 4 else only
        return [xp.mean(wide, axis=self.axis).astype(only.dtype)]

    def source_axes(self, axes: int) -> list[int | None]:
        return Unstack(0, self.axis).source_axes(axes)


@dataclass(frozen=True, slots=True)
class Cast(Operation):
    """Elements of another data type; its inverse gives the bits back if nothing was rounded.

    Attributes:
        dtype: numpy name of the data type.
        is_lossy: True if elements may be rounded.
    """

    dtype: str
    is_lossy: bool = False

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        (only,) = taken
        return [Kind(only.shape, self.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [arrays[0].astype(self.dtype)]

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        return None if self.is_lossy else Cast(taken[0].dtype)


def _position(axis: int, axes: int) -> int:
    """The position of an axis, which may be counted from the end."""
    if not -axes <= axis < axes:
        raise ValueError(f"expected an axis of {axes}, found axis {axis}")
    return axis % axes


def _one_along(taken: Sequence[Kind], axis: int) -> tuple[Kind, int]:
    """The only leaf that is taken, and the position of an axis of it."""
    (only,) = taken
    return only, _position(axis, len(only.shape))


def _with_length(shape: Shape, axis: int, length: int) -> Shape:
    """A shape with another length of an axis."""
    return (*shape[:axis], length, *shape[axis + 1 :])


def _without_axis(shape: Shape, axis: int) -> Shape:
    """A shape without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])


def _same_kind(taken: Sequence[Kind], name: str, but: int | None = None) -> Kind:
    """The kind of all leaves; refuses leaves of several, but for the length of one axis."""

    def compared(kind: Kind) -> tuple[object, ...]:
        shape = kind.shape if but is None else _without_axis(kind.shape, but)
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
