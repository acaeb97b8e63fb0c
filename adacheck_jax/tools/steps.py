"""Steps under a checkpoint root that a running manager may be changing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.store.steps import deletion, identity, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.lookup import resolve
from adacheck_jax.store.steps.manifest_file import DIRECTORY, remembering
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.location import AnyPath, at

Found = TypeVar("Found")
Progress = Callable[[int, int, str], None]
"""A callback that takes the number of things done, the number of all, and what comes next."""


def quiet(done: int, total: int, what: str) -> None:
    """Tell nobody of the progress."""


class InputError(Exception):
    """The root, step or item that a caller names does not exist, or cannot be used now."""


def steps_under(root: AnyPath) -> list[Step]:
    """The steps under a root, damaged ones included.

    Raises:
        InputError: the root is missing, is not a directory, or holds no step of ours.
    """
    steps = settled_steps(root)
    if not steps:
        raise no_steps(root)
    return steps


def selected(root: AnyPath, number: int | None, item: str | None) -> Step:
    """One step under a root.

    Raises:
        InputError: there is no such root, step or item.
    """
    steps = of_item(root, steps_under(root), item)
    number = numbered([step.step for step in steps], number, root)
    chosen = [step for step in steps if step.step == number]
    if not chosen:
        raise no_step(root, number, steps)
    if len(chosen) > 1:
        names = ", ".join(step.directory.name for step in chosen)
        raise InputError(
            f"{root}: expected one item in step {number}, found {names}. Name one with --item."
        )
    return chosen[0]


def of_item(root: AnyPath, steps: Sequence[Step], item: str | None) -> list[Step]:
    """The steps of an item; all for None.

    Raises:
        InputError: no step has such an item.
    """
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


def no_step(root: AnyPath, number: int, steps: Sequence[Step]) -> InputError:
    """Error for a number that none of some steps has."""
    numbers = ", ".join(str(step.step) for step in steps[-10:])
    earlier = f"{len(steps) - 10} earlier and " if len(steps) > 10 else ""
    return InputError(
        f"{root}: expected step {number}, found {earlier}{numbers}. Give one of these steps."
    )


def resolved(steps: Iterable[Step]) -> Iterator[tuple[Step, Lineage | AdaCheckError]]:
    """The lineage of each step, or the reason why it has none."""
    read = remembering()
    for step in steps:
        found: Lineage | AdaCheckError | None = step.error
        if found is None:
            try:
                with undeleted(step.directory):
                    found = resolve(step.directory, read)
            except AdaCheckError as error:
                found = error
        yield step, found


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


@contextlib.contextmanager
def undeleted(directory: AnyPath) -> Iterator[None]:
    """Tell an error of reading a step that was deleted meanwhile from one of a step that is there.

    Raises:
        StepDeletedError: in place of the error, if the step is gone.
    """
    try:
        yield
    except StepDeletedError:
        raise
    except (AdaCheckError, OSError, ValueError) as error:
        if deletion.is_deleted(directory):
            raise deleted(directory) from error
        raise


def deleted(directory: AnyPath) -> StepDeletedError:
    """Error for a step that was deleted while it was looked at."""
    return StepDeletedError(
        f"{directory}: expected a step to read, found that it was deleted meanwhile. Take another "
        "step (adacheck ls lists them)."
    )
