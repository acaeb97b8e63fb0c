"""Which results of an update depend on the order in which elements are added up.

Floating-point sums are not associative, so a result that a sum or a product of matrices went into
depends on how the arrays are cut over devices and on how the compiler fused the program. Everything
else that an update does to an array (element-wise arithmetic, moving elements, comparisons) gives
the same bits on every mesh. The decision is made on the jaxpr, once an update program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

_ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not optimization_barrier
    or population_count pow real reduce_precision rem reshard round rsqrt select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square stop_gradient sub tan tanh xor
"""
_MOVING = """
    broadcast_in_dim concatenate device_put dynamic_slice dynamic_update_slice expand_dims gather
    iota pad reshape rev scatter slice split squeeze transpose
"""
_ORDERLESS = """
    argmax argmin random_bits random_fold_in random_seed random_split random_unwrap random_wrap
    reduce_and reduce_max reduce_min reduce_or reduce_xor sort threefry2x32
"""
_EXACT = frozenset(_ELEMENTWISE.split() + _MOVING.split() + _ORDERLESS.split())


@dataclass(frozen=True, slots=True)
class Reductions:
    """What keeps an update from being element-wise.

    Attributes:
        outputs: positions of the results that depend on the order of a sum, ascending.
        primitives: the operations that they went through, sorted.
    """

    outputs: tuple[int, ...]
    primitives: tuple[str, ...]


def reductions_of(function: Callable[..., Any], arguments: Sequence[Any]) -> Reductions:
    """Finds the results of a function that depend on the order of a sum.

    Args:
        function: traced once; its results are counted in flattening order.
        arguments: pytrees of ``jax.ShapeDtypeStruct``.

    Returns:
        The dependent results; none if the function gives the same bits on every mesh. An operation
        that is not known to be exact counts as a sum.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    found: set[str] = set()
    mixed = _walk(closed.jaxpr, [False] * len(closed.jaxpr.invars), found)
    return Reductions(
        tuple(i for i, is_mixed in enumerate(mixed) if is_mixed), tuple(sorted(found))
    )


def independent_of(
    function: Callable[..., Any], arguments: Sequence[Any], inputs: Sequence[bool]
) -> tuple[int, ...]:
    """Finds the results of a function that some of its inputs have no part in.

    Args:
        function: traced once; its results are counted in flattening order.
        arguments: pytrees of ``jax.ShapeDtypeStruct``.
        inputs: for each leaf of the arguments whether it is one of those inputs.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    touched = _walk(closed.jaxpr, inputs, set())
    return tuple(position for position, is_touched in enumerate(touched) if not is_touched)


def _walk(jaxpr: Any, inputs: Sequence[bool], found: set[str]) -> list[bool]:
    """Whether each output depends on the order of a sum, given which inputs do."""
    mixed: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))

    def is_mixed(atom: Any) -> bool:
        return not hasattr(atom, "val") and mixed.get(atom, False)

    for equation in jaxpr.eqns:
        results = _equation(equation, [is_mixed(atom) for atom in equation.invars], found)
        mixed.update(zip(equation.outvars, results, strict=True))
    return [is_mixed(atom) for atom in jaxpr.outvars]


def _equation(equation: Any, inputs: list[bool], found: set[str]) -> list[bool]:
    count = len(equation.outvars)
    inner = _called(equation)
    if inner is not None:
        return _walk(inner, inputs, found)
    bodies = list(_bodies(equation.params))
    if bodies:  # control flow: exact if everything in it is
        reducing = [any(_walk(b, [False] * len(b.invars), found)) for b in bodies]
        return [any(inputs) or any(reducing)] * count
    if any(inputs):
        return [True] * count
    if _is_exact(equation):
        return [False] * count
    found.add(equation.primitive.name)
    return [True] * count


def _is_exact(equation: Any) -> bool:
    name = equation.primitive.name
    if name in _EXACT:
        return True
    if name in {"reduce_sum", "cumsum", "reduce_prod", "cumprod", "scatter-add"}:
        dtype = equation.invars[0].aval.dtype
        if jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_:
            return True  # modular arithmetic is associative
    sizes = [atom.aval.size for atom in [*equation.invars, *equation.outvars]]
    return name.startswith("reduce_") and max(sizes) <= 1


def _called(equation: Any) -> Any:
    """The jaxpr of a plain call, whose inputs are the equation's, else None."""
    if equation.primitive.name in {"cond", "while", "scan"}:
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
