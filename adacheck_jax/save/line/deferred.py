"""Steps that are kept in memory until the next save writes them with its own."""

from __future__ import annotations

import contextlib

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.save.line.notices import tell_given_up
from adacheck_jax.save.line.parents import Parent
from adacheck_jax.save.pending import Pending, Tip

_DRAINING_COUNT = 2
_UNCHECKED_COUNT = 4


class DeferredSteps:
    """The steps deferred since the last save: kept in memory, oldest first, for the next one.

    Each is replayed and compared with its state in the background. A step that replay gets wrong
    takes those after it along, so at most :data:`_UNCHECKED_COUNT` steps wait for that: then the
    next one waits for the oldest. On accelerators a record is copied on its device first and
    drained from there in the background, so that no step waits for a transfer;
    :data:`_DRAINING_COUNT` of them at most take device memory.
    """

    def __init__(self) -> None:
        self.follows: Parent | None = None
        self.steps: list[Pending] = []
        self._unproved: list[Pending] = []

    def __len__(self) -> int:
        return len(self.steps)

    def until(self, number: int | None) -> list[Pending]:
        """The steps up to a number, oldest first; all, if that is None."""
        return [each for each in self.steps if number is None or each.step <= number]

    def tip_behind(self, parent: Parent) -> Tip:
        """The last step in memory: of the deferred ones, else the parent's own."""
        return self.steps[-1] if self.steps else parent.tip

    def advance(self, parent: Parent, count: int) -> None:
        """Notes that the first steps are being saved, as the parent of those that are left."""
        for each in self.steps[:count]:
            if each is not parent.tip:
                each.forget()
        self.follows, self.steps = parent, self.steps[count:]

    def add(self, staged: Pending, *, drains: bool) -> None:
        """Adds a step; it ``drains`` if it takes device memory until it was copied to the host."""
        self.steps.append(staged)
        staged.begin()
        while len(self._unproved) >= (_DRAINING_COUNT if drains else _UNCHECKED_COUNT):
            with contextlib.suppress(AdaCheckError):  # raised for whoever saves or defers next
                self._unproved.pop(0).verify()
        self._unproved.append(staged)

    def cut(self, count: int) -> list[Pending]:
        """Gives up all but the first steps, and returns them."""
        given_up, self.steps = self.steps[count:], self.steps[:count]
        return given_up

    def give_up(self, count: int, why: str) -> None:
        """Gives up all but the first steps, and says so."""
        tell_given_up([each.step for each in self.cut(count)], why)

    def supersede(self, step: int | None) -> Pending | None:
        """Gives up the steps that a save replaces; the one that it saves again, if it was last."""
        steps = self.steps
        if step is None or not steps:
            return None
        kept = sum(each.step < step for each in steps)
        if kept == len(steps) - 1 and steps[-1].step == step:
            return self.cut(kept)[0]
        self.give_up(kept, f"step {step} is saved after them")
        return None

    def settle(self, *, verify: bool) -> None:
        """Settles the steps in order; raises where some are not one update apart, or wrong."""
        for each in self.steps:
            each.settled()
        if verify and self.steps:
            self.steps[-1].verify()

    @property
    def settled_count(self) -> int:
        """Number of steps, from the first on, that are known to be one update apart."""
        flags = [each.plan.is_speculative for each in self.steps]
        return flags.index(True) if True in flags else len(flags)

    @property
    def wrong(self) -> tuple[int, AdaCheckError] | None:
        """The first step that is known not to be what it was planned as, and the reason."""
        pairs = enumerate(each.refused for each in self.steps)
        return next(((i, error) for i, error in pairs if error is not None), None)
