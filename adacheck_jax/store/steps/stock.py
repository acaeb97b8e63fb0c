"""Steps that stock Orbax saved, told apart from ours."""

from __future__ import annotations

from adacheck_jax.store.steps import manifest_file, roots
from adacheck_jax.store.steps.marks import COMMIT_MARK
from adacheck_jax.store.storage.location import AnyPath, at

TREE_METADATA = "_METADATA"
"""Name of the file by which Orbax tells a pytree from another checkpointable."""


def is_stock(directory: AnyPath) -> bool:
    """True for a pytree that Orbax's own handlers wrote, such as weights to begin with."""
    return not _is_ours(directory) and at(directory / TREE_METADATA).exists


def steps_under(root: AnyPath, item: str | None = None) -> dict[int, list[AnyPath]]:
    """Item directories of the steps under a root that stock Orbax saved, by step number.

    A step that holds an item of ours is not among them: a data iterator beside it is no state.
    """
    found: dict[int, list[AnyPath]] = {}
    root = root if at(root).on_file_system else at(root).listed()
    for name in at(root).folders():
        step = root / name
        number = roots.place_of_step(step).step
        if number is None or roots.TMP_SUFFIX in name:
            continue
        if not at(root).on_file_system and not at(step / COMMIT_MARK).exists:
            continue
        folders = [step / each for each in at(step).folders() if roots.TMP_SUFFIX not in each]
        if any(map(_is_ours, [step, *folders])):
            continue
        stock = [path for path in [step, *folders] if is_stock(path)]
        if named := [path for path in stock if item in (None, path.name)]:
            found[number] = named
    return found


def _is_ours(directory: AnyPath) -> bool:
    return at(directory / manifest_file.DIRECTORY).exists
