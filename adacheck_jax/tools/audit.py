"""Verifies the steps under a checkpoint root, which a running manager may be changing."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adacheck_jax.errors import AdaCheckError, StorageError, unreadable
from adacheck_jax.format import lineage as lineages
from adacheck_jax.format import roots
from adacheck_jax.format.lineage import Lineage
from adacheck_jax.format.manifest import BaseManifest
from adacheck_jax.format.roots import TMP_SUFFIX, Step
from adacheck_jax.store.links import PROBE_PREFIX
from adacheck_jax.tools import inspection
from adacheck_jax.tools.inspection import InputError
from adacheck_jax.tools.recompute import RECOMPUTED, Recomputation
from adacheck_jax.tools.verification import (
    NUMBER,
    OTHER_BITS,
    Damage,
    Verifier,
    check,
    damage_of,
    unreadable_file,
    whole_part,
)

_log = logging.getLogger(__name__)

_OF_ONE_LEAF = {OTHER_BITS, RECOMPUTED}
"""What is told of a leaf, and not of the file that it lies in."""
_LOOK_COUNT = 20
_LOOK_AGAIN_S = 0.1

Progress = Callable[[int, int, str], None]
"""Called with how many steps are done, of how many, and what is looked at next."""


@dataclass(frozen=True, slots=True)
class Thoroughness:
    """How much of each step to check; its structure always.

    Attributes:
        read_data: read every stored byte.
        subset: the part of the steps, over 0 to 1, whose data is read, where ``read_data`` is not.
        seed: chooses these.
        replay: recompute each step.
    """

    read_data: bool = False
    subset: float = 0.0
    seed: int = 0
    replay: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """One row of ``adacheck verify``.

    Attributes:
        step: step number, None where neither manifest nor directory name tells it.
        item: path of the item directory, relative to the root.
        kind: ``base`` or ``delta``; None where the manifest cannot be read.
        checked: ``structure``, ``data`` and ``replay``, as far as they were checked.
        damage: what is damaged; empty if all that was checked is as it was saved.
        rounded: leaf paths that replay gives to rounding only, on this machine.
        not_checked: why the step could not be recomputed here, else None.
        unchecked: steps of its lineage whose replay nobody compared with the state, neither when
            they were saved nor now.
        replayed_count: how many updates a restore replays.
    """

    step: int | None
    item: str
    kind: str | None
    checked: tuple[str, ...]
    damage: tuple[Damage, ...]
    rounded: tuple[str, ...] = ()
    not_checked: str | None = None
    unchecked: tuple[int, ...] = ()
    replayed_count: int = 0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory under a root that is no step.

    Attributes:
        path: relative to the root.
        why: what it is.
        is_temporary: whether an interrupted save left it.
    """

    path: str
    why: str
    is_temporary: bool


@dataclass(frozen=True, slots=True)
class RootReport:
    """What ``adacheck verify`` shows.

    Attributes:
        root: the checkpoint root.
        steps: ascending.
        leftovers: what lies there and is no step; no damage.
        data_count: of how many steps the data was read.
        subset: the part that was asked for, None for all or none.
        seed: chose which; None without ``subset``.
        damaged_count: of steps.
        not_looked_at: what damage may be in that this report would not show, for people.
    """

    root: str
    steps: tuple[StepReport, ...]
    leftovers: tuple[Leftover, ...]
    data_count: int
    subset: float | None
    seed: int | None
    damaged_count: int
    not_looked_at: tuple[str, ...] = ()


def verify_root(
    root: Path,
    number: int | None = None,
    item: str | None = None,
    thoroughness: Thoroughness | None = None,
    progress: Progress | None = None,
) -> RootReport:
    """Verifies the steps under a root.

    Args:
        root: the directory given to the checkpoint manager.
        number: the step, None for all.
        item: name of the item directory, None for all.
        thoroughness: what to check; by default structure alone.
        progress: is told how far it is.

    Returns:
        What was found. Steps that were deleted meanwhile are left out.

    Raises:
        InputError: there is no such root, step or item.
    """
    wanted = thoroughness or Thoroughness()
    root = root.absolute()  # Orbax takes no other
    try:
        steps = _selected(root, inspection.steps_under(root), number, item)
    except InputError:
        only_leftovers = root.is_dir() and any(each.is_temporary for each in leftovers(root))
        if not only_leftovers or (number, item) != (None, None):
            raise
        steps = []  # what a first save left when it was interrupted
    audit = _Audit(root, wanted, _chosen(steps, wanted))
    reports = []
    # Item by item, so that each lineage is replayed once.
    ordered = sorted(steps, key=lambda each: (each.directory.name, each.step, each.directory))
    for done, step in enumerate(ordered):
        if progress is not None:
            progress(done, len(ordered), str(step.directory.relative_to(root)))
        report = audit.settled(step)
        if report is not None:
            reports.append(report)
    reports.sort(key=lambda each: (-1 if each.step is None else each.step, each.item))
    partly = wanted.subset > 0 and not wanted.read_data
    return RootReport(
        root=str(root),
        steps=tuple(reports),
        leftovers=tuple(leftovers(root)),
        data_count=sum("data" in each.checked for each in reports),
        subset=wanted.subset if partly else None,
        seed=wanted.seed if partly else None,
        damaged_count=sum(bool(each.damage) for each in reports),
        not_looked_at=tuple(_not_looked_at(reports)),
    )


def _not_looked_at(reports: Sequence[StepReport]) -> Iterator[str]:
    unread = sum("data" not in each.checked for each in reports)
    if unread:
        yield f"the array bytes of {_of(unread, reports)} (--read-data)"
    replaying = [each for each in reports if each.replayed_count]
    missing = sum("replay" not in each.checked for each in replaying)
    if missing:
        yield f"the replay of {_of(missing, replaying)} with updates (--replay)"
    unchecked = sorted({step for each in reports for step in each.unchecked})
    if unchecked:
        shown = lineages.shown_steps(unchecked)
        yield f"whether the deltas of steps {shown} are exact, unchecked when saved (--replay)"


def _of(count: int, every: Sequence[StepReport]) -> str:
    steps = f"{len(every)} step{'' if len(every) == 1 else 's'}"
    return steps if count == len(every) else f"{count} of {steps}"


class RestorableStep(int):
    """The number of a step that verifies, and where it is restored from.

    It may have no directory of its own: it was recorded, or the manager deleted it, and a later
    step's directory holds it. Restore either with::

        found = adacheck.latest_restorable(root)
        args = adacheck.RestoreArgs(abstract_state, step=found.step)
        state = manager.restore(found.saved, args=args)

    Args:
        saved: number of the step directory to restore from, as the manager lists it.
        step: for :class:`RestoreArgs`: None for the step that was saved there.
    """

    saved: int
    step: int | None

    def __new__(cls, saved: int, step: int | None = None) -> RestorableStep:  # noqa: D102
        self = super().__new__(cls, saved if step is None else step)
        self.saved, self.step = saved, step
        return self


def latest_restorable(
    root: str | os.PathLike[str], item: str | None = None, *, read_data: bool = True
) -> RestorableStep | None:
    """The newest step that verifies, for a script that would rather go on than stop.

    What is newer and does not verify is skipped, and the log says why. A damaged step's directory
    may hold earlier ones that verify: see :class:`RestorableStep`. Every process may call it, and
    finds the same where the root is shared. ``RestoreArgs(fallback=True)`` does the same while it
    restores, and so reads each file once.

    No update is replayed. Where the delta of a step was not checked when it was saved (an earlier
    release wrote it), its bytes may be whole and its replay not exact: the log says so.

    Args:
        root: the directory given to the checkpoint manager.
        item: name of the item that has to verify; None for every item of a step.
        read_data: read every stored byte; otherwise only structure is looked at, in a fraction of
            a second, and a flipped bit is found by the restore.

    Returns:
        The number of the step, and what to restore it from; None where no step was ever saved.

    Raises:
        AdaCheckError: there are steps, and none of them verifies; it is what is wrong with the
            newest. Training should not begin anew unasked.
        StorageError: a step cannot be read now, and may be whole.
    """
    steps: dict[int, list[Path]] = {}
    for path in roots.items_of(Path(root).absolute()):
        number = roots.place_of(path).step
        if number is not None and item in (None, path.name):
            steps.setdefault(number, []).append(path)
    verifier, first, inner = Verifier(), None, None
    for number, paths in sorted(steps.items(), reverse=True):
        if inner is not None and inner > number:
            break
        try:
            found = [check(path, read_data=read_data, verifier=verifier) for path in sorted(paths)]
        except StorageError:
            raise
        except AdaCheckError as error:
            _refuse_unreadable(paths, error)
            if all(path.is_dir() for path in paths):  # else it was deleted meanwhile
                _log.warning("Skipping step %d, which does not verify: %s", number, error)
                first = first or error
                another = _newest_within(number, paths, read_data, verifier)
                inner = max(filter(None, (inner, another)), default=None)
            continue
        _tell_unchecked(number, found)
        return RestorableStep(number)
    if inner is None and first is not None:
        raise first
    if inner is not None:
        told = "Step %d verifies, and is restored from step %d with RestoreArgs(step=%d)."
        _log.warning(told, inner, inner.saved, inner.step)
        held = [lineages.held(path) for path in steps[inner.saved]]
        _tell_unchecked(inner, [each.to(inner) for each in held])
    return inner


def _refuse_unreadable(paths: Sequence[Path], error: AdaCheckError) -> None:
    """Raises a StorageError in place of an error, where files cannot be read now."""
    for path in paths:
        problem = unreadable_file(path)
        if problem is not None and (refused := unreadable(path, problem)):
            raise refused from error


def _newest_within(
    number: int, paths: Sequence[Path], read_data: bool, verifier: Verifier
) -> RestorableStep | None:
    """The newest step that verifies in every item, of those that a bad step's directory holds."""
    common: set[int] | None = None
    for path in paths:
        try:
            part = whole_part(lineages.held(path), read_data=read_data, verifier=verifier)
        except StorageError:
            raise
        except AdaCheckError:  # no manifest in it is whole
            return None
        steps = set() if part is None else {*part.steps}
        common = steps if common is None else common & steps
    return RestorableStep(number, max(common)) if common else None


def _tell_unchecked(number: int, found: Sequence[Lineage]) -> None:
    unchecked = sorted({step for each in found for step in each.unchecked})
    if unchecked:
        _log.warning(
            "Step %d verifies, but nobody compared the deltas of steps %s with the state when they "
            "were saved: whether their replay is exact only restoring the step tells, or adacheck "
            "verify --replay.",
            number,
            lineages.shown_steps(unchecked),
        )


def _selected(
    root: Path, every: Sequence[Step], number: int | None, item: str | None
) -> list[Step]:
    steps = [step for step in every if item in (None, step.directory.name)]
    if not steps:
        names = ", ".join(sorted({step.directory.name for step in every}))
        raise InputError(f"{root}: expected an item {item!r}, found {names}. Give one of these.")
    if number is None:
        return steps
    chosen = [step for step in steps if number in (step.step, roots.place_of(step.directory).step)]
    if not chosen:
        numbers = ", ".join(str(step.step) for step in steps[-10:])
        earlier = f"{len(steps) - 10} earlier and " if len(steps) > 10 else ""
        raise InputError(
            f"{root}: expected step {number}, found {earlier}{numbers}. Give one of these steps."
        )
    return chosen


def _chosen(steps: Sequence[Step], wanted: Thoroughness) -> frozenset[Path]:
    """The steps whose data is read."""
    paths = [step.directory for step in steps]
    if wanted.read_data:
        return frozenset(paths)
    count = math.ceil(wanted.subset * len(paths))
    return frozenset(random.Random(wanted.seed).sample(paths, count))


class _Audit:
    """Looks at one step after the other, and remembers what they share."""

    def __init__(self, root: Path, wanted: Thoroughness, chosen: frozenset[Path]) -> None:
        self._root, self._wanted, self._chosen = root, wanted, chosen
        self._verifier, self._recomputation = Verifier(), Recomputation()

    def settled(self, step: Step) -> StepReport | None:
        """Looks again while a damaged step's files change; None for a step that is gone.

        A step that a manager is deleting looks damaged.
        """
        report = None
        for _ in range(_LOOK_COUNT):
            before = lineages.identity(step.directory)
            report = self._report(step)
            if before and not report.damage:
                return report
            time.sleep(_LOOK_AGAIN_S)
            after = lineages.identity(step.directory)
            if not after:
                return None
            if before == after:
                return report
        return report

    def _report(self, step: Step) -> StepReport:
        manifest = step.manifest
        number = None if step.step < 0 else step.step
        kind = None if manifest is None else "delta"
        if isinstance(manifest, BaseManifest):
            kind = "base"
        place = str(step.directory.relative_to(self._root))
        checked, rounded, problem = ["structure"], (), None
        damage: list[Damage] = []
        if manifest is not None:
            misplaced = roots.misplaced(step.directory, manifest)
            if misplaced:
                damage.append(Damage(str(step.directory), None, misplaced, NUMBER))
        try:
            lineage = lineages.resolve(step.directory)
        except AdaCheckError as error:
            damage.append(damage_of(error, step.directory))
            return StepReport(number, place, kind, ("structure",), tuple(damage))
        damage += self._verifier.structure(lineage)
        if step.directory in self._chosen:
            checked.append("data")
            damage += _new(damage, self._verifier.data(lineage))
        if self._wanted.replay:
            replayed = self._recomputation.replay(lineage)
            problem, rounded = replayed.problem, replayed.rounded
            if problem is None:
                checked.append("replay")
                damage += _new(damage, list(replayed.damage))
        found = tuple(dict.fromkeys(damage))
        unchecked = () if "replay" in checked else tuple(lineage.unchecked)
        count = lineage.replayed_count
        return StepReport(
            number, place, kind, tuple(checked), found, rounded, problem, unchecked, count
        )


def _new(known: Sequence[Damage], found: Sequence[Damage]) -> list[Damage]:
    """What is not known yet, and of what several leaves suffer from the same way one.

    A leaf that is damaged once is damaged in every way.
    """
    leaves = {each.leaf for each in known if each.leaf is not None}
    said = {(each.file, each.message) for each in known}
    new: list[Damage] = []
    places: dict[tuple[str, str], int] = {}
    for each in found:
        key = (each.file, each.message)
        if key in said or (each.leaf is not None and each.leaf in leaves):
            continue
        place = places.setdefault(key, len(new))
        if place == len(new) or each.message in _OF_ONE_LEAF:
            new.append(each)
        else:
            new[place] = dataclasses.replace(new[place], leaf=None)
    return new


def leftovers(root: Path) -> list[Leftover]:
    """What lies under a root and in its step directories, and is no step."""
    found = []
    ours = {path for each in roots.items_of(root) for path in (each, each.parent)}
    unfinished = {path for each in roots.uncommitted_of(root) for path in (each, each.parent)}
    for path in _directories(root):
        relative = str(path.relative_to(root))
        is_named_temporary = TMP_SUFFIX in path.name or path.name.startswith(PROBE_PREFIX)
        if is_named_temporary or path in unfinished:
            found.append(Leftover(relative, "left by an interrupted save", True))
        elif path in ours:
            found += [
                Leftover(str(inner.relative_to(root)), "left by an interrupted save", True)
                for inner in _directories(path)
                if TMP_SUFFIX in inner.name
            ]
        elif path.name.rsplit("_", maxsplit=1)[-1].isdecimal():
            found.append(Leftover(relative, "holds no step saved by AdaCheckHandler", False))
    return found


def _directories(parent: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(parent))
    except OSError:
        return []
    return [parent / name for name in names if (parent / name).is_dir()]
