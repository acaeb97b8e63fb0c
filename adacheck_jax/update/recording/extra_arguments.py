"""Extra arguments of an update: those that are recorded, and those that cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adacheck_jax.errors import RecorderError


@dataclass(frozen=True, slots=True)
class ExtraArguments:
    """The extra arguments that a recorder knows of.

    Attributes:
        declared: shapes and data types of those that are recorded, by name.
        takes_others: True if the wrapped transformation could consume others.
    """

    declared: dict[str, jax.ShapeDtypeStruct]
    takes_others: bool

    def zeros(self) -> dict[str, jax.Array]:
        """Recorded ones before the first update."""
        return {name: jnp.zeros(s.shape, s.dtype) for name, s in self.declared.items()}

    def recorded(self, received: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The declared ones of the extra arguments that an update receives.

        Returns:
            The arguments by name, and the reason why the update cannot be replayed, if there is
            one.

        Raises:
            RecorderError: a declared one is missing, or has another shape; or an undeclared one is
                an array that the wrapped transformation could consume.
        """
        extra, problem = {}, None
        has_function = any(map(callable, received.values()))
        for name, value in received.items():
            if name in self.declared:
                extra[name] = _as_declared(name, value, self.declared[name])
            elif self.takes_others:
                problem = _problem_of(name, value, has_function)
        if missing := sorted(self.declared.keys() - extra.keys()):
            raise RecorderError(
                f"expected update() to receive the declared extra arguments {missing}, found "
                f"{sorted(received)}. Pass them to every update, or do not declare them."
            )
        return extra, problem


def _as_declared(name: str, value: Any, declared: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.shape(value) != declared.shape:
        raise RecorderError(
            f"expected the extra argument {name!r} in the declared shape {declared.shape}, found "
            f"{jnp.shape(value)}. Declare the shape that update() receives."
        )
    return jnp.asarray(value, declared.dtype)


def _problem_of(name: str, value: Any, has_function: bool) -> str:
    """The reason why an update with an undeclared argument cannot be replayed."""
    if has_function:
        return (
            f"update() received the extra argument {name!r} and a function, as line searches "
            "take it (optax.lbfgs). An update that evaluates the model cannot be replayed: leave "
            "the Recorder out, and save differences with AdaCheckHandler(delta='bits')"
        )
    if isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise RecorderError(
            f"update() received the extra argument {name!r} "
            f"({jnp.result_type(value)}{list(jnp.shape(value))}), which the Recorder does not "
            f"know. Expected every array that the wrapped transformation may consume to be "
            f"declared: Recorder(tx, extra_args={{{name!r}: jnp.zeros({jnp.shape(value)})}})."
        )
    return (
        f"update() received the extra argument {name!r} of type {type(value).__name__}, which "
        "cannot be recorded"
    )
