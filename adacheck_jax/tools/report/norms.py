"""Norms of gradients, updates and changes of leaves, from restored steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.tools.history import log as logs
from adacheck_jax.tools.history.differences import norm
from adacheck_jax.tools.history.log import StepLog
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.report.changes import evenly
from adacheck_jax.tools.steps import InputError

SMALL_STEP_COUNT = 400
SMALL_RUN_BYTES = 4_000_000_000
"""Steps, and bytes of all their states, up to which every step is restored unasked."""
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Known:
    """Norms of one restored step.

    Attributes:
        row: its norms.
        relative: relative change of each leaf since the recorded step before, by leaf path; None
            where elements are no numbers. Empty for the first step.
    """

    row: StepLog
    relative: dict[str, float | None]


@dataclass(slots=True)
class Norms:
    """Norms of some steps of a run; it may be filled again after more steps were saved.

    Attributes:
        known: what each restored step told, by its number and fingerprints, and those of the step
            before it.
        failed: the reason for each step that was not to be restored.
    """

    known: dict[object, Known] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def fill(
        self,
        walk: Walk,
        wanted: Sequence[int],
        tell: Callable[[int, int, str], None] | None = None,
    ) -> dict[int, Known]:
        """Restore steps that are not known yet, each with the recorded step before it.

        Args:
            walk: the run.
            wanted: numbers of recorded steps, ascending.
            tell: is told of the progress.

        Returns:
            What each step told; those that cannot be restored are in :attr:`failed`.
        """
        before_of = dict(zip(walk.steps[1:], walk.steps, strict=False))
        self.failed.clear()
        found: dict[int, Known] = {}
        reached: State | None = None
        for n, step in enumerate(wanted):
            if tell is not None:
                tell(n, len(wanted), f"step {step}")
            before = before_of.get(step)
            key = tuple(
                (each, hash(tuple(walk.fingerprints(each).values())))
                for each in (before, step)
                if each is not None
            )
            if key not in self.known:
                try:
                    if before is not None and (reached is None or reached.step != before):
                        reached = walk.at(before)
                    state = walk.at(step)
                except (AdaCheckError, InputError, OSError) as error:
                    self.failed[step] = " ".join(str(error).split())
                    reached = None
                    continue
                self.known[key] = _told(walk, state, reached if before is not None else None)
                reached = state
            found[step] = self.known[key]
        return found


def chosen(walk: Walk, asked: int | None) -> list[int]:
    """The steps to restore for their norms.

    Args:
        walk: the run.
        asked: the most steps that a caller wants; None for all of a small run, and none else.
    """
    steps = walk.steps
    if asked is None:
        state_bytes = sum(leaf.nbytes for leaf in walk.leaves(steps[-1]))
        is_small = len(steps) <= SMALL_STEP_COUNT and len(steps) * state_bytes <= SMALL_RUN_BYTES
        return steps if is_small else []
    return evenly(steps, asked)


def note(walk: Walk, restored: int, wanted: int, failed: dict[int, str]) -> str:
    """Sentence about steps without norms; empty if there are none.

    Args:
        walk: the run.
        restored: number of steps with norms.
        wanted: number of steps that were to be restored.
        failed: the reason for each step that was not to be restored.
    """
    steps = walk.steps
    said = []
    if not wanted:
        said.append(
            f"Norms were not computed: {len(steps):,} steps would have to be restored. "
            "--norms 100 restores that many of them."
        )
    elif wanted < len(steps):
        said.append(f"Norms of {restored:,} of {len(steps):,} steps, evenly spread.")
    if failed:
        step, why = next(iter(failed.items()))
        others = f" and {len(failed) - 1:,} others" if len(failed) > 1 else ""
        said.append(f"Step {step}{others} could not be restored here: {why}")
    return " ".join(said)


def _told(walk: Walk, state: State, before: State | None) -> Known:
    row = logs.row_of(walk, state, logs.params_of(before) if before else ())
    if before is None:
        return Known(row, {})
    old = {leaf.path: array for leaf, array in zip(before.leaves, before.arrays, strict=True)}
    relative = {}
    for leaf, array in zip(state.leaves, state.arrays, strict=True):
        last = old.get(leaf.path)
        if last is not None and last.shape == array.shape and last.dtype == array.dtype:
            is_number = leaf.key_type is None and array.dtype.kind != "b"
            relative[leaf.path] = relative_change(last, array) if is_number else None
    return Known(row, relative)


def relative_change(before: np.ndarray, after: np.ndarray) -> float:
    """Norm of a change relative to the array before; infinite if that was zero.

    Args:
        before: elements of a leaf, which are numbers.
        after: others, of the same shape.
    """
    old, new = before.reshape(-1), after.reshape(-1)
    kind = np.complex128 if old.dtype.kind == "c" else np.float64
    changes, sizes = [], []
    with np.errstate(all="ignore"):
        for start in range(0, old.size, _BLOCK):
            a = old[start : start + _BLOCK].astype(kind)
            changes.append(norm([new[start : start + _BLOCK].astype(kind) - a]))
            sizes.append(norm([a]))
    change, size = math.hypot(*changes), math.hypot(*sizes)
    if math.isnan(change) or math.isnan(size):
        return math.nan
    return change / size if size else (math.inf if change else 0.0)
