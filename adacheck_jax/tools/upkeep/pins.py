"""Pins: steps that no retention deletes, hard-linked under ``pinned`` in the checkpoint root.

A pin is a second name of the step's files, and takes no bytes. No manager takes ``ROOT/pinned`` for
a step, and every tool takes it for a root.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from adacheck_jax.store.steps import identity, lookup
from adacheck_jax.store.steps.roots import PINNED, TMP_SUFFIX, Step
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools import verification
from adacheck_jax.tools.steps import InputError, pinned, selected, undeleted


@dataclass(frozen=True, slots=True)
class PinReport:
    """The output of ``adacheck pin``.

    Attributes:
        root: the checkpoint root.
        step: number of the step that was pinned, or is not any more.
        is_pinned: True if it is pinned now.
        was_pinned: True if it was before.
        pinned: numbers of all pinned steps now, ascending.
    """

    root: str
    step: int
    is_pinned: bool
    was_pinned: bool
    pinned: tuple[int, ...]


def pin(root: AnyPath, number: int | None, item: str | None = None) -> PinReport:
    """Keep a step from every retention: link its files under ``ROOT/pinned``.

    Args:
        root: the directory given to the checkpoint manager.
        number: step number; None for the newest step; below zero a place counted from it.
        item: name of the item directory, needed if a step holds several; all items are pinned.

    Raises:
        InputError: there is no such step, its files changed meanwhile, or the file system has no
            hard links.
        AdaCheckError: the step cannot be restored.
    """
    top = _on_file_system(root)
    step = selected(top, number, item)
    if step.error is not None:
        raise step.error
    with undeleted(step.directory):
        return _pinned(root, top, step)


def _pinned(root: AnyPath, top: Location, step: Step) -> PinReport:
    own = _step_directory(top, step.directory)
    others = {at(each.holder).key for each in lookup.resolve(step.directory).entries}
    if others != {at(step.directory).key}:
        shown = ", ".join(sorted(others - {at(step.directory).key}))
        raise InputError(
            f"{own}: expected a step that is complete in itself, found that it refers to {shown}, "
            "since it was saved without hard links. Copy it with adacheck cp."
        )
    place = top / PINNED / own.name
    was_pinned = place.is_folder
    if not was_pinned:
        _link(own, place, step.directory)
    return PinReport(str(root), step.step, True, was_pinned, pinned(root))


def unpin(root: AnyPath, number: int | None) -> PinReport:
    """Let go of a pinned step; where retention deleted its own directory, it is gone then.

    Args:
        root: the directory given to the checkpoint manager.
        number: number of a pinned step; None for the newest of these.

    Raises:
        InputError: no such step is pinned.
    """
    place = _on_file_system(root) / PINNED
    if not place.is_folder:
        raise InputError(f"{root}: expected pinned steps, found none.")
    step = selected(place, number, None)
    own = _step_directory(place, step.directory)
    gone = own.with_name(_temporary(own.name))
    own.move(gone)  # ended midway, nothing takes the rest for a step
    gone.delete()
    if not place.folders():
        place.delete()
    return PinReport(str(root), step.step, False, True, pinned(root))


def _on_file_system(root: AnyPath) -> Location:
    if not at(root).on_file_system:
        raise InputError(
            f"{root}: expected a directory, found a URL: in a bucket nothing is linked. Keep the "
            "step by a preservation policy, or by the bucket's own retention."
        )
    return at(root).absolute()


def _step_directory(root: Location, item: AnyPath) -> Location:
    return root / at(item).below(root).partition("/")[0]


def _temporary(name: str) -> str:
    return f"{name}{TMP_SUFFIX}-{uuid.uuid4().hex}"


def _link(source: Location, target: Location, item: AnyPath) -> None:
    """Give all files of a step a second name; all of them, or none.

    Raises:
        InputError: the file system has no hard links, or the files changed meanwhile.
        AdaCheckError: a file of the item is not there.
    """
    source.check_plain()
    work = target.with_name(_temporary(target.name))
    try:
        if not work.adopt({each.below(source): each.key for each in source.list()}):
            raise InputError(
                f"{source}: expected a file system with hard links, found that none can be made. "
                "Copy the step with adacheck cp."
            )
        verification.check(item, read_data=False)  # nothing of it was deleted before it was listed
        if identity.of_directory(work) != identity.of_directory(source):
            raise FileNotFoundError
        work.sync(deep=True)
        work.move(target)  # only a whole step has its name
        target.parent.sync()
    except FileNotFoundError as error:
        raise InputError(
            f"{source}: expected files that stay as they are, found that they changed while they "
            "were linked: the step is deleted, or becomes a base. Pin again, or a newer step."
        ) from error
    finally:
        work.delete()
