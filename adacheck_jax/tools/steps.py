"""Steps under a checkpoint root that a running manager may be changing, and their sizes on disk."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.manifest_file import DIRECTORY
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.interface import Entry
from adacheck_jax.store.storage.location import AnyPath, at

_LOOK_COUNT = 20
_LOOK_AGAIN_S = 0.1


class InputError(Exception):
    """The root, step or item that a caller names does not exist, or cannot be used now."""


def steps_under(root: AnyPath) -> list[Step]:
    """The steps under a root, damaged ones included.

    Args:
        root: the directory given to the checkpoint manager.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step of ours.
    """
    if not at(root).exists:
        raise InputError(
            f"{root}: expected a checkpoint root, found nothing there. Give the directory that "
            "the checkpoint manager was given."
        )
    if not at(root).is_folder:
        raise InputError(
            f"{root}: expected a checkpoint root, found a file. Give the directory that the "
            "checkpoint manager was given."
        )
    steps = _settled_steps(root)
    if not steps:
        top = at(root)
        names = sorted([*top.folders(), *(each.name for each in top.list(deep=False))])
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise InputError(
            f"{root}: expected steps saved by AdaCheckHandler, found {found or 'nothing'}. "
            f"{_remedy(root, names)}"
        )
    return steps


def selected(root: AnyPath, number: int | None, item: str | None) -> Step:
    """One step under a root.

    Args:
        root: the directory given to the checkpoint manager.
        number: step number, None for the newest step.
        item: name of the item directory, needed if a step holds several.

    Raises:
        InputError: there is no such root, step or item.
    """
    steps = steps_under(root)
    items = sorted({step.directory.name for step in steps})
    if item is not None and item not in items:
        raise InputError(
            f"{root}: expected an item {item!r}, found {', '.join(items)}. Give one of these."
        )
    steps = [step for step in steps if item in (None, step.directory.name)]
    if number is None:
        number = steps[-1].step
    chosen = [step for step in steps if step.step == number]
    if not chosen:
        numbers = ", ".join(str(step.step) for step in steps[-10:])
        earlier = f"{len(steps) - 10} earlier and " if len(steps) > 10 else ""
        raise InputError(
            f"{root}: expected step {number}, found {earlier}{numbers}. Give one of these steps."
        )
    if len(chosen) > 1:
        names = ", ".join(step.directory.name for step in chosen)
        raise InputError(
            f"{root}: expected one item in step {number}, found {names}. Name one with --item."
        )
    return chosen[0]


def _remedy(root: AnyPath, names: list[str]) -> str:
    if DIRECTORY in names:
        return f"This is one step's item directory; give {at(root).parent.parent}."
    if any(name.isdecimal() for name in names):
        return "Read steps that stock Orbax saved with ocp.StandardCheckpointer."
    return "Give the directory that holds the step directories."


def _settled_steps(root: AnyPath) -> list[Step]:
    """The steps under a root, without those that are being deleted.

    A step that is being deleted looks damaged. So damage counts only if the number of files stays
    the same between two looks, and a step without files is no step.
    """
    before: dict[AnyPath, int] | None = None
    steps: list[Step] = []
    for _ in range(_LOOK_COUNT):
        found = roots.steps_of(root)
        suspects = [step.directory for step in found if step.error]
        file_counts = {path: sum(1 for _ in _files(path)) for path in suspects}
        steps = [step for step in found if file_counts.get(step.directory, 1)]
        damaged = {path: count for path, count in file_counts.items() if count}
        if not damaged or damaged == before:
            break
        before = damaged
        time.sleep(_LOOK_AGAIN_S)
    return steps


def new_bytes(directory: AnyPath) -> int | None:
    """Bytes of the files under a step or item directory, without its links to earlier steps.

    None in an object store: tensorstore tells a value's size only with the value.
    """
    if not at(directory).on_file_system:
        return None
    return sum(each.size_bytes for each in _files(directory, (lineages.LINEAGE, lineages.KEPT)))


def disk_bytes(directory: AnyPath) -> int | None:
    """Bytes of all files under a directory, each hard-linked file counted once; as above."""
    if not at(directory).on_file_system:
        return None
    found = {each.stamp: each.size_bytes for each in _files(directory)}
    return sum(found.values())


def _files(directory: AnyPath, skipped: tuple[str, ...] = ()) -> Iterator[Entry]:
    """Descriptions of the files under a directory; files deleted meanwhile are left out.

    Args:
        directory: the directory.
        skipped: relative paths of folders to leave out, wherever they lie.
    """
    top = at(directory)
    with contextlib.suppress(FileNotFoundError):
        for each in top.list():
            path = f"/{each.below(top)}"
            if not any(f"/{folder}/" in path for folder in skipped):
                with contextlib.suppress(FileNotFoundError):
                    yield each.stat()
