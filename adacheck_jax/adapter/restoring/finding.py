"""Steps of a root, as a restore finds them: a lineage, the newest step, those beside a bad one."""

from __future__ import annotations

import contextlib
import logging

from adacheck_jax.adapter.stock import descriptions
from adacheck_jax.errors import AdaCheckError, LineageError
from adacheck_jax.save.resuming import Newest
from adacheck_jax.store.steps import lookup, manifest_file, roots
from adacheck_jax.store.steps.lineage import Lineage, shown_steps
from adacheck_jax.store.storage.location import AnyPath

_log = logging.getLogger(__name__)


def resolve(path: AnyPath) -> Lineage:
    """The base and deltas that a step is restored from.

    Raises:
        LineageError: one of them is missing; the message lists the steps that can be restored.
        FormatError, IntegrityError: a manifest is damaged.
    """
    try:
        return lookup.resolve(path)
    except LineageError as error:
        steps = [s.step for s in roots.steps_of(*roots.place_of_lost(path).line) if s.error is None]
        hint = ", ".join(map(str, steps[-10:])) or "none"
        raise LineageError(f"{error} Steps that can be restored: {hint}.") from error


def lineage_of(path: AnyPath, step: int | None) -> Lineage:
    """The lineage of a directory's own step, or of an earlier one that it holds."""
    if step is None:
        return resolve(path)
    try:
        return lookup.held(path).to(step)
    except LineageError as error:
        if (holder := roots.holder_of(step, *roots.place_of(path).line)) is None:
            raise
        raise LineageError(f"{error} Restore it from step {holder}.") from error


def described_lineage(directory: AnyPath) -> Lineage:
    """The lineage of a step whose base has whole files that describe its arrays.

    Raises:
        LineageError: a step that this one builds on is missing.
        IntegrityError: a file that describes the base is damaged.
        FormatError: a manifest is missing or cannot be read.
    """
    lineage = resolve(directory)
    damage = descriptions.damaged_descriptions(lineage.base_directory, lineage.base)
    for error in damage.values():
        raise error
    return lineage


def newest(root: AnyPath, item: str | None) -> Newest | None:
    """The newest step of a line in storage, whoever saved it."""
    every = ((roots.place_of(path), path) for path in roots.items_of(root))
    ours = {place.step: path for place, path in every if place.line[1] == item}
    numbers = [*(each for each in ours if each is not None), *roots.stock_steps(root, item)]
    if not numbers:
        return None
    number, lineage = max(numbers), None
    step, path = number, ours.get(number)
    if path is not None:
        try:
            step = manifest_file.read(path).step
            lineage = resolve(path)
        except AdaCheckError as error:
            _log.warning("%s: the newest step in storage cannot be built on: %s", path, error)
    return Newest(step, number, lineage)


def has_steps(root: AnyPath) -> bool:
    """True unless a root is known to have no step."""
    with contextlib.suppress(OSError, AdaCheckError):
        return bool(roots.items_of(root) or roots.stock_steps(root))
    return True


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

    def tell(self, found: int) -> None:
        """Log the step that was restored, later ones, and those of stock Orbax in between."""
        every, first = [] if self._stop is None else roots.steps_of(*self._line), self.wanted or 0
        later = [each.step for each in every if each.step > first and each.error is None]
        told = f" Later ones were not tried: {shown_steps(later)}." if later else ""
        _log.warning("Restored step %d instead of step %s.%s", found, self.wanted, told)
        there = roots.stock_steps(*self._line) if self.wanted is not None else {}
        passed = sorted(step for step in there if found < step < (self.wanted or 0))
        if passed:
            message = "Passed over steps %s, which stock Orbax saved: nothing can verify them."
            _log.warning(message, shown_steps(passed))
