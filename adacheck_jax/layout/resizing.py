"""Operations that add, drop or round elements; most have an inverse that gives the bits back.

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
from adacheck_jax.layout.operations import Stack, Unstack


@dataclass(frozen=True, slots=True)
class Pad(SameAxes):
    """Zeros are added at the end of an axis.

    Attributes:
        axis: the axis.
        size: its new length.
    """

    axis: int
    size: int

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = one_along(taken, self.axis)
        if self.size < only.shape[axis]:
            raise ValueError(f"expected a size of at least {only.shape[axis]}, found {self.size}")
        return [Kind(with_length(only.shape, axis, self.size), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        axis = position(self.axis, only.ndim)
        missing = with_length(only.shape, axis, self.size - only.shape[axis])
        return [xp.concatenate([only, xp.zeros(missing, only.dtype)], axis=axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        axis = position(self.axis, len(taken[0].shape))
        return Strip(axis, taken[0].shape[axis])


@dataclass(frozen=True, slots=True)
class Strip(SameAxes):
    """The end of an axis is cut off; its inverse gives the bits back if only zeros were.

    Attributes:
        axis: the axis.
        size: its new length.
        is_lossy: True if other elements than zeros may be lost.
    """

    axis: int
    size: int
    is_lossy: bool = False

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = one_along(taken, self.axis)
        if not 0 <= self.size <= only.shape[axis]:
            raise ValueError(f"expected a size of at most {only.shape[axis]}, found {self.size}")
        return [Kind(with_length(only.shape, axis, self.size), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        del xp
        (only,) = arrays
        axis = position(self.axis, only.ndim)
        return [only[(*(slice(None),) * axis, slice(0, self.size))]]

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        axis = position(self.axis, len(taken[0].shape))
        return None if self.is_lossy else Pad(axis, taken[0].shape[axis])


@dataclass(frozen=True, slots=True)
class Repeat:
    """Copies of a leaf along a new axis.

    Attributes:
        count: number of copies.
        axis: position of the new axis in the result.
    """

    count: int
    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        (only,) = taken
        if self.count < 1:
            raise ValueError(f"expected at least one copy, found {self.count}")
        return Stack(self.axis).kinds([only] * self.count)

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [xp.stack(list(arrays) * self.count, axis=self.axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return First(self.count, self.axis)

    def source_axes(self, axes: int) -> list[int | None]:
        return Stack(self.axis).source_axes(axes)


@dataclass(frozen=True, slots=True)
class First:
    """The first of equal copies along an axis: the inverse of :class:`Repeat`.

    Attributes:
        count: number of copies.
        axis: position of the axis.
    """

    count: int
    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        return Unstack(self.count, self.axis).kinds(taken)[:1]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        return [xp.take(arrays[0], 0, axis=self.axis)]

    def inverse(self, taken: Sequence[Kind]) -> Operation:
        return Repeat(self.count, self.axis)

    def source_axes(self, axes: int) -> list[int | None]:
        return Unstack(self.count, self.axis).source_axes(axes)


@dataclass(frozen=True, slots=True)
class Average:
    """The mean along an axis, of copies that drifted apart; to rounding.

    Attributes:
        axis: position of the axis.
    """

    axis: int = 0

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        only, axis = one_along(taken, self.axis)
        if "float" not in only.dtype and "complex" not in only.dtype:
            raise ValueError(f"expected elements that have a mean, found {only.dtype}")
        if not only.shape[axis]:
            raise ValueError(f"expected at least one copy along axis {axis}, found none")
        return [Kind(without_axis(only.shape, axis), only.dtype)]

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        (only,) = arrays
        # Narrow elements are added up as float32: a sum of bfloat16 loses most of the digits.
        wide = only.astype("float32") if only.dtype.itemsize < 4 else only
        return [xp.mean(wide, axis=self.axis).astype(only.dtype)]

    def inverse(self, taken: Sequence[Kind]) -> None:
        del taken

    def source_axes(self, axes: int) -> list[int | None]:
        return Unstack(0, self.axis).source_axes(axes)


@dataclass(frozen=True, slots=True)
class Cast(SameAxes):
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
        del xp
        return [arrays[0].astype(self.dtype)]

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        return None if self.is_lossy else Cast(taken[0].dtype)
