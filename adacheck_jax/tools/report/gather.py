"""A report of a run, gathered from its root; it reads, and changes nothing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from adacheck_jax.format.manifest import Delta
from adacheck_jax.store.steps import roots
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools import audit, listing
from adacheck_jax.tools.audit import RootReport
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.listing import FOREIGN, STOCK, RootSummary, StepSummary
from adacheck_jax.tools.report import norms as norms_of_steps
from adacheck_jax.tools.report import ways
from adacheck_jax.tools.report.changes import changes_of, with_norms
from adacheck_jax.tools.report.facts import (
    DAMAGED,
    DEFERRED,
    LeafBytes,
    Report,
    Savings,
    StepFacts,
    Verification,
)
from adacheck_jax.tools.report.norms import Norms

MOST_VERIFIED = 300
"""Saved steps up to which the structure of all is checked: it takes some milliseconds a step."""

Tell = Callable[[int, int, str], None]


def gather(
    root: AnyPath,
    version: str,
    item: str | None = None,
    norm_count: int | None = None,
    norms: Norms | None = None,
    tell: Tell | None = None,
) -> Report:
    """Gather a report.

    Args:
        root: the directory given to the checkpoint manager.
        version: version of this library.
        item: name of the item directory, needed if steps hold several.
        norm_count: number of the steps that are restored for norms, at most; None for all of a
            small run, and none else.
        norms: what an earlier report found, so that no step is restored twice; it is filled.
        tell: is told of the progress.

    Raises:
        InputError: there is no such root, step or item.
    """
    summary = listing.summarize_root(root)
    rows = [row for row in summary.steps if _is_of(row, item)]
    ours = [row for row in rows if row.kind not in (STOCK, FOREIGN)]
    verified = None
    if 0 < len(ours) <= MOST_VERIFIED:
        verified = audit.verify_root(root, item=item, progress=tell)
    facts = _waits([_facts_of(row) for row in rows])
    facts = _damaged(facts, verified) if verified else facts
    report = Report(
        root=str(root),
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version,
        disk_bytes=summary.disk_bytes,
        saved_count=len(rows),
        recorded_count=0,
        newest=max((row.step for row in rows if row.step is not None), default=None),
        leaf_count=None,
        update="",
        steps=tuple(facts),
        savings=None,
        leaves=(),
        changes=None,
        restored_count=0,
        norms_note="",
        verification=_verification(verified, facts, ours),
    )
    if all(row.error for row in ours):
        return report
    with contextlib.closing(Walk(root, item)) as walk:
        return _walked(report, summary, walk, norm_count, norms or Norms(), tell)


def _walked(
    report: Report,
    summary: RootSummary,
    walk: Walk,
    norm_count: int | None,
    norms: Norms,
    tell: Tell | None,
) -> Report:
    """The report with what recorded steps tell."""
    counter, checks = ways.WaysCounter(), Counter[str]()
    for step in walk.steps:
        lineage = walk.lineage(step)
        counter.add(lineage)
        if isinstance(lineage.end, Delta):
            checks[lineage.end.checked or "not checked"] += 1
    leaves = counter.found()
    changes, counts = changes_of(walk, leaves)
    wanted = norms_of_steps.chosen(walk, norm_count)
    known = norms.fill(walk, wanted, tell)
    note = norms_of_steps.note(walk, len(known), len(wanted), norms.failed)
    rows = {row.step: row for row in report.steps if _has_place(row)}
    others = [row for row in report.steps if not _has_place(row)]
    for step in walk.steps:
        row = rows.get(step) or _held(walk, step)
        row = replace(row, changed_count=counts.get(step))
        if step in known:
            told = known[step].row
            row = replace(
                row,
                gradient_norm=told.gradient_norm,
                update_norm=told.update_norm,
                params_norm=told.params_norm,
                learning_rate=told.learning_rate,
            )
        rows[step] = row
    steps = sorted([*rows.values(), *others], key=lambda r: -1 if r.step is None else r.step)
    newest = walk.steps[-1]
    return replace(
        report,
        recorded_count=len(walk.steps),
        newest=max(newest, report.newest or newest),
        leaf_count=len(walk.leaves(newest)),
        update=_update_of(walk, newest),
        steps=tuple(steps),
        savings=_savings(walk, leaves, summary, counter.zero_bytes),
        leaves=leaves,
        changes=with_norms(changes, {step: each.relative for step, each in known.items()}),
        restored_count=walk.restored_count,
        norms_note=note,
        verification=replace(report.verification, at_save=dict(checks)),
    )


def _is_of(row: StepSummary, item: str | None) -> bool:
    is_other = row.kind in (STOCK, FOREIGN)
    return item is None or is_other or row.item.rpartition("/")[2] == item


def _has_place(row: StepFacts) -> bool:
    """True for a numbered step of ours."""
    return row.step is not None and row.kind not in (STOCK, FOREIGN)


def _facts_of(row: StepSummary) -> StepFacts:
    return StepFacts(
        step=row.step,
        kind=DAMAGED if row.error or row.kind is None else row.kind,
        item=row.item,
        saved_at=row.saved_at,
        metrics=row.metrics,
        parent=row.parent,
        depth=row.depth,
        recorded=row.recorded,
        checked=row.checked,
        new_bytes=row.new_bytes,
        size_bytes=row.size_bytes,
        error=row.error,
    )


def _held(walk: Walk, step: int) -> StepFacts:
    """A recorded step without a directory of its own."""
    lineage = walk.lineage(step)
    saved, end = lineage.manifest, lineage.end
    is_deferred = saved.step != step
    held_by = roots.place_of(lineage.entries[-1].holder).step
    return StepFacts(
        step=step,
        kind=DEFERRED if is_deferred else listing.kind_of(saved),
        held_by=held_by,
        parent=None if is_deferred else listing.parent_of(saved),
        depth=len(lineage.deltas),
        checked=(end.checked or "not checked") if isinstance(end, Delta) else None,
    )


def _waits(rows: Sequence[StepFacts]) -> list[StepFacts]:
    """The rows with the time between commits."""
    found, last = [], None
    for row in rows:
        when = None if row.saved_at is None else datetime.fromisoformat(row.saved_at)
        waited = None
        if when is not None:
            waited = (when - last).total_seconds() if last is not None else None
            last = when
        is_later = waited is not None and waited >= 0  # a step may have been saved again
        found.append(replace(row, waited_s=round(waited or 0, 3)) if is_later else row)
    return found


def _damaged(rows: Iterable[StepFacts], verified: RootReport) -> list[StepFacts]:
    """The rows with the damage that a verification found."""
    said = {
        each.item: f"{each.damage[0].file}: {each.damage[0].message}"
        for each in verified.steps
        if each.damage
    }
    return [
        replace(row, kind=DAMAGED, error=row.error or said[row.item]) if row.item in said else row
        for row in rows
    ]


def _verification(
    verified: RootReport | None, rows: Sequence[StepFacts], ours: Sequence[StepSummary]
) -> Verification:
    if verified:
        unseen = verified.not_looked_at
    elif ours:
        unseen = (f"files of {len(ours):,} steps, since they are many (adacheck verify)",)
    else:
        unseen = ()
    left = verified.leftovers if verified else ()
    return Verification(
        structure_count=len(verified.steps) if verified else 0,
        damaged_count=sum(row.kind == DAMAGED for row in rows),
        not_looked_at=tuple(unseen),
        at_save={},
        leftovers=tuple((each.path, each.why) for each in left),
    )


def _update_of(walk: Walk, step: int) -> str:
    """The way in which deltas onto a step are made."""
    lineage = walk.lineage(step)
    update = lineage.base.update
    if update is None:
        return "no update program: deltas hold bits"
    if lineage.problem:
        return f"not replayed: {lineage.problem}"
    if update.reducing:
        count = len(update.reducing)
        return f"replayed; {count:,} leaves add up elements, exact on the mesh of the save"
    return "replayed, exact on every mesh"


def _savings(
    walk: Walk, leaves: Sequence[LeafBytes], summary: RootSummary, zero_bytes: int
) -> Savings:
    own = [leaf for leaf in leaves if leaf.role != "record"]
    at_newest = {leaf.path for leaf in walk.leaves(walk.steps[-1])}
    train_state = ways.added(own)
    sizes: dict[str, int | None] = {}
    for kind in ("base", "delta"):
        known = [row.new_bytes for row in summary.steps if row.kind == kind]
        every = [size for size in known if size is not None]
        sizes[kind] = sum(every) if len(every) == len(known) else None
    return Savings(
        step_count=len(walk.steps),
        train_state_bytes=sum(leaf.leaf_bytes for leaf in own if leaf.path in at_newest),
        full_bytes=ways.total(train_state),
        train_state=train_state,
        added=ways.added(leaf for leaf in leaves if leaf.role == "record"),
        zero_bytes=zero_bytes,
        disk_bytes=summary.disk_bytes,
        base_bytes=sizes["base"],
        delta_bytes=sizes["delta"],
    )
