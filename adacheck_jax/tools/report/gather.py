"""A report of a run, gathered from its root; it reads, and changes nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

from adacheck_jax.format.manifest import Delta
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools import audit, listing, statistics
from adacheck_jax.tools.audit import Progress
from adacheck_jax.tools.history.differences import roles_of
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.listing import FOREIGN, STOCK
from adacheck_jax.tools.report import norms
from adacheck_jax.tools.report.facts import Report

MOST_VERIFIED = 300
"""Saved steps up to which the structure of all is checked: it takes some milliseconds a step."""
_OTHERS = (STOCK, FOREIGN)


def gather(
    root: AnyPath,
    item: str | None = None,
    norm_count: int | None = None,
    tell: Progress | None = None,
) -> Report:
    """Gather a report.

    Args:
        root: the directory given to the checkpoint manager.
        item: name of the item directory, needed if steps hold several.
        norm_count: number of the steps that are restored for norms, at most; None for all of a
            small run, and none else.
        tell: is told of the progress.

    Raises:
        InputError: there is no such root, step or item.
    """
    summary = listing.summarize_root(root)
    rows = tuple(
        row
        for row in summary.steps
        if row.kind in _OTHERS or item in (None, row.item.rpartition("/")[2])
    )
    ours = [row for row in rows if row.kind not in _OTHERS]
    damage = {row.item: row.error for row in ours if row.error}
    verified = None
    if 0 < len(ours) <= MOST_VERIFIED:
        verified = audit.verify_root(root, item=item, progress=tell)
        found = {each.item: each.damage[0] for each in verified.steps if each.damage}
        damage = {place: f"{each.file}: {each.message}" for place, each in found.items()} | damage
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(made_at, replace(summary, steps=rows), verified, damage)
    if all(row.error for row in ours):
        return report
    report = replace(report, statistics=statistics.statistics_of(root))
    with contextlib.closing(Walk(root, item)) as walk:
        return _walked(report, walk, norm_count, tell)


def _walked(report: Report, walk: Walk, norm_count: int | None, tell: Progress | None) -> Report:
    """The report with what recorded steps tell."""
    found, failed = norms.norms_of(walk, norms.chosen(walk, norm_count), tell)
    note = f"Norms of {len(found):,} of {len(walk.steps):,} steps; --norms N restores N of them."
    if failed:
        step, why = next(iter(failed.items()))
        note += f" {len(failed):,} could not be restored here, such as step {step:,}: {why}"
    lineages = {step: walk.lineage(step) for step in walk.steps}
    saved_with = {step: each.manifest.step for step, each in lineages.items()}
    present = {row.step for row in report.summary.steps if row.kind not in _OTHERS}
    kept = [step for step in walk.steps if saved_with[step] in present]
    pairs = itertools.pairwise(map(walk.fingerprints, kept))
    changed = Counter(path for old, new in pairs for path, _ in new.items() - old.items())
    base = lineages[walk.steps[-1]].base
    roles = zip(base.leaves, roles_of(len(base.leaves), base.update), strict=True)
    ends = [each.end for each in lineages.values()]
    return replace(
        report,
        state_bytes=sum(leaf.nbytes for leaf, role in roles if role != "record"),
        kept=tuple(kept),
        held={step: saved for step, saved in saved_with.items() if step not in present},
        checked=dict(Counter(e.checked or "not checked" for e in ends if isinstance(e, Delta))),
        logs=tuple(row for row, _ in found.values()),
        norms_note=note if len(found) < len(walk.steps) else "",
        changed=dict(changed),
        changes={
            leaf.path: tuple(relative.get(leaf.path) for _, relative in found.values())
            for leaf in base.leaves
        },
    )
