"""A recorded step, found by its number: saved, deferred, or held by a later step's directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from adacheck_jax.adapter.arguments import RestoreArgs
from adacheck_jax.adapter.restoring.outcome import Restored
from adacheck_jax.adapter.restoring.restorer import StepRestorer
from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.layout.rules import Rule
from adacheck_jax.store.steps import lookup, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools.recompute import wide_integers
from adacheck_jax.tools.steps import InputError, resolved, selected, undeleted


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

    def restored(self, stock: StockCheckpoints, rules: Sequence[Rule] | None = None) -> Restored:
        """Restore the step, exactly, on its own devices or on one of this machine.

        Raises:
            AdaCheckError: the step is damaged, cannot be restored exactly on this machine, or rules
                do not fit it.
        """
        with wide_integers(leaf.dtype for leaf in self.lineage.base.leaves):
            device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            number = None if self.is_own else self.number
            args = RestoreArgs(
                require_exact=True, fallback_sharding=device, step=number, rules=rules
            )
            return StepRestorer(stock, {}, None).restore(self.directory, args)


def find(root: AnyPath, number: int | None, item: str | None = None) -> RecordedStep:
    """Find a recorded step: saved, deferred, or held by a later step's directory.

    Raises:
        InputError: there is no such root, step or item, or stock Orbax saved the step.
        AdaCheckError: the step is damaged.
    """
    try:
        step = selected(root, number, item)
    except InputError as error:
        if number is None or number < 0:
            raise
        if found := _held(root, number, item):
            return found
        if number in roots.stock_steps(root):
            raise InputError(
                f"{root}: expected a step saved by AdaCheckHandler, found that stock Orbax saved "
                f"step {number}: nothing can verify it. It is a plain checkpoint already; copy its "
                "directory, or restore it with ocp.StandardCheckpointer."
            ) from error
        raise
    with undeleted(step.directory):
        return RecordedStep(step.step, step.directory, lookup.resolve(step.directory), True)


def _held(root: AnyPath, number: int, item: str | None) -> RecordedStep | None:
    """A step without a directory of its own, in the first later directory that holds it."""
    places = dict[str, RecordedStep]()
    later = [each for each in roots.steps_of(root, item) if each.step > number]
    for step, lineage in resolved(later):
        if not isinstance(lineage, AdaCheckError) and number in lineage.steps:
            found = RecordedStep(number, step.directory, lineage.to(number), False)
            places.setdefault(step.directory.name, found)
    if len(places) > 1:
        raise InputError(
            f"{root}: expected one item that holds step {number}, found {', '.join(places)}. Name "
            "one with --item."
        )
    return next(iter(places.values()), None)
