"""Log of the recorded steps: norms of gradients and updates, learning rate, and metrics."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.tools.history.differences import norm, params_of, relative_change, wide
from adacheck_jax.tools.history.walk import State, Walk
from adacheck_jax.tools.listing import note_of
from adacheck_jax.tools.steps import InputError, Progress, quiet
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


def log(walk: Walk, last: int | None = None, progress: Progress = quiet) -> RunLog:
    """Tell what the recorded steps did, from records and states alone.

    Raises:
        InputError: this machine cannot replay a step.
        AdaCheckError: a step is damaged.
    """
    asked = walk.numbers[-last:] if last else walk.numbers
    rows, gone = list[StepLog](), list[int]()
    for step, found, _ in logged(walk, asked, progress):
        if isinstance(found, StepLog):
            rows.append(found)
        elif isinstance(found, StepDeletedError):
            gone.append(step)
        else:
            raise found
    return RunLog(str(walk.root), len(walk.steps), tuple(rows), tuple(gone))


def logged(
    walk: Walk, wanted: Sequence[int], progress: Progress, *, every_leaf: bool = False
) -> Iterator[tuple[int, StepLog | Exception, dict[str, float]]]:
    """Logs of steps, which are compared with the recorded steps before them.

    Args:
        walk: the run.
        wanted: numbers of the steps, ascending.
        progress: callback before each step.
        every_leaf: True to compare all leaves that hold numbers, not the params alone.

    Yields:
        Number of a step; its log, or the reason why it cannot be restored; and, if every leaf is
        compared, the norm of the change of each, relative to the leaf before, by its path.
    """
    before_of = dict(itertools.pairwise(reversed(walk.steps)))
    place, before = None, _Arrays()
    for n, step in enumerate(wanted):
        progress(n, len(wanted), f"step {step}")
        try:
            earlier = before_of.get(step)
            if earlier is not None and earlier != place:
                before = _Arrays()
                with contextlib.suppress(StepDeletedError):  # then nothing tells the change
                    before = _arrays(walk.at(earlier), every_leaf)
            state = walk.at(step)
        except (AdaCheckError, InputError, OSError) as error:
            place, before = None, _Arrays()
            yield step, error, {}
            continue
        row, changes = _row_of(walk, state, before), _changes(state, before) if every_leaf else {}
        place, before = step, _arrays(state, every_leaf)
        del state  # or two of them would be in memory while the next one is restored
        yield step, row, changes


_Arrays = dict[str, np.ndarray]


def _arrays(state: State, every_leaf: bool) -> _Arrays:
    indices = range(len(state.leaves)) if every_leaf else params_of(state.leaves, state.update)
    return {state.leaves[i].path: state.arrays[i] for i in indices}


def _changes(state: State, before: _Arrays) -> dict[str, float]:
    """The norm of each leaf's change, relative to the leaf before; of leaves that hold numbers."""
    return {
        leaf.path: relative_change(old, array)
        for leaf, array in zip(state.leaves, state.arrays, strict=True)
        if (old := before.get(leaf.path)) is not None
        and (old.dtype, old.shape) == (array.dtype, array.shape)
        and leaf.key_type is None
        and array.dtype.kind != "b"
    }


def _row_of(walk: Walk, state: State, before: _Arrays) -> StepLog:
    params, change = _arrays(state, every_leaf=False), None
    if params and all(p in before and before[p].shape == x.shape for p, x in params.items()):
        change = norm([wide(array) - wide(before[path]) for path, array in params.items()])
    folder, update = walk.steps[state.step].folder, state.update
    return StepLog(
        step=state.step,
        kind="delta" if walk.lineage(state.step).deltas else "base",
        gradient_norm=norm([state.arrays[i] for i in update.record]) if update else None,
        update_norm=change,
        params_norm=norm([*params.values()]) if params else None,
        learning_rate=_learning_rate(state),
        metrics=note_of(folder)[1] if folder else {},
        rounded=bool(state.rounded),
    )


def _learning_rate(state: State) -> float | None:
    """The learning rate that the last update took, if it is a leaf."""
    found = [
        (f"/{PASSED_FIELD}/" not in leaf.path, float(array))
        for leaf, array in zip(state.leaves, state.arrays, strict=True)
        if leaf.path.replace(".", "/").split("/")[-1] == _RATE and array.shape == ()
    ]
    return min(found)[1] if found else None
