"""The walk of a checkpoint root: its steps, with all that manifests tell of them, read once.

A running manager may be changing the root; a step that is being deleted is none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from adacheck_jax.errors import AdaCheckError, listed
from adacheck_jax.store.steps import deletion, identity, marks, roots
from adacheck_jax.store.steps.lineage import Lineage
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


class Steps:
    """The steps under a root that have a directory of their own.

    Attributes:
        saved: the steps, damaged ones included, by ascending number; there may be none.

    Raises:
        InputError: the root is missing, or is not a directory.
    """

    def __init__(self, root: AnyPath) -> None:
        self.root = root = root.absolute()  # Orbax takes no other
        if not at(root).is_folder:
            found = "a file" if at(root).exists else "nothing there"
            raise InputError(
                f"{root}: expected a checkpoint root, found {found}. Give the directory that the "
                "checkpoint manager was given."
            )
        steps, gone = settled(
            lambda: roots.steps_of(root), lambda found: [x.directory for x in found if x.error]
        )
        self.saved = [step for step in steps if step.directory not in gone]

    @functools.cached_property
    def stock(self) -> dict[int, list[AnyPath]]:
        """Item directories of the steps that stock Orbax saved, by number."""
        return roots.stock_steps(self.root)

    def of(self, item: str | None = None) -> list[Step]:
        """The steps of an item, or of all.

        Raises:
            InputError: there is none.
        """
        if not self.saved:
            raise self.nothing()
        chosen = [step for step in self.saved if item in (None, step.directory.name)]
        if not chosen:
            names = ", ".join(sorted({step.directory.name for step in self.saved}))
            raise InputError(
                f"{self.root}: expected an item {item!r}, found {names}. Give one of these."
            )
        return chosen

    def nothing(self) -> InputError:
        """Error for a root without steps, which says what it has instead."""
        top, remedy = at(self.root), "Give the directory that holds the step directories."
        names = sorted([*top.folders(), *(each.name for each in top.list(deep=False))])
        if DIRECTORY in names:
            remedy = f"This is one step's item directory; give {top.parent.parent}."
        elif self.stock:
            remedy = "Read steps that stock Orbax saved with ocp.StandardCheckpointer."
        elif numbered := [name for name in names if name.isdecimal()]:
            remedy = f"Step {numbered[-1]} {why_no_step(top / numbered[-1])}."
        return InputError(
            f"{top}: expected steps saved by AdaCheckHandler, found "
            f"{listed(names, 5) or 'nothing'}. {remedy}"
        )

    def lacks(self, number: int, known: Iterable[int]) -> InputError:
        """Error for a number that no step has, which says what has it or what is near it."""
        if number in self.stock:
            return InputError(
                f"{self.root}: expected a step saved by AdaCheckHandler, found that stock Orbax "
                f"saved step {number}: nothing can verify it. It is a plain checkpoint already; "
                "copy its directory, or restore it with ocp.StandardCheckpointer."
            )
        near = sorted(sorted({*known}, key=lambda step: abs(step - number))[:6])
        return InputError(
            f"{self.root}: expected step {number}, found {', '.join(map(str, near))} near it. "
            "Give one of these steps."
        )


Root = AnyPath | Steps
"""A root, or its steps where they were read already."""


def walked(root: Root) -> Steps:
    """The steps under a root."""
    return root if isinstance(root, Steps) else Steps(root)


def refuse_inside(path: AnyPath, root: AnyPath) -> None:
    """Refuse to write a local path below a root.

    Raises:
        InputError: it lies there, whatever links lead to it.
    """
    place, top = at(path).parent.resolve() / path.name, at(root).resolve()
    if place.storage == top.storage and f"{place.key}/".startswith(f"{top.key}/"):
        raise InputError(
            f"{path}: expected a place outside of the checkpoint root {root}, where a manager "
            "keeps its steps, found one in it. Give another path."
        )


def why_no_step(directory: AnyPath) -> str:
    """The reason why no step lies in a directory with a step's name, in words about it."""
    if marks.is_part(directory):
        return "lacks its state: a deletion or a copy was cut off (adacheck cp copies whole steps)"
    return "holds no step saved by AdaCheckHandler"


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

    @property
    def folder(self) -> AnyPath | None:
        """The step's directory, with all its items; None if it has none of its own."""
        if not self.is_own:
            return None
        return self.directory.parent if roots.place_of(self.directory).line[1] else self.directory


class RecordedSteps:
    """The recorded steps of a run: saved, deferred, or held by a later step's directory.

    Attributes:
        root: the checkpoint root.
        steps: the recorded steps, by ascending number.
        damaged: the error of each step whose own directory cannot be restored, by number. A later
            step's directory may hold it all the same.

    Raises:
        InputError: there is no step or no such item, or a step holds several items.
    """

    def __init__(self, root: Root, item: str | None = None) -> None:
        self._saved = walked(root)
        self.root, saved = self._saved.root, self._saved.of(item)
        named = {(step.step, step.directory.name) for step in saved if step.step >= 0}
        if item is None and len({number for number, _ in named}) < len(named):
            items = ", ".join(sorted({name for _, name in named}))
            raise InputError(
                f"{self.root}: expected one item a step, found {items}. Name one with --item."
            )
        self.damaged = {step.step: step.error for step in saved if step.error is not None}
        own = dict[int, RecordedStep]()
        for step in saved:
            if step.lineage is None:
                continue
            if step.step in own and roots.misplaced(step.directory, step.lineage.manifest):
                continue  # a copy under another number
            own[step.step] = RecordedStep(step.step, step.directory, step.lineage, True)
        # Of several steps that hold one the newest is deleted last.
        holders = {number: each for each in own.values() for number in each.lineage.steps}
        self.steps = {
            number: own.get(number)
            or RecordedStep(number, each.directory, each.lineage.to(number), False)
            for number, each in sorted(holders.items())
        }

    def find(self, wanted: int | None) -> RecordedStep:
        """The recorded step that a caller means.

        Raises:
            InputError: it is not recorded, or stock Orbax saved it.
            AdaCheckError: it is damaged, and no later step's directory holds it.
        """
        number = numbered([*self.steps, *self.damaged], wanted, self.root)
        if number in self.steps:
            return self.steps[number]
        raise self.damaged.get(number) or self._saved.lacks(number, self.steps)


def numbered(numbers: Iterable[int], wanted: int | None, root: AnyPath) -> int:
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
    return deletion.detected(directory, AdaCheckError, OSError, ValueError)
