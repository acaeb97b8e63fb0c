"""Deletions of steps beside those who read them, told from damage.

A manager deletes a step file by file, in any order, and its directories last. So one look at a step
of which something is missing does not tell; but a deletion goes on, and a damaged step stays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    StepDeletedError,
    StorageError,
    tells_of_absence,
)
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps import lookup, manifest_file, marks, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.storage.location import AnyPath, at

_STILL_S = 0.5
"""A deletion that does nothing for so long has ended, or was interrupted.

Orbax's own waits a tenth of a second between the last file and the directories.
"""
_LOOK_S = 0.005
_LOOK_BY_REQUEST_S = 0.1


@contextlib.contextmanager
def detected(item_directory: AnyPath, *errors: type[Exception]) -> Iterator[None]:
    """Tells what is missing of a step that somebody deletes as its deletion, not as damage.

    Args:
        item_directory: item directory of the step that is read, not in a view that was listed
            before; or the step's own directory.
        errors: other errors that what is missing may raise.

    Raises:
        StepDeletedError: in place of the error of a step that is gone, or that builds on one that
            went while it was read.
    """
    try:
        yield
    except StepDeletedError:
        raise
    except (FormatError, IntegrityError, LineageError, StorageError, *errors) as error:
        # Bytes that were read and are wrong are damage, unless the step has gone since.
        is_damage = isinstance(error, IntegrityError) and not tells_of_absence(error)
        looked_at = [item_directory]
        if not isinstance(error, LineageError):  # which says already that a parent is missing
            looked_at += _parents(item_directory)
        gone = first_deleted(looked_at, 0.0 if is_damage else _STILL_S)
        if gone is None:
            raise
        builds = "" if gone == item_directory else f", and {item_directory} builds on it"
        raise error_of(gone, builds) from error


def error_of(directory: AnyPath, builds: str = "") -> StepDeletedError:
    """The error of who reads a step that is gone."""
    return StepDeletedError(
        f"{directory}: expected a step to read, found that it was deleted{builds}. It is gone and "
        "not damaged, as a manager's retention deletes steps. Steps that are there now: "
        f"{lineages.shown_steps(_left(directory))}. Call manager.reload() and restore the newest "
        "of these, or restore with skip_damaged=True."
    )


def is_emptied(step: AnyPath) -> bool:
    """True if no file is left in a step's directory, as where its deletion was killed."""
    place = at(step)
    with contextlib.suppress(OSError):
        return place.on_file_system and place.is_folder and next(place.list(), None) is None
    return False


def first_deleted(directories: Sequence[AnyPath], still_s: float = _STILL_S) -> AnyPath | None:
    """The first of some steps that is gone, or goes while this looks.

    Args:
        directories: their item directories, not in a view that was listed before.
        still_s: time after which a step stays that has not changed.
    """
    before, since_s, looks = None, time.monotonic(), 0
    pause_s = _LOOK_BY_REQUEST_S if at(directories[0]).looks_cost else _LOOK_S
    while True:
        found = [_files(each) for each in directories]
        if None in found:
            return directories[found.index(None)]
        if found != before:
            before, since_s, looks = found, time.monotonic(), 0
        # On a machine that is busy for others the deletion stands still, and so do the looks.
        if time.monotonic() - since_s >= still_s and 2 * looks * pause_s >= still_s:
            return None
        looks += 1
        time.sleep(pause_s)


def _left(item_directory: AnyPath) -> list[int]:
    """Numbers of the steps that are left under the root of one that is gone."""
    (root, _), found = roots.place_of_lost(item_directory).line, set[int | None]()
    with contextlib.suppress(OSError, AdaCheckError):
        found.update(
            roots.stock_steps(root), (roots.place_of(x).step for x in roots.items_of(root))
        )
    return sorted(each for each in found if each is not None)


def _files(item_directory: AnyPath) -> frozenset[str] | None:
    """Keys of what is left of a step; None if it is gone."""
    # The other items count as well: where one alone is missing the step is there.
    in_step = at(item_directory.parent / marks.STEP_METADATA).exists
    top = at(item_directory.parent if in_step else item_directory)
    found = set[str]()
    with contextlib.suppress(OSError):  # a folder vanished while it was listed
        found.update(each.key for each in top.list())
    return frozenset(found) if found or top.is_folder else None


def _parents(item_directory: AnyPath) -> list[AnyPath]:
    """Item directories of the steps that one refers to, as far as manifests tell."""
    found: list[AnyPath] = []
    with contextlib.suppress(AdaCheckError):
        while not at(item_directory / LINEAGE).is_folder:
            manifest = manifest_file.read(item_directory)
            if not isinstance(manifest, DeltaManifest):
                break
            item_directory = lookup.referred(item_directory, manifest.parent.reference)
            found.append(item_directory)
    return found
