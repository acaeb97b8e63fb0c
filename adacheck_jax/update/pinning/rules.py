"""Rules of pinning: the operations that can be pinned, and those of them that round.

Operations that are not in :data:`KNOWN` are evaluated as they are, and nothing is promised of their
bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from adacheck_jax.update.pinning.fence import NAME, can_fence
from adacheck_jax.update.pinning.flat_jaxpr import Op, called

_EXACT = """
    abs and bitcast_convert_type ceil clamp clz copy copy_p device_put eq floor ge gt is_finite le
    lt max min ne neg nextafter not or population_count rem reshard round select_n
    sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign stop_gradient xor
"""
_PLACING = """
    argmax argmin broadcast_in_dim concatenate dynamic_slice dynamic_update_slice expand_dims gather
    iota pad random_bits random_fold_in random_seed random_split random_unwrap random_wrap
    reduce_and reduce_max reduce_min reduce_or reduce_xor reshape rev scatter slice sort split
    squeeze stack threefry2x32 transpose unstack
"""
_ROUNDED = """
    add add_any cbrt convert_element_type cos div erf erf_inv exp expm1 integer_pow log log1p
    logistic mul pow reduce_precision rsqrt sin sqrt square sub tanh
"""
ELEMENTWISE = frozenset({*_EXACT.split(), *_ROUNDED.split(), NAME})
"""Operations on elements of the same index that give the same bits in every program, if fenced."""
PLACING = frozenset(_PLACING.split())
"""Operations that move and compare elements."""
CONTROL = frozenset({"cond", "scan", "while", "custom_jvp_call", "custom_vjp_call"})
KNOWN = ELEMENTWISE | PLACING | CONTROL
_UNROUNDED = PLACING | CONTROL | set(_EXACT.split())


class PinningRule(NamedTuple):
    """The part of an operation's evaluation that depends on the operations around it.

    Attributes:
        is_scaling: True for a division that is a product with the reciprocal.
        finished: for each result, True if it is a result of the function: it is fenced, and its
            NaNs become the platform's own.
    """

    is_scaling: bool
    finished: tuple[bool, ...]


def rules_of(ops: Sequence[Op], finished: Collection[int]) -> dict[int, PinningRule]:
    """A rule for each operation, by its ``id``; ``finished`` are the function's own results."""
    spread: set[int] = set()  # arrays that may be one scalar in many places
    rules = {}
    for op in ops:
        rules[id(op)] = PinningRule(
            _is_scaling(op, spread), tuple(i in finished for i in op.outputs)
        )
        arrays = [ref for ref, shape in op.shapes.items() if shape]
        is_copied = op.name == "broadcast_in_dim" and op.avals[0].size > op.eqn.invars[0].aval.size
        if is_copied or (arrays and spread.issuperset(arrays)):
            spread.update(op.outputs)
    return rules


def _is_scaling(op: Op, spread: set[int]) -> bool:
    """True for a division by a constant, or of an array by a scalar or something broadcast."""
    if op.name != "div":
        return False
    divisor = op.inputs[1]
    if not isinstance(divisor, int):
        return True
    return bool(op.avals[0].shape) and (not op.shapes[divisor] or divisor in spread)


def is_rounded(op: Op, aval: Any) -> bool:
    """True for a result that was rounded: a fence behind it keeps the rounding.

    Without one, compilers contract products with sums, also across operations that change no bit;
    divide quotients, roots and functions in other ways; take the root of a square; merge constants;
    and may compute ``(x + 1) * y`` as ``x * y + y``.
    """
    if op.name in _UNROUNDED or not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    if op.name == "convert_element_type" and aval.dtype.itemsize >= 4:
        before = op.eqn.invars[0].aval.dtype
        return before.itemsize > aval.dtype.itemsize and jnp.issubdtype(before, jnp.floating)
    return True


def can_pin(equation: Any) -> bool:
    """True for an operation of a jaxpr that gives the same bits in every program."""
    if called(equation) is not None:
        return True
    atoms = [*equation.invars, *equation.outvars]
    dtypes = [atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")]
    if equation.primitive.name not in KNOWN:
        return _is_exact(equation, dtypes)
    return all(map(_can_hold, dtypes))


def _is_exact(equation: Any, dtypes: Sequence[Any]) -> bool:
    """True for exact arithmetic: of integers, or the reduction of a single element."""
    if not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return True
    sizes = [atom.aval.size for atom in [*equation.invars, *equation.outvars]]
    return equation.primitive.name.startswith("reduce_") and max(sizes) <= 1


def _can_hold(dtype: Any) -> bool:
    return can_fence(dtype) or not jnp.issubdtype(dtype, jnp.inexact)
