"""Pinned evaluation: every rounding of a function fixed, in whatever program it is compiled.

A compiler may contract a product and a sum into one operation, divide by a broadcast scalar as it
multiplies by its reciprocal, keep more digits than a data type has, and merge constants: what it
does depends on all that surrounds an operation. So a function is traced, and its operations are
evaluated one by one with fences (:mod:`adacheck_jax.update.fence`) between those that could be
taken together. No operation is left out or reordered, and each is rounded as it is written, but
for a division by a scalar or by something broadcast, which is always a multiplication by the
reciprocal.

Operations that are not in :data:`ELEMENTWISE` or :data:`PLACING` are evaluated as they are, and
nothing is promised of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from adacheck_jax.update.fence import NAME, can_fence, fence
from adacheck_jax.update.flat_jaxpr import Flat, Group, Op, called, flatten, groups

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
"""Operations on elements of the same index that give the same bits in every program."""
PLACING = frozenset(_PLACING.split())
"""Operations that move and compare elements."""
_CONTROL = frozenset({"cond", "scan", "while", "custom_jvp_call", "custom_vjp_call"})
_KNOWN = ELEMENTWISE | PLACING | _CONTROL
_UNROUNDED = PLACING | _CONTROL | set(_EXACT.split())
_COMPARISONS = frozenset({"eq", "ge", "gt", "is_finite", "le", "lt", "ne"})

_APART = {
    "sum": {"comparison", "product", "quotient", "root", "scaling", "square"},
    "shift": {"comparison", "quotient", "root"},
    "product": {"comparison", "product", "quotient", "root", "scaling", "square"},
    "scaling": {"comparison", "quotient", "root"},
    "square": {"comparison", "product", "quotient", "scaling", "square"},
    "quotient": {"comparison", "shift", "sum"},
    "root": {"comparison", "shift", "sum"},
}
"""For each kind of operation the kinds that may consume its result without a fence between them.

Compilers contract products with sums, also through operations that change no bit; divide quotients,
roots and functions in other ways; take the root of a square; bring constants together; and may take
``(x + 1) * y`` for ``x * y + y``. A shift is a sum with a constant, a scaling a product with a
constant or a scalar.
"""


class Pinned:
    """A traced function, evaluated with fences.

    Args:
        closed: what ``jax.make_jaxpr`` gives.
        entering: for each of its inputs, whether somebody may have computed it in the same program,
            provided that the function returns it unchanged.
    """

    def __init__(self, closed: Any, entering: Sequence[bool]) -> None:
        self._consts = closed.consts
        flat = flatten(closed.jaxpr)
        places = {each: i for i, each in enumerate(flat.inputs[len(self._consts) :])}
        self.origins = tuple(
            places.get(ref) if isinstance(ref, int) else None for ref in flat.outputs
        )
        fenced = [i in self.origins and each for i, each in enumerate(entering)]
        # A compiler must not see that constants are constant: it divides by them otherwise.
        self._body = _Body(flat, [*[True] * len(self._consts), *fenced], is_whole=True)

    def __call__(self, zero: Any, values: Sequence[Any]) -> list[Any]:
        """Evaluates the function.

        Args:
            zero: the ``z`` of the fences.
            values: its inputs.

        Returns:
            Its results. An input that it returns as it is comes back as the very same object; the
            others are fenced, and all NaNs in them are the platform's own.
        """
        return self._body(zero, [*self._consts, *values])


class _Body:
    """The operations of one jaxpr, in groups, with the places of its fences."""

    def __init__(self, flat: Flat, entering: Sequence[bool], *, is_whole: bool) -> None:
        self._flat = flat
        self._entering = [i for i, each in zip(flat.inputs, entering, strict=True) if each]
        finished = {ref for ref in flat.outputs if isinstance(ref, int)}
        rules = _rules(flat.ops, finished, is_whole=is_whole)
        shared: dict[Any, _Part] = {}
        self._groups: list[tuple[Group, _Part]] = []
        for group in groups(flat):
            own = [rules[id(op)] for op in group.ops]
            part = shared.setdefault(group.key(own), _Part(group, own))
            part.uses += 1
            self._groups.append((group, part))

    def __call__(self, zero: Any, values: Sequence[Any]) -> list[Any]:
        given = dict(zip(self._flat.inputs, values, strict=True))
        env = given | {i: fence(_array(given[i]), zero) for i in self._entering}
        is_staged = any(isinstance(value, jax.core.Tracer) for value in [zero, *values])
        for group, part in self._groups:
            run = part.run if is_staged and part.uses == 1 else part.compiled
            results = run(zero, *(env[i] for i in group.inputs))
            env.update(zip(group.outputs, results, strict=True))
        return [
            given.get(ref, env[ref]) if isinstance(ref, int) else _array(ref.val)
            for ref in self._flat.outputs
        ]


class _Part:
    """Some operations as a function of their inputs, for every group that is equal to them."""

    def __init__(self, group: Group, rules: Sequence[_Rule]) -> None:
        self._group, self._rules = group, rules
        self.uses = 0
        self.compiled: Any = jax.jit(self.run) if group.is_known(_KNOWN) else self.run

    def run(self, zero: Any, *values: Any) -> list[Any]:
        env = dict(zip(self._group.inputs, values, strict=True))
        for op, rule in zip(self._group.ops, self._rules, strict=True):
            read = [env[ref] if isinstance(ref, int) else ref.val for ref in op.inputs]
            with op.context():
                results = _evaluate(op, rule, read, zero)
            for i, (ref, value) in enumerate(zip(op.outputs, results, strict=True)):
                is_fenced = rule.fenced[i] or rule.finished[i]
                env[ref] = fence(value, zero, canonical=rule.finished[i]) if is_fenced else value
        return [env[i] for i in self._group.outputs]


class _Rule(NamedTuple):
    """How one operation is evaluated.

    Attributes:
        kind: of :data:`_APART`, or else ``comparison``, ``exact`` or ``rounded``.
        divides: ``reciprocal``: as a product with the reciprocal; ``fenced``: the divisor is fenced
            first; else as written.
        fenced: for each result whether it is fenced for those that consume it.
        finished: for each result whether it is the function's: fenced, its NaNs the platform's.
    """

    kind: str
    divides: str = ""
    fenced: tuple[bool, ...] = ()
    finished: tuple[bool, ...] = ()


def _rules(ops: Sequence[Op], outputs: Collection[int], *, is_whole: bool) -> dict[int, _Rule]:
    """Where fences stand, from what produces a value and from what consumes it."""
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


def _kinds(ops: Sequence[Op]) -> dict[int, _Rule]:
    spread: set[int] = set()  # what may be one scalar in many places
    constant: set[int] = set()
    kinds = {}
    for op in ops:
        kinds[id(op)] = _kind(op, spread, constant)
        ids = [ref for ref in op.inputs if isinstance(ref, int)]
        arrays = [ref for ref in ids if op.shapes[ref]]
        if (op.name == "broadcast_in_dim" and op.grows) or (arrays and spread.issuperset(arrays)):
            spread.update(op.outputs)
        if constant.issuperset(ids):
            constant.update(op.outputs)
    return kinds


def _kind(op: Op, spread: set[int], constant: set[int]) -> _Rule:
    name, shape = op.name, op.avals[0].shape if op.avals else ()

    def is_constant(ref: Any) -> bool:
        return not isinstance(ref, int) or ref in constant

    def is_scalar(ref: Any) -> bool:
        return not isinstance(ref, int) or not op.shapes[ref] or ref in spread

    if name in {"add", "add_any", "sub"}:
        return _Rule("shift" if any(map(is_constant, op.inputs)) else "sum")
    if name == "mul":
        if op.inputs[0] is op.inputs[1] or op.inputs[0] == op.inputs[1]:
            return _Rule("square")
        return _Rule("scaling" if any(map(is_scalar, op.inputs)) else "product")
    if name == "div":
        divisor = op.inputs[1]
        if not isinstance(divisor, int) or (shape and is_scalar(divisor)):
            return _Rule("scaling", "reciprocal")
        return _Rule("quotient", "fenced" if is_constant(divisor) else "as written")
    if name == "square" or (name == "integer_pow" and op.eqn.params["y"] == 2):
        return _Rule("square")
    if name == "sqrt":
        return _Rule("root")
    if name in _COMPARISONS:
        return _Rule("comparison")
    return _Rule("exact" if name in _UNROUNDED else "rounded")


def _is_fenced(op: Op, rule: _Rule, aval: Any, consumers: Collection[str]) -> bool:
    if not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    is_narrow = aval.dtype.itemsize < 4
    if op.name == "convert_element_type":
        before = op.eqn.invars[0].aval.dtype
        is_shorter = before.itemsize > aval.dtype.itemsize
        return is_narrow or (is_shorter and jnp.issubdtype(before, jnp.floating))
    if rule.kind in {"comparison", "exact"}:
        return False
    return is_narrow or not _APART.get(rule.kind, frozenset()).issuperset(consumers)


def _array(value: Any) -> Any:
    return value if hasattr(value, "dtype") else jnp.asarray(value)


def _evaluate(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    special = _SPECIAL.get(op.name)
    is_float = all(jnp.issubdtype(each.dtype, jnp.floating) for each in op.avals)
    if special is not None and (is_float or op.name in _CONTROL):
        return special(op, rule, values, zero)
    return op.bind(values)


def _divide(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    dividend, divisor = values
    if rule.divides == "as written":
        return op.bind(values)
    if rule.divides == "fenced":
        return op.bind([dividend, fence(divisor, zero)])
    divisor = jnp.asarray(divisor, op.avals[0].dtype)
    return [jax.lax.mul(dividend, _reciprocal(divisor, zero))]


def _reciprocal(value: Any, zero: Any) -> Any:
    return fence(jax.lax.div(jax.lax.full_like(value, 1), value), zero)


def _inverse_root(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del op, rule
    return [_reciprocal(fence(jax.lax.sqrt(values[0]), zero), zero)]


def _square(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del op, rule, zero
    return [jax.lax.mul(values[0], values[0])]


def _power(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del rule
    exponent, base = op.eqn.params["y"], values[0]
    left, factors = abs(exponent), []
    while left:
        if left & 1:
            factors.append(base)
        left >>= 1
        if left:
            base = fence(jax.lax.mul(base, base), zero)
    result = factors[0] if factors else jax.lax.full_like(base, 1)
    for each in factors[1:]:
        result = fence(jax.lax.mul(result, each), zero)
    return [_reciprocal(result, zero) if exponent < 0 else result]


def _logistic(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del op, rule
    decayed = fence(jax.lax.exp(jax.lax.neg(values[0])), zero)
    whole = fence(jax.lax.add(jax.lax.full_like(decayed, 1), decayed), zero)
    return [_reciprocal(whole, zero)]


def _pinned(body: Any) -> Callable[..., list[Any]]:
    """A jaxpr inside an operation, as a function of z and its inputs."""
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    flat = flatten(jaxpr)
    inner = _Body(flat, [False] * len(flat.inputs), is_whole=False)
    return lambda zero, *values: inner(zero, [*consts, *values])


def _cond(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del rule
    branches = [_pinned(each) for each in op.eqn.params["branches"]]
    return jax.lax.switch(values[0], branches, zero, *values[1:])


def _while(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del rule
    params = op.eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    test, body = _pinned(params["cond_jaxpr"]), _pinned(params["body_jaxpr"])
    return jax.lax.while_loop(
        lambda carry: test(zero, *values[:first], *carry)[0],
        lambda carry: body(zero, *values[first:second], *carry),
        [_array(value) for value in values[second:]],
    )


def _scan(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del rule
    params = op.eqn.params
    jaxpr = params["jaxpr"].jaxpr

    def same(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(
            len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outer, inner, strict=True)
        )

    whole = same(op.eqn.invars, jaxpr.invars)  # what is not cut along the axis of the loop
    carried = same(op.eqn.outvars, jaxpr.outvars)
    constants = values[: whole - carried]
    body = _pinned(params["jaxpr"])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(zero, *constants, *carry, *slices)
        return results[:carried], results[carried:]

    carry, stacked = jax.lax.scan(
        step,
        [_array(value) for value in values[whole - carried : whole]],
        [_array(value) for value in values[whole:]],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _custom_jvp(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    """Differentiates as the function's own rule says."""
    del rule
    body = _pinned(op.eqn.params["call_jaxpr"])
    function: Any = jax.custom_jvp(body)

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *inputs: op.bind(list(inputs)), primals[1:], tangents[1:])

    return function(zero, *values)


def _custom_vjp(op: Op, rule: _Rule, values: list[Any], zero: Any) -> list[Any]:
    del rule
    body = _pinned(op.eqn.params["call_jaxpr"])
    function: Any = jax.custom_vjp(body)
    function.defvjp(
        lambda _, *inputs: jax.vjp(lambda *each: op.bind(list(each)), *inputs),
        lambda pullback, cotangents: (np.zeros((), jax.dtypes.float0), *pullback(cotangents)),
    )
    return function(zero, *values)


_SPECIAL: dict[str, Callable[[Op, _Rule, list[Any], Any], list[Any]]] = {
    "cond": _cond,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "div": _divide,
    "integer_pow": _power,
    "logistic": _logistic,
    "rsqrt": _inverse_root,
    "scan": _scan,
    "square": _square,
    "while": _while,
}


def can_pin(equation: Any) -> bool:
    """True for an operation of a jaxpr that gives the same bits in every program."""
    if called(equation) is not None:
        return True
    atoms = [*equation.invars, *equation.outvars]
    dtypes = [atom.aval.dtype for atom in atoms if hasattr(atom.aval, "dtype")]
    if equation.primitive.name not in _KNOWN:
        return _is_modular(equation, dtypes)
    return all(map(_can_hold, dtypes))


def _is_modular(equation: Any, dtypes: Sequence[Any]) -> bool:
    """Integers are exact, whatever is done with them; and so is the sum of one element."""
    if not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes):
        return True
    sizes = [atom.aval.size for atom in [*equation.invars, *equation.outvars]]
    return equation.primitive.name.startswith("reduce_") and max(sizes) <= 1


def _can_hold(dtype: Any) -> bool:
    return can_fence(dtype) or not jnp.issubdtype(dtype, jnp.inexact)


class PinnedFunction:
    """A function of pytrees that is evaluated with fences.

    Inside another trace it is traced each time, as any function is. Called with arrays it is traced
    once for each structure: as under ``jax.jit``, what it reads beside its arguments is read then.

    Args:
        function: takes and returns pytrees; leaves that are no arrays are passed through.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._known: dict[Any, _Traced] = {}

    def __call__(self, zero: Any, *trees: Any) -> Any:
        """Evaluates the function, with ``zero`` as the ``z`` of the fences."""
        traced = self._trace(trees)
        arrays = [_array(leaf) for leaf in jax.tree.leaves(trees) if _is_array(leaf)]
        return traced.result(traced.pinned(zero, arrays))

    def origins(self, *trees: Any) -> Any:
        """For each result the position of the leaf of the arguments that it is, unchanged, or None.

        Returns:
            A pytree like the result. Leaves that are no arrays are None.
        """
        traced = self._trace(trees)
        places = [i for i, leaf in enumerate(jax.tree.leaves(trees)) if _is_array(leaf)]
        found = [None if i is None else places[i] for i in traced.pinned.origins]
        return traced.result(found)

    def _trace(self, trees: Any) -> _Traced:
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        is_staged = any(isinstance(leaf, jax.core.Tracer) for leaf in arrays)
        key = None
        if len(arrays) == len(leaves):
            key = (treedef, *map(_aval, arrays), *_settings())
            known = self._known.get(key)
            if known is not None and not is_staged:
                return known
        traced = _Traced(self._function, leaves, treedef)
        if key is not None and traced.is_constant and not is_staged:
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[key] = traced
        return traced


_KEPT = 8
_SMALL = 64
_SETTINGS = """
    jax_default_matmul_precision jax_default_prng_impl jax_enable_x64 jax_numpy_dtype_promotion
    jax_numpy_rank_promotion jax_threefry_partitionable
"""


def _settings() -> list[Any]:
    """Settings that a trace depends on, beside its arguments."""
    names = _SETTINGS.split()
    return [jax.sharding.get_abstract_mesh(), *(getattr(jax.config, name) for name in names)]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or core.valid_jaxtype(leaf)


def _aval(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


class _Traced:
    """One trace of a function of pytrees."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], treedef: Any) -> None:
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        held: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            given = iter(values)
            trees = treedef.unflatten([next(given) if _is_array(x) else x for x in leaves])
            results, out_tree = jax.tree.flatten(function(*trees))
            others = {i: each for i, each in enumerate(results) if not _is_array(each)}
            held[:] = [out_tree, len(results), others]
            return [each for each in results if _is_array(each)]

        closed = jax.make_jaxpr(flat)(*arrays)
        self._out_tree, self._count, self._others = held
        self.pinned = Pinned(closed, [_aval(leaf).size <= _SMALL for leaf in arrays])
        self.is_constant = not any(isinstance(each, jax.core.Tracer) for each in closed.consts)

    def result(self, arrays: Sequence[Any]) -> Any:
        """The tree of the results, from those that are arrays."""
        given = iter(arrays)
        leaves = [self._others[i] if i in self._others else next(given) for i in range(self._count)]
        return self._out_tree.unflatten(leaves)
