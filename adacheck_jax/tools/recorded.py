"""The recorded steps of a run: saved, deferred, or held by a later step's directory."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools.steps import InputError, numbered, steps_under


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that can be restored, with or without a directory of its own.

    Attributes:
        number: its step number.
        directory: item directory to restore it from.
        lineage: base and deltas that end at it.
        is_own: True if the directory is its own.
    """

    number: int
    directory: AnyPath
    lineage: Lineage
    is_own: bool

    @property
    def kind(self) -> str:
        """``base``, ``delta``, or ``deferred`` for a step that was saved with a later one."""
        if not self.lineage.deltas:
            return "base"
        return "deferred" if self.lineage.left_out else "delta"

    @property
    def folder(self) -> AnyPath | None:
        """The step's directory, with all its items; None if it has none of its own."""
        if not self.is_own:
            return None
        return self.directory.parent if roots.place_of(self.directory).line[1] else self.directory

    def holding(self, number: int) -> RecordedStep:
        """An earlier step that the directory of this one holds."""
        return RecordedStep(number, self.directory, self.lineage.to(number), False)


class RecordedSteps:
    """The recorded steps under a root.

    Args:
        root: the directory given to the checkpoint manager.
        item: name of the item directory, needed if steps hold several.

    Attributes:
        steps: the steps, by ascending number.
        damaged: the error of each step whose own directory cannot be restored, by number. A later
            step's directory may hold it all the same.

    Raises:
        InputError: there is no such root or item, or a step holds several items.
    """

    def __init__(self, root: AnyPath, item: str | None = None) -> None:
        self._root = root
        saved = steps_under(root, item)
        named = {(step.step, step.directory.name) for step in saved if step.step >= 0}
        if item is None and len({number for number, _ in named}) < len(named):
            items = ", ".join(sorted({name for _, name in named}))
            raise InputError(
                f"{root}: expected one item a step, found {items}. Name one with --item."
            )
        self.damaged = {step.step: step.error for step in saved if step.error is not None}
        own = dict[int, RecordedStep]()
        for step in saved:
            if step.lineage is None:
                continue
            if step.step in own and roots.misplaced(step.directory, step.lineage.manifest):
                continue  # a copy under another number
            own[step.step] = RecordedStep(step.step, step.directory, step.lineage, True)
        # Of several steps that hold one the newest is deleted last.
        holders = {number: each for each in own.values() for number in each.lineage.steps}
        self.steps = {
            number: own.get(number) or each.holding(number)
            for number, each in sorted(holders.items())
        }

    def find(self, wanted: int | None) -> RecordedStep:
        """The recorded step that a caller means.

        Args:
            wanted: its number; None for the newest; below zero a place counted from it.

        Raises:
            InputError: it is not recorded, or stock Orbax saved it.
            AdaCheckError: it is damaged, and no later step's directory holds it.
        """
        number = numbered([*self.steps, *self.damaged], wanted, self._root)
        if number in self.steps:
            return self.steps[number]
        if number in self.damaged:
            raise self.damaged[number]
        if number in roots.stock_steps(self._root):
            raise InputError(
                f"{self._root}: expected a step saved by AdaCheckHandler, found that stock Orbax "
                f"saved step {number}: nothing can verify it. It is a plain checkpoint already; "
                "copy its directory, or restore it with ocp.StandardCheckpointer."
            )
        near = sorted(sorted(self.steps, key=lambda step: abs(step - number))[:6])
        raise InputError(
            f"{self._root}: expected step {number}, found {', '.join(map(str, near))} near it. "
            "Give one of these steps."
        )
