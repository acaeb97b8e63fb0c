"""Checkpoint roots: their steps, and the meaning of paths under a root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.manifest import Manifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.folders import BASE, DELTA, KEPT, LINEAGE
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.lookup import resolve
from adacheck_jax.store.steps.marks import (
    COMMIT_MARK,
    IN_PLACE,
    TREE_METADATA,
    is_committed,
    is_item,
    is_told_by_names,
)
from adacheck_jax.store.storage.location import AnyPath, Location, at

TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""Part of the names that Orbax gives to directories that are not committed."""
PROBE_PREFIX = ".adacheck-"
"""Beginning of the names of files and directories that exist for a while beside the steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step directory as it lies under a root.

    Attributes:
        step: step number, by the manifest or else by the path; -1 if neither tells it.
        directory: item directory.
        manifest: its manifest, None if it cannot be read.
        lineage: base and deltas that it is restored from, None if there is an error.
        error: the reason why it cannot be restored, None if its lineage resolves.
    """

    step: int
    directory: AnyPath
    manifest: Manifest | None
    lineage: Lineage | None
    error: AdaCheckError | None


def items_of(root: AnyPath, *, committed: bool = True) -> list[AnyPath]:
    """Item directories of ours under a checkpoint root, in no particular order.

    Steps that a manager deletes meanwhile are left out.

    Args:
        root: the root.
        committed: False for those whose save was interrupted or is under way instead, though they
            are named as committed.
    """
    found = [path for places in _places(root) for path in places if is_ours(path)]
    return [path for path in found if is_committed(path) == committed]


def _places(root: AnyPath) -> Iterator[list[AnyPath]]:
    """Committed directories under a root, each followed by those in it, which may be items."""
    for step in _directories(root if at(root).on_file_system else at(root).listed()):
        yield [step, *_directories(step)]


def is_ours(path: AnyPath) -> bool:
    """True if a directory holds our folder; an item may have our folder's name."""
    traces = (manifest_file.FILE, LINEAGE, BASE, KEPT, IN_PLACE)
    return any(at(path / name).exists for name in traces) or any(
        each.name.startswith(("update.", f"{DELTA}."))
        for each in at(path / manifest_file.DIRECTORY).list(deep=False)
    )


def _directories(parent: AnyPath) -> list[AnyPath]:
    """Committed directories in another one; none if it does not exist (any more)."""
    return [parent / name for name in at(parent).folders() if TMP_SUFFIX not in name]


def steps_of(root: AnyPath, item: str | None = None) -> list[Step]:
    """Steps under a root, of one item or of all, with the errors that keep them from a restore."""
    steps = []
    read = manifest_file.remembering()
    for directory in items_of(root):
        if item is not None and directory.name != item:
            continue
        manifest: Manifest | None = None
        lineage: Lineage | None = None
        error: AdaCheckError | None = None
        try:
            manifest = read(directory / manifest_file.FILE)
            lineage = resolve(directory, read)
        except AdaCheckError as refused:
            error = refused
            if not at(directory).is_folder:
                continue  # deleted while it was looked at
        number = manifest.step if manifest else place_of(directory).step
        number = -1 if number is None else number
        steps.append(Step(number, directory, manifest, lineage, error))
    return sorted(steps, key=lambda step: (step.step, str(step.directory)))


def holder_of(step: int, root: AnyPath, item: str | None = None) -> int | None:
    """The step under a root that can be restored and holds a step: itself, or recorded before it.

    None if there is none.
    """
    for each in steps_of(root, item):
        if each.lineage is not None and step in each.lineage.manifest.steps:
            return each.step
    return None


Line = tuple[AnyPath, str | None]
"""Root and, under a checkpoint manager, name of the item in each step."""


@dataclass(frozen=True, slots=True)
class Place:
    """Root, item name and step number of an item directory.

    Attributes:
        line: what the steps of one training run share.
        step: number in the name of the step's directory, None if it has none.
    """

    line: Line
    step: int | None


def place_of(item_directory: AnyPath, *, in_step: bool | None = None) -> Place:
    """Place of an item directory, which may be temporary or not exist yet.

    Args:
        item_directory: the directory.
        in_step: True if it is known to be one of several items of a step, False if it is known to
            be the step's own; None to look.
    """
    step = item_directory.parent
    if in_step is None:
        in_step = TMP_SUFFIX in step.name or is_item(item_directory)
    if in_step:
        line = step.parent, _committed(item_directory.name)
        return Place(line, _number_in(_committed(step.name)))
    return Place((step, None), _number_in(_committed(item_directory.name)))


def place_of_lost(item_directory: AnyPath) -> Place:
    """Place of a directory of which nothing may be left that tells an item from a step."""
    step = item_directory.parent
    is_numbered = _number_in(step.name) is not None and is_told_by_names(item_directory)
    in_step = is_item(item_directory) or is_numbered or not at(step).is_folder
    return place_of(item_directory, in_step=in_step)


def beside(item_directory: AnyPath, what: str) -> Location:
    """A path under a step's root, with a temporary name: it is told for no step, but a leftover."""
    (root, item), final = place_of(item_directory).line, committed_path(item_directory)
    name = final.name if item is None else f"{final.parent.name}.{final.name}"
    return at(root) / f"{PROBE_PREFIX}{name}.{what}{TMP_SUFFIX}"


def is_written_in_place(item_directory: AnyPath) -> bool:
    """True if a directory that is being saved into keeps its name when it is committed."""
    return not any(TMP_SUFFIX in each.name for each in (item_directory, item_directory.parent))


def committed_path(directory: AnyPath) -> AnyPath:
    """Path of a directory, temporary or not, once Orbax has committed it."""
    parent = directory.parent
    return directory if parent == directory else committed_path(parent) / _committed(directory.name)


def _committed(name: str) -> str:
    return name.split(TMP_SUFFIX, maxsplit=1)[0]


def _number_in(name: str) -> int | None:
    digits = name.rsplit("_", maxsplit=1)[-1]
    return int(digits) if digits.removeprefix("-").isdecimal() else None


def misplaced(item_directory: AnyPath, manifest: Manifest) -> str:
    """Warning that a step was saved in a directory of another number; else empty."""
    found, saved = place_of(item_directory).step, manifest.directory_step
    if found is None or saved is None or found == saved:
        return ""
    return f"expected what was saved as step {found}, found what was saved as step {saved}"


def is_stock(directory: AnyPath) -> bool:
    """True for a pytree that Orbax's own handlers wrote, such as weights to begin with."""
    return not _has_our_folder(directory) and at(directory / TREE_METADATA).exists


def stock_steps(root: AnyPath, item: str | None = None) -> dict[int, list[AnyPath]]:
    """Item directories of the steps under a root that stock Orbax saved, by step number.

    A step that holds an item of ours is not among them: a data iterator beside it is no state.
    """
    found: dict[int, list[AnyPath]] = {}
    for places in _places(root):
        step, number = at(places[0]), place_of(places[0], in_step=False).step
        if number is None or not (step.on_file_system or (step / COMMIT_MARK).exists):
            continue
        if any(map(_has_our_folder, places)):
            continue
        stock = [path for path in places if is_stock(path)]
        if named := [path for path in stock if item in (None, path.name)]:
            found[number] = named
    return found


def _has_our_folder(directory: AnyPath) -> bool:
    return at(directory / manifest_file.DIRECTORY).exists
