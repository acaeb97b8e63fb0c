"""Shapes and data types of leaves, what an operation on leaves is, and arithmetic of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Operation(Protocol):
    """An operation on leaves of known shapes."""

    def kinds(self, taken: Sequence[Kind]) -> list[Kind]:
        """Shapes and data types of the results.

        Raises:
            ValueError: the operation cannot take these leaves; it says why.
        """
        ...

    def apply(self, xp: Any, arrays: Arrays) -> list[Any]:
        """The results, computed with the functions of numpy or ``jax.numpy``."""
        ...

    def inverse(self, taken: Sequence[Kind]) -> Operation | None:
        """The operation that gives the taken leaves back; None if it loses something."""
        ...

    def source_axes(self, axes: int) -> list[int | None]:
        """For each axis of a taken leaf the axis of a result that it becomes, None if it has none.

        Args:
            axes: number of axes of the taken leaf.
        """
        ...


class SameAxes:
    """Part of an operation whose results have the axes of what it takes."""

    __slots__ = ()

    def source_axes(self, axes: int) -> list[int | None]:
        """For each axis of a taken leaf the axis of a result that it becomes."""
        return [*range(axes)]


def position(axis: int, axes: int) -> int:
    """The position of an axis, which may be counted from the end.

    Raises:
        ValueError: there is no such axis.
    """
    if not -axes <= axis < axes:
        raise ValueError(f"expected an axis of {axes}, found axis {axis}")
    return axis % axes


def one_along(taken: Sequence[Kind], axis: int) -> tuple[Kind, int]:
    """The only leaf that is taken, and the position of an axis of it.

    Raises:
        ValueError: there is no such axis.
    """
    (only,) = taken
    return only, position(axis, len(only.shape))


def with_length(shape: Shape, axis: int, length: int) -> Shape:
    """A shape with another length of an axis."""
    return (*shape[:axis], length, *shape[axis + 1 :])


def without_axis(shape: Shape, axis: int) -> Shape:
    """A shape without an axis."""
    return (*shape[:axis], *shape[axis + 1 :])
