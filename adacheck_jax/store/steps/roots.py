"""Checkpoint roots: their steps, and the meaning of paths under a root."""

from __future__ import annotations

from dataclasses import dataclass

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.manifest import DeltaManifest, Manifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.folders import BASE, DELTA, KEPT, LINEAGE
from adacheck_jax.store.steps.lookup import resolve
from adacheck_jax.store.steps.marks import IN_PLACE, is_committed, is_item, is_told_by_names
from adacheck_jax.store.storage.location import AnyPath, at

TMP_SUFFIX = ".orbax-checkpoint-tmp"
"""Part of the names that Orbax gives to directories that are not committed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step directory as it lies under a root.

    Attributes:
        step: step number, by the manifest or else by the path; -1 if neither tells it.
        directory: item directory.
        manifest: its manifest, None if it cannot be read.
        error: the reason why it cannot be restored, None if its lineage resolves.
        delta_count: number of deltas after its base; None without a lineage.
    """

    step: int
    directory: AnyPath
    manifest: Manifest | None
    error: AdaCheckError | None
    delta_count: int | None = None


def items_of(root: AnyPath) -> list[AnyPath]:
    """Committed item directories of ours under a checkpoint root, in no particular order.

    Steps that a manager deletes meanwhile are left out.
    """
    return [path for path in _ours_under(root) if is_committed(path)]


def uncommitted_of(root: AnyPath) -> list[AnyPath]:
    """Item directories whose save was interrupted or is under way, though named as committed."""
    return [path for path in _ours_under(root) if not is_committed(path)]


def _ours_under(root: AnyPath) -> list[AnyPath]:
    found = []
    for step_directory in _directories(root if at(root).on_file_system else at(root).listed()):
        candidates = [step_directory, *_directories(step_directory)]
        found += [path for path in candidates if _is_ours(path)]
    return found


def _is_ours(path: AnyPath) -> bool:
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
    manifests = manifest_file.ManifestReader()
    for directory in items_of(root):
        if item is not None and directory.name != item:
            continue
        try:
            path = directory / manifest_file.FILE
            manifest: Manifest | None = manifests.read_file(path)
            error: AdaCheckError | None = None
        except AdaCheckError as unreadable:
            manifest, error = None, unreadable
        delta_count = None
        if manifest is not None:
            try:
                delta_count = _delta_count(directory, manifest, manifests)
            except AdaCheckError as unresolved:
                error = unresolved
        if error is not None and not at(directory).is_folder:
            continue  # deleted while it was looked at
        number = manifest.step if manifest else place_of(directory).step
        number = -1 if number is None else number
        steps.append(Step(number, directory, manifest, error, delta_count))
    return sorted(steps, key=lambda step: (step.step, str(step.directory)))


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


def place_of(item_directory: AnyPath) -> Place:
    """Place of an item directory, which may be temporary or not exist yet."""
    in_step = TMP_SUFFIX in item_directory.parent.name or is_item(item_directory)
    return place_in_step(item_directory) if in_step else place_of_step(item_directory)


def place_of_lost(item_directory: AnyPath) -> Place:
    """Place of a directory of which nothing may be left that tells an item from a step."""
    step = item_directory.parent
    is_numbered = _number_in(step.name) is not None and is_told_by_names(item_directory)
    in_step = is_item(item_directory) or is_numbered or not at(step).is_folder
    return place_in_step(item_directory) if in_step else place_of_step(item_directory)


def place_in_step(item_directory: AnyPath) -> Place:
    """Place of a directory that is known to be one of several items of a step."""
    step = item_directory.parent
    return Place((step.parent, _committed(item_directory.name)), _number_in(_committed(step.name)))


def place_of_step(directory: AnyPath) -> Place:
    """Place of a directory that is known to be a step's own."""
    return Place((directory.parent, None), _number_in(_committed(directory.name)))


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


def siblings(item_directory: AnyPath) -> list[Step]:
    """Steps of an item directory's root, its own included."""
    root, item = place_of(item_directory).line
    return steps_of(root, item)


def _delta_count(
    directory: AnyPath, manifest: Manifest, manifests: manifest_file.ManifestReader
) -> int:
    """Number of deltas after the base of a step.

    Raises:
        AdaCheckError: its lineage does not resolve.
    """
    if isinstance(manifest, DeltaManifest):
        return resolve(directory, manifests.read_file).delta_count
    manifest_file.refuse_links(directory)
    return 0
