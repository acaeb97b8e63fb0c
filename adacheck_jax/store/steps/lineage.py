"""Lineages: a base and the contiguous deltas that follow it, found and checked on disk.

Where the file system has hard links, a delta's directory holds links to every file of its base and
of the deltas before it, under ``adacheck/lineage/``: each step is complete in itself, and no
retention policy, deletion or move of another step can break it. Links are cheap and directories are
not, so only the base gets a directory there, ``<step>/``; the files of a delta, all from its
``adacheck`` folder, are linked as ``<step>.<name>``. Without hard links a delta refers to its
parent by a relative path, and :class:`~adacheck_jax.store.retention.KeepLineage` keeps that alive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from adacheck_jax.errors import (
    AdaCheckError,
    FormatError,
    IntegrityError,
    LineageError,
    StorageError,
)
from adacheck_jax.format.manifest import BaseManifest, Delta, DeltaManifest, Manifest
from adacheck_jax.store.steps import manifest_file, marks, references
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at

LINEAGE = f"{manifest_file.DIRECTORY}/lineage"
DELTA = "delta"
"""Beginning of the names of a pack's files; a dot, the process and a dot follow."""
BASE = f"{manifest_file.DIRECTORY}/base"
"""Folder of the volumes of a base, one or two a process."""
STILL = ".still"
"""End of the name of a volume with arrays that are expected not to change."""
KEPT = f"{manifest_file.DIRECTORY}/kept"
"""Folder of hard links to volumes of earlier bases whose arrays have not changed since."""

ReadManifest = Callable[[AnyPath], Manifest]
"""Reads a manifest from its own path."""


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One saved step of a lineage, and the directory that its files are read from.

    Attributes:
        manifest: the step's manifest.
        holder: its own item directory, or that of a later step with links to its files.
        is_link: True if ``holder`` is the directory of a later step.
    """

    manifest: Manifest
    holder: AnyPath
    is_link: bool = False

    @property
    def directory(self) -> AnyPath:
        """For a base: directory of the stock Orbax checkpoint."""
        return self.holder / LINEAGE / str(self.manifest.step) if self.is_link else self.holder

    @property
    def start(self) -> str:
        """Beginning of the paths of the step's files, and of no other step's."""
        if isinstance(self.manifest, BaseManifest):
            return str(self.directory)
        return str(self.path(DELTA)).removesuffix(DELTA)

    @property
    def place(self) -> AnyPath:
        """Path for messages."""
        return self.directory if isinstance(self.manifest, BaseManifest) else self.path(DELTA)

    @property
    def manifest_path(self) -> AnyPath:
        """Path of the manifest."""
        if isinstance(self.manifest, BaseManifest):
            return self.directory / manifest_file.FILE
        return self.path(manifest_file.NAME)

    def path(self, name: str) -> AnyPath:
        """Path of a file of a delta.

        Args:
            name: the file's name in the step's own ``adacheck`` folder.
        """
        if self.is_link:
            return self.holder / LINEAGE / f"{self.manifest.step}.{name}"
        return self.holder / manifest_file.DIRECTORY / name

    def pack(self, process: int) -> AnyPath:
        """Beginning of the paths of one process's pack."""
        return self.path(_pack(process))


def _pack(process: int) -> str:
    return f"{DELTA}.{process}"


def pack_in(item_directory: AnyPath, process: int) -> AnyPath:
    """Beginning of the paths of the pack that a process writes; a dot follows."""
    return item_directory / manifest_file.DIRECTORY / _pack(process)


@dataclass(frozen=True, slots=True)
class Lineage:
    """Everything that one step is restored from: the base first, the step itself last.

    Attributes:
        entries: the saved steps.
        left_out: number of deltas at the end of the last save that are not part of the lineage,
            which may end at a deferred step (:meth:`to`).
    """

    entries: tuple[LineageStep, ...]
    left_out: int = 0

    @property
    def base(self) -> BaseManifest:
        """The base's manifest."""
        first = self.entries[0].manifest
        assert isinstance(first, BaseManifest)
        return first

    @property
    def base_directory(self) -> AnyPath:
        """Directory of the stock Orbax checkpoint to start from."""
        return self.entries[0].directory

    @property
    def saves(self) -> list[tuple[DeltaManifest, LineageStep]]:
        """Saved steps after the base, oldest first."""
        return [
            (entry.manifest, entry)
            for entry in self.entries
            if isinstance(entry.manifest, DeltaManifest)
        ]

    @property
    def deltas(self) -> list[Delta]:
        """Deltas after the base, those of deferred steps included, oldest first."""
        every = [delta for manifest, _ in self.saves for delta in manifest.deltas]
        return every[: len(every) - self.left_out]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the saved step at the end."""
        return self.entries[-1].manifest

    @property
    def end(self) -> BaseManifest | Delta:
        """The step itself, which may be a deferred one."""
        deltas = self.deltas
        return deltas[-1] if deltas else self.base

    @property
    def problem(self) -> str:
        """Reason why no update can be replayed onto the step; empty if updates can."""
        update = self.base.update
        problems = [update.problem if update else "", *(saved.problem for saved, _ in self.saves)]
        return next(filter(None, problems), "")

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps that can be restored from the lineage, ascending."""
        return [self.base.step, *(delta.step for delta in self.deltas)]

    @property
    def delta_count(self) -> int:
        """Number of deltas after the base."""
        return self.manifest.depth - self.base.depth - self.left_out

    @property
    def replayed_count(self) -> int:
        """Number of updates that a restore of the step replays."""
        return sum(delta.has_update for delta in self.deltas)

    def to(self, step: int) -> Lineage:
        """The lineage of an earlier step, which may be a deferred one.

        Raises:
            LineageError: the lineage has no such step.
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
        """The lineage of a step, or of the last one before it.

        Raises:
            LineageError: the lineage begins after the step.
        """
        return self.to(max((each for each in self.steps if each <= step), default=step))

    @property
    def unchecked(self) -> list[int]:
        """Numbers of steps whose delta was not compared with the state when it was saved."""
        return [delta.step for delta in self.deltas if not checked_of(delta)]

    @property
    def checksums(self) -> tuple[str, ...]:
        """Checksums of all manifests: others where a step has become a base meanwhile."""
        return tuple(entry.manifest.checksum for entry in self.entries)

    @property
    def files(self) -> tuple[str, ...]:
        """Digests of the files that the step is restored from: see :func:`identity_of`."""
        return (*map(identity_of, self.entries), str(self.left_out))

    def exists(self) -> bool:
        """True if every step is still on disk; in a store, where looks cost, it is taken for so."""
        if not at(self.entries[-1].holder).on_file_system:
            return True
        first, last = self.entries[0], self.entries[-1]
        # Links in the last step are deleted with it: two looks tell as much as one at each.
        chosen = (first, last) if first.holder == last.holder else self.entries
        return all(at(entry.manifest_path).exists for entry in chosen)

    def followed_by(self, manifest: DeltaManifest, directory: AnyPath, *, linked: bool) -> Lineage:
        """The lineage of the next delta.

        Args:
            manifest: the delta's manifest.
            directory: its item directory.
            linked: True if that directory holds links to all of this lineage.
        """
        entries = self.entries
        if linked:
            entries = tuple(
                LineageStep(entry.manifest, directory, is_link=True) for entry in entries
            )
        return Lineage((*entries, LineageStep(manifest, directory)))


def resolve(item_directory: AnyPath, read: ReadManifest = manifest_file.read_file) -> Lineage:
    """Finds the base and the deltas that reproduce one step, and checks every parent.

    Args:
        item_directory: the step's item directory.
        read: reads a manifest from its own path.

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


def _looked_up(item_directory: AnyPath, read: ReadManifest) -> Lineage:
    item_directory = _for_many_looks(item_directory)
    manifest_file.refuse_links(item_directory)
    marks.refuse_uncommitted(item_directory)
    manifest = read(item_directory / manifest_file.FILE)
    return _resolved(LineageStep(manifest, item_directory), read)


def _for_many_looks(item_directory: AnyPath) -> AnyPath:
    """An item directory in a store, in a view of its root."""
    if at(item_directory).on_file_system:
        return item_directory
    root = item_directory.parent.parent if marks.is_item(item_directory) else item_directory.parent
    return Location(at(root).listed().storage, at(item_directory).key)


def held(item_directory: AnyPath) -> Lineage:
    """The longest lineage in the directory of a step, which may be damaged.

    Args:
        item_directory: the step's item directory.

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
        manifest_file.refuse_links(item_directory)
        for entry in _linked(item_directory):
            with contextlib.suppress(LineageError, IntegrityError, FormatError):
                return _resolved(entry)
        raise error


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


def linked_manifests(item_directory: AnyPath) -> Iterator[Location]:
    """Manifests of earlier steps that are linked into the directory of a step."""
    links = at(item_directory / LINEAGE)
    bases = (links / name / manifest_file.FILE for name in links.folders())
    yield from (each for each in bases if each.exists)
    for each in links.list(deep=False):
        if each.name.endswith(f".{manifest_file.NAME}"):
            yield each


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
    lineage = Lineage(tuple(reversed(entries)))
    for manifest, entry in lineage.saves:
        if len(manifest.fingerprints) != len(lineage.base.leaves):
            raise IntegrityError(
                f"{entry.place}: expected a fingerprint for each of {len(lineage.base.leaves)} "
                f"leaves of the base, found {len(manifest.fingerprints)}. Restore another step."
            )
    return lineage


def checked_of(delta: Delta) -> str:
    """Comparison that a delta's replay passed before it was committed.

    Returns:
        ``full``, ``sample``, ``identity`` (the state is the arrays that the update returned),
        ``stored`` (nothing is replayed), or an empty text: none, by a release before 0.2.
    """
    return getattr(delta, "checked", "") or ("" if delta.has_update else "stored")


def identity(directory: AnyPath) -> str:
    """Digest of the names and inodes of all files under a directory; empty if there are none.

    Two directories with hard links to the same files under the same names have the same digest.
    """
    return _identity(at(directory).list(), at(directory).key)


def _identity(files: Iterable[Location], start: str) -> str:
    found = []
    with contextlib.suppress(OSError):  # a folder vanished while it was listed
        for each in files:
            with contextlib.suppress(OSError):
                found.append((each.key.removeprefix(start), *each.stamp))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest() if found else ""


def identity_of(entry: LineageStep) -> str:
    """Digest of one step's files, as :func:`identity`, without its links to earlier steps."""
    if isinstance(entry.manifest, BaseManifest):
        return identity(entry.directory)
    start = at(entry.path(DELTA)).key.removesuffix(DELTA)
    files = at(entry.path(DELTA)).parent.list(deep=False)
    return _identity((each for each in files if each.key.startswith(start)), start)


def check_ancestors(ancestors: Lineage, stamp: Stamp | None, item_directory: AnyPath) -> None:
    """Looks for the lineage of a delta that is being saved into a store: two requests.

    Args:
        ancestors: the parent's lineage, as it was known when the save began.
        stamp: identity of the parent's manifest; None if it is not known.
        item_directory: item directory of the delta, not in a view that was listed before.

    Raises:
        LineageError: a step is gone, or the parent was replaced, or Orbax did not commit it.
    """
    parent = ancestors.entries[-1]
    holders = [at(entry.holder) for entry in ancestors.entries]
    steps = [each.parent if marks.is_item(each) else each for each in holders]
    names = sorted(each.name for each in steps)
    root = Location(at(item_directory).storage, steps[0].parent.key)
    view = root.listed((names[0], names[-1])).storage
    needed = [at(entry.manifest_path) for entry in ancestors.entries]
    needed.append(at(ancestors.base_directory / "manifest.ocdbt"))  # which names all its files
    lost = [each for each in needed if not Location(view, each.key).exists]
    with contextlib.suppress(FileNotFoundError):
        if (
            not lost
            and marks.is_committed(Location(view, holders[-1].key))
            and stamp in (None, manifest_file.stamp(parent.holder))
        ):
            return
    raise LineageError(
        f"{lost[0] if lost else needed[-1]}: step {parent.manifest.step}, which is built on, was "
        "deleted or replaced, it or a step before it, or Orbax has not committed it "
        f"({marks.COMMIT_MARK} in it). This step is not saved, the next one will be a base."
    )


def shown_steps(steps: Sequence[int]) -> str:
    """Step numbers for a message, as ranges; of many ranges the last ones."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    names = [f"{a} to {b}" if a < b else f"{a}" for a, b in runs]
    return ", ".join(["...", *names[-10:]] if len(names) > 10 else names) or "none"


def follow(known: Sequence[Lineage], item_directory: AnyPath) -> Lineage:
    """Resolves a step as :func:`resolve` does, but reads one manifest if its lineage is known.

    Args:
        known: lineages that were resolved before.
        item_directory: the step's item directory.
    """
    marks.refuse_uncommitted(item_directory)
    manifest = manifest_file.read(item_directory)
    for each in known:
        if manifest.checksum == each.manifest.checksum:
            return each
        if (
            isinstance(manifest, DeltaManifest)
            and manifest.parent.checksum == each.manifest.saved_checksum
        ):
            linked = at(item_directory / LINEAGE).is_folder
            return each.followed_by(manifest, item_directory, linked=linked)
    return resolve(item_directory)


def shortened(known: Lineage, stamp: Stamp | None = None) -> Lineage | None:
    """A lineage from its newest step on that has become a base since it was saved.

    Args:
        known: the lineage, as it was resolved or saved.
        stamp: identity of the manifest at its end; None if it is not known.

    Returns:
        None if there is no such step that is on the disk.
    """
    directory = known.entries[-1].holder
    for count in reversed(range(1, len(known.entries))):
        entry = known.entries[count]
        assert isinstance(entry.manifest, DeltaManifest)
        if base := _compacted(entry, directory, stamp):
            first = LineageStep(base, directory)
            return Lineage((first, *known.entries[count + 1 :]), known.left_out)
        directory = references.referred(directory, entry.manifest.parent.reference)
    return None


def _compacted(entry: LineageStep, directory: AnyPath, stamp: Stamp | None) -> BaseManifest | None:
    """The manifest of the base that took a delta's place in its own directory, if one did."""
    with contextlib.suppress(OSError, AdaCheckError):  # what is there is no base to begin at
        known = at(entry.manifest_path).stamp if entry.is_link else stamp
        if manifest_file.stamp(directory) == known:
            return None
        found = manifest_file.read(directory)
        if (
            isinstance(found, BaseManifest)
            and (found.step, found.saved_checksum) == (entry.manifest.step, entry.manifest.checksum)
            and marks.is_committed(directory)
        ):
            manifest_file.refuse_links(directory)
            return found
    return None


def _find(
    child: DeltaManifest, entry: LineageStep, holders: Sequence[AnyPath], read: ReadManifest
) -> LineageStep:
    """The parent of a delta.

    Args:
        child: the delta's manifest.
        entry: the delta.
        holders: directories that may hold links to the parent.
        read: reads a manifest from its own path.
    """
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
    # A directory with links has links to all; and a reference holds for the delta's own directory.
    if not (entry.is_link or at(entry.holder / LINEAGE).is_folder):
        places.append(entry.holder / parent.reference)
        if found := references.found(entry.holder, parent.reference):
            marks.refuse_uncommitted(found)
            return LineageStep(read(found / manifest_file.FILE), found)
    raise LineageError(
        f"{entry.place}: step {child.step} builds on step {parent.step}, expected at "
        f"{' or '.join(map(str, places))}, found nothing there."
    )
