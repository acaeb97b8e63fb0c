"""Steps under a checkpoint root that a running manager may be changing."""

from __future__ import annotations

import time
from collections.abc import Sequence

from adacheck_jax.store.steps import roots, sizes
from adacheck_jax.store.steps.manifest_file import DIRECTORY
from adacheck_jax.store.steps.roots import Step
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
    existing(root)
    steps = settled_steps(root)
    if not steps:
        top = at(root)
        names = sorted([*top.folders(), *(each.name for each in top.list(deep=False))])
        found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise InputError(
            f"{root}: expected steps saved by AdaCheckHandler, found {found or 'nothing'}. "
            f"{_remedy(root, names)}"
        )
    return steps


def existing(root: AnyPath) -> None:
    """Refuse a root that is missing, or is not a directory.

    Raises:
        InputError: it is.
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


def selected(root: AnyPath, number: int | None, item: str | None) -> Step:
    """One step under a root.

    Args:
        root: the directory given to the checkpoint manager.
        number: step number; None for the newest step; -1 is the newest too, -2 the one before it.
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
    number = numbered([step.step for step in steps], -1 if number is None else number, root)
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


def newest(root: AnyPath, wanted: int | None, item: str | None = None) -> int:
    """The number of the step that a caller means, which need not be a saved one.

    Args:
        root: the directory given to the checkpoint manager.
        wanted: a step number; None for the newest step; -1 is the newest too, -2 the one before it.
        item: name of the item directory, None for any.

    Raises:
        InputError: there is no such root, or it has fewer steps.
    """
    if wanted is not None and wanted >= 0:
        return wanted
    steps = [step.step for step in steps_under(root) if item in (None, step.directory.name)]
    return numbered(steps, -1 if wanted is None else wanted, root)


def numbered(numbers: Sequence[int], wanted: int, root: AnyPath) -> int:
    """The step number that a caller means.

    Args:
        numbers: numbers of all steps.
        wanted: a step number, or below zero a place counted from the newest step, which is -1.
        root: the directory given to the checkpoint manager.

    Raises:
        InputError: there are not so many steps.
    """
    if wanted >= 0:
        return wanted
    known = sorted({number for number in numbers if number >= 0})
    if -wanted > len(known):
        raise InputError(f"{root}: expected at least {-wanted} steps, found {len(known)}.")
    return known[wanted]


def _remedy(root: AnyPath, names: list[str]) -> str:
    if DIRECTORY in names:
        return f"This is one step's item directory; give {at(root).parent.parent}."
    if any(name.isdecimal() for name in names):
        return "Read steps that stock Orbax saved with ocp.StandardCheckpointer."
    return "Give the directory that holds the step directories."


def settled_steps(root: AnyPath) -> list[Step]:
    """The steps under a root, without those that are being deleted.

    A step that is being deleted looks damaged. So damage counts only if the number of files stays
    the same between two looks, and a step without files is no step.
    """
    before: dict[AnyPath, int] | None = None
    steps: list[Step] = []
    for _ in range(_LOOK_COUNT):
        found = roots.steps_of(root)
        suspects = [step.directory for step in found if step.error]
        file_counts = {path: sum(1 for _ in sizes.files(path)) for path in suspects}
        steps = [step for step in found if file_counts.get(step.directory, 1)]
        damaged = {path: count for path, count in file_counts.items() if count}
        if not damaged or damaged == before:
            break
        before = damaged
        time.sleep(_LOOK_AGAIN_S)
    return steps
