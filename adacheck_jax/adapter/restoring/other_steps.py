"""Steps that may be restored in the place of one that cannot be."""

from __future__ import annotations

import logging

from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)


class OtherSteps:
    """The other steps of the line of a bad one, newest first.

    Args:
        path: item directory of the step that was asked for.
        end: number of the earlier step that was asked for in it; None for its own.
        is_gone: True if it was deleted. Then any other step may stand for it: retention deletes the
            oldest steps first.
    """

    def __init__(self, path: AnyPath, end: int | None, *, is_gone: bool) -> None:
        place = roots.place_of_lost(path)
        self._line, self._tried = place.line, {path}
        self.wanted, self._stop = place.step, place.step
        if self.wanted is not None and end is not None:
            self.wanted, self._stop = end, end + 1
        if is_gone:
            self._stop = None
        self._left = [] if self.wanted is None else self._listed()

    def _listed(self) -> list[roots.Step]:
        found = roots.steps_of(*self._line)
        if self._stop is not None:
            found = [each for each in found if each.step < self._stop]
        return [each for each in found if each.directory not in self._tried]

    @property
    def newest(self) -> roots.Step | None:
        """The newest one that was not taken; None if there is none."""
        return self._left[-1] if self._left else None

    def take(self) -> AnyPath:
        """Item directory of the newest one, which is taken out."""
        directory = self._left.pop().directory
        self._tried.add(directory)
        return directory

    def look_again(self) -> None:
        """Look for steps that were saved since, where a step was deleted while it was read."""
        self._left = self._listed()

    def tell_passed_over(self, found: int) -> None:
        """Log which steps that stock Orbax saved lie between a bad step and the one restored."""
        there = roots.stock_steps(*self._line) if self.wanted is not None else {}
        passed = sorted(step for step in there if found < step < (self.wanted or 0))
        if passed:
            message = "Passed over steps %s, which stock Orbax saved: nothing can verify them."
            _log.warning(message, lineages.shown_steps(passed))
