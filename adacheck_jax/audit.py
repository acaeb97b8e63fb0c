"""Verifies the steps under a checkpoint root, which a running manager may be changing."""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adacheck_jax import inspection
from adacheck_jax import lineage as lineages
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.inspection import InputError
from adacheck_jax.lineage import TMP_SUFFIX, Step
from adacheck_jax.manifest import BaseManifest
from adacheck_jax.verification import NUMBER, Damage, Verifier, damage_of, identity

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
    """

    step: int | None
    item: str
    kind: str | None
    checked: tuple[str, ...]
    damage: tuple[Damage, ...]
    rounded: tuple[str, ...] = ()
    not_checked: str | None = None


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
    """

    root: str
    steps: tuple[StepReport, ...]
    leftovers: tuple[Leftover, ...]
    data_count: int
    subset: float | None
    seed: int | None
    damaged_count: int


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
    every = inspection.steps_under(root)
    steps = _selected(root, every, number, item)
    chosen = _chosen(steps, wanted)
    verifier = Verifier()
    misplaced = _misplaced(every)
    reports = []
    # Item by item, so that each lineage is replayed once.
    ordered = sorted(steps, key=lambda each: (each.directory.name, each.step, each.directory))
    for done, step in enumerate(ordered):
        if progress is not None:
            progress(done, len(ordered), str(step.directory.relative_to(root)))
        report = _settled(step, root, verifier, wanted, step.directory in chosen, misplaced)
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
    chosen = [
        step for step in steps if number in (step.step, lineages.place_of(step.directory).step)
    ]
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


def _misplaced(steps: Sequence[Step]) -> dict[Path, int]:
    """Steps that lie where another one was: their directory's number by path.

    The number of a step need not be that of its directory. But where it mostly is, or where the
    numbers do not ascend together, two steps were swapped.
    """
    lines: dict[object, list[tuple[int, int, Path]]] = {}
    for step in steps:
        place = lineages.place_of(step.directory)
        if step.manifest is not None and place.step is not None:
            entry = (place.step, step.manifest.step, step.directory)
            lines.setdefault(place.line, []).append(entry)
    found = {}
    for line in lines.values():
        line.sort()
        numbers = [number for _, number, _ in line]
        odd = [each for each in line if each[0] != each[1]]
        ascends = all(a < b for a, b in itertools.pairwise(numbers))
        if 2 * len(odd) < len(line) or not ascends:
            found |= {path: number for number, _, path in odd}
    return found


def _settled(
    step: Step,
    root: Path,
    verifier: Verifier,
    wanted: Thoroughness,
    read_data: bool,
    misplaced: dict[Path, int],
) -> StepReport | None:
    """Looks again while a damaged step's files change; None for a step that is gone.

    A step that a manager is deleting looks damaged.
    """
    report = None
    for _ in range(_LOOK_COUNT):
        before = identity(step.directory)
        report = _report(step, root, verifier, wanted, read_data, misplaced)
        if before and not report.damage:
            return report
        time.sleep(_LOOK_AGAIN_S)
        after = identity(step.directory)
        if not after:
            return None
        if before == after:
            return report
    return report


def _report(
    step: Step,
    root: Path,
    verifier: Verifier,
    wanted: Thoroughness,
    read_data: bool,
    misplaced: dict[Path, int],
) -> StepReport:
    manifest = step.manifest
    number = None if step.step < 0 else step.step
    kind = None if manifest is None else "delta"
    if isinstance(manifest, BaseManifest):
        kind = "base"
    place = str(step.directory.relative_to(root))
    checked, rounded, problem = ["structure"], (), None
    damage: list[Damage] = []
    if manifest is not None and step.directory in misplaced:
        there = misplaced[step.directory]
        message = f"expected step {there} in this directory, found step {manifest.step}"
        damage.append(Damage(str(step.directory), None, message, NUMBER))
    try:
        lineage = lineages.resolve(step.directory)
    except AdaCheckError as error:
        damage.append(damage_of(error, step.directory))
        return StepReport(number, place, kind, ("structure",), tuple(damage))
    damage += verifier.structure(lineage)
    if read_data:
        checked.append("data")
        damage += _new(damage, verifier.data(lineage))
    if wanted.replay:
        replayed = verifier.replay(lineage)
        problem, rounded = replayed.problem, replayed.rounded
        if problem is None:
            checked.append("replay")
            damage += _new(damage, list(replayed.damage))
    found = tuple(dict.fromkeys(damage))
    return StepReport(number, place, kind, tuple(checked), found, rounded, problem)


def _new(known: Sequence[Damage], found: Sequence[Damage]) -> list[Damage]:
    """What is not known yet: a leaf that is damaged once is damaged in every way."""
    leaves = {each.leaf for each in known if each.leaf is not None}
    return [each for each in found if each.leaf is None or each.leaf not in leaves]


def leftovers(root: Path) -> list[Leftover]:
    """What lies under a root and in its step directories, and is no step."""
    found = []
    ours = {path for each in lineages.items_of(root) for path in (each, each.parent)}
    for path in _directories(root):
        relative = str(path.relative_to(root))
        if TMP_SUFFIX in path.name or path.name.startswith(lineages.PROBE_PREFIX):
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
