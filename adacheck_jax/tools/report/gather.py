"""A report of a run, gathered from its root; it reads, and changes nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from adacheck_jax.format.manifest import Delta
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools import audit, listing
from adacheck_jax.tools.audit import RootReport
from adacheck_jax.tools.history.differences import roles_of
from adacheck_jax.tools.history.log import StepLog, logged
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.listing import FOREIGN, STOCK, RootSummary
from adacheck_jax.tools.report.statistics import Statistics, statistics_of
from adacheck_jax.tools.steps import Progress, Steps, quiet

MOST_VERIFIED = 300
"""Saved steps up to which the structure of all is checked: it takes some milliseconds a step."""
_OTHERS = (STOCK, FOREIGN)
SMALL_STEP_COUNT = 400
SMALL_RUN_BYTES = 4_000_000_000
"""Steps, and bytes of all their states, up to which every step is restored unasked."""


@dataclass(frozen=True, slots=True)
class Report:
    """The output of ``adacheck report``: that of other commands about the same steps, and changes.

    Attributes:
        made_at: time of the report, in ISO 8601.
        summary: the steps under the root, as ``adacheck ls`` has them.
        verified: their structure, as ``adacheck verify`` has it; None if they are too many.
        damage: the reason for each saved step that cannot be restored, or in which damage was
            found, by its item directory relative to the root.
        statistics: what became of the bytes of their states; None if no step can be restored.
        state_bytes: bytes of the newest state in memory, without the record of the update.
        kept: recorded steps, but those that were deleted and a later step's directory still holds.
        held: for each recorded step without a directory of its own the step that it was saved with:
            a deferred step has a later one, a deleted step itself.
        checked: number of deltas by the comparison that they passed when they were saved.
        logs: steps that were restored for their norms, as ``adacheck log`` has them.
        norms_note: remark on steps without norms; empty if all were restored.
        changed: number of kept steps at which each leaf's fingerprint changed, by leaf path.
        changes: the norm of each leaf's change at each of ``logs``, relative to the leaf before, by
            leaf path; None where nothing tells.
    """

    made_at: str
    summary: RootSummary
    verified: RootReport | None
    damage: dict[str, str]
    statistics: Statistics | None = None
    state_bytes: int = 0
    kept: tuple[int, ...] = ()
    held: dict[int, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    logs: tuple[StepLog, ...] = ()
    norms_note: str = ""
    changed: dict[str, int] = field(default_factory=dict)
    changes: dict[str, tuple[float | None, ...]] = field(default_factory=dict)


def gather(
    root: AnyPath,
    item: str | None = None,
    norm_count: int | None = None,
    progress: Progress = quiet,
) -> Report:
    """Gather a report, for which so many steps are restored; by default all of a small run.

    Raises:
        InputError: there is no such root, step or item.
    """
    steps = Steps(root)
    summary = listing.summarize_root(steps)
    rows = tuple(
        row
        for row in summary.steps
        if row.kind in _OTHERS or item in (None, row.item.rpartition("/")[2])
    )
    ours = [row for row in rows if row.kind not in _OTHERS]
    damage = {row.item: row.error for row in ours if row.error}
    verified = None
    if 0 < len(ours) <= MOST_VERIFIED:
        verified = audit.verify_root(steps, item=item, progress=progress)
        found = {each.item: each.damage[0] for each in verified.steps if each.damage}
        damage = {place: f"{each.file}: {each.message}" for place, each in found.items()} | damage
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    report = Report(made_at, replace(summary, steps=rows), verified, damage)
    if all(row.error for row in ours):
        return report
    with contextlib.closing(Walk(steps, item)) as walk:
        return _walked(report, walk, norm_count, progress)


def _walked(report: Report, walk: Walk, norm_count: int | None, progress: Progress) -> Report:
    """The report with what recorded steps tell."""
    logs, changes, failed = list[StepLog](), list[dict[str, float]](), dict[int, str]()
    wanted = _chosen(walk, norm_count)
    for step, found, changed in logged(walk, wanted, progress, every_leaf=True):
        if isinstance(found, StepLog):
            logs.append(found)
            changes.append(changed)
        else:
            failed[step] = " ".join(str(found).split())
    note = f"Norms of {len(logs):,} of {len(walk.steps):,} steps; --norms N restores N of them."
    if failed:
        step, why = next(iter(failed.items()))
        note += f" {len(failed):,} could not be restored here, such as step {step:,}: {why}"
    lineages = {step: each.lineage for step, each in walk.recorded.steps.items()}
    saved_with = {step: each.manifest.step for step, each in lineages.items()}
    present = {row.step for row in report.summary.steps if row.kind not in _OTHERS}
    kept = [step for step in walk.steps if saved_with[step] in present]
    pairs = itertools.pairwise(map(walk.fingerprints, kept))
    base = lineages[walk.steps[-1]].base
    roles = zip(base.leaves, roles_of(len(base.leaves), base.update), strict=True)
    ends = [each.end for each in lineages.values()]
    return replace(
        report,
        statistics=statistics_of(lineages.values()),
        state_bytes=sum(leaf.nbytes for leaf, role in roles if role != "record"),
        kept=tuple(kept),
        held={step: saved for step, saved in saved_with.items() if step not in present},
        checked=dict(Counter(e.checked or "not checked" for e in ends if isinstance(e, Delta))),
        logs=tuple(logs),
        norms_note=note if len(logs) < len(walk.steps) else "",
        changed=dict(Counter(path for old, new in pairs for path, _ in new.items() - old.items())),
        changes={x.path: tuple(each.get(x.path) for each in changes) for x in base.leaves},
    )


def _chosen(walk: Walk, asked: int | None) -> list[int]:
    """The steps to restore: as many as asked, else all of a small run and none of a larger one."""
    steps = walk.steps
    if asked is None:
        run_bytes = len(steps) * sum(leaf.nbytes for leaf in walk.lineage(steps[-1]).base.leaves)
        is_small = len(steps) <= SMALL_STEP_COUNT and run_bytes <= SMALL_RUN_BYTES
        asked = len(steps) if is_small else 0
    count = min(asked, len(steps))
    return [steps[(n + 1) * len(steps) // count - 1] for n in range(count)]  # evenly spread
