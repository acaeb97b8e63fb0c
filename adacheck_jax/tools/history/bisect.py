"""The first recorded step at which something holds, by halving."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.steps import InputError, Progress, quiet

Predicate = Callable[[State], str | None]
"""The words for a state at which something holds; None where it does not hold."""


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
        tried: the predicate's words for each step that was looked at, in order; None where it does
            not hold.
        rounded: leaf paths that were right to rounding only at some of them.
    """

    root: str
    step: int | None
    before: int | None
    says: str | None
    searched_count: int
    restored_count: int
    tried: dict[int, str | None]
    rounded: tuple[str, ...]


def bisect(
    walk: Walk,
    predicate: Predicate,
    first: int | None = None,
    last: int | None = None,
    progress: Progress = quiet,
) -> Bisection:
    """Find the first step at which a predicate holds, if it holds at all later ones too.

    Takes the logarithm to base 2 of the number of steps, and the two ends.

    Raises:
        InputError: no step is recorded between the ends.
        AdaCheckError: a step is damaged.
    """
    every = walk.numbers
    oldest = every[0] if first is None else first
    newest = every[-1] if last is None else last
    steps = [step for step in every if oldest <= step <= newest]
    if not steps:
        raise InputError(
            f"{walk.root}: expected recorded steps from {first} to {last}, found none. The oldest "
            f"is {every[0]}, the newest {every[-1]}."
        )
    tried, rounded = dict[int, str | None](), dict[str, None]()
    most = 2 + max(len(steps) - 2, 0).bit_length()

    def holds(index: int) -> bool:
        progress(len(tried), most, f"step {steps[index]}")
        state = walk.at(steps[index])
        rounded.update(dict.fromkeys(state.rounded))
        tried[state.step] = predicate(state)
        return tried[state.step] is not None

    end, index = len(steps) - 1, None
    if holds(end):
        index = 0 if not end or holds(0) else bisect_left(range(end), True, 1, end, key=holds)
    return Bisection(
        root=str(walk.root),
        step=None if index is None else steps[index],
        before=steps[index - 1] if index else None,
        says=None if index is None else tried[steps[index]],
        searched_count=len(steps),
        restored_count=walk.restored_count,
        tried=tried,
        rounded=(*rounded,),
    )


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
