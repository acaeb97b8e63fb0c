"""Pruning of a checkpoint root: the steps that rules of retention keep stay, all others go.

One pure function decides, from step numbers and dates alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.store.steps import lookup
from adacheck_jax.store.storage.location import AnyPath, Location, at
from adacheck_jax.tools.listing import FOREIGN, STOCK, StepSummary, saved_at, summarize_root
from adacheck_jax.tools.steps import InputError
from adacheck_jax.tools.upkeep.removal import Removal, execute, is_plain, needed_by, planned


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules of retention; a step stays if one of them keeps it.

    Attributes:
        last: number of the newest steps to keep.
        every: keep the steps whose numbers are multiples of this.
        within: keep the steps that were saved so long before the newest one, or less.
    """

    last: int | None = None
    every: int | None = None
    within: timedelta | None = None


@dataclass(frozen=True, slots=True)
class KeptStep:
    """A step that stays.

    Attributes:
        step: its number, None if nothing tells it.
        path: path of its item directory, relative to the root.
        why: the rules that keep it, or what else does.
    """

    step: int | None
    path: str
    why: str


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The output of ``adacheck prune``.

    Attributes:
        root: the checkpoint root.
        is_dry_run: True if nothing was removed.
        removals: step directories that were removed, or would be.
        kept: steps that stay, ascending.
        lost_steps: deferred steps that no other directory holds, and that go with the others.
        freed_bytes: bytes that all removals free; 0 in an object store, which does not tell sizes.
    """

    root: str
    is_dry_run: bool
    removals: tuple[Removal, ...]
    kept: tuple[KeptStep, ...]
    lost_steps: tuple[int, ...]
    freed_bytes: int


def prune(
    root: AnyPath, rules: Retention, item: str | None = None, *, dry_run: bool = False
) -> PruneReport:
    """Remove the steps that no rule keeps.

    The newest step stays, since a running training builds on it; so do steps that others refer to
    (without hard links), damaged ones, which :mod:`~adacheck_jax.tools.upkeep.repair` judges, and
    what neither this library nor stock Orbax saved.

    Args:
        root: the directory given to the checkpoint manager.
        rules: what to keep.
        item: name of the item directory whose steps are looked at, needed if steps hold several.
        dry_run: True to remove nothing.

    Raises:
        InputError: there is no such root, or no rule, or steps hold several items.
    """
    top = at(root).resolve()
    rows = [row for row in summarize_root(top).steps if item in (None, _item_of(row))]
    _check(top, rows, rules, item)
    kept = kept_by(rows, rules)
    going = [row for n, row in enumerate(rows) if n not in kept]
    needed = needed_by(top / row.item for n, row in enumerate(rows) if n in kept)
    for n, row in enumerate(rows):
        if row in going and (why := needed.get(at(top / row.item).resolve())):
            kept[n] = f"{why} builds on it"
        elif row in going and not is_plain(top / row.item):
            kept[n] = "it lies behind a symbolic link, which is not followed"
    going = [row for n, row in enumerate(rows) if n not in kept]
    staying = [row for n, row in enumerate(rows) if n in kept]
    removals = planned(top, [(_step_directory(top, row), _NOT_KEPT) for row in going])
    lost = _lost(top, going, staying)
    done = removals
    if not dry_run:
        done = [each for each in removals if execute(top, each)]
        changed = {each.path for each in removals} - {each.path for each in done}
        for n, row in enumerate(rows):
            directory = _step_directory(top, row)
            if directory.below(top) in changed and directory.exists:  # else a manager deleted it
                kept[n] = "it changed meanwhile"
    return PruneReport(
        root=str(root),
        is_dry_run=dry_run,
        removals=tuple(done),
        kept=tuple(KeptStep(rows[n].step, rows[n].item, why) for n, why in sorted(kept.items())),
        lost_steps=lost,
        freed_bytes=sum(each.freed_bytes for each in done),
    )


_NOT_KEPT = "no rule keeps it"


def kept_by(rows: Sequence[StepSummary], rules: Retention) -> dict[int, str]:
    """Positions of the steps that stay, each with the reason.

    Args:
        rows: steps, ascending.
        rules: rules of retention.
    """
    why: dict[int, list[str]] = {n: [] for n in range(len(rows))}
    sound = [n for n, row in enumerate(rows) if row.error is None and row.kind != FOREIGN]
    for n, row in enumerate(rows):
        if row.error is not None:
            why[n].append("damaged: see adacheck repair")
        elif row.kind == FOREIGN:
            why[n].append("neither adacheck_jax nor stock Orbax saved it")
    for n in sound[-1:]:
        why[n].append("newest")
    for n in sound[max(len(sound) - (rules.last or 0), 0) :]:
        why[n].append(f"one of the last {rules.last}")
    for n in sound if rules.every else []:
        number = rows[n].step
        if number is not None and rules.every and number % rules.every == 0:
            why[n].append(f"a multiple of {rules.every}")
    if rules.within is not None:
        dates = {n: saved_at(rows[n]) for n in sound}
        newest = max((date for date in dates.values() if date), default=None)
        for n, date in dates.items():
            if date is None:
                why[n].append("nothing tells when it was saved")
            elif newest is not None and newest - date <= rules.within:
                why[n].append("new enough")
    return {n: ", ".join(reasons) for n, reasons in why.items() if reasons}


def _check(root: Location, rows: Sequence[StepSummary], rules: Retention, item: str | None) -> None:
    if rules == Retention():
        raise InputError(
            f"{root}: expected a rule of what to keep, found none. Give --keep-last, --keep-every "
            "or --keep-within; nothing was removed."
        )
    items = sorted({_item_of(row) for row in rows if row.kind not in (STOCK, FOREIGN)})
    if item is None and len(items) > 1:
        raise InputError(
            f"{root}: expected one item a step, found {', '.join(items)}. Their step directories "
            "are removed whole; name the item that the rules look at with --item."
        )
    if item is not None and not rows:
        raise InputError(f"{root}: expected steps with an item {item!r}, found none.")


def _item_of(row: StepSummary) -> str:
    return row.item.rpartition("/")[2] if "/" in row.item else ""


def _step_directory(root: Location, row: StepSummary) -> Location:
    return root / row.item.partition("/")[0]


def _lost(
    root: Location, going: Sequence[StepSummary], staying: Sequence[StepSummary]
) -> tuple[int, ...]:
    """Deferred steps that only removed directories hold."""
    deferred = {step for row in going for step in row.recorded}
    held: set[int] = set()
    for row in staying if deferred else ():
        try:
            held.update(lookup.resolve(root / row.item).steps)
        except AdaCheckError:  # it holds nothing that can be restored
            continue
    return tuple(sorted(deferred - held))
