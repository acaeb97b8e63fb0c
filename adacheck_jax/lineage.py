"""A base and the deltas that follow it: find them, keep them together, preserve them.

Where the file system has hard links, a delta's directory holds links to every file of its base and
of the deltas before it, under ``adacheck/lineage/<step>/``: each step is complete in itself, so
that no retention policy, deletion or move of another step can break it. Where it has none, a delta
refers to its parent by a relative path and :class:`KeepLineage` keeps that parent alive.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adacheck_jax import manifest as manifests
from adacheck_jax.errors import AdaCheckError, IntegrityError, LineageError
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Manifest

LINEAGE = f"{manifests.DIRECTORY}/lineage"
DELTA = f"{manifests.DIRECTORY}/delta"
TMP_SUFFIX = ".orbax-checkpoint-tmp"


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a lineage: its manifest, and the directory that its files are read from."""

    manifest: Manifest
    directory: Path


@dataclass(frozen=True, slots=True)
class Lineage:
    """What one step is restored from: the base first, the step itself last."""

    entries: tuple[Entry, ...]

    @property
    def base(self) -> BaseManifest:
        """The base's manifest."""
        first = self.entries[0].manifest
        assert isinstance(first, BaseManifest)
        return first

    @property
    def base_directory(self) -> Path:
        """The stock Orbax checkpoint to start from."""
        return self.entries[0].directory

    @property
    def deltas(self) -> list[tuple[DeltaManifest, Path]]:
        """The deltas after the base, oldest first."""
        return [
            (entry.manifest, entry.directory)
            for entry in self.entries
            if isinstance(entry.manifest, DeltaManifest)
        ]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the step itself."""
        return self.entries[-1].manifest

    def exists(self) -> bool:
        """Whether every step is still on disk."""
        return all((entry.directory / manifests.FILE).is_file() for entry in self.entries)

    def followed_by(self, manifest: DeltaManifest, directory: Path, *, linked: bool) -> Lineage:
        """The lineage of the next delta, whose directory may hold links to all of this one."""
        entries = self.entries
        if linked:
            entries = tuple(
                Entry(e.manifest, directory / LINEAGE / str(e.manifest.step)) for e in entries
            )
        return Lineage((*entries, Entry(manifest, directory)))


def resolve(item_directory: Path) -> Lineage:
    """Finds the base and the deltas that reproduce one step, and checks every link.

    Args:
        item_directory: the step's item directory.

    Raises:
        FormatError: a manifest is missing or cannot be read.
        IntegrityError: a manifest does not match its checksum.
        LineageError: a step that this one builds on is missing, or is not the one it was.
    """
    entry = Entry(manifests.read(item_directory), item_directory)
    entries = [entry]
    holders = [item_directory]
    while isinstance(entry.manifest, DeltaManifest):
        child = entry.manifest
        directory, is_own_copy = _find(child, entry.directory, holders)
        parent = manifests.read(directory)
        if parent.checksum != child.parent.checksum or parent.step != child.parent.step:
            raise LineageError(
                f"{directory}: step {child.step} builds on step {child.parent.step} with manifest "
                f"{child.parent.checksum[:12]}, found step {parent.step} with manifest "
                f"{parent.checksum[:12]}. The step was saved again or replaced; restore a base "
                "step, or a step saved after the replacement."
            )
        depth = 0 if isinstance(parent, BaseManifest) else parent.depth
        if child.depth != depth + 1:
            raise IntegrityError(
                f"{entry.directory}: expected delta number {depth + 1} of its lineage, found "
                f"{child.depth}. Restore another step."
            )
        entry = Entry(parent, directory)
        entries.append(entry)
        if not is_own_copy:
            holders.append(directory)
    return Lineage(tuple(reversed(entries)))


def follow(known: Lineage | None, item_directory: Path) -> Lineage:
    """As :func:`resolve`, reading one manifest where the parent's lineage is known already."""
    manifest = manifests.read(item_directory)
    if (
        isinstance(manifest, DeltaManifest)
        and known is not None
        and manifest.parent.checksum == known.manifest.checksum
    ):
        linked = (item_directory / LINEAGE).is_dir()
        return known.followed_by(manifest, item_directory, linked=linked)
    if known is not None and manifest.checksum == known.manifest.checksum:
        return known
    return resolve(item_directory)


def _find(
    child: DeltaManifest, child_directory: Path, holders: Sequence[Path]
) -> tuple[Path, bool]:
    """The directory of the child's parent, and whether it is a linked copy of it."""
    for holder in holders:
        linked = holder / LINEAGE / str(child.parent.step)
        if linked.is_dir():
            return linked, True
    referenced = child_directory / child.parent.reference
    if _is_reference(child.parent.reference) and referenced.is_dir():
        return referenced.resolve(), False
    raise LineageError(
        f"{child_directory}: step {child.step} builds on step {child.parent.step}, expected at "
        f"{holders[0] / LINEAGE / str(child.parent.step)} or {referenced}, found at neither."
    )


def reference(from_directory: Path, to_directory: Path) -> str | None:
    """Relative path from one step's item directory to another's, None if they are not siblings."""
    relative = os.path.relpath(to_directory, from_directory)
    return relative if _is_reference(relative) else None


def _is_reference(relative: str) -> bool:
    """Whether a path names a sibling (``../other``) or a sibling's item (``../../5/state``)."""
    parts = Path(relative).parts
    names = [part for part in parts if part != ".."]
    ups = len(parts) - len(names)
    return ups == len(names) <= 2 and parts[:ups] == ("..",) * ups and ups > 0


def can_link(directory: Path) -> bool:
    """Whether the file system of an existing directory has hard links."""
    with tempfile.TemporaryDirectory(prefix=".adacheck-", dir=directory) as name:
        probe = Path(name) / "probe"
        probe.touch()
        try:
            os.link(probe, probe.with_name("link"))
        except OSError:
            return False
    return True


def link_ancestors(lineage: Lineage, item_directory: Path) -> None:
    """Hard-links every file of a lineage into the directory of the step that follows it.

    Args:
        lineage: of the parent.
        item_directory: of the new delta.

    Raises:
        OSError: a link cannot be made.
    """
    for entry in lineage.entries:
        target = item_directory / LINEAGE / str(entry.manifest.step)
        _link_tree(entry.directory, target, skip=entry.directory / LINEAGE)


def _link_tree(source: Path, target: Path, skip: Path) -> None:
    target.mkdir(parents=True)
    with os.scandir(source) as found:
        for each in found:
            path = Path(each.path)
            if path == skip:
                continue
            if each.is_dir(follow_symlinks=False):
                _link_tree(path, target / each.name, skip)
            else:
                os.link(path, target / each.name, follow_symlinks=False)


@dataclass(frozen=True, slots=True)
class Step:
    """One step directory as it lies under a root.

    Attributes:
        step: step number; None where no manifest tells it.
        directory: item directory.
        manifest: its manifest, None where it cannot be read.
        error: why it cannot be restored, None if its lineage resolves.
    """

    step: int
    directory: Path
    manifest: Manifest | None
    error: AdaCheckError | None


def items_of(root: Path) -> list[Path]:
    """Item directories of ours under a checkpoint root, in no particular order.

    A manager may be deleting steps meanwhile: what vanishes is left out.
    """
    found = []
    for step_directory in _directories(root):
        candidates = [step_directory, *_directories(step_directory)]
        found += [path for path in candidates if (path / manifests.DIRECTORY).is_dir()]
    return found


def _directories(parent: Path) -> list[Path]:
    """The committed directories in another one; none where it does not exist (any more)."""
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    paths = [parent / name for name in names if TMP_SUFFIX not in name]
    return [path for path in paths if path.is_dir()]


def steps_of(root: Path, item: str | None = None) -> list[Step]:
    """The steps under a checkpoint root, ascending, with what keeps each from being restored.

    Args:
        root: the directory given to the checkpoint manager.
        item: name of the item directory, None for any.
    """
    steps = []
    for directory in items_of(root):
        if item is not None and directory.name != item:
            continue
        try:
            manifest: Manifest | None = manifests.read(directory)
            error: AdaCheckError | None = None
        except AdaCheckError as unreadable:
            manifest, error = None, unreadable
        if isinstance(manifest, DeltaManifest):
            error = _resolve_error(directory)
        if error is not None and not directory.is_dir():
            continue  # deleted while it was looked at
        number = manifest.step if manifest else step_number(directory)
        steps.append(Step(-1 if number is None else number, directory, manifest, error))
    return sorted(steps, key=lambda step: (step.step, step.directory))


def siblings(item_directory: Path) -> list[Step]:
    """The steps that lie beside an item directory, under a manager's root or on their own."""
    managed = steps_of(item_directory.parent.parent, item_directory.name)
    return managed or steps_of(item_directory.parent)


def _resolve_error(directory: Path) -> AdaCheckError | None:
    try:
        resolve(directory)
    except AdaCheckError as error:
        return error
    return None


def step_number(item_directory: Path) -> int | None:
    """The step number in the name of an item directory or of its parent, None if there is none."""
    for name in (item_directory.parent.name, item_directory.name):
        digits = name.split(TMP_SUFFIX)[0].rsplit("_", maxsplit=1)[-1]
        if digits.isdecimal():
            return int(digits)
    return None


class _Checkpoint(Protocol):
    step: int


class _Policy(Protocol):
    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]: ...


class KeepLineage:
    """An Orbax preservation policy that keeps the ancestors of whatever another policy keeps.

    Needed only where the file system has no hard links, so that a delta refers to other steps.
    Give the same object to the manager and to the handler::

        keep = adacheck.KeepLineage(LatestN(3))
        handler = adacheck.AdaCheckHandler(recorder, keep_lineage=keep)
        options = ocp.CheckpointManagerOptions(preservation_policy=keep)

    Args:
        inner_policy: decides which steps to keep for their own sake.
    """

    def __init__(self, inner_policy: _Policy) -> None:
        self._inner = inner_policy
        self._parents: dict[int, int] = {}

    def note(self, step: int, parent: int | None) -> None:
        """Learns that a step builds on another, or (None) on none; called by the handler."""
        if parent is None:
            self._parents.pop(step, None)
        else:
            self._parents[step] = parent

    def should_preserve(
        self, checkpoints: Sequence[_Checkpoint], *, context: Any
    ) -> Sequence[bool]:
        """Keeps what the inner policy keeps, and every step that those build on."""
        inner = self._inner.should_preserve(checkpoints, context=context)
        kept = {c.step for c, keep in zip(checkpoints, inner, strict=True) if keep}
        waiting = list(kept)
        while waiting:
            parent = self._parents.get(waiting.pop())
            if parent is not None and parent not in kept:
                kept.add(parent)
                waiting.append(parent)
        return [checkpoint.step in kept for checkpoint in checkpoints]
