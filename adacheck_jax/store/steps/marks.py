"""Marks of a step in progress, committed, and of an item: empty files, most of them Orbax's."""

from __future__ import annotations

import re

from adacheck_jax.errors import LineageError
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at

IN_PLACE = f"{manifest_file.DIRECTORY}/in_place"
"""Empty file in a step that was not written under a temporary name: Orbax marks it at the end."""
FINALIZED = f"{manifest_file.DIRECTORY}/finalized"
"""Empty file in such a step that is none of Orbax's: its handler was called by itself."""
STEP_METADATA = "_CHECKPOINT_METADATA"
"""File that Orbax writes into the directory of a step, and not into those of its items."""
_STEP_FILES = (STEP_METADATA, "orbax.checkpoint")
"""The same, and what Orbax v1 writes there before it: its metadata come after the items."""
COMMIT_MARK = "commit_success.txt"
"""File that Orbax writes last, into each item and then into the step."""
TREE_METADATA = "_METADATA"
"""File by which Orbax tells a pytree from another checkpointable."""
_WRITTEN = re.compile(
    r"([^/]+/)?(commit_success\.txt|orbax\.checkpoint|_[A-Z_]+|_sharding|_strings\.json"
    r"|manifest\.ocdbt|d/[0-9a-f]+|array_metadatas/.+|ocdbt\.process_.+|adacheck/.+)"
)
"""Paths below a step of what Orbax and this library write into it."""


def is_committed(item_directory: AnyPath) -> bool:
    """True if a step whose directory has no temporary name was committed.

    Orbax renames a step to commit it. On object stores, and with ``AtomicityMode.COMMIT_FILE``, it
    writes into the final directory instead, and adds a mark at the end. A directory that Orbax does
    not know is committed by the handler that saved into it.
    """
    item = at(item_directory)
    if not item.on_file_system:
        # Of an item both are marked, the step last. An item alone is the rest of a deleted step.
        found = (item / COMMIT_MARK).exists and (
            (item.parent / COMMIT_MARK).exists or (item / STEP_METADATA).exists
        )
    elif (item / IN_PLACE).exists:
        step = item.parent if is_item(item_directory) else item
        found = (step / COMMIT_MARK).exists
    else:
        found = True
    return found or ((item / FINALIZED).exists and not _is_of_orbax(item_directory))


def _is_of_orbax(item_directory: AnyPath) -> bool:
    """True if a checkpointer or a manager of Orbax saves, or has saved, into a directory."""
    return any(
        at(each / name).exists
        for name in _STEP_FILES
        for each in (item_directory.parent, item_directory)
    )


def finalize(item_directory: AnyPath) -> bool:
    """Commits a step that was written in place, if nobody but its handler will.

    Returns:
        False if Orbax commits it.
    """
    if _is_of_orbax(item_directory):
        return False
    mark = at(item_directory / FINALIZED)
    mark.write(b"")
    mark.sync(mark.parent)
    return True


def is_there(item_directory: AnyPath, stamp: Stamp | None) -> bool:
    """True if a step is committed, by the same manifest as before.

    Raises:
        OSError: there is no manifest.
    """
    found = at(item_directory / manifest_file.FILE).stamp
    return is_committed(item_directory) and stamp in (None, found)


def is_rest(step: AnyPath) -> bool:
    """True for what an interrupted deletion, or save, has left of a step in a store.

    A whole step is marked, and so is each of its items; and nothing lies in it but what Orbax and
    this library write.
    """
    top = at(step)
    if top.on_file_system:
        return False
    names = [each.below(top) for each in top.list()]
    is_marked = {COMMIT_MARK, *_STEP_FILES}.intersection(names) > {COMMIT_MARK}
    items = [x for x in names if x == TREE_METADATA or x.endswith(f"/{COMMIT_MARK}")]
    return not (is_marked and items) and all(map(_WRITTEN.fullmatch, names))


def is_part(step: AnyPath) -> bool:
    """True if nothing lies in a directory but what Orbax and this library write into a step."""
    return all(_WRITTEN.fullmatch(name) for name, _ in at(step).described())


def is_item(directory: AnyPath) -> bool:
    """True if a directory lies in that of its step.

    It is told by what Orbax wrote into both. In a store, where a look costs a request if nothing is
    listed yet, the names tell if they can: steps end with a number.
    """
    if at(directory).looks_cost and is_told_by_names(directory):
        return _is_numbered(directory.parent.name)
    in_step = any(at(directory.parent / name).exists for name in _STEP_FILES)
    return in_step and not at(directory / STEP_METADATA).exists


def is_told_by_names(directory: AnyPath) -> bool:
    """True if either a directory or the one that it lies in is named like a step.

    Of ``run_7/5`` and ``step_3/7`` both are, and one stands for a step, the other for an item.
    """
    return _is_numbered(directory.parent.name) != _is_numbered(directory.name)


def _is_numbered(name: str) -> bool:
    return name.rpartition("_")[2].isdecimal()


def refuse_uncommitted(item_directory: AnyPath) -> None:
    """Raises if a step was not committed.

    Raises:
        LineageError: its save was interrupted, or is under way.
    """
    if not is_committed(item_directory):
        raise LineageError(
            f"{item_directory}: expected a step that Orbax has committed ({COMMIT_MARK} in it), "
            "found one that is being saved or deleted, or whose save or deletion was interrupted. "
            "Restore another step; where a handler is used by itself, call its finalize."
        )
