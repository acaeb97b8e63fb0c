"""The first recorded step at which something holds, by halving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.steps import InputError

Predicate = Callable[[State], str | None]
"""The words for a state at which something holds; None where it does not hold."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One step that was looked at.

    Attributes:
        step: its number.
        holds: True if the predicate held there.
        says: what it said of it.
    """

    step: int
    holds: bool
    says: str | None


@dataclass(frozen=True, slots=True)
class Bisection:
    """The result of ``adacheck bisect``.

    Attributes:
        root: the checkpoint root.
        step: the first step at which the predicate holds; None if it does not hold at the last.
        before: the recorded step before that one, at which it does not hold; None if there is none.
        says: what the predicate says of ``step``.
        searched_count: number of recorded steps among which it was looked for.
        restored_count: number of states that were restored.
        tried: the steps that were looked at, in order.
        rounded: leaf paths that were right to rounding only at some of them.
    """

    root: str
    step: int | None
    before: int | None
    says: str | None
    searched_count: int
    restored_count: int
    tried: tuple[Tried, ...]
    rounded: tuple[str, ...]


def bisect(
    walk: Walk,
    predicate: Predicate,
    first: int | None = None,
    last: int | None = None,
    tell: Callable[[int, int, str], None] | None = None,
) -> Bisection:
    """Find the first step at which a predicate holds, if it holds at all later ones too.

    Takes the logarithm to base 2 of the number of steps, and the two ends.

    Args:
        walk: the run.
        predicate: what to look for.
        first: the oldest step to look at; None for the oldest recorded one.
        last: the newest step to look at; None for the newest recorded one.
        tell: is told of the progress: looks that were taken, most looks to take, and at what.

    Raises:
        InputError: no step is recorded between the ends.
        AdaCheckError: a step is damaged.
    """
    steps, tried, rounded = walk.between(first, last), list[Tried](), dict[str, None]()
    if not steps:
        raise InputError(
            f"{walk.root}: expected recorded steps from {first} to {last}, found none. The oldest "
            f"is {walk.steps[0]}, the newest {walk.steps[-1]}."
        )
    most = 2 + max(len(steps) - 2, 0).bit_length()

    def holds(index: int) -> bool:
        if tell is not None:
            tell(len(tried), most, f"step {steps[index]}")
        state = walk.at(steps[index])
        says = predicate(state)
        rounded.update(dict.fromkeys(state.rounded))
        tried.append(Tried(state.step, says is not None, says))
        return says is not None

    def result(index: int | None) -> Bisection:
        step = None if index is None else steps[index]
        says = next((each.says for each in tried if each.step == step), None)
        before = steps[index - 1] if index else None
        counts = (len(steps), walk.restored_count)
        return Bisection(str(walk.root), step, before, says, *counts, (*tried,), (*rounded,))

    if not holds(len(steps) - 1):
        return result(None)
    if len(steps) == 1 or holds(0):
        return result(0)
    low, high = 0, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return result(high)


def not_finite(state: State) -> str | None:
    """Name the first element of a state that is NaN or infinite."""
    for leaf, array in zip(state.leaves, state.arrays, strict=True):
        if array.dtype.kind in "iub" or leaf.key_type is not None:
            continue
        finite = np.isfinite(array if array.dtype.kind == "c" else array.astype(np.float64))
        if not finite.all():
            flat = int(np.argmin(finite.reshape(-1)))
            index = [int(each) for each in np.unravel_index(flat, array.shape)]
            count = int(finite.size - np.count_nonzero(finite))
            more = f", and {count - 1:,} more in it" if count > 1 else ""
            return f"{leaf.path} {index} is {array.reshape(-1)[flat]}{more}"
    return None
