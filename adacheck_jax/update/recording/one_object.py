"""Transformations that stay one and the same object wherever they are copied."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self

import jax
import optax

_OWNER = "adacheck_owner"
"""Attribute of a transformation's functions that holds the transformation."""


class OneObject(optax.GradientTransformationExtraArgs):
    """An optax transformation with a memory: a copy of it, or of its two functions, is itself."""

    def __new__(cls, init: Callable[..., Any], update: Callable[..., Any]) -> Self:
        """Make a transformation of two functions of its own."""
        self = super().__new__(cls, init, update)
        vars(init)[_OWNER] = vars(update)[_OWNER] = self
        return self

    def __init_subclass__(cls) -> None:
        # A node without leaves, as an optax transformation has none.
        jax.tree_util.register_pytree_node(cls, lambda one: ((), one), lambda one, _: one)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    @classmethod
    def _make(cls, iterable: Iterable[Any]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The transformation that owns two functions; a plain one if none owns both."""
        made = optax.GradientTransformationExtraArgs(*iterable)
        owners = [getattr(function, _OWNER, None) for function in made]
        return owners[0] if owners[0] is owners[1] is not None else made

    def _replace(self, /, **changes: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        unknown = changes.keys() - set(self._fields)
        if unknown:
            raise ValueError(f"expected the fields {self._fields}, found {sorted(unknown)}")
        return self._make({**self._asdict(), **changes}.values())
