"""Copies of a checkpoint root, on file systems and in object stores.

Reads manifests, and no array: a copy has the bytes of its original, sound or not. Every file is
read back and compared, and a step exists whole or not at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from adacheck_jax.store.steps import deletion, marks, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, Location, at, located
from adacheck_jax.tools.handover.copy_steps import (
    COPIED,
    DELETED,
    REFUSED,
    THERE,
    CopiedStep,
    Copier,
    Lineages,
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
    planned, lineages = _planned(root)
    _check_destination(destination, root)
    is_new = not destination.exists
    copier, rows = Copier(root, destination), dict[str, CopiedStep]()
    for n, each in enumerate(planned):
        progress(n, len(planned), f"copying {each.name}")
        own = lineages.get(each.name, {})
        needs = sorted(_needs(root, own) - {each.name})
        lost = next((name for name in needs if rows[name].result not in (COPIED, THERE)), None)
        if each.result:
            rows[each.name] = each
        elif lost is not None:
            why = f"it builds on {lost}, which was not copied"
            rows[each.name] = replace(each, result=REFUSED, why=why)
        else:
            rows[each.name] = copier.copied(each, own)
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


def _planned(root: Location) -> tuple[list[CopiedStep], dict[str, dict[str, Lineage]]]:
    """Plans a copy of the step directories under a root.

    Returns:
        Step directories in the order of their numbers, the result of one that can be copied empty;
        and the lineages of the deltas in each.
    """
    rows: dict[str, CopiedStep] = {}
    lineages: dict[str, dict[str, Lineage]] = {}
    for step in Steps(root).of():
        item = at(step.directory).below(root)
        name = item.partition("/")[0]
        rows.setdefault(name, CopiedStep(name, ""))
        if step.error is not None:
            rows[name] = CopiedStep(name, REFUSED, " ".join(str(step.error).split()))
            if not root.on_file_system and deletion.is_deleted(root / name):  # the view is older
                rows[name] = CopiedStep(name, DELETED)
        elif step.lineage is not None and step.lineage.deltas:
            lineages.setdefault(name, {})[item] = step.lineage
    for places in roots.stock_steps(root).values():
        name = _name_of(root, places[0])
        why = "stock Orbax saved it: cp -r copies it, or a tool of the bucket"
        rows[name] = CopiedStep(name, REFUSED, why)
    numbers = {name: roots.place_of(root / name, in_step=False).step or 0 for name in rows}
    return sorted(rows.values(), key=lambda row: (numbers[row.name], row.name)), lineages


def _needs(root: Location, own: Lineages) -> set[str]:
    """Names of the step directories whose files some deltas are restored from."""
    return {_name_of(root, each.holder) for lineage in own.values() for each in lineage.entries}


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
