"""The way from a step to its base: lineages, looked up in a storage, with every parent checked.

A step without links in its directory names the one that it builds on by a *reference*: a relative
path to a sibling, which its manifest holds.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    StorageError,
)
from adacheck_jax.format.manifest import DeltaManifest, Manifest
from adacheck_jax.store.steps import manifest_file, marks
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.interface import NotPlainError
from adacheck_jax.store.storage.location import AnyPath, Location, at

ReadManifest = Callable[[AnyPath], Manifest]
"""Reads a manifest from its own path."""


def resolve(item_directory: AnyPath, read: ReadManifest = manifest_file.read_file) -> Lineage:
    """Finds the base and the deltas that reproduce one step, and checks every parent.

    Raises:
        FormatError: a manifest is missing or cannot be read.
        IntegrityError: a manifest does not match its checksum.
        LineageError: a step of the lineage is missing, was replaced, or was not committed by
            Orbax.
    """
    try:
        return _looked_up(item_directory, read)
    except (LineageError, FormatError, IntegrityError):
        if not at(item_directory).on_file_system:
            raise
        # A step may have become a base, and lost its links, while the lineage was followed.
        return _looked_up(item_directory, read)


def follow(known: Sequence[Lineage], item_directory: AnyPath) -> Lineage:
    """Resolves a step as :func:`resolve` does, but reads one manifest if its lineage is known."""
    marks.refuse_uncommitted(item_directory)
    read = manifest_file.remembering()
    manifest = read(item_directory / manifest_file.FILE)
    for each in known:
        if manifest.checksum == each.manifest.checksum:
            return each
        if (
            isinstance(manifest, DeltaManifest)
            and manifest.parent.checksum == each.manifest.saved_checksum
        ):
            linked = _is_complete(item_directory)
            return each.followed_by(manifest, item_directory, linked=linked)
    return resolve(item_directory, read)


def held(item_directory: AnyPath) -> Lineage:
    """The longest lineage in the directory of a step, which may be damaged.

    Returns:
        The lineage of the step itself, if its manifests are whole; else of the newest step linked
        into its directory whose manifests are whole.

    Raises:
        AdaCheckError: there is none; the error is that of :func:`resolve` for the step itself.
    """
    item_directory = _for_many_looks(item_directory)
    try:
        return resolve(item_directory)
    except StorageError:
        raise
    except AdaCheckError as error:
        at(item_directory).check_plain()
        for entry in _linked(item_directory):
            with contextlib.suppress(LineageError, IntegrityError, FormatError):
                return _resolved(entry)
        raise error


def linked_manifests(item_directory: AnyPath) -> Iterator[Location]:
    """Manifests of earlier steps that are linked into the directory of a step."""
    links = at(item_directory / LINEAGE)
    bases = (links / name / manifest_file.FILE for name in links.folders())
    yield from (each for each in bases if each.exists)
    for each in links.list(deep=False):
        if each.name.endswith(f".{manifest_file.NAME}"):
            yield each


def _looked_up(item_directory: AnyPath, read: ReadManifest) -> Lineage:
    item_directory = _for_many_looks(item_directory)
    at(item_directory).check_plain()
    marks.refuse_uncommitted(item_directory)
    manifest = read(item_directory / manifest_file.FILE)
    return _resolved(LineageStep(manifest, item_directory), read)


def _for_many_looks(item_directory: AnyPath) -> AnyPath:
    """An item directory in a store, in a view of its root."""
    if at(item_directory).on_file_system:
        return item_directory
    root = item_directory.parent.parent if marks.is_item(item_directory) else item_directory.parent
    return Location(at(root).listed().storage, at(item_directory).key)


def _linked(item_directory: AnyPath) -> Iterator[LineageStep]:
    """Steps linked into a directory whose own manifests are whole, newest first."""
    found = {}
    for path in linked_manifests(item_directory):
        name = path.below(at(item_directory / LINEAGE)).partition("/")[0].partition(".")[0]
        if name.isdecimal():
            found[int(name)] = path
    for step, path in sorted(found.items(), key=lambda each: each[0], reverse=True):
        with contextlib.suppress(IntegrityError, FormatError):
            manifest = manifest_file.read_file(path)
            if manifest.step == step:
                yield LineageStep(manifest, item_directory, is_link=True)


def _resolved(entry: LineageStep, read: ReadManifest = manifest_file.read_file) -> Lineage:
    """Follows a step's parents to its base."""
    entries = [entry]
    holders = [entry.holder]
    while isinstance(entry.manifest, DeltaManifest):
        child = entry.manifest
        found = _find(child, entry, holders, read)
        parent = found.manifest
        if parent.saved_checksum != child.parent.checksum or parent.step != child.parent.step:
            raise LineageError(
                f"{found.place}: step {child.step} builds on step {child.parent.step} with "
                f"manifest {child.parent.checksum[:12]}, found step {parent.step} with manifest "
                f"{parent.saved_checksum[:12]}. The step was saved again or replaced; restore a "
                "base step, or a step saved after the replacement."
            )
        depth = parent.depth + len(child.deltas)
        if child.depth != depth:
            raise IntegrityError(
                f"{entry.place}: expected delta number {depth} of its line, found "
                f"{child.depth}. Restore another step."
            )
        entry = found
        entries.append(entry)
        if not entry.is_link:
            # A directory with links has links to the whole lineage: the first and the last suffice.
            holders[1:] = [entry.holder]
    found = entries[-1:]
    for each in entries[-2::-1]:
        found.append(each.behind(found[-1]))
    return Lineage(tuple(found))


def _find(
    child: DeltaManifest, entry: LineageStep, holders: Sequence[AnyPath], read: ReadManifest
) -> LineageStep:
    """The parent of a delta."""
    parent = child.parent
    for holder in holders:
        linked = at(holder) / LINEAGE / str(parent.step)
        if linked.is_folder:
            manifest = read(linked / manifest_file.FILE)
            return LineageStep(manifest, holder, is_link=True)
        path = linked.with_name(f"{parent.step}.{manifest_file.NAME}")
        if path.exists:
            return LineageStep(read(path), holder, is_link=True)
    places: list[AnyPath] = [holders[0] / LINEAGE / f"{parent.step}[.{manifest_file.NAME}]"]
    # References are alike in all steps of a root.
    if not _is_complete(entry.holder):
        places.append(entry.holder / parent.reference)
        if found := _found(entry.holder, parent.reference):
            marks.refuse_uncommitted(found)
            return LineageStep(read(found / manifest_file.FILE), found)
    raise LineageError(
        f"{entry.place}: step {child.step} builds on step {parent.step}, expected at "
        f"{' or '.join(map(str, places))}, found nothing there."
    )


def _is_complete(directory: AnyPath) -> bool:
    """True if a directory has links to all that its step builds on.

    What lies there in a store was copied from a disk: files of those steps that the copy lacks.
    """
    links = at(directory / LINEAGE)
    return links.on_file_system and links.is_folder


def reference(from_directory: AnyPath, to_directory: AnyPath) -> str | None:
    """Relative path from one step's item directory to another's; None if they are not siblings."""
    relative = posixpath.relpath(str(to_directory), str(from_directory))
    return relative if _is_reference(relative) else None


def referred(directory: AnyPath, relative: str) -> AnyPath:
    """The directory that a reference names, without a look at it."""
    names = _names(relative)
    for _ in names:  # as many as steps up
        directory = directory.parent
    for name in names:
        directory = directory / name
    return directory


def _found(directory: AnyPath, relative: str) -> AnyPath | None:
    """The directory that a text from a manifest names, if it is a reference to something."""
    if not _is_reference(relative):
        return None
    path = referred(directory.resolve(), relative)
    for each in (path.parent, path)[-len(_names(relative)) :]:
        if each.resolve() != each:
            raise NotPlainError(str(each), "a symbolic link")
    if not at(path).is_folder:
        return None
    at(path).check_plain()
    return path


def _names(relative: str) -> list[str]:
    return [name for name in PurePosixPath(relative).parts if name != ".."]


def _is_reference(relative: str) -> bool:
    """True if a path names a sibling (``../other``) or a sibling's item (``../../5/state``)."""
    parts = PurePosixPath(relative).parts
    count = len(_names(relative))
    ups = len(parts) - count
    is_sibling = ups == count <= 2 and parts[:ups] == ("..",) * ups and ups > 0
    return is_sibling and "\0" not in relative  # which no system takes for a path
