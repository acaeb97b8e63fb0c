"""Pinned evaluation: every rounding of a function fixed, in whatever program it is compiled.

A compiler may contract a product and a sum into one operation, divide by a broadcast scalar by
multiplying by its reciprocal, keep more digits than a data type has, and merge constants; the
choice depends on everything around an operation. So a function is traced, and its operations are
evaluated one by one, with fences (:mod:`~adacheck_jax.update.pinning.fence`) between operations
that a compiler could merge. No operation is left out or reordered. Each is rounded as it is
written, except that a division by a scalar, or by something broadcast, is always a multiplication
by the reciprocal.

:mod:`~adacheck_jax.update.pinning.rules` says where fences stand. The order of a sum cannot be
fixed: its result is recorded instead (:mod:`~adacheck_jax.update.pinning.reductions`).
"""

# Threads: trained with on one, exported on others; traces are kept by single assignments, no lock.

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AxisType

from adacheck_jax.device import jax_settings
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.errors import RecorderError
from adacheck_jax.update.pinning import reductions
from adacheck_jax.update.pinning.branches import cheap, without_branches
from adacheck_jax.update.pinning.fence import fence
from adacheck_jax.update.pinning.flat_jaxpr import (
    Flat,
    Group,
    Op,
    bodies,
    evaluate,
    flatten,
    groups,
    living,
    numbers_in,
)
from adacheck_jax.update.pinning.reductions import Slots
from adacheck_jax.update.pinning.rules import KNOWN, PinningRule, rules_of

_KEPT_COUNT = 8
"""Traces that a function keeps."""
_SMALL_COUNT = 64
"""Elements of the largest input that is fenced if it is returned unchanged."""
_PROMOTIONS = ("jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")


class PinnedFunction:
    """A function of pytrees, evaluated with fences.

    Called inside another trace it is traced each time, as any function is. Called with arrays it is
    traced once for each structure: values that it reads besides its arguments are read then, as
    under ``jax.jit``. A replay takes the last trace of either kind, which is what was trained with.

    Args:
        function: a function from pytrees to a pytree. Leaves that are no arrays pass through.
        records: True to record results of sums, as many as its first argument leaves room for.
    """

    def __init__(self, function: Callable[..., Any], *, records: bool = False) -> None:
        self._function, self._records = function, records
        self._known: dict[Any, _Traced] = {}
        self._staged: dict[Any, _Traced] = {}

    @jax_settings.compiled()
    def __call__(self, zero: Any, *trees: Any) -> Any:
        """Evaluate the function; ``zero`` is the ``z`` of the fences."""
        return self._trace(trees)(zero, _arrays_of(trees))[0]

    @jax_settings.compiled()
    def recording(self, zero: Any, *trees: Any) -> tuple[Any, Any]:
        """Evaluate the function; its result, and the words of its recorded reduction results."""
        return self._trace(trees)(zero, _arrays_of(trees))

    @jax_settings.compiled()
    def replaying(self, zero: Any, words: Any, slots: Slots, *trees: Any) -> Any:
        """Evaluate the function by a trace that was made before, if there is one.

        The words are those of :meth:`recording`, and the slots those of :meth:`known` for such
        arguments; without any the function adds up itself.
        """
        traced = self._trace(trees, is_replay=True, slots=slots)
        has_results = bool(slots) and reductions.alike(traced.slots, slots)
        return traced(zero, _arrays_of(trees), words if has_results else None)[0]

    @jax_settings.compiled()
    def known(self, *trees: Any) -> tuple[Any, Slots]:
        """Facts about a call of the function.

        Returns:
            For each result, the position of the argument leaf that it returns unchanged, as a
            pytree like the result; None for a leaf that is computed, or is no array. And the
            reduction results that are recorded.
        """
        traced = self._trace(trees)
        places = [i for i, leaf in enumerate(jax.tree.leaves(trees)) if _is_array(leaf)]
        found = [None if i is None else places[i] for i in traced.origins]
        return traced.result(found), traced.slots

    def _trace(self, trees: Any, *, is_replay: bool = False, slots: Slots = ()) -> _Traced:
        leaves, treedef = jax.tree.flatten(trees)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        is_staged = any(isinstance(leaf, jax.core.Tracer) for leaf in arrays)
        keys, kept = (), self._staged if is_staged else self._known
        if len(arrays) == len(leaves):
            keys = [(treedef, *map(each, arrays), *_settings()) for each in (_aval, _kind)]
            known = _first(kept, keys)
            if known is None and is_replay and not self._staged:  # an update without jax.jit
                known = _first(self._known, keys)
            if known is not None and (is_replay or not is_staged):
                return known
        sizes = [_aval(x).size for x in _arrays_of(trees[:1])] if self._records else []
        limit = reductions.limit_of(sum(sizes)) if sizes else 0
        traced = _Traced(self._function, leaves, treedef, limit, slots)
        if is_replay and not traced.is_constant:
            raise RecorderError(
                "expected an update that reads its arguments alone, found one that reads a value "
                "which the train step computes; give it as an extra argument of the update"
            )
        if keys and traced.is_constant and not is_replay:
            key = keys[0 if traced.names_mesh else 1]
            kept.pop(key, None)
            while len(kept) >= _KEPT_COUNT:
                oldest, *_ = kept
                kept.pop(oldest, None)
            kept[key] = traced
        return traced


def _first(kept: Mapping[Any, _Traced], keys: Sequence[Any]) -> _Traced | None:
    return next((kept[key] for key in keys if key in kept), None)


def _settings() -> list[Any]:
    """Settings that a trace depends on, besides its arguments."""
    promotions = [getattr(jax.config, name) for name in _PROMOTIONS]
    return [jax.sharding.get_abstract_mesh(), Arithmetic.current(), *promotions]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or core.valid_jaxtype(leaf)


def _aval(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)


def _kind(leaf: Any) -> Any:
    """All that a trace without a mesh's name depends on of an argument."""
    aval = _aval(leaf)
    if isinstance(aval, jax.ShapeDtypeStruct):
        return aval.shape, aval.dtype, aval.weak_type
    is_explicit = AxisType.Explicit in getattr(aval.sharding.mesh, "axis_types", ())
    place = aval.sharding if is_explicit else None
    return aval.shape, aval.dtype, aval.weak_type, aval.memory_space, place


def _arrays_of(trees: Any) -> list[Any]:
    return [_array(leaf) for leaf in jax.tree.leaves(trees) if _is_array(leaf)]


class _Traced:
    """One trace of a function of pytrees, pinned.

    It records what the limit of the words leaves room for. Where that is something else than a
    trace with other shapes recorded (``slots``), it records the same, if it computes that.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        treedef: Any,
        limit: int,
        slots: Slots = (),
    ) -> None:
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        outcome: list[Any] = []

        def function_of_arrays(*values: Any) -> list[Any]:
            remaining = iter(values)
            trees = treedef.unflatten([next(remaining) if _is_array(x) else x for x in leaves])
            results, out_tree = jax.tree.flatten(function(*trees))
            others = {i: each for i, each in enumerate(results) if not _is_array(each)}
            outcome[:] = [out_tree, len(results), others]
            return [each for each in results if _is_array(each)]

        closed = jax.make_jaxpr(function_of_arrays)(*arrays)
        self._out_tree, self._count, self._others = outcome
        if any(map(cheap, flatten(closed.jaxpr).ops)):
            first = closed
            closed = jax.make_jaxpr(lambda *x: without_branches(first, x))(*arrays)
        self._consts = closed.consts
        # A trace that closes over a tracer cannot be used again.
        self.is_constant = not any(isinstance(each, jax.core.Tracer) for each in closed.consts)
        # Such a trace is another one's on other devices: zeros_like tells of a mesh.
        self.names_mesh = _names_mesh(closed.jaxpr)
        flat = flatten(closed.jaxpr)
        # For each result the input that it returns unchanged.
        places = {each: i for i, each in enumerate(flat.inputs[len(closed.consts) :])}
        self.origins = [places.get(x) if isinstance(x, int) else None for x in flat.outputs]
        # Small inputs that are returned unchanged: the surrounding program may have computed them.
        fenced = [
            i in self.origins and _aval(leaf).size <= _SMALL_COUNT for i, leaf in enumerate(arrays)
        ]
        self.slots = reductions.chosen(flat, limit)
        if slots and not reductions.alike(self.slots, slots):
            self.slots = slots if reductions.computes(flat, slots) else ()
        # Constants are fenced: a compiler divides by a known constant in another way.
        self._body = _PinnedJaxpr(
            flat, [*[True] * len(closed.consts), *fenced], is_whole=True, slots=self.slots
        )

    def __call__(self, zero: Any, arrays: Sequence[Any], words: Any = None) -> tuple[Any, Any]:
        """Evaluate the function, with reduction results from words if there are any.

        An input that is returned unchanged comes back as the very same object; all other results
        are fenced, and their NaNs are the platform's own.

        Returns:
            The result, and the words of the recorded reduction results.
        """
        given = None if words is None else reductions.unpacked(words, self.slots)
        arrays, found = self._body.with_results(zero, [*self._consts, *arrays], given)
        if given is None and found:
            words = reductions.packed(found)
        return self.result(arrays), words

    def result(self, arrays: Sequence[Any]) -> Any:
        """The tree of all results, from the results that are arrays."""
        remaining, others = iter(arrays), self._others
        leaves = [others[i] if i in others else next(remaining) for i in range(self._count)]
        return self._out_tree.unflatten(leaves)


def _names_mesh(jaxpr: Any) -> bool:
    """True if an operation is told where its result lies."""
    given = [value for eqn in jaxpr.eqns for value in eqn.params.values()]
    parts = [x for value in given for x in (value if isinstance(value, tuple | list) else [value])]
    inner = [body for eqn in jaxpr.eqns for body in bodies(eqn)]
    return any(isinstance(x, jax.sharding.Sharding) for x in parts) or any(map(_names_mesh, inner))


class _PinnedJaxpr:
    """The operations of one jaxpr, in groups, with fences between them and at some inputs."""

    def __init__(
        self, flat: Flat, entering: Sequence[bool], *, is_whole: bool, slots: Slots = ()
    ) -> None:
        self._flat, self._slots = flat, slots
        self._entering = [i for i, each in zip(flat.inputs, entering, strict=True) if each]
        kept = tuple(each.ref for each in slots)
        finished = numbers_in((*flat.outputs, *kept))
        self._rules = rules_of(flat.ops, finished, is_whole=is_whole)
        self._recording = dataclasses.replace(flat, outputs=(*flat.outputs, *kept))

    @functools.cached_property
    def _all(self) -> _Groups:
        return _grouped(self._recording, self._rules)

    @functools.cached_property
    def _without_reductions(self) -> _Groups:
        return _grouped(living(self._flat, [each.ref for each in self._slots]), self._rules)

    def __call__(self, zero: Any, values: Sequence[Any]) -> list[Any]:
        return self.with_results(zero, values)[0]

    def with_results(
        self, zero: Any, values: Sequence[Any], given: Sequence[Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """The results, and the reduction results; these are not computed if they are given."""
        inputs = dict(zip(self._flat.inputs, values, strict=True))
        env = inputs | {i: fence(_array(inputs[i]), zero) for i in self._entering}
        if given is not None:
            env |= zip((each.ref for each in self._slots), given, strict=True)
        is_staged = any(isinstance(value, jax.core.Tracer) for value in [zero, *values])
        for group, part in self._all if given is None else self._without_reductions:
            run = part.run if is_staged and part.uses == 1 else part.compiled
            results = run(zero, *(env[i] for i in group.inputs))
            env.update(zip(group.outputs, results, strict=True))
        outputs = [
            inputs.get(ref, env[ref]) if isinstance(ref, int) else _array(ref.val)
            for ref in self._flat.outputs
        ]
        return outputs, [env[each.ref] for each in self._slots]


_Groups = list[tuple[Group, "_GroupFunction"]]


def _grouped(flat: Flat, rules: Mapping[int, PinningRule]) -> _Groups:
    """The groups of a list of operations, each with a function that is shared by equal ones."""
    shared: dict[Any, _GroupFunction] = {}
    found: _Groups = []
    for group in groups(flat):
        own = [rules[id(op)] for op in group.ops]
        part = shared.setdefault(group.key(own), _GroupFunction(group, own))
        part.uses += 1
        found.append((group, part))
    return found


class _GroupFunction:
    """A group of operations as a function of its inputs, shared by all groups equal to it."""

    def __init__(self, group: Group, rules: Sequence[PinningRule]) -> None:
        self._group, self._rules = group, rules
        self.uses = 0
        is_known = all(op.name in KNOWN for op in group.ops)
        self.compiled: Any = jax.jit(self.run) if is_known else self.run

    def run(self, zero: Any, *values: Any) -> list[Any]:
        """Evaluate the operations one by one, with their fences."""
        env, rules = dict(zip(self._group.inputs, values, strict=True)), iter(self._rules)
        evaluate(self._group.ops, env, lambda op, taken: _fenced(op, next(rules), taken, zero))
        return [env[i] for i in self._group.outputs]


def _array(value: Any) -> Any:
    return value if hasattr(value, "dtype") else jnp.asarray(value)


def _fenced(op: Op, rule: PinningRule, values: list[Any], zero: Any) -> list[Any]:
    """The results of one operation, by its rule."""
    is_float = all(jnp.issubdtype(each.dtype, jnp.floating) for each in op.avals)
    if op.name == "div" and is_float:
        results = _divide(op, rule, values, zero)
    elif op.name in _CONTROL or (op.name in _ROUNDED and is_float):
        results = (_CONTROL | _ROUNDED)[op.name](op, values, zero)
    else:
        results = op.bind(values)
    return [
        fence(value, zero, canonical=finished) if fenced or finished else value
        for value, fenced, finished in zip(results, rule.fenced, rule.finished, strict=True)
    ]


def _divide(op: Op, rule: PinningRule, values: list[Any], zero: Any) -> list[Any]:
    dividend, divisor = values
    if rule.divides == "as written":
        return op.bind(values)
    if rule.divides == "fenced":
        return op.bind([dividend, fence(divisor, zero)])
    divisor = jnp.asarray(divisor, op.avals[0].dtype)
    return [jax.lax.mul(dividend, _reciprocal(divisor, zero))]


def _reciprocal(value: Any, zero: Any) -> Any:
    return fence(jax.lax.div(jax.lax.full_like(value, 1), value), zero)


def _inverse_root(op: Op, values: list[Any], zero: Any) -> list[Any]:
    del op
    return [_reciprocal(fence(jax.lax.sqrt(values[0]), zero), zero)]


def _square(op: Op, values: list[Any], zero: Any) -> list[Any]:
    del op, zero
    return [jax.lax.mul(values[0], values[0])]


def _power(op: Op, values: list[Any], zero: Any) -> list[Any]:
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


def _logistic(op: Op, values: list[Any], zero: Any) -> list[Any]:
    del op
    decayed = fence(jax.lax.exp(jax.lax.neg(values[0])), zero)
    whole = fence(jax.lax.add(jax.lax.full_like(decayed, 1), decayed), zero)
    return [_reciprocal(whole, zero)]


def _pinned(body: Any) -> Callable[..., list[Any]]:
    """A jaxpr inside an operation, as a function of the fences' ``z`` and its inputs."""
    jaxpr, consts = getattr(body, "jaxpr", body), getattr(body, "consts", ())
    flat = flatten(jaxpr)
    inner = _PinnedJaxpr(flat, [False] * len(flat.inputs), is_whole=False)
    return lambda zero, *values: inner(zero, [*consts, *values])


def _cond(op: Op, values: list[Any], zero: Any) -> list[Any]:
    branches = [_pinned(each) for each in op.eqn.params["branches"]]
    return jax.lax.switch(values[0], branches, zero, *values[1:])


def _while(op: Op, values: list[Any], zero: Any) -> list[Any]:
    params = op.eqn.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    test, body = _pinned(params["cond_jaxpr"]), _pinned(params["body_jaxpr"])
    return jax.lax.while_loop(
        lambda carry: test(zero, *values[:first], *carry)[0],
        lambda carry: body(zero, *values[first:second], *carry),
        [_array(value) for value in values[second:]],
    )


def _scan(op: Op, values: list[Any], zero: Any) -> list[Any]:
    params = op.eqn.params
    jaxpr = params["jaxpr"].jaxpr

    def same(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(
            len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outer, inner, strict=True)
        )

    whole = same(op.eqn.invars, jaxpr.invars)  # inputs that are not cut along the loop's axis
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


def _custom(op: Op, values: list[Any], zero: Any) -> list[Any]:
    """Evaluate pinned; differentiate by the function's own rule."""
    function: Any = jax.custom_jvp(_pinned(op.eqn.params["call_jaxpr"]))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(lambda *inputs: op.bind(list(inputs)), primals[1:], tangents[1:])

    return function(zero, *values)


_Handler = Callable[[Op, list[Any], Any], list[Any]]
_ROUNDED: dict[str, _Handler] = {
    "integer_pow": _power,
    "logistic": _logistic,
    "rsqrt": _inverse_root,
    "square": _square,
}
_CONTROL: dict[str, _Handler] = {
    "cond": _cond,
    "custom_jvp_call": _custom,
    "custom_vjp_call": _custom,
    "scan": _scan,
    "while": _while,
}
