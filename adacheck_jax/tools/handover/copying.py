"""Copies of a checkpoint root, on file systems and in object stores.

Reads manifests, and no array: a copy has the bytes of its original, sound or not. Every file is
read back and compared, and a step exists whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from adacheck_jax.store.steps import deletion, marks, roots
from adacheck_jax.store.steps.roots import Step
from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from adacheck_jax.tools.handover.copy_steps import (
    COPIED,
    DELETED,
    REFUSED,
    THERE,
    CopiedStep,
    Copier,
)
from adacheck_jax.tools.steps import InputError, Progress, Steps, quiet


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The output of ``adacheck cp``.

    Attributes:
        root: the checkpoint root.
        destination: root of the copy.
        steps: step directories, in the order in which they were copied.
        written_bytes: bytes that were written.
        not_copied: names of other files and directories under the root.
    """

    root: str
    destination: str
    steps: tuple[CopiedStep, ...]
    written_bytes: int
    not_copied: tuple[str, ...]


def copy(source: AnyPath, target: AnyPath, progress: Progress = quiet) -> CopyReport:
    """Copy the steps of a root into another root.

    On a file system hard links stay hard links. In an object store, which has none, a delta refers
    to the steps that it builds on, and back on a file system it gets links to them. A step that is
    refused, or cannot be copied, is told in its row, and the others are copied. Steps that an
    earlier call copied stay, so that a copy that was killed goes on with the step that it was at;
    so do other steps at the target.

    Raises:
        InputError: there is no such root, or the target lies in it, or it in the target.
        OSError: an object store does not answer any more.
    """
    root, destination = (at(located(each)) for each in (source, target))
    if (root / marks.STEP_METADATA).exists:
        raise InputError(
            f"{root}: expected a checkpoint root, found one step of one. Give {root.parent}; on a "
            "disk cp -a copies a step, with its hard links; adacheck export writes any step."
        )
    every, found = Steps(root), dict[str, list[Step]]()
    for step in every.of():
        found.setdefault(_name_of(root, step.directory), []).append(step)
    found |= {_name_of(root, places[0]): [] for places in every.stock.values()}
    _check_destination(destination, root)
    is_new = not destination.exists
    copier, rows = Copier(root, destination), dict[str, CopiedStep]()
    for n, (name, steps) in enumerate(sorted(found.items(), key=lambda x: _number(root, x[0]))):
        progress(n, len(found), f"copying {name}")
        items = {at(x.directory).below(root): x.lineage for x in steps}
        deltas = {item: each for item, each in items.items() if each and each.deltas}
        rows[name] = _refused(root, name, steps, rows) or copier.copied(name, deltas)
    if is_new and destination.on_file_system and not destination.folders():
        destination.delete()
    top = root.listed()
    others = {*top.folders(), *(each.name for each in top.list(deep=False))} - rows.keys()
    return CopyReport(
        root=str(root),
        destination=str(destination),
        steps=tuple(rows.values()),
        written_bytes=sum(row.written_bytes for row in rows.values()),
        not_copied=tuple(sorted(name for name in others if roots.TMP_SUFFIX not in name)),
    )


def _refused(
    root: Location, name: str, steps: Sequence[Step], rows: Mapping[str, CopiedStep]
) -> CopiedStep | None:
    """The row of a step directory that cannot be copied; None of one that can."""
    if not steps:
        why = "stock Orbax saved it: cp -r copies it, or a tool of the bucket"
        return CopiedStep(name, REFUSED, why)
    if error := next((step.error for step in steps if step.error), None):
        if not root.on_file_system and deletion.first_deleted([root / name]):  # the view is older
            return CopiedStep(name, DELETED)
        return CopiedStep(name, REFUSED, " ".join(str(error).split()))
    lineages = [step.lineage for step in steps if step.lineage]
    needs = {_name_of(root, each.holder) for lineage in lineages for each in lineage.entries}
    for other in sorted(needs - {name}):
        if rows[other].result not in (COPIED, THERE):
            return CopiedStep(name, REFUSED, f"it builds on {other}, which was not copied")
    return None


def _number(root: Location, name: str) -> tuple[int, str]:
    """Number and name of a step directory, by which steps are copied in order."""
    return roots.place_of(root / name, in_step=False).step or 0, name


def _name_of(root: Location, item: AnyPath) -> str:
    """Name of the step directory of an item."""
    return at(item).below(root).partition("/")[0]


def _check_destination(path: Location, root: Location) -> None:
    if path.exists and not path.is_folder:
        raise InputError(f"{path}: expected a directory or nothing, found a file.")
    if path.on_file_system and not path.parent.is_folder:
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    place, top = (f"{each.resolve().key}/".lstrip("/") for each in (path, root))
    if path.storage == root.storage and (place.startswith(top) or top.startswith(place)):
        raise InputError(
            f"{path}: expected a place apart from the checkpoint root {root}. Give another path."
        )
