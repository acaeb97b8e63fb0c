"""A jaxpr as one list of operations, cut into groups that have only scalars in common.

An optimizer puts each leaf of its state through the same operations. So leaves of one shape make
equal groups, and the evaluation of one group serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Ref = Any
"""An input of an operation: the number of a value, or a literal."""

PICK = "adacheck_pick"
"""Name of the operation that takes a recorded value from a vector of words."""
CALLS = frozenset({"call", "checkpoint", "closed_call", "core_call", "jit", "pjit", "remat2"})


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
        eqn: the jaxpr's equation.
        inputs: numbers of the values that it takes, or literals.
        outputs: numbers of its results.
    """

    eqn: Any
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def avals(self) -> list[Any]:
        """Abstract values of the results."""
        return [var.aval for var in self.eqn.outvars]

    @property
    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Shapes of the inputs that are numbered values."""
        pairs = zip(self.inputs, self.eqn.invars, strict=True)
        return {ref: var.aval.shape for ref, var in pairs if isinstance(ref, int)}

    @property
    def has_arrays(self) -> bool:
        """True if a result is no scalar, or an input is none but a vector to pick one from."""
        taken = () if self.name == PICK else self.eqn.invars
        return any(var.aval.shape for var in [*taken, *self.eqn.outvars])

    def bind(self, values: Sequence[Any]) -> list[Any]:
        """Evaluate the operation as it is."""
        primitive = self.eqn.primitive
        results = primitive.bind(*values, **primitive.get_bind_params(self.eqn.params))
        return list(results) if primitive.multiple_results else [results]

    def key(self) -> Any:
        """A key that is equal for equal operations; unhashable if its parameters are."""
        context = self.eqn.ctx
        return (
            self.name,
            tuple(sorted(self.eqn.params.items())),
            context.cur_abstract_mesh,
            context.compute_type,
            context.threefry_partitionable,
        )


@dataclass(frozen=True, slots=True)
class Flat:
    """The operations of a jaxpr, with calls inlined and dead operations removed.

    Attributes:
        inputs: numbers of the constants, and then of the inputs.
        ops: operations, each after the operations whose results it takes.
        outputs: numbers of the values that are returned, or literals.
    """

    inputs: tuple[int, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Ref, ...]


def flatten(jaxpr: Any) -> Flat:
    """Inline the calls of an open jaxpr, and remove its dead operations.

    Its constants count as its first inputs.
    """
    ops: list[Op] = []
    numbers = iter(range(1 << 62))

    def walk(inner: Any, refs: Sequence[Ref]) -> list[Ref]:
        env = dict(zip([*inner.constvars, *inner.invars], refs, strict=True))

        def read(atom: Any) -> Ref:
            return atom if hasattr(atom, "val") else env[atom]

        for eqn in inner.eqns:
            inputs = tuple(map(read, eqn.invars))
            callee = called(eqn)
            if eqn.primitive.name == "integer_pow" and eqn.params["y"] == 1:
                results = inputs
            elif callee is not None:
                consts = [_Constant(value) for value in getattr(callee, "consts", ())]
                results = walk(getattr(callee, "jaxpr", callee), [*consts, *inputs])
            else:
                results = tuple(next(numbers) for _ in eqn.outvars)
                ops.append(Op(eqn, inputs, results))
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    inputs = tuple(next(numbers) for _ in [*jaxpr.constvars, *jaxpr.invars])
    outputs = tuple(walk(jaxpr, inputs))
    return living(Flat(inputs, tuple(ops), outputs))


def evaluate(
    ops: Sequence[Op],
    values: dict[int, Any],
    bind: Callable[[Op, list[Any]], Sequence[Any]] = Op.bind,
) -> None:
    """Evaluate operations one by one."""
    for op in ops:
        taken = [values[ref] if isinstance(ref, int) else ref.val for ref in op.inputs]
        with op.eqn.ctx.manager:  # the mesh and the settings that it was traced with
            values.update(zip(op.outputs, bind(op, taken), strict=True))


def without_equal_scalars(flat: Flat) -> Flat:
    """Make each scalar once that operations compute from equal scalars.

    A pinned quotient multiplies by the inverse of its divisor, which each leaf computes anew: with
    an inverse of its own no group would equal another.
    """
    known: dict[Any, tuple[int, ...]] = {}
    other: dict[int, int] = {}
    ops = []
    for op in flat.ops:
        inputs = tuple(other.get(ref, ref) if isinstance(ref, int) else ref for ref in op.inputs)
        key = object()
        if not op.has_arrays and not op.eqn.effects:
            refs = tuple(ref if isinstance(ref, int) else _literal(ref) for ref in inputs)
            key = _hashable((op.key(), refs, tuple(map(str, op.avals))))
        if (found := known.setdefault(key, op.outputs)) is op.outputs:
            ops.append(Op(op.eqn, inputs, op.outputs))
        other.update(zip(op.outputs, found, strict=True))
    outputs = tuple(other.get(ref, ref) if isinstance(ref, int) else ref for ref in flat.outputs)
    return Flat(flat.inputs, tuple(ops), outputs)


@dataclass(frozen=True, slots=True, eq=False)
class _Constant:
    val: Any


def called(eqn: Any) -> Any:
    """The jaxpr that a plain call runs; None for any other operation."""
    if eqn.primitive.name not in CALLS:
        return None
    shardings = [*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ())]
    if any(isinstance(each, jax.sharding.Sharding) for each in shardings):
        return None
    return eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]


def bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs inside an operation."""
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            body = getattr(each, "jaxpr", each)
            if hasattr(body, "eqns"):
                yield body


def with_numbers_of(own: Flat, other: Flat) -> Flat | None:
    """The same operations, with the single numbers that another list of them has for constants.

    Returns:
        None if the other list has other operations, or takes other values or constant arrays.
    """
    if len(own.ops) != len(other.ops) or _refs(own.outputs) != _refs(other.outputs):
        return None
    ops = []
    for op, like in zip(own.ops, other.ops, strict=True):
        inside, outside = (
            [described(flatten(body)) for body in bodies(each.eqn)] for each in (op, like)
        )
        kinds = [
            (each.name, _refs(each.inputs), [_kind_of(x) for x in each.inputs])
            for each in (op, like)
        ]
        if kinds[0] != kinds[1] or op.outputs != like.outputs or inside != outside:
            return None
        ops.append(Op(op.eqn, like.inputs, op.outputs))
    return Flat(own.inputs, tuple(ops), own.outputs)


def _refs(refs: Sequence[Ref]) -> list[int | None]:
    return [ref if isinstance(ref, int) else None for ref in refs]


def _kind_of(ref: Ref) -> Any:
    """Data type of a single number, bits of another constant; None for a numbered value."""
    if isinstance(ref, int):
        return None
    value = np.asarray(ref.val)
    return str(value.dtype) if not value.shape else (str(value.dtype), value.tobytes())


def described(flat: Flat) -> list[str]:
    """Names and constants of all operations, and of those inside them, in order."""
    found: list[str] = []
    for op in flat.ops:
        found.append(f"{op.name} {[ref.val for ref in op.inputs if hasattr(ref, 'aval')]}")
        for body in bodies(op.eqn):
            found += described(flatten(body))
    return found


def living(flat: Flat, given: Collection[int] = ()) -> Flat:
    """The operations that are needed where some values are given, as further inputs."""
    wanted, known = numbers_in(flat.outputs), {*given}
    kept = []
    for op in reversed(flat.ops):
        if op.eqn.effects or not known.issuperset(wanted.intersection(op.outputs)):
            kept.append(op)
            wanted |= numbers_in(op.inputs)
    return Flat((*flat.inputs, *given), tuple(kept[::-1]), flat.outputs)


def numbers_in(refs: Sequence[Ref]) -> set[int]:
    """The numbers of the values among some inputs."""
    return {ref for ref in refs if isinstance(ref, int)}


@dataclass(frozen=True, slots=True)
class Group:
    """Operations connected by arrays.

    Attributes:
        ops: operations, in order.
        inputs: numbers of the values that come from outside the group, by first use.
        outputs: numbers of the values that are used outside the group, in order.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def key(self, rules: Sequence[Any]) -> Any:
        """A key that is equal for equal groups, evaluated by equal rules."""
        local: dict[int, int] = {each: i for i, each in enumerate(self.inputs)}
        keys = []
        for op, rule in zip(self.ops, rules, strict=True):
            refs = tuple(local[ref] if isinstance(ref, int) else _literal(ref) for ref in op.inputs)
            for each in op.outputs:
                local[each] = len(local)
            keys.append((op.key(), rule, refs, len(op.outputs)))
        return _hashable((tuple(keys), tuple(local[each] for each in self.outputs)))


def _hashable(key: Any) -> Any:
    """The key, or one that equals no other if it cannot be hashed."""
    try:
        hash(key)
    except TypeError:
        return object()
    return key


def _literal(ref: Ref) -> Any:
    value = ref.val
    if isinstance(ref, _Constant) or not hasattr(ref, "aval") or ref.aval.shape:
        return id(value)
    return (str(ref.aval), np.asarray(value).tobytes())


def groups(flat: Flat) -> list[Group]:
    """Cut a list of operations into groups between which only scalars pass.

    A scalar that is computed from arrays (a norm) ends their groups: operations that take it are in
    later groups.
    """
    stages: dict[int, int] = {}
    parents: dict[Any, Any] = {}

    def root(key: Any) -> Any:
        while parents.setdefault(key, key) != key:
            parents[key] = key = parents[parents[key]]
        return key

    placed = []
    arrays = {i for op in flat.ops for i, shape in op.shapes.items() if shape}
    for op in flat.ops:
        ids = numbers_in(op.inputs)
        stage = max((stages.get(ref, 0) for ref in ids), default=0)
        for each, aval in zip(op.outputs, op.avals, strict=True):
            stages[each] = stage + (op.has_arrays and not aval.shape)
        own = (stage, "scalars")
        if op.has_arrays:
            own = (stage, op.outputs[0] if op.outputs else id(op))
            for ref in [*ids, *op.outputs]:
                if ref in arrays:
                    parents[root((stage, ref))] = root(own)
        placed.append(own)
    members: dict[Any, list[Op]] = {}
    for op, own in zip(flat.ops, placed, strict=True):
        members.setdefault(root(own), []).append(op)
    ordered = sorted(members, key=lambda own: (own[0], own[1] != "scalars"))
    homes = {each: own for own, ops in members.items() for op in ops for each in op.outputs}
    taken = numbers_in(flat.outputs)
    for own, ops in members.items():
        taken.update(ref for op in ops for ref in numbers_in(op.inputs) if homes.get(ref) != own)
    return [_group(members[own], taken) for own in ordered]


def _group(ops: Sequence[Op], taken: Collection[int]) -> Group:
    results = [each for op in ops for each in op.outputs]
    inside = set(results)
    inputs = dict.fromkeys(
        ref for op in ops for ref in op.inputs if isinstance(ref, int) and ref not in inside
    )
    return Group(tuple(ops), tuple(inputs), tuple(each for each in results if each in taken))
