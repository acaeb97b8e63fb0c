"""A base and the deltas that follow it: find them, keep them together, preserve them.

Where the file system has hard links, a delta's directory holds links to every file of its base and
of the deltas before it, under ``adacheck/lineage/<step>/``: each step is complete in itself, so
that no retention policy, deletion or move of another step can break it. Where it has none, a delta
refers to its parent by a relative path and :class:`KeepLineage` keeps that parent alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from adacheck_jax import manifest as manifests
from adacheck_jax.errors import AdaCheckError, IntegrityError, LineageError
from adacheck_jax.manifest import BaseManifest, Delta, DeltaManifest, Manifest

LINEAGE = f"{manifests.DIRECTORY}/lineage"
DELTA = f"{manifests.DIRECTORY}/delta"
BASE = f"{manifests.DIRECTORY}/base"
"""What the processes wrote of a base: a volume or two each."""
KEPT = f"{manifests.DIRECTORY}/kept"
"""Hard links to volumes of earlier bases that hold what has not changed since."""
TMP_SUFFIX = ".orbax-checkpoint-tmp"
PROBE_PREFIX = ".adacheck-"
"""Of a directory that exists for a moment, to see whether there are hard links."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a lineage: its manifest, and the directory that its files are read from."""

    manifest: Manifest
    directory: Path


@dataclass(frozen=True, slots=True)
class Lineage:
    """What one step is restored from: the base first, the step itself last.

    Attributes:
        entries: the saved steps.
        left_out: how many deltas at the end of the last one are not part of it: a lineage may end
            at a recorded step (:meth:`to`).
    """

    entries: tuple[Entry, ...]
    left_out: int = 0

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
    def saves(self) -> list[tuple[DeltaManifest, Path]]:
        """The saved steps after the base, oldest first."""
        return [
            (entry.manifest, entry.directory)
            for entry in self.entries
            if isinstance(entry.manifest, DeltaManifest)
        ]

    @property
    def deltas(self) -> list[Delta]:
        """The deltas after the base, of recorded steps too, oldest first."""
        every = [delta for manifest, _ in self.saves for delta in manifest.deltas]
        return every[: len(every) - self.left_out]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the saved step at the end."""
        return self.entries[-1].manifest

    @property
    def end(self) -> BaseManifest | Delta:
        """The step itself, which may be a recorded one."""
        deltas = self.deltas
        return deltas[-1] if deltas else self.base

    @property
    def problem(self) -> str:
        """What speaks against replaying updates onto the step; empty if nothing does."""
        update = self.base.update
        problems = [update.problem if update else "", *(saved.problem for saved, _ in self.saves)]
        return next(filter(None, problems), "")

    @property
    def steps(self) -> list[int]:
        """The numbers of all steps that can be restored from it, ascending."""
        return [self.base.step, *(delta.step for delta in self.deltas)]

    def to(self, step: int) -> Lineage:
        """The part of it that an earlier step is restored from.

        Raises:
            LineageError: it has no such step.
        """
        for count, entry in enumerate(self.entries, start=1):
            manifest = entry.manifest
            steps = [manifest.step]
            if isinstance(manifest, DeltaManifest):
                steps = [delta.step for delta in manifest.deltas]
            if step in steps:
                return Lineage(self.entries[:count], len(steps) - 1 - steps.index(step))
        raise LineageError(
            f"{self.entries[-1].directory}: expected step {step} in what was saved there, found "
            f"the steps {shown_steps(self.steps)}."
        )

    def exists(self) -> bool:
        """Whether every step is still on disk."""
        first, last = self.entries[0], self.entries[-1]
        # What is linked below the last one goes with it: two looks tell as much as one at each.
        linked = first.directory.is_relative_to(last.directory)
        chosen = (first, last) if linked else self.entries
        return all((entry.directory / manifests.FILE).is_file() for entry in chosen)

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
    _refuse_links(item_directory)
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
        depth = parent.depth + len(child.deltas)
        if child.depth != depth:
            raise IntegrityError(
                f"{entry.directory}: expected delta number {depth} of its lineage, found "
                f"{child.depth}. Restore another step."
            )
        entry = Entry(parent, directory)
        entries.append(entry)
        if not is_own_copy:
            # Who holds links holds them to all that he builds on: the first and the last suffice.
            holders[1:] = [directory]
    lineage = Lineage(tuple(reversed(entries)))
    for manifest, directory in lineage.saves:
        if len(manifest.fingerprints) != len(lineage.base.leaves):
            raise IntegrityError(
                f"{directory}: expected a fingerprint for each of {len(lineage.base.leaves)} "
                f"leaves of the base, found {len(manifest.fingerprints)}. Restore another step."
            )
    return lineage


def shown_steps(steps: Sequence[int]) -> str:
    """Step numbers for a message: runs of them as ranges, and of many runs the last ones."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    names = [f"{a} to {b}" if a < b else f"{a}" for a, b in runs]
    return ", ".join(["...", *names[-10:]] if len(names) > 10 else names) or "none"


def _refuse_links(directory: Path) -> None:
    """Refuses symbolic links, pipes and devices anywhere below a step's item directory.

    Nobody writes them there, so that whoever put one there wants something else read. The directory
    itself and those above it may be links: they are the user's.

    Raises:
        FormatError: names the first one found.
    """
    waiting = [os.fspath(directory)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as found:
                for each in found:
                    if each.is_dir(follow_symlinks=False):
                        waiting.append(each.path)
                    elif not each.is_file(follow_symlinks=False):
                        kind = "a symbolic link" if each.is_symlink() else "a pipe or a device"
                        raise manifests.not_plain(Path(each.path), kind)
        except OSError:  # it is not there, or is being deleted: whoever reads it will say so
            continue


def follow(known: Sequence[Lineage], item_directory: Path) -> Lineage:
    """As :func:`resolve`, reading one manifest where the step or its parent is known already."""
    manifest = manifests.read(item_directory)
    for each in known:
        if manifest.checksum == each.manifest.checksum:
            return each
        if (
            isinstance(manifest, DeltaManifest)
            and manifest.parent.checksum == each.manifest.checksum
        ):
            linked = (item_directory / LINEAGE).is_dir()
            return each.followed_by(manifest, item_directory, linked=linked)
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
        return _plain_sibling(child_directory, child.parent.reference), False
    raise LineageError(
        f"{child_directory}: step {child.step} builds on step {child.parent.step}, expected at "
        f"{holders[0] / LINEAGE / str(child.parent.step)} or {referenced}, found at neither."
    )


def _plain_sibling(directory: Path, relative: str) -> Path:
    """The directory that a reference names; neither it nor the step that it is in may be a link.

    Raises:
        FormatError: one of them is a symbolic link, or something in it is.
    """
    parts = Path(relative).parts  # as many names as steps up; see _is_reference
    found = directory.joinpath(*parts[: len(parts) // 2]).resolve()
    for name in parts[len(parts) // 2 :]:
        found /= name
        if found.is_symlink():
            raise manifests.not_plain(found, "a symbolic link")
    _refuse_links(found)
    return found


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


_TROUBLE = {
    *(errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOENT),
    *(errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}
"""Refusals of a hard link that pass; others are of file systems that have none."""


def can_link(directory: Path) -> bool:
    """Whether the file system of an existing directory has hard links.

    Raises:
        OSError: that cannot be told now.
    """
    # A name that Orbax knows, so that what a crash leaves behind is gone when a manager is opened.
    with tempfile.TemporaryDirectory(TMP_SUFFIX, PROBE_PREFIX, directory) as name:
        probe = Path(name) / "probe"
        probe.touch()
        try:
            os.link(probe, probe.with_name("link"))
        except OSError as error:
            if error.errno in _TROUBLE:
                raise
            return False
    return True


def files_of(item_directory: Path, step: int) -> frozenset[str]:
    """Every file of a step, and of what is linked into it, as links to it will be named.

    Args:
        item_directory: of a step that is whole: just committed, or just restored.
        step: its number.
    """
    found = []
    waiting = [(os.fspath(item_directory), str(step))]
    linked = os.fspath(item_directory / LINEAGE)
    while waiting:
        directory, name = waiting.pop()
        # What is being deleted meanwhile is not there: whoever needs it will say so.
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
            for each in entries:
                own = f"{name}/{each.name}" if name else each.name
                if not each.is_dir(follow_symlinks=False):
                    found.append(own)
                else:
                    waiting.append((each.path, "" if each.path == linked else own))
    return frozenset(found)


def link_ancestors(
    lineage: Lineage, item_directory: Path, expected: frozenset[str] = frozenset()
) -> None:
    """Hard-links every file of a lineage into the directory of the step that follows it.

    Args:
        lineage: of the parent.
        item_directory: of the new delta.
        expected: the parent's files while it was whole, as :func:`files_of` told them.

    Raises:
        LineageError: the parent was being deleted.
        OSError: a link cannot be made.
    """
    links = item_directory / LINEAGE
    try:
        links.mkdir(parents=True)
        made: set[str] = set()
        for entry in lineage.entries:
            source, skip = os.fspath(entry.directory), os.fspath(entry.directory / LINEAGE)
            _link_tree(source, os.fspath(links), str(entry.manifest.step), skip, made)
        # Whoever deletes a step may have begun before, and not be done yet.
        lost = min(expected - made, default=None)
    except FileNotFoundError as error:
        lost = error.filename
    if lost is not None:
        parent = lineage.entries[-1]
        raise LineageError(
            f"{item_directory}: step {parent.manifest.step}, which this one builds on, was deleted "
            f"while this one was saved: {lost} is missing. This step is not saved, the next one "
            "will be a base. Keep the latest step (a preservation policy with LatestN(1)), or do "
            "not delete in the background."
        )


def _link_tree(source: str, top: str, name: str, skip: str, made: set[str]) -> None:
    """Links a directory's files into a new one.

    Args:
        source: the directory.
        top: where the new one goes.
        name: of the new one, below that.
        skip: a directory that is left out.
        made: the names of the links below ``top``; added to.
    """
    os.mkdir(f"{top}/{name}")
    with os.scandir(source) as found:
        for each in found:
            own = f"{name}/{each.name}"
            if not each.is_dir(follow_symlinks=False):
                os.link(each.path, f"{top}/{own}", follow_symlinks=False)
                made.add(own)
            elif each.path != skip:
                _link_tree(each.path, top, own, skip, made)


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
        found += [path for path in candidates if _is_ours(path)]
    return found


def _is_ours(path: Path) -> bool:
    """Whether a directory holds our folder; an item may have our folder's name."""
    ours = path / manifests.DIRECTORY
    traces = (manifests.FILE, DELTA, LINEAGE, BASE, KEPT)
    return any((path / name).exists() for name in traces) or (
        ours.is_dir() and any(ours.glob("update.*"))
    )


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
        if manifest is not None:
            error = _resolve_error(directory, manifest)
        if error is not None and not directory.is_dir():
            continue  # deleted while it was looked at
        number = manifest.step if manifest else place_of(directory).step
        steps.append(Step(-1 if number is None else number, directory, manifest, error))
    return sorted(steps, key=lambda step: (step.step, step.directory))


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item directory lies.

    Attributes:
        line: what the steps of one training run share: the directory that they lie in and, under a
            checkpoint manager, the name of the item in each step.
        step: the number in the name of the step's directory, None if there is none.
    """

    line: tuple[Path, str | None]
    step: int | None


def place_of(item_directory: Path) -> Place:
    """Reads an item directory's place from its path; it may be temporary, or not exist yet."""
    parent, name = item_directory.parent, _committed(item_directory.name)
    marker = "_CHECKPOINT_METADATA"  # Orbax writes it into the step's directory
    is_item = TMP_SUFFIX in parent.name or (
        (parent / marker).exists() and not (item_directory / marker).exists()
    )
    if is_item:
        return Place((parent.parent, name), _number_in(_committed(parent.name)))
    return Place((parent, None), _number_in(name))


def committed_path(directory: Path) -> Path:
    """Where a temporary directory will be once Orbax has renamed it."""
    return Path(*map(_committed, directory.parts))


def _committed(name: str) -> str:
    return name.split(TMP_SUFFIX, maxsplit=1)[0]


def _number_in(name: str) -> int | None:
    digits = name.rsplit("_", maxsplit=1)[-1]
    return int(digits) if digits.isdecimal() else None


def misplaced(item_directory: Path, manifest: Manifest) -> str:
    """What is wrong with where a step lies: empty unless its directory had another number."""
    found, saved = place_of(item_directory).step, manifest.directory_step
    if found is None or saved is None or found == saved:
        return ""
    return f"expected what was saved as step {found}, found what was saved as step {saved}"


def siblings(item_directory: Path) -> list[Step]:
    """The steps that lie beside an item directory, itself included."""
    root, item = place_of(item_directory).line
    return steps_of(root, item)


def _resolve_error(directory: Path, manifest: Manifest) -> AdaCheckError | None:
    try:
        if isinstance(manifest, DeltaManifest):
            resolve(directory)
        else:
            _refuse_links(directory)
    except AdaCheckError as error:
        return error
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
        self._parents: dict[int, set[int]] = {}
        self._let_go: set[int] = set()

    def note(self, step: int, parent: int) -> None:
        """Learns that an item of a step builds on that of another; called by the handler.

        Args:
            step: the manager's number of a step.
            parent: the manager's number of the step that it builds on.
        """
        self._parents.setdefault(step, set()).add(parent)

    def lets_go(self, step: int) -> bool:
        """Whether a step is to be deleted, and perhaps still there: nothing may build on it.

        Args:
            step: the manager's number of a step.
        """
        return step in self._let_go

    def should_preserve(
        self, checkpoints: Sequence[_Checkpoint], *, context: Any
    ) -> Sequence[bool]:
        """Keeps what the inner policy keeps, and every step that those build on."""
        inner = self._inner.should_preserve(checkpoints, context=context)
        kept = {c.step for c, keep in zip(checkpoints, inner, strict=True) if keep}
        waiting = list(kept)
        while waiting:
            parents = self._parents.get(waiting.pop(), set()) - kept
            kept |= parents
            waiting += parents
        steps = {checkpoint.step for checkpoint in checkpoints}
        self._let_go = (self._let_go | steps) - kept
        return [checkpoint.step in kept for checkpoint in checkpoints]
