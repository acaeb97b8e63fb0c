"""Classification of an update's results by the exactness of a replay, read from the jaxpr.

Floating-point sums are not associative: a result of a sum, or of a product of matrices, depends on
the sharding of the arrays and on the compiler's fusions. All other operations of an update give the
same bits on every mesh: arithmetic on elements of the same index, and moving or comparing elements.
If elements also stay in their places, the update can be computed on samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.update.pinning.fence import NAME
from adacheck_jax.update.pinning.flat_jaxpr import CALLS, PICK, bodies
from adacheck_jax.update.pinning.rules import ELEMENTWISE, PLACING, can_pin


class Level(IntEnum):
    """Dependence of one result of an update; each level includes those before it."""

    ELEMENT = 0
    """Elements of the same index, and scalars."""
    PLACE = 1
    """The places of elements; the bits are the same on every mesh."""
    ORDER = 2
    """The order in which elements are added up."""


_ELEMENTWISE = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e complex conj cosh digamma erfc exp2
    igamma igammac imag lgamma real sinh tan
"""
"""Operations on elements of the same index that cannot be pinned."""
_LEVELS = dict.fromkeys(ELEMENTWISE.union(_ELEMENTWISE.split()), Level.ELEMENT)
_LEVELS |= dict.fromkeys(PLACING, Level.PLACE)
_CALLS = CALLS | {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map"}
_MODULAR = {"reduce_sum", "cumsum", "reduce_prod", "cumprod", "scatter-add"}
"""Sums and products that are associative on integers."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Classification of the results of an update.

    Attributes:
        levels: level of each result.
        origins: for each result the position of the input that it returns unchanged, else None.
        primitives: names of the operations that made results depend on an order, sorted.
    """

    levels: tuple[Level, ...]
    origins: tuple[int | None, ...]
    primitives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    level: Level
    origin: int | None = None


def of(
    function: Callable[..., Any], arguments: Sequence[Any], *, pinned: bool = False
) -> Exactness:
    """Classify the results of a function.

    Args:
        function: a function, which is traced once; results are counted in flattening order.
        arguments: pytrees of ``jax.ShapeDtypeStruct``; inputs are counted in flattening order.
        pinned: True if its roundings are pinned (:mod:`adacheck_jax.update.pinning`). Then an
            operation that cannot be pinned counts as a sum.

    Returns:
        The classification. An unknown operation counts as a sum.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    inputs = [_Value(Level.ELEMENT, i) for i in range(len(closed.jaxpr.invars))]
    walk = _Walk(pinned=pinned)
    results = walk.through(closed.jaxpr, inputs)
    return Exactness(
        tuple(result.level for result in results),
        tuple(result.origin for result in results),
        tuple(sorted(walk.primitives)),
    )


class _Walk:
    """One walk through a function, which notes the operations that depend on an order."""

    def __init__(self, *, pinned: bool) -> None:
        self.primitives: set[str] = set()
        self._pinned = pinned
        self._known: dict[Any, list[_Value]] = {}

    def called(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """As :meth:`through`, once for all calls with inputs of the same levels."""
        levels = tuple(value.level for value in inputs)
        key = id(jaxpr), levels  # it is part of the jaxpr that is walked through
        if (results := self._known.get(key)) is None:
            own = [_Value(level, k) for k, level in enumerate(levels)]
            results = self._known[key] = self.through(jaxpr, own)
        return [
            _Value(each.level, None if each.origin is None else inputs[each.origin].origin)
            for each in results
        ]

    def through(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """The values of a jaxpr's outputs, from the values of its inputs."""
        values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

        def value_of(atom: Any) -> _Value:
            if not hasattr(atom, "val") and atom in values:
                return values[atom]
            return _Value(Level.PLACE) if atom.aval.size > 1 else _CONSTANT  # a mask has places

        for equation in jaxpr.eqns:
            results = self._results(equation, [value_of(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _results(self, equation: Any, inputs: list[_Value]) -> list[_Value]:
        name, count = equation.primitive.name, len(equation.outvars)
        if name == PICK:
            return [_Value(Level.PLACE) if equation.outvars[0].aval.shape else _CONSTANT]
        if name == "optimization_barrier":
            return inputs
        if name == NAME:  # a canonical fence changes NaNs
            origin = None if equation.params["canonical"] else inputs[0].origin
            return [_Value(inputs[0].level, origin)]
        if name == "cond":
            return self._chosen(equation, *inputs)
        is_free = self._pinned and not can_pin(equation)
        body = None if is_free else _called(equation)
        if body is not None:
            return self.called(body, inputs)
        level = max((value.level for value in inputs), default=Level.ELEMENT)
        if name in {"while", "scan"}:  # has the level of its bodies, and may depend on places
            inside = [
                result.level
                for each in bodies(equation)
                for result in self.through(each, [_CONSTANT] * len(each.invars))
            ]
            return [_Value(max([level, Level.PLACE, *inside]))] * count
        own = Level.ORDER if is_free else _level(equation)
        if own is Level.ORDER and level < Level.ORDER:
            self.primitives.add(name)
        return [_Value(max(level, own))] * count

    def _chosen(self, equation: Any, choice: _Value, *operands: _Value) -> list[_Value]:
        """The values of a conditional: the highest level of its branches and of its choice."""
        branches = [self.through(each.jaxpr, operands) for each in equation.params["branches"]]
        results = []
        for each in zip(*branches, strict=True):
            origins = {value.origin for value in each}
            origin = origins.pop() if len(origins) == 1 else None
            results.append(_Value(max([choice.level, *(value.level for value in each)]), origin))
        return results


_CONSTANT = _Value(Level.ELEMENT)


def _level(equation: Any) -> Level:
    name = equation.primitive.name
    sizes = [atom.aval.size for atom in [*equation.invars, *equation.outvars]]
    level = _LEVELS.get(name)
    if level is None and name in _MODULAR:
        dtype = equation.invars[0].aval.dtype
        if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
            level = Level.PLACE  # modular arithmetic is associative
    if level is None and not (name.startswith("reduce_") and max(sizes) <= 1):
        return Level.ORDER
    # A scalar has only one place, and so has an array that it is broadcast to.
    is_scalar = max(sizes[: len(equation.invars)], default=2) <= 1
    is_spread = name in {"broadcast_in_dim", "random_wrap", "random_unwrap"} or max(sizes) <= 1
    return Level.ELEMENT if level is None or (is_scalar and is_spread) else level


def _called(equation: Any) -> Any:
    """The jaxpr of a plain call, whose inputs are the equation's, else None."""
    inside = bodies(equation) if equation.primitive.name in _CALLS else ()
    return next((each for each in inside if len(each.invars) == len(equation.invars)), None)
