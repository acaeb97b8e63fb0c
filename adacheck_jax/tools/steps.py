"""The walk of a checkpoint root: its steps, with what is known of each, once it stands still.

A running manager may be changing the root; a step that is being deleted is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import deletion, identity, roots
from adacheck_jax.store.steps.manifest_file import DIRECTORY
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.location import AnyPath, at

Found = TypeVar("Found")
Progress = Callable[[int, int, str], None]
"""A callback that takes the number of things done, the number of all, and what comes next."""


def quiet(done: int, total: int, what: str) -> None:
    """Tell nobody of the progress."""


class InputError(Exception):
    """The root, step or item that a caller names does not exist, or cannot be used now."""


def steps_under(root: AnyPath, item: str | None = None) -> list[Step]:
    """The steps under a root, of an item or of all, damaged ones included.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step of ours or of that
            item.
    """
    steps = settled_steps(root)
    if not steps:
        raise no_steps(root)
    chosen = [step for step in steps if item in (None, step.directory.name)]
    if not chosen:
        names = ", ".join(sorted({step.directory.name for step in steps}))
        raise InputError(f"{root}: expected an item {item!r}, found {names}. Give one of these.")
    return chosen


def no_steps(root: AnyPath) -> InputError:
    """Error for a root without steps, which says what it has instead."""
    top, remedy = at(root), "Give the directory that holds the step directories."
    names = sorted([*top.folders(), *(each.name for each in top.list(deep=False))])
    if DIRECTORY in names:
        remedy = f"This is one step's item directory; give {top.parent.parent}."
    elif any(name.isdecimal() for name in names):
        remedy = "Read steps that stock Orbax saved with ocp.StandardCheckpointer."
    found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return InputError(
        f"{root}: expected steps saved by AdaCheckHandler, found {found or 'nothing'}. {remedy}"
    )


def numbered(numbers: Sequence[int], wanted: int | None, root: AnyPath) -> int:
    """The step number that a caller means.

    Raises:
        InputError: there are not so many steps.
    """
    wanted = -1 if wanted is None else wanted
    if wanted >= 0:
        return wanted
    known = sorted({number for number in numbers if number >= 0})
    if -wanted > len(known):
        raise InputError(f"{root}: expected at least {-wanted} steps, found {len(known)}.")
    return known[wanted]


def settled_steps(root: AnyPath) -> list[Step]:
    """The steps under a root, which may be none, without those that are being deleted.

    Raises:
        InputError: the root is missing, or is not a directory.
    """
    if not at(root).is_folder:
        found = "a file" if at(root).exists else "nothing there"
        raise InputError(
            f"{root}: expected a checkpoint root, found {found}. Give the directory that the "
            "checkpoint manager was given."
        )
    steps, gone = settled(
        lambda: roots.steps_of(root), lambda found: [each.directory for each in found if each.error]
    )
    return [step for step in steps if step.directory not in gone]


def settled(
    look: Callable[[], Found], suspects: Callable[[Found], Iterable[AnyPath]]
) -> tuple[Found, frozenset[AnyPath]]:
    """Look at steps until the files of those that look damaged stay as they are.

    A step that is being deleted looks damaged; :mod:`~adacheck_jax.store.steps.deletion` tells.

    Returns:
        Findings of the last look, and the suspects that are gone.
    """
    found = look()
    while True:
        before = {path: identity.of_directory(path) for path in suspects(found)}
        there = [path for path, digest in before.items() if digest]
        if there:
            deletion.first_deleted(there)
        if all(before[path] == identity.of_directory(path) for path in there):
            return found, frozenset(before.keys() - there)
        found = look()


def undeleted(directory: AnyPath) -> AbstractContextManager[None]:
    """Tell an error of reading a step that was deleted meanwhile from one of a step that is there.

    Raises:
        StepDeletedError: in place of the error, if the step is gone.
    """
    return deletion.told(directory, AdaCheckError, OSError, ValueError)
