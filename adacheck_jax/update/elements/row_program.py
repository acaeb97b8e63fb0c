"""The operations of an update on rows: of each leaf :data:`ROW` elements along its last axis.

An operation that leaves elements in their places does to a row what it does to the leaf. So the
operations of the whole update are taken, with other shapes; where one of them tells more of a shape
than how far a number is spread, the update is traced again, with rows for leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

from adacheck_jax.update.pinning.flat_jaxpr import (
    PICK,
    Flat,
    Op,
    bodies,
    flatten,
    with_numbers_of,
    without_equal_scalars,
)
from adacheck_jax.update.pinning.rules import ELEMENTWISE
from adacheck_jax.update.recording.signatures import abstract

ROW = 128
"""Elements of a row. XLA may compile shorter rows to other arithmetic."""

_PLACED = frozenset({"copy", "copy_p", "device_put", "reshard", "sharding_constraint"})
"""Those of :data:`ELEMENTWISE` that tell where an array lies."""
_SHAPELESS = ELEMENTWISE - _PLACED


class UnevenError(Exception):
    """The leaves of an update cannot be computed one by one."""


@dataclass(frozen=True, slots=True)
class RowProgram:
    """An update on rows.

    Attributes:
        flat: its operations.
        consts: values of its first inputs.
        avals: abstract values of all numbered values.
        words: numbers of the inputs that recorded values are picked from, which stay whole.
    """

    flat: Flat
    consts: Sequence[Any]
    avals: Mapping[int, Any]
    words: frozenset[int]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Numbers of the inputs behind the constants."""
        return self.flat.inputs[len(self.consts) :]


def row_program(
    function: Callable[..., Any], specs: Sequence[Sequence[jax.ShapeDtypeStruct]], switches: Any
) -> RowProgram:
    """The operations of an update over four lists of flat leaves, of these shapes.

    Raises:
        UnevenError: the update looks at the shapes of what it takes.
    """
    whole = jax.make_jaxpr(function)(*specs, switches)
    flat = flatten(whole.jaxpr)
    words = frozenset(op.inputs[0] for op in flat.ops if op.name == PICK)
    variables = [*whole.jaxpr.constvars, *whole.jaxpr.invars]
    avals = {
        ref: var.aval if ref in words else _row_of(var.aval)
        for ref, var in zip(flat.inputs, variables, strict=True)
    }
    consts = whole.consts
    if (rows := _on_rows(flat)) is None:
        given = iter(flat.inputs[len(consts) :])
        rows, consts, avals = _traced(
            function,
            [[abstract(avals[next(given)]) for _ in each] for each in specs],
            switches,
            flat,
            len(consts),
        )
    rows = without_equal_scalars(rows)
    for op in rows.ops:
        avals |= dict(zip(op.outputs, op.avals, strict=True))
    return RowProgram(rows, consts, avals, words)


def _on_rows(flat: Flat) -> Flat | None:
    """The same operations with rows for arrays; None if one of them has to be traced."""
    known: dict[int, Any] = {}  # calls of one function are of the same equations
    ops = []
    for op in flat.ops:
        if (equation := known.get(id(op.eqn))) is None:
            if (equation := _equation(op)) is None:
                return None
            known[id(op.eqn)] = equation
        ops.append(Op(equation, op.inputs, op.outputs))
    return Flat(flat.inputs, tuple(ops), flat.outputs)


def _equation(op: Op) -> Any:
    """An equation with rows for arrays; None where those of other shapes do not tell it."""
    eqn, params = op.eqn, op.eqn.params
    if not op.has_arrays:
        return eqn
    taken = {atom.aval.shape for atom in eqn.invars if atom.aval.shape}
    shapes = taken | {var.aval.shape for var in eqn.outvars}
    is_literal = any(atom.aval.shape and hasattr(atom, "val") for atom in eqn.invars)
    if len(shapes) > 1 or is_literal or eqn.effects or next(bodies(eqn), None) is not None:
        return None
    if params.get("sharding") is not None:
        return None
    if op.name == "broadcast_in_dim" and not taken:
        params = {**params, "shape": _row_shape(*shapes)}
    elif op.name not in _SHAPELESS:
        return None
    return eqn.replace(
        invars=[each if hasattr(each, "val") else _variable(each) for each in eqn.invars],
        outvars=[*map(_variable, eqn.outvars)],
        params=params,
    )


def _variable(var: Any) -> Any:
    return core.Var(_row_of(var.aval))


def _traced(
    function: Callable[..., Any],
    rows: Sequence[Sequence[jax.ShapeDtypeStruct]],
    switches: Any,
    whole: Flat,
    const_count: int,
) -> tuple[Flat, Sequence[Any], dict[int, Any]]:
    """The operations of an update that is traced on rows, with the numbers of the whole one."""
    closed = jax.make_jaxpr(function)(*rows, switches)
    flat = with_numbers_of(flatten(closed.jaxpr), whole)
    if flat is None or len(closed.consts) != const_count:
        raise UnevenError("the update looks at the shapes of what it takes")
    variables = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
    avals = {ref: var.aval for ref, var in zip(flat.inputs, variables, strict=True)}
    return flat, closed.consts, avals


def _row_of(aval: Any) -> Any:
    return aval.update(shape=_row_shape(aval.shape)) if aval.shape else aval


def _row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of a row of a leaf: its number of axes, with :data:`ROW` elements along the last.

    A leaf without elements keeps its shape.
    """
    return (*(1,) * (len(shape) - 1), ROW) if shape and 0 not in shape else (*shape,)
