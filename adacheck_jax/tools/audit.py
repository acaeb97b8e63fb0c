"""Verification of all steps under a checkpoint root that a running manager may be changing."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps import deletion, lookup, marks, roots
from adacheck_jax.store.steps.folders import LINEAGE
from adacheck_jax.store.steps.roots import PROBE_PREFIX, TMP_SUFFIX, Step
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.recompute import Recomputation, Replayed
from adacheck_jax.tools.steps import (
    Progress,
    Root,
    Steps,
    numbered,
    quiet,
    settled,
    walked,
    why_no_step,
)
from adacheck_jax.tools.verification import NUMBER, Damage, Verifier, damage_of


@dataclass(frozen=True, slots=True)
class StepReport:
    """One row of ``adacheck verify``.

    Attributes:
        step: step number, None if neither manifest nor directory name has it.
        item: path of the item directory, relative to the root.
        kind: ``base`` or ``delta``; None if the manifest cannot be read.
        checked: the checks that were made, of ``structure``, ``data`` and ``replay``.
        damage: damage found by these checks.
        rounded: paths of the leaves that a replay on this machine gives to rounding only.
        not_checked: the reason why the step could not be recomputed here, else None.
        replayed_count: number of updates that a restore replays.
        stale: paths of the ephemeral leaves that have an earlier step's bits, which were verified.
    """

    step: int | None
    item: str
    kind: str | None
    checked: tuple[str, ...]
    damage: tuple[Damage, ...]
    rounded: tuple[str, ...] = ()
    not_checked: str | None = None
    replayed_count: int = 0
    stale: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause of damage.

    Attributes:
        file: path of the damaged file, as the first of the steps has it.
        steps: numbers of the damaged steps, ascending; those without a number are left out.
        leaves: leaf paths that it concerns; none where no single leaf is damaged.
        message: the expected and the found.
    """

    file: str
    steps: tuple[int, ...]
    leaves: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True)
class ToldDirectory:
    """A directory under a root of which there is something to be said.

    Attributes:
        path: path relative to the root.
        why: description of the directory, or the reason for what is done with it.
    """

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Leftover(ToldDirectory):
    """A directory that is no step.

    Attributes:
        is_temporary: True if an interrupted save left it.
    """

    is_temporary: bool


@dataclass(frozen=True, slots=True)
class RootReport:
    """The output of ``adacheck verify``.

    Attributes:
        root: the checkpoint root.
        steps: rows, by ascending step number.
        leftovers: directories that are no steps; they are no damage.
        data_count: number of steps whose data was read.
        damaged_count: number of damaged steps.
        not_looked_at: parts that were not checked, described for people.
        causes: causes of all damage, each once.
        deleted: numbers of the steps that were deleted meanwhile.
    """

    root: str
    steps: tuple[StepReport, ...]
    leftovers: tuple[Leftover, ...]
    data_count: int
    damaged_count: int
    not_looked_at: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    deleted: tuple[int, ...] = ()


def verify_root(
    root: Root,
    number: int | None = None,
    item: str | None = None,
    *,
    read_data: bool = False,
    replay: bool = False,
    progress: Progress = quiet,
) -> RootReport:
    """Verify one step under a root, or all: their structure, their bytes, and what replays give.

    Returns:
        The report. Steps that were deleted meanwhile have a number in it, and no row.

    Raises:
        InputError: there is no such root, step or item.
        StepDeletedError: the only step was deleted meanwhile.
    """
    every = walked(root)
    top, steps = every.root, _selected(every, number, item)
    recomputation = Recomputation() if replay else None
    report = functools.partial(_report, top, Verifier(), read_data, recomputation)
    reports = _settled_reports(top, steps, report, progress)
    gone = {step.directory for step in steps} - reports.keys()
    if number is not None and gone and not reports:
        raise deletion.error_of(steps[0].directory)
    rows = [*reports.values()]
    rows.sort(key=lambda each: (-1 if each.step is None else each.step, each.item))
    return RootReport(
        root=str(top),
        steps=tuple(rows),
        leftovers=tuple(leftovers(top)),
        data_count=sum("data" in each.checked for each in rows),
        damaged_count=sum(bool(each.damage) for each in rows),
        not_looked_at=tuple(_not_looked_at(rows, read_data=read_data, replay=replay)),
        causes=_causes_of(str(top), ((each.step, d) for each in rows for d in each.damage)),
        deleted=tuple(sorted({step.step for step in steps if step.directory in gone})),
    )


def _not_looked_at(
    reports: Sequence[StepReport], *, read_data: bool, replay: bool
) -> Iterator[str]:
    """Parts that were not checked, and the option that has them checked, or why they were not."""
    replaying = [each for each in reports if each.replayed_count]
    for check, every, what, option, is_asked in (
        ("data", reports, "the array bytes of {}", "--read-data", read_data),
        ("replay", replaying, "the replay of {} with updates", "--replay", replay),
    ):
        if missing := sum(check not in each.checked for each in every):
            steps = f"{len(every)} step{'' if len(every) == 1 else 's'}"
            how = "asked for, and not possible: see the step" if is_asked else f"verify {option}"
            some = "" if missing == len(every) else f"{missing} of "
            yield f"{what.format(some + steps)} ({how})"


def _selected(every: Steps, number: int | None, item: str | None) -> list[Step]:
    """Steps to verify; none where the first save was interrupted."""
    is_first = not every.saved and (number, item) == (None, None)
    if is_first and any(each.is_temporary for each in leftovers(every.root)):
        return []
    steps = every.of(item)
    if number is None:
        return steps
    number = numbered([step.step for step in steps], number, every.root)
    chosen = [step for step in steps if number in (step.step, roots.place_of(step.directory).step)]
    if not chosen:
        raise every.lacks(number, (step.step for step in steps))
    return chosen


def _settled_reports(
    root: AnyPath,
    steps: Sequence[Step],
    report: Callable[[Step], StepReport],
    progress: Progress,
) -> dict[AnyPath, StepReport]:
    """Reports of steps, without those that are deleted meanwhile."""
    reports = dict[AnyPath, StepReport]()
    # Item by item, so that each lineage is replayed once.
    ordered = sorted(steps, key=lambda x: (x.directory.name, x.step, str(x.directory)))

    def damaged() -> list[AnyPath]:
        """Verify steps; when called again, damaged ones alone."""
        for done, step in enumerate(ordered):
            if step.directory not in reports:
                progress(done, len(ordered), at(step.directory).below(at(root)))
            elif not reports[step.directory].damage:
                continue
            reports[step.directory] = report(step)
        return [path for path, report in reports.items() if report.damage]

    _, gone = settled(damaged, lambda found: found)
    return {path: report for path, report in reports.items() if path not in gone}


def _report(
    root: AnyPath,
    verifier: Verifier,
    read_data: bool,
    recomputation: Recomputation | None,
    step: Step,
) -> StepReport:
    """Verify one step, and recompute it if there is something to do it with."""
    manifest = step.manifest
    report = StepReport(
        step=None if step.step < 0 else step.step,
        item=at(step.directory).below(at(root)),
        kind=manifest and manifest.kind,
        checked=("structure",),
        damage=(),
    )
    damage: list[Damage] = []
    if manifest and (misplaced := roots.misplaced(step.directory, manifest)):
        damage.append(Damage(str(step.directory), None, misplaced, NUMBER))
    try:
        lineage = lookup.resolve(step.directory)  # anew: it may be a base by now
    except AdaCheckError as error:
        return replace(report, damage=(*damage, damage_of(error, step.directory)))
    checked = ["structure"]
    damage += verifier.structure(lineage)
    if read_data:
        checked.append("data")
        damage += _new(damage, verifier.data(lineage))
    replayed = recomputation.replay(lineage) if recomputation else Replayed()
    if recomputation and replayed.problem is None:
        checked.append("replay")
        damage += _new(damage, replayed.damage)
    return replace(
        report,
        checked=tuple(checked),
        damage=tuple(dict.fromkeys(damage)),
        rounded=replayed.rounded,
        not_checked=replayed.problem,
        replayed_count=lineage.replayed_count,
        stale=tuple(lineage.base.leaves[i].path for i, _ in lineage.end.stale),
    )


def _new(known: Sequence[Damage], found: Sequence[Damage]) -> list[Damage]:
    """New damage: a leaf whose bytes are damaged is damaged in every other check too."""
    leaves = {each.leaf for each in known if each.leaf is not None}
    said = {(each.file, each.message) for each in known}
    return [x for x in found if x.leaf not in leaves and (x.file, x.message) not in said]


def leftovers(root: AnyPath) -> list[Leftover]:
    """Directories under a root, and in its step directories, that are no steps."""
    top, interrupted = at(root), "left by an interrupted save"
    items = roots.items_of(top)
    ours = {path for each in items for path in (each, each.parent)}
    unfinished = roots.items_of(top, committed=False)
    unfinished += [each.parent for each in unfinished]
    found: list[Leftover] = []
    for path in _directories(top):
        name = path.below(top)
        if _is_temporary(path) or path.name.startswith(PROBE_PREFIX) or path in unfinished:
            found.append(Leftover(name, interrupted, True))
        elif path in ours:
            inside = filter(_is_temporary, _directories(path))
            found += [Leftover(inner.below(top), interrupted, True) for inner in inside]
        elif path.name.rsplit("_", maxsplit=1)[-1].isdecimal() and marks.is_rest(path):
            found.append(Leftover(name, f"{interrupted} or deletion", True))
        elif path.name.rsplit("_", maxsplit=1)[-1].isdecimal():
            found.append(Leftover(name, why_no_step(path), False))
    why = "holds files that an interrupted compaction left"
    return found + [Leftover(each.below(top), why, False) for each in half_compacted(items)]


def _is_temporary(path: Location) -> bool:
    return TMP_SUFFIX in path.name


def half_compacted(directories: Iterable[AnyPath]) -> list[Location]:
    """The item directories that hold what an interrupted compaction left."""
    found = []
    for directory in directories:
        with contextlib.suppress(AdaCheckError):  # damaged: nobody knows what belongs to it
            if in_place.leftovers(directory):
                found.append(at(directory))
    return found


def _directories(parent: Location) -> list[Location]:
    try:
        return [parent / name for name in sorted(parent.folders())]
    except OSError:
        return []


_QUOTED = re.compile(r'"/[^"]*"|"[a-z0-9]+://[^"]*"')


def _causes_of(root: str, found: Iterable[tuple[int | None, Damage]]) -> tuple[Cause, ...]:
    """The causes of all damage, in the order in which they were found.

    Files that steps share are verified once, so that a cause has the same words in each of them.
    """
    causes: dict[object, tuple[str, str, dict[int, None], dict[str, None]]] = {}
    for step, each in found:
        words = _without(each.message, each.leaf)
        named = bool(_QUOTED.search(words))  # then the words tell the file
        key = words if named else (words, _own_name(root, step, each.file))
        _, _, steps, leaves = causes.setdefault(key, (each.file, words, {}, {}))
        if step is not None:
            steps[step] = None
        if each.leaf is not None:
            leaves[each.leaf] = None
    return tuple(
        Cause(file, (*steps,), (*leaves,), words) for file, words, steps, leaves in causes.values()
    )


def _without(message: str, leaf: str | None) -> str:
    """A message that says nothing of a single leaf."""
    if leaf is None:
        return message
    words = re.sub(rf" of {re.escape(leaf)} (are|is) ", r" \1 ", message)
    return words.replace(f"{leaf}: ", "")


def _own_name(root: str, step: int | None, file: str) -> str:
    """Name of a file in the step that wrote it, the same whichever step links it."""
    below = file.removeprefix(root).lstrip("/")
    _, is_link, rest = below.partition(f"/{LINEAGE}/")
    if is_link:
        return rest
    return f"{step}.{below.rpartition('/')[2]}"
