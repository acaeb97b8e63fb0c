"""Copies of a checkpoint root, or of some of its steps, on file systems and in object stores.

Reads manifests, and no array: a copy has the bytes of its original, sound or not. Every file is
read back and compared, and a step exists whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adacheck_jax.errors import AdaCheckError, StepDeletedError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import deletion, manifest_file, marks, roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.handover.copy_files import files_of
from adacheck_jax.tools.handover.copy_steps import (
    COPIED,
    DELETED,
    REFUSED,
    THERE,
    CopiedStep,
    Copier,
    Lineages,
    Meter,
    name_of,
)
from adacheck_jax.tools.handover.copy_to_disk import ToDisk
from adacheck_jax.tools.handover.copy_to_store import ToStore
from adacheck_jax.tools.steps import InputError, Progress, deleted, quiet, resolved, steps_under


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The output of ``adacheck cp``.

    Attributes:
        root: the checkpoint root.
        destination: root of the copy.
        steps: step directories, in the order in which they were copied.
        written_bytes: bytes that were written.
        found_bytes: bytes of them that an interrupted copy had written, and were not again.
        plain_bytes: bytes that it would have been with every link as a file of its own.
        seconds: time that it took.
        not_copied: names of other files and directories under the root, if all of it was copied.
    """

    root: str
    destination: str
    steps: tuple[CopiedStep, ...]
    written_bytes: int
    found_bytes: int
    plain_bytes: int
    seconds: float
    not_copied: tuple[str, ...]


def copy(sources: Sequence[AnyPath], target: AnyPath, progress: Progress = quiet) -> CopyReport:
    """Copy a root, or some of its steps, into another root.

    On a file system hard links stay hard links. In an object store, which has none, a delta refers
    to the steps that it builds on, and back on a file system it gets links to them. A step that is
    refused, or cannot be copied, is told in its row, and the others are copied. A copy that was
    killed goes on where it was.

    Args:
        sources: a root, or step directories under one root.
        target: the other root; it may exist and hold other steps.
        progress: callback after each file, with bytes, or where a store does not tell these, files.

    Raises:
        InputError: a path is not there, or the target lies in the root.
        OSError: an object store does not answer any more.
    """
    root, names = _asked([at(each) for each in sources])
    destination = _destination(at(target), root)
    planned, lineages = _planned(root, names)
    is_new = not destination.exists
    here = [row.name for row in planned]
    seen = root.listed()
    meter = Meter(progress, [x for name in here for x in files_of(seen / name).values()])
    if destination.on_file_system:
        copier: Copier = ToDisk(root, destination, meter, here)
    else:
        copier = ToStore(root, destination, meter)
    rows: dict[str, CopiedStep] = {}
    for each in planned:
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
    done = [row for row in rows.values() if row.result == COPIED]
    top = root.listed()
    others = {*top.folders(), *(each.name for each in top.list(deep=False))} - rows.keys()
    return CopyReport(
        root=str(root),
        destination=str(destination),
        steps=tuple(rows.values()),
        written_bytes=sum(row.written_bytes for row in done),
        found_bytes=sum(row.found_bytes for row in done),
        plain_bytes=sum(row.plain_bytes for row in done),
        seconds=meter.seconds,
        not_copied=() if names else tuple(sorted(n for n in others if roots.TMP_SUFFIX not in n)),
    )


def _planned(
    root: Location, names: Sequence[str]
) -> tuple[list[CopiedStep], Mapping[str, Lineages]]:
    """Plans a copy of some step directories under a root, or of all, with all that they need.

    Returns:
        Step directories in the order of their numbers, the result of one that can be copied empty;
        and the lineages of the deltas in each.
    """
    rows: dict[str, CopiedStep] = {}
    lineages: dict[str, dict[str, Lineage]] = {}
    for step, lineage in resolved(steps_under(root)):
        item = at(step.directory).below(root)
        name = item.partition("/")[0]
        rows.setdefault(name, CopiedStep(name, ""))
        if isinstance(lineage, StepDeletedError):
            rows[name] = CopiedStep(name, DELETED)
        elif isinstance(lineage, AdaCheckError):
            rows[name] = CopiedStep(name, REFUSED, " ".join(str(lineage).split()))
            if not root.on_file_system and deletion.is_deleted(root / name):  # the view is older
                rows[name] = CopiedStep(name, DELETED)
        elif isinstance(lineage.manifest, DeltaManifest):
            lineages.setdefault(name, {})[item] = lineage
    for places in roots.stock_steps(root).values():
        name = name_of(root, places[0])
        rows[name] = CopiedStep(
            name, REFUSED, "stock Orbax saved it: cp -r copies it, or a tool of the bucket"
        )
    for name in names:
        if name not in rows:
            is_deleted = deletion.is_deleted(root / name)
            found = CopiedStep(name, REFUSED, "found no committed step there")
            rows[name] = CopiedStep(name, DELETED) if is_deleted else found
    chosen, waiting = set[str](), [*(names or rows)]
    while waiting:
        chosen.add(name := waiting.pop())
        waiting += _needs(root, lineages.get(name, {})) - chosen
    numbers = {name: roots.place_of(root / name, in_step=False).step or 0 for name in chosen}
    ordered = sorted(chosen, key=lambda name: (numbers[name], name))
    return [replace(rows[n], is_added=bool(names) and n not in names) for n in ordered], lineages


def _needs(root: Location, own: Lineages) -> set[str]:
    """Names of the step directories whose files some deltas are restored from."""
    return {name_of(root, each.holder) for lineage in own.values() for each in lineage.entries}


def _asked(paths: Sequence[Location]) -> tuple[Location, list[str]]:
    """The root that paths name, and the step directories; none of these for all."""
    traces = (marks.STEP_METADATA, manifest_file.DIRECTORY, marks.TREE_METADATA)
    is_step = {path: any((path.listed() / each).exists for each in traces) for path in paths}
    found = {path.parent if is_step[path] else path for path in paths}
    if len(found) > 1:
        shown = ", ".join(sorted(map(str, found)))
        raise InputError(f"expected steps of one root, found {shown}. Copy one after another.")
    root = found.pop()
    for path in paths:
        if not path.exists:
            known = ", ".join(sorted(_step_names(path.parent)))
            raise InputError(
                f"{path}: expected a checkpoint root or a step in one, found nothing there."
                + (f" Steps there: {known}." if known else "")
            )
    try:
        steps_under(root)
    except InputError:
        if roots.place_of(root, in_step=False).step is not None and deletion.is_deleted(root):
            raise deleted(root) from None  # it is a step
        raise
    return root, [] if root in paths else list(dict.fromkeys(path.name for path in paths))


def _step_names(root: Location) -> set[str]:
    """Names of step directories, of any kind; none if a path is no directory."""
    if not root.is_folder:
        return set()
    others = (path for paths in roots.stock_steps(root).values() for path in paths)
    return {name_of(root, each) for each in (*roots.items_of(root), *others)}


def _destination(path: Location, root: Location) -> Location:
    if path.exists and not path.is_folder:
        raise InputError(f"{path}: expected a directory or nothing, found a file.")
    if path.on_file_system and not path.parent.is_folder:
        raise InputError(f"{path.parent}: expected a directory, found none. Make it first.")
    place, top = (f"{each.resolve().key}/".lstrip("/") for each in (path, root))
    if path.storage == root.storage and (place.startswith(top) or top.startswith(place)):
        raise InputError(
            f"{path}: expected a place apart from the checkpoint root {root}. Give another path."
        )
    return path
