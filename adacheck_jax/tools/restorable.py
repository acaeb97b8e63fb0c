"""The newest step that verifies, for a script that has to choose one."""

from __future__ import annotations

import logging
import os

from adacheck_jax.errors import AdaCheckError, IntegrityError, StepDeletedError, StorageError
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import AnyPath, located
from adacheck_jax.tools.steps import undeleted
from adacheck_jax.tools.verification import Verifier, check

_log = logging.getLogger(__name__)


def latest_restorable(
    root: str | os.PathLike[str], item: str | None = None, *, read_data: bool = True
) -> int | None:
    """The newest step that verifies, for a script that would rather go on than stop.

    Newer steps that do not verify are skipped, and the log says why; so are steps that stock Orbax
    saved, which nothing can verify. Every process may call this, and finds the same step under a
    shared root. ``RestoreArgs(skip_damaged=True)`` does the same during a restore, so reads each
    file once, and restores the earlier steps that only a bad step's directory holds, too.

    No update is replayed.

    Args:
        root: the directory or URL given to the checkpoint manager.
        item: name of the item that has to verify; None for every item of a step.
        read_data: True to read every stored byte; False to check only the structure, in a fraction
            of a second: then a flipped bit is found by the restore.

    Returns:
        The number of the step, as the manager lists it; None if no step was ever saved.

    Raises:
        AdaCheckError: there are steps and none of them verifies; the error of the newest. Training
            should not begin anew unasked.
        StorageError: a step cannot be read now, and may be whole.
    """
    path = located(os.fspath(root))
    steps, verifier, first = roots.stock_steps(path, item), Verifier(), None
    for each in roots.items_of(path):
        if (number := roots.place_of(each).step) is not None and item in (None, each.name):
            steps.setdefault(number, []).append(each)
    for number, paths in sorted(steps.items(), reverse=True):
        try:
            for each in sorted(paths, key=str):
                _refuse_stock(each)
                with undeleted(each):
                    check(each, read_data=read_data, verifier=verifier)
        except StorageError:
            raise
        except StepDeletedError as error:
            _log.info("Skipping step %d: %s", number, error)
        except AdaCheckError as error:
            _log.warning("Skipping step %d, which does not verify: %s", number, error)
            first = first or error
        else:
            return number
    if first is not None:
        raise first
    return None


def _refuse_stock(path: AnyPath) -> None:
    if roots.is_stock(path):
        raise IntegrityError(
            f"{path}: expected a step with fingerprints, found one that stock Orbax saved, "
            "which nothing can verify. To go on from it, restore it by its number."
        )
