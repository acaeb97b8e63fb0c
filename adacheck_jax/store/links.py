"""Hard links that make a delta complete in itself: to every file of its lineage."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Iterator

from adacheck_jax.errors import LineageError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import ancestors, manifest_file
from adacheck_jax.store.steps.folders import DELTA, LINEAGE
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.steps.roots import TMP_SUFFIX
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at

PROBE_PREFIX = ".adacheck-"
"""Beginning of the name of a directory that exists for a moment, to try a hard link in it."""
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

    Args:
        lineage: the parent's lineage.
        item_directory: item directory of the new delta.
        expected: names from :func:`files_of` while the parent was whole.
        stamp: identity of the parent's manifest; None if it is not known.

    Raises:
        LineageError: the parent is being deleted.
        OSError: a link cannot be made.
    """
    top, lost = at(item_directory / LINEAGE), None
    for _ in range(2):  # a step may become a base while its files are linked
        for each in (ancestors.shortened(lineage, stamp), lineage):
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


def _link(
    lineage: Lineage, top: Location, expected: frozenset[str], stamp: Stamp | None
) -> str | None:
    """Links the files of a lineage.

    Returns:
        The name of a file that is missing; None if all were linked.
    """
    starts = tuple(_start(each) for each in lineage.entries)
    made: set[str] = set()
    try:
        for entry in lineage.entries:
            if not entry.is_link:  # links are found in the directory that has them
                new = {n: key for n, key in _files_of(entry) if n.startswith(starts)}
                new = {name: key for name, key in new.items() if name not in made}
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
        own = f"{_start(end)}{manifest_file.NAME}"
        return None if _is_same(end, top / own, stamp) else own
    return min(every - made, default=None)


def _start(entry: LineageStep) -> str:
    """Beginning of the names of the links to a step's files."""
    end = "/" if isinstance(entry.manifest, BaseManifest) else "."
    return f"{entry.manifest.step}{end}"


def _is_same(entry: LineageStep, linked: Location, stamp: Stamp | None) -> bool:
    """True if the manifest that was linked is a delta's own, and not one in its place."""
    if stamp is not None and linked.stamp == stamp:
        return True
    return manifest_file.read_file(linked).checksum == entry.manifest.checksum


def _files_of(entry: LineageStep) -> Iterator[tuple[str, str]]:
    """Files of a step in its own directory, and files that are linked into it.

    What an interrupted compaction left there is not among them.

    Yields:
        The name of a link to a file, and the file's key.

    Raises:
        FileNotFoundError: the step is being deleted.
    """
    assert not entry.is_link
    start, ours = _start(entry), at(entry.holder / manifest_file.DIRECTORY)
    if isinstance(entry.manifest, DeltaManifest):
        for name, key in _below(ours, "", deep=False):
            if name == manifest_file.NAME or name.startswith(f"{DELTA}."):
                yield f"{start}{name}", key
        yield from _below(at(entry.holder / LINEAGE), "")
        return
    for name, key in base_files(entry.holder):
        yield f"{start}{name}", key


def base_files(item_directory: AnyPath) -> Iterator[tuple[str, str]]:
    """Files of a base, without those of a delta that it took the place of.

    Yields:
        Path of a file below the directory, and its key.

    Raises:
        FileNotFoundError: the step is being deleted.
    """
    item, ours = at(item_directory), manifest_file.DIRECTORY
    yield from _below(item, "", deep=False)
    for name in item.folders():
        if name != ours:
            yield from _below(item / name, f"{name}/")
    for name, key in _below(item / ours, "", deep=False):
        if not name.startswith((f"{DELTA}.", OWN_TREE_METADATA)):
            yield f"{ours}/{name}", key
    for name in (item / ours).folders():
        if f"{ours}/{name}" != LINEAGE:
            yield from _below(item / ours / name, f"{ours}/{name}/")


def _below(folder: Location, start: str, *, deep: bool = True) -> Iterator[tuple[str, str]]:
    # Keys, not locations: a save lists every file of its lineage.
    for key in folder.storage.list(folder.key, deep=deep):
        yield f"{start}{key.removeprefix(folder.key).lstrip('/')}", key
