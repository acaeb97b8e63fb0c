"""The place of an export: written under a temporary name, durable, and renamed last."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from adacheck_jax.tools.steps import InputError


def checked(text: str, root: AnyPath | None) -> Path:
    """The destination that a user names, if something can be written there.

    Raises:
        InputError: it exists, lies under the root, has no parent, or is a URL.
    """
    if "://" in text:
        raise InputError(
            f"{text}: expected a local path, found a URL. Export to a local path, and copy that."
        )
    path = Path(str(located(os.path.abspath(text))))
    if os.path.lexists(path):
        raise InputError(f"{path}: expected nothing there, found something. Give another path.")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    if root is not None and not isinstance(root, Location):
        place, top = path.parent.resolve() / path.name, root.resolve()
        if place == top or top in place.parents:
            raise InputError(
                f"{path}: expected a place outside of the checkpoint root {root}, where a manager "
                "would take it for a step, found one in it. Give another path."
            )
    return path


@contextlib.contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A path beside a destination to write to; it becomes the destination if nothing fails.

    Waits for another process that writes the same destination. What a killed one left is removed.

    Yields:
        A path of the same name in a directory of its own, which a failure takes with it.

    Raises:
        InputError: there is something at the destination when its turn comes, or at the end.
    """
    work = path.with_name(f".{path.name}.adacheck-export")
    with at(path.with_name(f"{work.name}-lock")).lock():
        _refuse_taken(path)
        if work.exists():  # of a process that is gone, since the lock is held
            shutil.rmtree(work)
        work.mkdir(mode=0o700)
        try:
            made = work / path.name
            yield made
            at(made).sync(*at(made).list(), deep=True)
            # Last: only a whole export has the name that was asked for.
            _refuse_taken(path)
            made.rename(path)
            at(path.parent).sync()
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _refuse_taken(path: Path) -> None:
    if os.path.lexists(path):
        raise InputError(f"{path}: expected nothing there, found that something was put there.")
