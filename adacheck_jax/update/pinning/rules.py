"""Rules of pinning: the operations that can be pinned, and the places of fences between them.

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
_COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})
_UNFENCED = {
    "sum": {"comparison", "product", "quotient", "root", "scaling", "square"},
    "shift": {"comparison", "quotient", "root"},
    "product": {"comparison", "product", "quotient", "root", "scaling", "square"},
    "scaling": {"comparison", "quotient", "root"},
    "square": {"comparison", "product", "quotient", "scaling", "square"},
    "quotient": {"comparison", "shift", "sum"},
    "root": {"comparison", "shift", "sum"},
}
"""For each kind of operation, the kinds that may consume its result without a fence between them.

Compilers contract products with sums, also across operations that change no bit; divide quotients,
roots and functions in other ways; take the root of a square; merge constants; and may compute
``(x + 1) * y`` as ``x * y + y``. A shift is a sum with a constant, a scaling a product with a
constant or a scalar.
"""


class PinningRule(NamedTuple):
    """The evaluation of one operation.

    Attributes:
        kind: a kind of :data:`_UNFENCED`, or ``comparison``, ``exact`` or ``rounded``.
        divides: ``reciprocal`` for a product with the reciprocal, ``fenced`` to fence the divisor
            first, anything else for a division as it is written.
        fenced: for each result, True to fence it for the operations that consume it.
        finished: for each result, True if it is a result of the function: it is fenced, and its
            NaNs become the platform's own.
    """

    kind: str
    divides: str = ""
    fenced: tuple[bool, ...] = ()
    finished: tuple[bool, ...] = ()


def rules_of(
    ops: Sequence[Op], outputs: Collection[int], *, is_whole: bool
) -> dict[int, PinningRule]:
    """A rule for each operation, from the kinds that produce and consume each value.

    Returns:
        Rules by ``id`` of the operation.
    """
    kinds = _kinds(ops)
    consumers: dict[int, set[str]] = {}
    for op in ops:
        for ref in op.inputs:
            if isinstance(ref, int):
                consumers.setdefault(ref, set()).add(kinds[id(op)].kind)
    for ref in () if is_whole else outputs:
        consumers.setdefault(ref, set()).add("result")
    rules = {}
    for op in ops:
        rule, pairs = kinds[id(op)], list(zip(op.outputs, op.avals, strict=True))
        rules[id(op)] = rule._replace(
            fenced=tuple(_is_fenced(op, rule, aval, consumers.get(i, set())) for i, aval in pairs),
            finished=tuple(is_whole and i in outputs for i, _ in pairs),
        )
    return rules


def _kinds(ops: Sequence[Op]) -> dict[int, PinningRule]:
    spread: set[int] = set()  # arrays that may be one scalar in many places
    constant: set[int] = set()
    kinds = {}
    for op in ops:
        kinds[id(op)] = _kind(op, spread, constant)
        ids = [ref for ref in op.inputs if isinstance(ref, int)]
        arrays = [ref for ref in ids if op.shapes[ref]]
        is_copied = op.name == "broadcast_in_dim" and op.avals[0].size > op.eqn.invars[0].aval.size
        if is_copied or (arrays and spread.issuperset(arrays)):
            spread.update(op.outputs)
        if constant.issuperset(ids):
            constant.update(op.outputs)
    return kinds


def _kind(op: Op, spread: set[int], constant: set[int]) -> PinningRule:
    name, shape = op.name, op.avals[0].shape if op.avals else ()

    def is_constant(ref: Any) -> bool:
        return not isinstance(ref, int) or ref in constant

    def is_scalar(ref: Any) -> bool:
        return not isinstance(ref, int) or not op.shapes[ref] or ref in spread

    if name in {"add", "add_any", "sub"}:
        return PinningRule("shift" if any(map(is_constant, op.inputs)) else "sum")
    if name == "mul":
        if op.inputs[0] is op.inputs[1] or op.inputs[0] == op.inputs[1]:
            return PinningRule("square")
        return PinningRule("scaling" if any(map(is_scalar, op.inputs)) else "product")
    if name == "div":
        divisor = op.inputs[1]
        if not isinstance(divisor, int) or (shape and is_scalar(divisor)):
            return PinningRule("scaling", "reciprocal")
        return PinningRule("quotient", "fenced" if is_constant(divisor) else "as written")
    if name == "square" or (name == "integer_pow" and op.eqn.params["y"] == 2):
        return PinningRule("square")
    if name == "sqrt":
        return PinningRule("root")
    if name in _COMPARISONS:
        return PinningRule("comparison")
    return PinningRule("exact" if name in _UNROUNDED else "rounded")


def _is_fenced(op: Op, rule: PinningRule, aval: Any, consumers: Collection[str]) -> bool:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    is_narrow = aval.dtype.itemsize < 4
    if op.name == "convert_element_type":
        before = op.eqn.invars[0].aval.dtype
        is_shorter = before.itemsize > aval.dtype.itemsize
        return is_narrow or (is_shorter and jnp.issubdtype(before, jnp.floating))
    if rule.kind in {"comparison", "exact"}:
        return False
    return is_narrow or not _UNFENCED.get(rule.kind, frozenset()).issuperset(consumers)


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
