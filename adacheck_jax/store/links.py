"""The steps that a delta builds on: hard links to all their files, or a look at them in a store."""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Iterator

from adacheck_jax.errors import AdaCheckError, LineageError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import lookup, manifest_file, marks
from adacheck_jax.store.steps.folders import DELTA, LINEAGE
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.steps.roots import PROBE_PREFIX, TMP_SUFFIX
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at

OWN_TREE_METADATA = "tree_metadata"
"""File in our folder of a delta that is being compacted: what Orbax's tree metadata were before."""


def can_link(directory: AnyPath) -> bool:
    """True if the file system of an existing directory has hard links.

    Raises:
        OSError: an error that may pass.
    """
    # A name that Orbax knows: an opening manager removes it if a crash left it behind.
    folder = at(directory) / f"{PROBE_PREFIX}{uuid.uuid4().hex}{TMP_SUFFIX}"
    probe = folder / "probe"
    try:
        probe.write(b"", if_absent=True)
        return folder.adopt({"link": probe.key})
    finally:
        folder.delete()


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
            and stamp in (None, at(parent.manifest_path).stamp)
        ):
            return
    raise LineageError(
        f"{lost[0] if lost else needed[-1]}: step {parent.manifest.step}, which is built on, was "
        "deleted or replaced, it or a step before it, or Orbax has not committed it "
        f"({marks.COMMIT_MARK} in it). This step is not saved, the next one will be a base."
    )


def files_of(entry: LineageStep) -> frozenset[str]:
    """Names of future links to every file of a step and to the files that are linked into it.

    Args:
        entry: a whole step in its own directory: just committed, or just restored.
    """
    try:
        return frozenset(name for name, _ in _files_of(entry))
    except FileNotFoundError:  # it is being deleted; linking to it will fail
        return frozenset()


def link_ancestors(
    lineage: Lineage,
    item_directory: AnyPath,
    expected: frozenset[str] = frozenset(),
    stamp: Stamp | None = None,
) -> None:
    """Hard-links every file of a lineage into the directory of the step that follows it.

    If a step of the lineage has become a base since, it is linked as such, and nothing before it.

    Raises:
        LineageError: the parent is being deleted.
        OSError: a link cannot be made.
    """
    top, lost = at(item_directory / LINEAGE), None
    for _ in range(2):  # a step may become a base while its files are linked
        for each in (_shortened(lineage, stamp), lineage):
            if each is None:
                continue
            lost = _link(each, top, expected, stamp)
            if lost is None:
                return
            top.delete()
    parent = lineage.entries[-1]
    raise LineageError(
        f"{item_directory}: step {parent.manifest.step}, which this one builds on, was deleted "
        f"while this one was saved: {lost} is missing. This step is not saved, the next one "
        "will be a base. Keep the latest step (a preservation policy with LatestN(1)), or do "
        "not delete in the background."
    )


def _shortened(known: Lineage, stamp: Stamp | None) -> Lineage | None:
    """A lineage from its newest step on that has become a base since; None if there is none."""
    directory = known.entries[-1].holder
    for count in reversed(range(1, len(known.entries))):
        entry = known.entries[count]
        assert isinstance(entry.manifest, DeltaManifest)
        if base := _compacted(entry, directory, stamp):
            first = LineageStep(base, directory)
            return Lineage((first, *known.entries[count + 1 :]), known.left_out)
        directory = lookup.referred(directory, entry.manifest.parent.reference)
    return None


def _compacted(entry: LineageStep, directory: AnyPath, stamp: Stamp | None) -> BaseManifest | None:
    """The manifest of the base that took a delta's place in its own directory, if one did."""
    with contextlib.suppress(OSError, AdaCheckError):  # what is there is no base to begin at
        known = at(entry.manifest_path).stamp if entry.is_link else stamp
        if at(directory / manifest_file.FILE).stamp == known:
            return None
        found = manifest_file.read(directory)
        if (
            isinstance(found, BaseManifest)
            and (found.step, found.saved_checksum) == (entry.manifest.step, entry.manifest.checksum)
            and marks.is_committed(directory)
        ):
            at(directory).check_plain()
            return found
    return None


def _link(
    lineage: Lineage, top: Location, expected: frozenset[str], stamp: Stamp | None
) -> str | None:
    """Links the files of a lineage; returns the name of one that is missing, None if none is."""
    starts = tuple(start_of(each) for each in lineage.entries)
    made: set[str] = set()
    try:
        for entry in lineage.entries:
            if not entry.is_link:  # links are found in the directory that has them
                files = ((n, k) for n, k in _files_of(entry) if n not in made)
                new = {name: key for name, key in files if name.startswith(starts)}
                if not top.adopt(new):
                    raise OSError(errno.ENOTSUP, "hard links cannot be made any more", str(top))
                made.update(new)
    except FileNotFoundError as error:
        return str(error.filename)
    # A deletion may have begun before the files were listed, and not be done yet.
    every = {f"{each.step}.{manifest_file.NAME}" for each, _ in lineage.saves}
    every |= {name for name in expected if name.startswith(starts)}
    every |= {f"{lineage.base.step}/{manifest_file.FILE}"}
    if lineage.base.replaces:
        every |= {f"{lineage.base.step}/{name}" for name in lineage.base.replaces.files}
    end = lineage.entries[-1]
    if isinstance(end.manifest, DeltaManifest) and every <= made:
        # It is the delta's own, and not one in its place.
        linked = top / f"{start_of(end)}{manifest_file.NAME}"
        is_own = stamp is not None and linked.stamp == stamp
        if is_own or manifest_file.read_file(linked).checksum == end.manifest.checksum:
            return None
        return linked.name
    return min(every - made, default=None)


def start_of(entry: LineageStep) -> str:
    """Beginning of the names of the links to a step's files."""
    end = "/" if isinstance(entry.manifest, BaseManifest) else "."
    return f"{entry.manifest.step}{end}"


def _files_of(entry: LineageStep) -> Iterator[tuple[str, str]]:
    """Names of links to a step's own files and to those linked into it, and the files' keys."""
    assert not entry.is_link
    files, linked = base_files(entry.holder), at(entry.holder / LINEAGE)
    if isinstance(entry.manifest, DeltaManifest):
        # What an interrupted compaction left there is not among them.
        begins = (manifest_file.NAME, f"{DELTA}.")
        files = ((n, k) for n, k in _below(linked.parent, deep=False) if n.startswith(begins))
    for name, key in files:
        yield f"{start_of(entry)}{name}", key
    if isinstance(entry.manifest, DeltaManifest):
        yield from _below(linked)


def base_files(item_directory: AnyPath) -> Iterator[tuple[str, str]]:
    """Files of a base, without those of a delta that it took the place of.

    Yields:
        Path of a file below the directory, and its key.

    Raises:
        FileNotFoundError: the step is being deleted.
    """
    ours = manifest_file.DIRECTORY
    of_delta = (f"{LINEAGE}/", f"{ours}/{DELTA}.", f"{ours}/{OWN_TREE_METADATA}")
    for name, key in _below(at(item_directory)):
        if not name.startswith(of_delta):
            yield name, key


def _below(folder: Location, *, deep: bool = True) -> Iterator[tuple[str, str]]:
    # Keys, not locations: a save lists every file of its lineage.
    for key in folder.storage.list(folder.key, deep=deep):
        yield key.removeprefix(folder.key).lstrip("/"), key
