"""Norms of restored steps, and changes of their leaves since the recorded step before."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.audit import Progress
from adacheck_jax.tools.history import log
from adacheck_jax.tools.history.differences import norm
from adacheck_jax.tools.history.log import StepLog
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.steps import InputError

SMALL_STEP_COUNT = 400
SMALL_RUN_BYTES = 4_000_000_000
"""Steps, and bytes of all their states, up to which every step is restored unasked."""

Norms = tuple[StepLog, dict[str, float]]
"""Log of a step, and the relative change of each leaf, by its path."""


def norms_of(
    walk: Walk, wanted: Sequence[int], tell: Progress | None = None
) -> tuple[dict[int, Norms], dict[int, str]]:
    """Restore steps, each with the recorded step before it.

    Args:
        walk: the run.
        wanted: numbers of recorded steps, ascending.
        tell: is told of the progress.

    Returns:
        Norms of each step, and the reason for each that could not be restored.
    """
    before_of = dict(zip(walk.steps[1:], walk.steps, strict=False))
    found, failed = dict[int, Norms](), dict[int, str]()
    last: State | None = None
    for n, step in enumerate(wanted):
        if tell is not None:
            tell(n, len(wanted), f"step {step}")
        try:
            earlier = before_of.get(step)
            if earlier is not None and (last is None or last.step != earlier):
                last = walk.at(earlier)
            before, last = None if earlier is None else last, walk.at(step)
            found[step] = _compared(walk, before, last)
        except (AdaCheckError, InputError, OSError) as error:
            failed[step] = " ".join(str(error).split())
    return found, failed


def _compared(walk: Walk, before: State | None, after: State) -> Norms:
    if before is None:
        return log.row_of(walk, after, ()), {}
    pairs = zip(before.leaves, before.arrays, strict=True)
    old = {(leaf.path, array.dtype, array.shape): array for leaf, array in pairs}
    relative = {
        leaf.path: relative_change(last, array)
        for leaf, array in zip(after.leaves, after.arrays, strict=True)
        if (last := old.get((leaf.path, array.dtype, array.shape))) is not None
        and leaf.key_type is None
        and array.dtype.kind != "b"
    }
    return log.row_of(walk, after, log.params_of(before)), relative


def relative_change(before: np.ndarray, after: np.ndarray) -> float:
    """Norm of the change of an array of numbers, relative to it before; infinite from zero."""
    kind = np.complex128 if before.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        change, size = norm([after.astype(kind) - before.astype(kind)]), norm([before])
    return change / size if size else (math.inf if change else 0.0)


def chosen(walk: Walk, asked: int | None) -> list[int]:
    """The steps to restore for their norms.

    Args:
        walk: the run.
        asked: the most steps that a caller wants; None for all of a small run, and none else.
    """
    steps = walk.steps
    if asked is None:
        run_bytes = len(steps) * sum(leaf.nbytes for leaf in walk.leaves(steps[-1]))
        is_small = len(steps) <= SMALL_STEP_COUNT and run_bytes <= SMALL_RUN_BYTES
        asked = len(steps) if is_small else 0
    count = min(asked, len(steps))
    return [steps[(n + 1) * len(steps) // count - 1] for n in range(count)]  # evenly spread
