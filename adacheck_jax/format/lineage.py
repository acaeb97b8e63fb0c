"""A base and the deltas that follow it: which they are, and where they lie.

Where the file system has hard links, a delta's directory holds links to every file of its base and
of the deltas before it, under ``adacheck/lineage/``: each step is complete in itself, so that no
retention policy, deletion or move of another step can break it. A link costs next to nothing, a
directory does not: so the base has one, ``<step>/``, and the files of a delta, which are all in its
folder of ours, lie there with its step in front of their names, ``<step>.<name>``. Where there are
no hard links, a delta refers to its parent by a relative path and :class:`KeepLineage` keeps that
parent alive.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    StorageError,
)
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.manifest import BaseManifest, Delta, DeltaManifest, Manifest

LINEAGE = f"{manifests.DIRECTORY}/lineage"
DELTA = "delta"
"""What the names of the files of a delta's packs begin with; then come the process and a dot."""
BASE = f"{manifests.DIRECTORY}/base"
"""What the processes wrote of a base: a volume or two each."""
KEPT = f"{manifests.DIRECTORY}/kept"
"""Hard links to volumes of earlier bases that hold what has not changed since."""
IN_PLACE = f"{manifests.DIRECTORY}/in_place"
"""Empty; in a step that was written where it lies, and not renamed: it exists once it is marked."""
STEP_METADATA = "_CHECKPOINT_METADATA"
"""What Orbax writes into the directory of a step, and not into those of its items."""
_COMMIT_MARK = "commit_success.txt"
"""What Orbax writes last, into each item and then into the step."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of a lineage, and where its files are read from.

    Attributes:
        manifest: of the step.
        holder: an item directory: its own, or that of a later step, which has links to its files.
        is_link: whether it is that of a later step.
    """

    manifest: Manifest
    holder: Path
    is_link: bool = False

    @property
    def directory(self) -> Path:
        """Of a base: the stock Orbax checkpoint."""
        return self.holder / LINEAGE / str(self.manifest.step) if self.is_link else self.holder

    @property
    def start(self) -> str:
        """What the paths of its files begin with, and of no other step's."""
        if isinstance(self.manifest, BaseManifest):
            return os.fspath(self.directory)
        folder = f"{LINEAGE}/{self.manifest.step}." if self.is_link else f"{manifests.DIRECTORY}/"
        return f"{self.holder}/{folder}"

    @property
    def place(self) -> Path:
        """Where it lies, for messages."""
        return self.directory if isinstance(self.manifest, BaseManifest) else self.path(DELTA)

    @property
    def manifest_path(self) -> Path:
        """Of the file."""
        if isinstance(self.manifest, BaseManifest):
            return self.directory / manifests.FILE
        return self.path(manifests.NAME)

    def path(self, name: str) -> Path:
        """Where a file of a delta lies.

        Args:
            name: that it has in the step's own folder of ours.
        """
        return Path(f"{self.start}{name}")

    def pack(self, process: int) -> Path:
        """What the paths of the files of a process's pack begin with."""
        return self.path(_pack(process))


def _pack(process: int) -> str:
    return f"{DELTA}.{process}"


def pack_in(item_directory: Path, process: int) -> Path:
    """What the paths of the files begin with that a process writes of a delta; then comes a dot."""
    return item_directory / manifests.DIRECTORY / _pack(process)


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
    def saves(self) -> list[tuple[DeltaManifest, Entry]]:
        """The saved steps after the base, oldest first."""
        return [
            (entry.manifest, entry)
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

    @property
    def replayed_count(self) -> int:
        """Number of updates that a restore of the step replays."""
        return sum(delta.has_update for delta in self.deltas)

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
            f"{self.entries[-1].holder}: expected step {step} in what was saved there, found "
            f"the steps {shown_steps(self.steps)}."
        )

    def until(self, step: int) -> Lineage:
        """The part of it that ends at a step, or at the last one before it.

        Raises:
            LineageError: it begins after the step.
        """
        return self.to(max((each for each in self.steps if each <= step), default=step))

    @property
    def unchecked(self) -> list[int]:
        """The numbers of steps whose delta nobody compared with the state when it was saved."""
        return [delta.step for delta in self.deltas if not checked_of(delta)]

    @property
    def files(self) -> tuple[str, ...]:
        """An identity of all files that the step is restored from: see :func:`identity_of`."""
        return (*map(identity_of, self.entries), str(self.left_out))

    def exists(self) -> bool:
        """Whether every step is still on disk."""
        first, last = self.entries[0], self.entries[-1]
        # What is linked into the last one goes with it: two looks tell as much as one at each.
        chosen = (first, last) if first.holder == last.holder else self.entries
        return all(entry.manifest_path.is_file() for entry in chosen)

    def followed_by(self, manifest: DeltaManifest, directory: Path, *, linked: bool) -> Lineage:
        """The lineage of the next delta, whose directory may hold links to all of this one."""
        entries = self.entries
        if linked:
            entries = tuple(Entry(entry.manifest, directory, is_link=True) for entry in entries)
        return Lineage((*entries, Entry(manifest, directory)))


def resolve(item_directory: Path) -> Lineage:
    """Finds the base and the deltas that reproduce one step, and checks every link.

    Args:
        item_directory: the step's item directory.

    Raises:
        FormatError: a manifest is missing or cannot be read.
        IntegrityError: a manifest does not match its checksum.
        LineageError: a step that this one builds on is missing, or is not the one it was; or a
            save of one of them was interrupted before Orbax committed it.
    """
    refuse_links(item_directory)
    _refuse_uncommitted(item_directory)
    return _resolved(Entry(manifests.read(item_directory), item_directory))


def held(item_directory: Path) -> Lineage:
    """The longest lineage that a step's directory holds, which may be a damaged step's.

    Args:
        item_directory: the step's item directory.

    Returns:
        That of the step itself, if its manifests are whole; else that of the newest of the steps
        linked into its directory of which they are.

    Raises:
        AdaCheckError: it holds none; as :func:`resolve` raises it for the step itself.
    """
    try:
        return resolve(item_directory)
    except StorageError:
        raise
    except AdaCheckError as error:
        refuse_links(item_directory)
        for entry in _linked(item_directory):
            with contextlib.suppress(LineageError, IntegrityError, FormatError):
                return _resolved(entry)
        raise error


def _linked(item_directory: Path) -> Iterator[Entry]:
    """The steps linked into a directory whose own manifests are whole, newest first."""
    links, found = item_directory / LINEAGE, {}
    for path in (*links.glob(f"*/{manifests.FILE}"), *links.glob(f"*.{manifests.NAME}")):
        name = path.relative_to(links).parts[0].split(".", maxsplit=1)[0]
        if name.isdecimal():
            found[int(name)] = path
    for step, path in sorted(found.items(), reverse=True):
        with contextlib.suppress(IntegrityError, FormatError):
            manifest = manifests.read_file(path)
            if manifest.step == step:
                yield Entry(manifest, item_directory, is_link=True)


def _resolved(entry: Entry) -> Lineage:
    """Follows a step's parents to its base."""
    entries = [entry]
    holders = [entry.holder]
    while isinstance(entry.manifest, DeltaManifest):
        child = entry.manifest
        found = _find(child, entry, holders)
        parent = found.manifest
        if parent.checksum != child.parent.checksum or parent.step != child.parent.step:
            raise LineageError(
                f"{found.place}: step {child.step} builds on step {child.parent.step} with "
                f"manifest {child.parent.checksum[:12]}, found step {parent.step} with manifest "
                f"{parent.checksum[:12]}. The step was saved again or replaced; restore a base "
                "step, or a step saved after the replacement."
            )
        depth = parent.depth + len(child.deltas)
        if child.depth != depth:
            raise IntegrityError(
                f"{entry.place}: expected delta number {depth} of its lineage, found "
                f"{child.depth}. Restore another step."
            )
        entry = found
        entries.append(entry)
        if not entry.is_link:
            # Who holds links holds them to all that he builds on: the first and the last suffice.
            holders[1:] = [entry.holder]
    lineage = Lineage(tuple(reversed(entries)))
    for manifest, entry in lineage.saves:
        if len(manifest.fingerprints) != len(lineage.base.leaves):
            raise IntegrityError(
                f"{entry.place}: expected a fingerprint for each of {len(lineage.base.leaves)} "
                f"leaves of the base, found {len(manifest.fingerprints)}. Restore another step."
            )
    return lineage


def checked_of(delta: Delta) -> str:
    """How the replay of a delta was compared with the state before it was committed.

    Returns:
        ``full``, ``sample``, ``identity`` (of the arrays that the update returned), ``stored``
        (nothing is replayed), or nothing: it was not compared, as by an earlier release.
    """
    return getattr(delta, "checked", "") or ("" if delta.has_update else "stored")


def identity(directory: Path) -> str:
    """A digest of which files lie under a directory; empty if there are none.

    Hard links to the same files at the same places have the same one, wherever the directory is.
    """
    paths = [os.path.join(path, name) for path, _, files in os.walk(directory) for name in files]
    return _identity(paths, os.fspath(directory))


def _identity(paths: Iterable[str], start: str) -> str:
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            stat = os.stat(path)
            name = path.removeprefix(start)
            found.append((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def identity_of(entry: Entry) -> str:
    """As :func:`identity`, of one step of a lineage without its links to those before."""
    if isinstance(entry.manifest, BaseManifest):
        return identity(entry.directory)
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(entry.start)) as found:
        own = [each for each in found if each.path.startswith(entry.start)]
        files = [each.path for each in own if not each.is_dir(follow_symlinks=False)]
        return _identity(files, entry.start)
    return ""


def is_committed(item_directory: Path) -> bool:
    """Tells a saved step from one whose save was interrupted, where no name does.

    Orbax renames what it has committed. On object stores, and with ``AtomicityMode.COMMIT_FILE``,
    it writes where the step will lie, and a mark at the end.

    Args:
        item_directory: of a step; it has no temporary name.
    """
    if not (item_directory / IN_PLACE).exists():
        return True
    parent = item_directory.parent
    is_item = (parent / STEP_METADATA).exists() and not (item_directory / STEP_METADATA).exists()
    marked = (item_directory, parent) if is_item else (item_directory,)
    return all((each / _COMMIT_MARK).exists() for each in marked)


def _refuse_uncommitted(item_directory: Path) -> None:
    if not is_committed(item_directory):
        raise LineageError(
            f"{item_directory}: expected a step that Orbax has committed ({_COMMIT_MARK} in it), "
            "found one whose save was interrupted or is under way. Restore another step."
        )


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


def refuse_links(directory: Path) -> None:
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
    _refuse_uncommitted(item_directory)
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


def _find(child: DeltaManifest, entry: Entry, holders: Sequence[Path]) -> Entry:
    """The parent of a delta."""
    parent = child.parent
    for holder in holders:
        linked = holder / LINEAGE / str(parent.step)
        if linked.is_dir():
            return Entry(manifests.read(linked), holder, is_link=True)
        path = linked.with_name(f"{parent.step}.{manifests.NAME}")
        if path.exists():
            return Entry(manifests.read_file(path), holder, is_link=True)
    places = [holders[0] / LINEAGE / f"{parent.step}[.{manifests.NAME}]"]
    # Who holds links holds all; and a reference leads from where it was written.
    if not (entry.is_link or (entry.holder / LINEAGE).is_dir()):
        places.append(entry.holder / parent.reference)
        if _is_reference(parent.reference) and places[-1].is_dir():
            found = _plain_sibling(entry.holder, parent.reference)
            _refuse_uncommitted(found)
            return Entry(manifests.read(found), found)
    raise LineageError(
        f"{entry.place}: step {child.step} builds on step {parent.step}, expected at "
        f"{' or '.join(map(str, places))}, found nothing there."
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
    refuse_links(found)
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
