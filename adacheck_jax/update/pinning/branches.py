"""Conditionals as choices: both branches computed, and each result selected by itself.

A conditional takes all leaves at once, so that none of them could be computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adacheck_jax.update.pinning.flat_jaxpr import Op, evaluate, flatten
from adacheck_jax.update.pinning.rules import ELEMENTWISE

_CHEAP = ELEMENTWISE | {
    *("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "transpose", "iota", "cond")
}


def cheap(op: Op) -> bool:
    """True for a conditional of arrays whose branches are element-wise, or add up elements."""
    if op.name != "cond" or op.eqn.effects or not any(aval.shape for aval in op.avals):
        return False
    inside = [each for body in op.eqn.params["branches"] for each in flatten(body.jaxpr).ops]
    return all(
        (each.name in _CHEAP or each.name.startswith("reduce_"))
        and (each.name != "cond" or not each.has_arrays or cheap(each))
        for each in inside
    )


def without_branches(closed: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with choices in place of :func:`cheap` conditionals."""
    flat = flatten(closed.jaxpr)
    env = dict(zip(flat.inputs, [*closed.consts, *values], strict=True))

    def bind(op: Op, inputs: list[Any]) -> Sequence[Any]:
        if not cheap(op):
            return op.bind(inputs)
        choice, *operands = inputs
        branches = [without_branches(each, operands) for each in op.eqn.params["branches"]]
        results = branches[0]
        for number, branch in enumerate(branches[1:], 1):
            is_chosen = jnp.asarray(choice >= number)
            pairs = zip(results, branch, strict=True)
            results = [jax.lax.select_n(is_chosen, before, own) for before, own in pairs]
        return results

    evaluate(flat.ops, env, bind)
    return [jnp.asarray(env[ref] if isinstance(ref, int) else ref.val) for ref in flat.outputs]
