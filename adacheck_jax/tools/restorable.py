"""The newest step that verifies, for a script that has to choose one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from adacheck_jax.errors import (
    AdaCheckError,
    IntegrityError,
    StepDeletedError,
    StorageError,
    unreadable,
)
from adacheck_jax.store.steps import lookup, roots
from adacheck_jax.store.storage.location import AnyPath, located
from adacheck_jax.tools.steps import undeleted
from adacheck_jax.tools.verification import Verifier, check, unreadable_file, whole_part

_log = logging.getLogger(__name__)


class RestorableStep(int):
    """The number of a step that verifies, and the arguments that restore it.

    The step may have no directory of its own: it was a deferred step, or the manager deleted it,
    and a later step's directory holds it. Restore either with::

        found = adacheck.latest_restorable(root)
        args = adacheck.RestoreArgs(abstract_state, step=found.step)
        state = manager.restore(found.saved, args=args)

    Args:
        saved: number of the step directory to restore from, as the manager lists it.
        step: the ``step`` of :class:`RestoreArgs`; None for the step that was saved there.
    """

    saved: int
    step: int | None

    def __new__(cls, saved: int, step: int | None = None) -> RestorableStep:  # noqa: D102
        self = super().__new__(cls, saved if step is None else step)
        self.saved, self.step = saved, step
        return self


def latest_restorable(
    root: str | os.PathLike[str], item: str | None = None, *, read_data: bool = True
) -> RestorableStep | None:
    """The newest step that verifies, for a script that would rather go on than stop.

    Newer steps that do not verify are skipped, and the log says why; so are steps that stock Orbax
    saved, which nothing can verify. The directory of a damaged step may hold earlier steps that
    verify: see :class:`RestorableStep`. Every process may call this, and finds the same step under
    a shared root. ``RestoreArgs(skip_damaged=True)`` does the same during a restore, and so reads
    each file once.

    No update is replayed.

    Args:
        root: the directory or URL given to the checkpoint manager.
        item: name of the item that has to verify; None for every item of a step.
        read_data: True to read every stored byte; False to check only the structure, in a fraction
            of a second: then a flipped bit is found by the restore.

    Returns:
        The step; None if no step was ever saved.

    Raises:
        AdaCheckError: there are steps and none of them verifies; the error of the newest. Training
            should not begin anew unasked.
        StorageError: a step cannot be read now, and may be whole.
    """
    path = located(os.fspath(root))
    steps, verifier, first, inner = _steps_of(path, item), Verifier(), None, None
    for number, paths in sorted((steps | roots.stock_steps(path, item)).items(), reverse=True):
        if inner is not None and inner > number:
            break
        try:
            _verify(paths, read_data, verifier)
        except StorageError:
            raise
        except StepDeletedError as error:
            _log.info("Skipping step %d: %s", number, error)
            continue
        except AdaCheckError as error:
            _refuse_unreadable(paths, error)
            _log.warning("Skipping step %d, which does not verify: %s", number, error)
            first = first or error
            another = _newest_within(number, paths, read_data, verifier)
            inner = max(filter(None, (inner, another)), default=None)
            continue
        return RestorableStep(number)
    if inner is None and first is not None:
        raise first
    if inner is not None:
        told = "Step %d verifies, and is restored from step %d with RestoreArgs(step=%d)."
        _log.warning(told, inner, inner.saved, inner.step)
    return inner


def _steps_of(root: AnyPath, item: str | None) -> dict[int, list[AnyPath]]:
    """Item directories of this library under a root, by step number."""
    steps: dict[int, list[AnyPath]] = {}
    for path in roots.items_of(root):
        number = roots.place_of(path).step
        if number is not None and item in (None, path.name):
            steps.setdefault(number, []).append(path)
    return steps


def _verify(paths: Sequence[AnyPath], read_data: bool, verifier: Verifier) -> None:
    """Verify all items of a step.

    Raises:
        AdaCheckError: one of them does not verify, or stock Orbax saved it.
        StepDeletedError: it was deleted meanwhile.
    """
    for path in paths:
        if roots.is_stock(path):
            raise IntegrityError(
                f"{path}: expected a step with fingerprints, found one that stock Orbax saved, "
                "which nothing can verify. To go on from it, restore it by its number."
            )
    for path in sorted(paths, key=str):
        with undeleted(path):
            check(path, read_data=read_data, verifier=verifier)


def _refuse_unreadable(paths: Sequence[AnyPath], error: AdaCheckError) -> None:
    """Raise a StorageError in place of an error if files cannot be read now."""
    for path in paths:
        problem = unreadable_file(path)
        if problem is not None and (refused := unreadable(path, problem)):
            raise refused from error


def _newest_within(
    number: int, paths: Sequence[AnyPath], read_data: bool, verifier: Verifier
) -> RestorableStep | None:
    """The newest step in a bad step's directory that verifies in every item."""
    common: set[int] | None = None
    for path in paths:
        try:
            part = whole_part(lookup.held(path), read_data=read_data, verifier=verifier)
        except StorageError:
            raise
        except AdaCheckError:  # no manifest in it is whole
            return None
        steps = set() if part is None else {*part.steps}
        common = steps if common is None else common & steps
    return RestorableStep(number, max(common)) if common else None
