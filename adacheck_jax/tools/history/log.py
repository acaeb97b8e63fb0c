"""Log of the recorded steps: norms of gradients and updates, learning rate, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.errors import StepDeletedError
from adacheck_jax.tools.history import differences
from adacheck_jax.tools.history.differences import norm, wide
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.listing import note_of
from adacheck_jax.tools.steps import Progress, quiet
from adacheck_jax.update.recorder_state import PASSED_FIELD

_RATE = "learning_rate"


@dataclass(frozen=True, slots=True)
class StepLog:
    """Log of one step.

    Attributes:
        step: its number.
        kind: ``base`` or ``delta``.
        gradient_norm: Euclidean norm of all gradients that the Recorder got in the last update;
            None without a Recorder.
        update_norm: Euclidean norm of the change of the params since the recorded step before; None
            for the first one.
        params_norm: Euclidean norm of the params; None without a Recorder.
        learning_rate: the leaf of that name that the update took; None if the state has none.
        metrics: numbers that were given with the save, by name.
        rounded: True if this machine replays the step to rounding only.
    """

    step: int
    kind: str
    gradient_norm: float | None
    update_norm: float | None
    params_norm: float | None
    learning_rate: float | None
    metrics: dict[str, float]
    rounded: bool


@dataclass(frozen=True, slots=True)
class RunLog:
    """The result of ``adacheck log``.

    Attributes:
        root: the checkpoint root.
        recorded_count: number of recorded steps.
        steps: the steps that were asked for, ascending.
        deleted: numbers of those that were deleted meanwhile, and are left out.
    """

    root: str
    recorded_count: int
    steps: tuple[StepLog, ...]
    deleted: tuple[int, ...] = ()


def log(
    walk: Walk,
    last: int | None = None,
    progress: Progress = quiet,
) -> RunLog:
    """Tell what the recorded steps did, from records and states alone.

    Raises:
        InputError: this machine cannot replay a step.
        AdaCheckError: a step is damaged.
    """
    steps = walk.steps
    first = 0 if last is None else max(len(steps) - last, 0)
    wanted = steps[max(first - 1, 0) :]  # one more, to tell what the first of them changed
    rows, gone = list[StepLog](), list[int]()
    before: list[np.ndarray] = []
    for n, step in enumerate(wanted):
        progress(n, len(wanted), f"step {step}")
        try:
            state = walk.at(step)
        except StepDeletedError:
            gone.append(step)
            before = []
            continue
        rows.append(row_of(walk, state, before))
        before = params_of(state)
    asked = frozenset(steps[first:])
    return RunLog(
        str(walk.root),
        len(steps),
        tuple(row for row in rows if row.step in asked),
        tuple(step for step in gone if step in asked),
    )


def row_of(walk: Walk, state: State, before: Sequence[np.ndarray]) -> StepLog:
    """Log of one step."""
    params, change = params_of(state), None
    if before and [p.shape for p in params] == [p.shape for p in before]:
        pairs = zip(params, before, strict=True)
        change = norm([wide(new) - wide(old) for new, old in pairs])
    folder, update = walk.recorded.steps[state.step].folder, state.update
    return StepLog(
        state.step,
        "delta" if walk.lineage(state.step).deltas else "base",
        norm([state.arrays[i] for i in update.record]) if update else None,
        change,
        norm(params) if params else None,
        _learning_rate(state),
        note_of(folder)[1] if folder else {},
        bool(state.rounded),
    )


def params_of(state: State) -> list[np.ndarray]:
    """The params of a state."""
    return [state.arrays[i] for i in differences.params_of(state.leaves, state.update)]


def _learning_rate(state: State) -> float | None:
    """The learning rate that the last update took, if it is a leaf."""
    found = [
        (f"/{PASSED_FIELD}/" not in leaf.path, float(array))
        for leaf, array in zip(state.leaves, state.arrays, strict=True)
        if leaf.path.replace(".", "/").split("/")[-1] == _RATE and array.shape == ()
    ]
    return min(found)[1] if found else None
