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
from adacheck_jax.update.pinning.flat_jaxpr import called
from adacheck_jax.update.pinning.rules import PLACING, can_pin


class Level(IntEnum):
    """Dependence of one result of an update; each level includes those before it."""

    ELEMENT = 0
    """Elements of the same index, and scalars."""
    PLACE = 1
    """The places of elements; the bits are the same on every mesh."""
    ORDER = 2
    """The order in which elements are added up."""


_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    population_count pow real reduce_precision rem reshard round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor
"""
_LEVELS = dict.fromkeys(_ELEMENTWISE.split(), Level.ELEMENT) | dict.fromkeys(PLACING, Level.PLACE)
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
    found: set[str] = set()
    inputs = [_Value(Level.ELEMENT, i) for i in range(len(closed.jaxpr.invars))]
    results = _walk(closed.jaxpr, inputs, _Walk(found, pinned))
    return Exactness(
        tuple(result.level for result in results),
        tuple(result.origin for result in results),
        tuple(sorted(found)),
    )


def operations_of(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    """Names and constants of the operations of a function, in order.

    A function that looks at the shapes of its arguments has other operations for other shapes.

    Args:
        function: a function, which is traced once.
        arguments: pytrees of ``jax.ShapeDtypeStruct``.
    """
    return _operations(jax.make_jaxpr(function)(*arguments).jaxpr, {})


def _operations(jaxpr: Any, known: dict[int, list[str]]) -> list[str]:
    if id(jaxpr) not in known:  # equal leaves may share one called function
        found: list[str] = []
        for equation in jaxpr.eqns:
            if called(equation) is None:
                constants = [atom.val for atom in equation.invars if hasattr(atom, "val")]
                found.append(f"{equation.primitive.name} {constants}")
            for body in _bodies(equation.params):
                found += _operations(body, known)
        known[id(jaxpr)] = found
    return known[id(jaxpr)]


@dataclass(frozen=True, slots=True)
class _Walk:
    """Settings and findings of one walk through a jaxpr.

    Attributes:
        primitives: names of the operations that made results depend on an order.
        pinned: True if the function's roundings are pinned.
    """

    primitives: set[str]
    pinned: bool


def _walk(jaxpr: Any, inputs: Sequence[_Value], walk: _Walk) -> list[_Value]:
    """The values of a jaxpr's outputs, from the values of its inputs."""
    values: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))

    def value_of(atom: Any) -> _Value:
        if not hasattr(atom, "val") and atom in values:
            return values[atom]
        return _Value(Level.PLACE) if atom.aval.size > 1 else _CONSTANT  # a mask has places

    for equation in jaxpr.eqns:
        results = _equation(equation, [value_of(atom) for atom in equation.invars], walk)
        values.update(zip(equation.outvars, results, strict=True))
    return [value_of(atom) for atom in jaxpr.outvars]


_CONSTANT = _Value(Level.ELEMENT)


def _equation(equation: Any, inputs: list[_Value], walk: _Walk) -> list[_Value]:
    name, count = equation.primitive.name, len(equation.outvars)
    if name == "optimization_barrier":
        return inputs
    if name == NAME:  # a canonical fence changes NaNs
        return [_Value(inputs[0].level, None if equation.params["canonical"] else inputs[0].origin)]
    if name == "cond":
        return _cond(equation, inputs, walk)
    body = _called(equation)
    if walk.pinned and body is not None and not can_pin(equation):
        body = None
    if body is not None:
        return _walk(body, inputs, walk)
    level = max((value.level for value in inputs), default=Level.ELEMENT)
    bodies = list(_bodies(equation.params))
    if bodies:  # a loop has the level of its bodies, and may depend on elements' places
        inside = [
            result.level
            for each in bodies
            for result in _walk(each, [_CONSTANT] * len(each.invars), walk)
        ]
        return [_Value(max([level, Level.PLACE, *inside]))] * count
    own = _level(equation)
    if walk.pinned and not can_pin(equation):
        own = Level.ORDER
    if own is Level.ORDER and level < Level.ORDER:
        walk.primitives.add(name)
    return [_Value(max(level, own))] * count


def _cond(equation: Any, inputs: list[_Value], walk: _Walk) -> list[_Value]:
    """The values of a conditional: the highest level of its branches and of its choice."""
    choice, operands = inputs[0], inputs[1:]
    branches = [_walk(each.jaxpr, operands, walk) for each in equation.params["branches"]]
    results = []
    for each in zip(*branches, strict=True):
        origins = {value.origin for value in each}
        origin = origins.pop() if len(origins) == 1 else None
        results.append(_Value(max([choice.level, *(value.level for value in each)]), origin))
    return results


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
    if equation.primitive.name in {"while", "scan"}:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = equation.params.get(key)
        body = getattr(body, "jaxpr", body)
        if body is not None and len(body.invars) == len(equation.invars):
            return body
    return None


def _bodies(params: dict[str, Any]) -> Any:
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            body = getattr(each, "jaxpr", each)
            if hasattr(body, "eqns"):
                yield body
