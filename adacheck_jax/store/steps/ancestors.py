"""The steps that a delta builds on, looked at again before the delta is committed."""

from __future__ import annotations

import contextlib

from adacheck_jax.errors import AdaCheckError, LineageError
from adacheck_jax.format.manifest import BaseManifest, DeltaManifest
from adacheck_jax.store.steps import manifest_file, marks, references
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, Location, at


def check(ancestors: Lineage, stamp: Stamp | None, item_directory: AnyPath) -> None:
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
