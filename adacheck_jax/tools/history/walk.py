"""The recorded steps of a run, and the state at each of them, restored on one device.

A step that follows the one before in its lineage is had by replaying what lies between, so that a
walk from step to step replays each update once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax.device import transfer, trees
from adacheck_jax.errors import IntegrityError, StepDeletedError
from adacheck_jax.format.manifest import Leaf, Update
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.tools.recompute import Reached, cannot_replay_here
from adacheck_jax.tools.steps import (
    InputError,
    RecordedStep,
    RecordedSteps,
    Root,
    undeleted,
)

Tree = dict[str, Any]
_MOST_HOLDERS = 3
"""Directories that hold a step, of which each may be deleted while the step is read from it."""


@dataclass(frozen=True, slots=True)
class State:
    """The state of one recorded step.

    Attributes:
        step: its step number.
        leaves: description of each leaf.
        arrays: elements of each leaf: key data of a typed PRNG key, a 0-d array of a number.
        update: the update that the Recorder recorded; None without one.
        rounded: leaf paths that this machine replays to rounding only.
    """

    step: int
    leaves: tuple[Leaf, ...]
    arrays: tuple[np.ndarray, ...]
    update: Update | None
    rounded: tuple[str, ...]

    def tree(self) -> Tree:
        """The leaves in nested dicts, a level for each name in their paths."""
        paths = (leaf.path for leaf in self.leaves)
        return trees.nested(dict(zip(paths, self.arrays, strict=True)))


class Walk(RecordedSteps):
    """Restores recorded steps of one run, on the first device of this process.

    A recorded step is one that was saved, deferred until a later save, or deleted while a later
    step's directory still holds it.

    Attributes:
        restored_count: number of states that were restored or replayed.

    Raises:
        InputError: there is no such root or item.
        AdaCheckError: there are steps and none is whole; the error of the first.
    """

    def __init__(self, root: Root, item: str | None = None) -> None:
        super().__init__(root, item)
        self._item, self.restored_count = item, 0
        self._reached = Reached(lambda entry: entry.manifest.checksum)
        if not self.steps:
            raise next(iter(self.damaged.values()))

    @property
    def numbers(self) -> list[int]:
        """Numbers of the recorded steps, ascending."""
        return [*self.steps]

    def lineage(self, step: int) -> Lineage:
        """Everything that a recorded step is restored from."""
        return self.steps[step].lineage

    def fingerprints(self, step: int) -> dict[str, int]:
        """The digest of each leaf, by its path, as it was saved; no array is read."""
        lineage = self.lineage(step)
        paths = [leaf.path for leaf in lineage.base.leaves]
        return dict(zip(paths, lineage.end.fingerprints, strict=True))

    def at(self, step: int) -> State:
        """The state of a recorded step, verified.

        Raises:
            InputError: this machine cannot replay it.
            AdaCheckError: it is damaged.
            StepDeletedError: it was deleted meanwhile, and no later step holds it.
        """
        for _ in range(_MOST_HOLDERS):
            try:
                return self._at(step)
            except StepDeletedError as error:
                self.steps[step] = self._held_elsewhere(step, error)
        return self._at(step)

    def _held_elsewhere(self, step: int, error: StepDeletedError) -> RecordedStep:
        """A recorded step in a directory that is there.

        Raises:
            StepDeletedError: there is none; the given one.
        """
        try:
            found = RecordedSteps(self.root, self._item).steps.get(step)
        except InputError:
            raise error from None
        if found is None or found.lineage.end.fingerprints != self.lineage(step).end.fingerprints:
            raise error  # it is gone, or was saved anew
        return found

    def _at(self, step: int) -> State:
        lineage = self.lineage(step)
        problem = cannot_replay_here(lineage)
        if problem is not None:
            raise InputError(f"{self.root}: step {step} cannot be restored here: {problem}")
        with undeleted(lineage.entries[-1].holder):
            return self._restored(step, lineage)

    def close(self) -> None:
        """Release the state, and Orbax's reader."""
        self._reached.close()

    def _restored(self, step: int, lineage: Lineage) -> State:
        (leaves, wrong, rounded), base = self._reached.at(lineage), lineage.base
        self.restored_count += 1
        if wrong:
            shown = ", ".join(base.leaves[i].path for i in sorted(wrong)[:5])
            self._reached.release()
            raise IntegrityError(
                f"{self.root}: step {step}: expected the bits that were saved, found others in "
                f"{len(wrong)} leaves: {shown}. Look for damage with adacheck verify --read-data."
            )
        return State(
            step,
            lineage.leaves,
            tuple(_on_host(value, spec) for value, spec in zip(leaves, base.leaves, strict=True)),
            base.update,
            tuple(base.leaves[i].path for i in sorted(rounded)),
        )


def _on_host(value: Any, leaf: Leaf) -> np.ndarray:
    """A copy: a later update may be computed in the memory of the array."""
    return np.array(transfer.raw(value)).astype(np.dtype(leaf.dtype), copy=False)
