"""Reduction results: the few numbers that an update's sums gave, recorded so that none is repeated.

The bits of a sum depend on the mesh and on the program. A train step keeps the result that it used,
as 32-bit words in one vector; a replay takes it from there, and all that is left is element-wise.
Which results are kept follows from the operations and their shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from adacheck_jax.update.pinning.fence import can_fence
from adacheck_jax.update.pinning.flat_jaxpr import PICK, Flat, Op, bodies, living, numbers_in
from adacheck_jax.update.pinning.rules import can_pin

_SMALL_SIZE = 64
"""Elements of a result that is kept whatever it was computed from."""
_SHARE = 16
"""Of a record with this many words one may be kept."""


class Slot(NamedTuple):
    """One recorded result.

    Attributes:
        ref: number of the value in the operations that it was chosen from.
        shape: its shape.
        dtype: its data type.
    """

    ref: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def words(self) -> int:
        """Words that it takes."""
        return math.prod(self.shape) * max(1, self.dtype.itemsize // 4)


Slots = tuple[Slot, ...]


def word_count(slots: Slots) -> int:
    """Words that the results take together."""
    return sum(each.words for each in slots)


def alike(some: Slots, others: Slots) -> bool:
    """True if results lie at the same places of their vectors, whatever computes them."""
    return [x[1:] for x in some] == [x[1:] for x in others]


def computes(flat: Flat, slots: Slots) -> bool:
    """True if some operations compute values with the numbers, shapes and types of slots."""
    avals = _avals(flat)
    return all(each.ref in avals and _slot(each.ref, avals[each.ref]) == each for each in slots)


def limit_of(elements: int) -> int:
    """Words that may be kept beside a record of so many elements."""
    return max(_SMALL_SIZE, elements // _SHARE)


def chosen(flat: Flat, limit: int) -> Slots:
    """The results to record, none if they were more words than a limit.

    Of what is computed from results number by number only the last numbers are recorded, that
    arrays are computed from, or the first, whichever are fewer.
    """
    avals = _avals(flat)
    users: dict[int, list[Op | None]] = {ref: [None] for ref in numbers_in(flat.outputs)}
    for op in flat.ops:
        for ref in numbers_in(op.inputs):
            users.setdefault(ref, []).append(op)
    first: set[int] = set()
    numbers: set[int] = set()  # computed from results
    for op in flat.ops:
        taken = numbers_in(op.inputs)
        if _reduces(op):
            first.update(op.outputs)
            numbers.update(op.outputs)
        elif _is_number(op) and taken & numbers:
            numbers.update(op.outputs)
            taken &= numbers
            if taken <= first and all(len(users[ref]) == 1 for ref in taken):
                first = (first - taken) | {*op.outputs}  # nothing else takes those
    last = {
        ref
        for ref in numbers
        if any(op is None or numbers.isdisjoint(op.outputs) for op in users.get(ref, ()))
    }
    found = [
        tuple(_slot(ref, avals[ref]) for ref in sorted(cut & _taken(living(flat, cut))))
        for cut in (last, first)
    ]
    slots = min(found, key=word_count)
    return slots if word_count(slots) <= limit else ()


def _avals(flat: Flat) -> dict[int, Any]:
    return {ref: aval for op in flat.ops for ref, aval in zip(op.outputs, op.avals, strict=True)}


def _taken(flat: Flat) -> set[int]:
    """Numbers of the values that operations take, or that are returned."""
    return numbers_in(flat.outputs).union(*(numbers_in(op.inputs) for op in flat.ops))


def _is_number(op: Op) -> bool:
    """True for an operation on single numbers, of any number of axes."""
    avals = [*(var.aval for var in op.eqn.invars), *op.avals]
    return not op.eqn.effects and all(_can_keep(x) and x.size <= 1 for x in avals)


def _slot(ref: int, aval: Any) -> Slot:
    return Slot(ref, tuple(aval.shape), np.dtype(aval.dtype))


def _reduces(op: Op) -> bool:
    """True for an operation on arrays that gives few numbers, and is not element-wise."""
    shapes = [*op.shapes.values()]
    limit = max([_SMALL_SIZE, *(math.prod(shape) // 4 for shape in shapes)])
    if op.eqn.effects or any(not _can_keep(x) or x.size > limit for x in op.avals):
        return False
    is_one = op.name.startswith(("reduce_", "arg")) and all(x.size == 1 for x in op.avals)
    return (is_one and any(shapes)) or not _is_exact(op.eqn)


def _is_exact(equation: Any) -> bool:
    return can_pin(equation) and all(
        _is_exact(each) for body in bodies(equation) for each in body.eqns
    )


def _can_keep(aval: Any) -> bool:
    """True for numbers that can be words."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    is_whole = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits >= 8
    return is_whole or dtype == jnp.bool_ or can_fence(dtype)


def packed(values: Sequence[Any]) -> jax.Array:
    """The words of some values, one behind another, on all devices alike."""
    return jnp.concatenate([_words_of(_everywhere(jnp.asarray(x))) for x in values])


def unpacked(words: Any, slots: Slots) -> list[Any]:
    """The values of words from :func:`packed`."""
    places = np.cumsum([0, *(each.words for each in slots)])
    return [
        pick_p.bind(words, start=int(start), shape=each.shape, dtype=each.dtype)
        for each, start in zip(slots, places, strict=False)
    ]


def _words_of(value: Any) -> Any:
    value = jnp.reshape(value, (-1,))
    if value.dtype == jnp.bool_:
        return value.astype(jnp.uint32)
    bits = value.dtype.itemsize * 8
    unsigned = jax.lax.bitcast_convert_type(value, f"uint{min(bits, 32)}")
    return unsigned.astype(jnp.uint32).reshape(-1)


def _value_of(words: Any, *, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    slot = Slot(0, shape, dtype)
    words = jax.lax.slice_in_dim(words, start, start + slot.words)
    if dtype == jnp.bool_:
        return words.astype(jnp.bool_).reshape(shape)
    bits = min(dtype.itemsize * 8, 32)
    words = words.astype(f"uint{bits}").reshape(*shape, *([2] if dtype.itemsize == 8 else []))
    return jax.lax.bitcast_convert_type(words, dtype)


def _everywhere(value: Any) -> Any:
    """A value on all devices of its mesh, where its type tells that it is cut."""
    sharding = jax.typeof(value).sharding
    if all(each is None for each in sharding.spec):
        return value
    return jax.sharding.reshard(value, NamedSharding(sharding.mesh, PartitionSpec()))


pick_p = core.Primitive(PICK)
"""One value of a vector of words: an operation of its own, so that its parts are not looked at."""

pick_p.def_impl(_value_of)


@pick_p.def_abstract_eval
def _abstract(words: Any, *, start: int, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    del words, start
    return jax.core.ShapedArray(shape, dtype)


def _batch(arguments: Any, axes: Any, **where: Any) -> Any:
    return jax.vmap(lambda words: _value_of(words, **where), in_axes=axes)(*arguments), 0


batching.primitive_batchers[pick_p] = _batch
mlir.register_lowering(pick_p, mlir.lower_fun(_value_of, multiple_results=False))
