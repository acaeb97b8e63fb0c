"""Directories that Orbax's threads make while a save begins."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals

from adacheck_jax.errors import AdaCheckError, StorageError, first_line, is_refusal
from adacheck_jax.schemes import SCHEMES, no_answer, scheme_of, shown
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.marks import STEP_METADATA, is_told_by_names
from adacheck_jax.store.steps.roots import Place
from adacheck_jax.store.storage.location import AnyPath, Location, at, expect_client, located

_DIRECTORIES_S = 5.0
"""Longest wait of a refused save for Orbax's directories."""
_DIRECTORY_S = 0.1
"""Longest wait of a save for a directory that Orbax makes without saying when it is there."""
_STEP_METADATA_S = 1.0
"""Longest wait of a save for a file that Orbax is about to write into the step's directory."""
_LOOK_S = 0.001
_LOOK_BY_REQUEST_S = 0.05


async def _nothing() -> None:
    """A write of nothing: its future completes when Orbax's directories exist."""


def _wait_for_directories() -> None:
    with contextlib.suppress(TimeoutError):
        CommitFutureAwaitingContractedSignals(_nothing()).result(_DIRECTORIES_S)


@contextlib.contextmanager
def made_even_if_refused(directory: epath.Path) -> Iterator[None]:
    """Let Orbax's threads finish making directories before a refused save raises.

    They wait for each other for ten minutes if the save raises meanwhile, and the process cannot
    end before. The wait here is bounded: after an error of the disk they never finish. There is
    none where they cannot be made.
    """
    try:
        yield
    except Exception:
        if "://" in str(directory) or not _why_unwritable(Path(str(directory))):
            _wait_for_directories()
        raise


def place_while_saved(directory: AnyPath) -> Place:
    """The line and step of a directory that is being saved.

    Orbax may write a step in place, without a temporary name that tells an item from a step. Then
    the step's metadata file tells, which Orbax writes from its own thread, just after it made the
    directories. Where a handler is called by itself there is none, and the directory may have to be
    made.
    """
    if not roots.is_written_in_place(directory):
        return roots.place_of(directory)
    place = at(directory)
    if not place.on_file_system and is_told_by_names(place):
        return roots.place_of(directory)
    _wait_for_directories()
    if place.on_file_system and not _comes_true(lambda: place.exists, place, _DIRECTORY_S):
        # Nobody but the handler makes it: it was called by itself.
        Path(str(directory)).mkdir(parents=True, exist_ok=True)
        return roots.place_of(directory)
    marks = place / STEP_METADATA, place.parent / STEP_METADATA
    _comes_true(
        lambda: any(each.exists for each in marks) or not place.exists, place, _STEP_METADATA_S
    )
    return roots.place_of(directory)


def _comes_true(condition: Callable[[], bool], place: Location, most_s: float) -> bool:
    """Wait for what Orbax does to a directory from another thread; False if it does not."""
    until_s = time.monotonic() + most_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S if place.on_file_system else _LOOK_BY_REQUEST_S)
    return True


def root_path(root: AnyPath | str) -> epath.Path:
    """A root as Orbax takes it: absolute, ``~`` being the user's home, or a URL.

    Raises:
        StorageError: a URL of another kind, or one that a ``pathlib.Path`` has mangled; a path that
            is read otherwise in some places; no directory is, or can be, there; or the package is
            missing by which Orbax reaches a store.
        TypeError: it is no path.
        ValueError: it is the directory of a step, in which a run would begin anew.
    """
    if not isinstance(root, str | os.PathLike | Location) or not str(root):
        raise TypeError(
            f"expected a path or a URL as the root, found {root!r}. Nothing was made; give "
            f"checkpoint_manager a directory, or {shown('bucket/name')}."
        )
    text = str(root)
    if "://" not in text:
        text = os.path.expanduser(text)
    place = located(text)
    _refuse_misread(place)
    expect_client(place)
    if at(place).on_file_system and (why := _nearest(Path(str(place)))[1]):
        raise StorageError(
            f"{place}: expected a directory as the root, or nothing yet, but {why}. Nothing was "
            "made or read; give checkpoint_manager another root, or mend this one."
        )
    if at(place).on_file_system and at(place / STEP_METADATA).exists:
        raise ValueError(
            f"{place}: expected the root of steps, found the directory of a step, or another "
            "checkpoint. Nothing was made or read; give the directory that the steps lie in."
        )
    located(at(place).resolve())
    return epath.Path(str(place))


@contextlib.contextmanager
def answering(root: epath.Path) -> Iterator[None]:
    """Names the object store in errors of its client, and what to look after.

    Raises:
        StorageError: in place of them.
    """
    try:
        yield
    except Exception as error:
        is_named = isinstance(error, AdaCheckError) or scheme_of(root) is None
        if is_named or not is_refusal(error):
            raise
        raise StorageError(no_answer(root, first_line(error))) from error


def expect_names(root: epath.Path, step: str, items: Iterable[str]) -> None:
    """Refuse names of items by which no directory in a step can be called.

    Args:
        root: the root.
        step: name of a step, or its beginning.
        items: names of items.

    Raises:
        ValueError: a name is several, or none.
        StorageError: a name has a character that is read otherwise in some places.
    """
    for name in items:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
            raise ValueError(
                f"expected items with names of directories, found {name!r}. Nothing was made; give "
                "the item a name without a slash."
            )
        located(f"{root}/{step}/{name}")


def needs_commit_file(root: epath.Path) -> bool:
    """True if Orbax has to be told that nothing can be renamed there."""
    return (scheme := scheme_of(root)) is not None and not scheme.orbax_knows


def _refuse_misread(path: AnyPath) -> None:
    """Refuse a local path that was meant to be another."""
    found = {"~", *(f"{each}:" for each in SCHEMES)}.intersection(str(path).split("/"))
    if found and at(path).on_file_system:
        raise StorageError(
            f"{path}: expected a local path, found {found.pop()!r} in it. Nothing was saved; give "
            "URLs as texts, since a pathlib.Path takes a slash away, and write "
            "os.path.expanduser(...) for the home directory."
        )


def check_writable(directory: AnyPath) -> None:
    """Refuse a step directory that cannot be made, or not be committed.

    Raises:
        StorageError: the nearest existing parent is a file or cannot be written; or Orbax would
            rename a directory of an object store, which has none.
    """
    final = roots.committed_path(directory)
    if not at(directory).on_file_system:
        if roots.is_written_in_place(directory):
            return
        raise StorageError(
            f"{final}: expected a step that Orbax writes in place, found one under a temporary "
            "name, which an object store cannot rename at once. No release of Orbax up to "
            f"{importlib.metadata.version('orbax-checkpoint')} knows that of this kind by itself. "
            "Nothing was saved; give the manager the option "
            "atomicity_options=ocp.options.AtomicityOptions("
            "mode=ocp.options.AtomicityMode.COMMIT_FILE)."
        )
    _refuse_misread(final)
    if why := _why_unwritable(final):
        raise StorageError(
            f"{final}: expected a directory that can be written, but {why}. Nothing was saved; "
            "give the manager another root, or mend the disk or its permissions."
        )


def _why_unwritable(directory: AnyPath) -> str:
    """Why a directory cannot be made on a disk; empty if it can, by what its permissions say."""
    existing, why = _nearest(Path(str(roots.committed_path(directory))).parent)
    if why or os.access(existing, os.W_OK | os.X_OK):
        return why
    is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
    return f"{existing} is not writable" + (": its disk is read-only" if is_read_only else "")


def _nearest(path: Path) -> tuple[Path, str]:
    """The first of a path and its parents that exists, and why it is no directory; empty if it is.

    A link that leads nowhere exists: nothing can be made in its place.
    """
    while not (path.exists() or path.is_symlink()):
        path = path.parent
    if path.is_dir():
        return path, ""
    led = f"a link to {os.readlink(path)}, where nothing is" if not path.exists() else "a file"
    return path, f"{path} is {led}"
