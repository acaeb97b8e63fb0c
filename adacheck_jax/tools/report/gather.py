"""A report of a run, gathered from its root; it reads, and changes nothing."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from adacheck_jax.format.manifest import Delta
from adacheck_jax.format.pack_plan import plan_of
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath
from adacheck_jax.tools import audit, listing
from adacheck_jax.tools.audit import RootReport
from adacheck_jax.tools.history.differences import roles_of
from adacheck_jax.tools.history.log import StepLog, logged
from adacheck_jax.tools.history.walk import Walk
from adacheck_jax.tools.inspection import computed_by
from adacheck_jax.tools.listing import FOREIGN, STOCK, RootSummary
from adacheck_jax.tools.steps import Progress, Steps, quiet

MOST_VERIFIED = 300
"""Saved steps up to which the structure of all is checked: it takes some milliseconds a step."""
_OTHERS = (STOCK, FOREIGN)
SMALL_STEP_COUNT = 400
SMALL_RUN_BYTES = 4_000_000_000
"""Steps, and bytes of all their states, up to which every step is restored unasked."""

BASES, DELTAS, REPLAYED = "stored in bases", "stored in deltas", "replayed"
UNCHANGED, EQUAL, KEPT = "unchanged", "equal to another leaf", "kept from an earlier base"
CODED = "left out by a code"
_WAYS = (BASES, DELTAS, REPLAYED, CODED, UNCHANGED, EQUAL, KEPT)
_Tally = Counter[tuple[str, str]]
"""Bytes by one of these ways, and by leaf path; those of a code are of compressed gradients."""


@dataclass(frozen=True, slots=True)
class LeafReport:
    """One leaf that takes bytes.

    Attributes:
        path: leaf path.
        state_bytes: its bytes in one state, in memory.
        base_bytes: its bytes in all bases, before compression.
        delta_bytes: its bytes in all deltas, before compression.
        changed_count: number of kept steps at which its fingerprint changed.
        changes: the norm of its change at each step of the report's ``logs``, relative to the leaf
            before; None where nothing tells.
    """

    path: str
    state_bytes: int
    base_bytes: int
    delta_bytes: int
    changed_count: int = 0
    changes: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The output of ``adacheck report``: that of other commands about the same steps, and changes.

    Attributes:
        made_at: time of the report, in ISO 8601.
        summary: the steps under the root, as ``adacheck ls`` has them.
        verified: their structure, as ``adacheck verify`` has it; None if they are too many.
        damage: the reason for each saved step that cannot be restored, or in which damage was
            found, by its item directory relative to the root.
        redundancy: bytes of all recorded states in full, by what became of them:
            ``stored in bases``, ``stored in deltas``, ``replayed``, ``left out by a code`` (of a
            compressed gradient), ``unchanged``, ``equal to another leaf``, ``kept from an earlier
            base``.
        leaves: every leaf that takes bytes, the largest one first.
        state_bytes: bytes of the newest state in memory, without the record of the update.
        kept: recorded steps, but those that were deleted and a later step's directory still holds.
        held: for each recorded step without a directory of its own the step that it was saved with:
            a deferred step has a later one, a deleted step itself.
        checked: number of deltas by the comparison that they passed when they were saved.
        logs: steps that were restored for their norms, as ``adacheck log`` has them.
        norms_note: remark on steps without norms; empty if all were restored.
    """

    made_at: str
    summary: RootSummary
    verified: RootReport | None
    damage: dict[str, str]
    redundancy: dict[str, int] = field(default_factory=dict)
    leaves: tuple[LeafReport, ...] = ()
    state_bytes: int = 0
    kept: tuple[int, ...] = ()
    held: dict[int, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    logs: tuple[StepLog, ...] = ()
    norms_note: str = ""


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
    lineages = {step: each.lineage for step, each in walk.steps.items()}
    saved_with = {step: each.manifest.step for step, each in lineages.items()}
    present = {row.step for row in report.summary.steps if row.kind not in _OTHERS}
    kept = [step for step in walk.steps if saved_with[step] in present]
    pairs = itertools.pairwise(map(walk.fingerprints, kept))
    changed = Counter(path for old, new in pairs for path, _ in new.items() - old.items())
    tally, totals = tally_of(lineages.values()), Counter[str]()
    for (way, _), size_bytes in tally.items():
        totals[way] += size_bytes
    sizes = {x.path: x.nbytes for each in lineages.values() for x in each.base.leaves}
    leaves = [
        LeafReport(
            path=path,
            state_bytes=size_bytes,
            base_bytes=tally[BASES, path],
            delta_bytes=tally[DELTAS, path],
            changed_count=changed[path],
            changes=tuple(each.get(path) for each in changes),
        )
        for path, size_bytes in sorted(sizes.items(), key=lambda x: -x[1])
        if tally[BASES, path] or tally[DELTAS, path]
    ]
    base = lineages[max(lineages)].base
    roles = zip(base.leaves, roles_of(len(base.leaves), base.update), strict=True)
    ends = [each.end for each in lineages.values()]
    return replace(
        report,
        redundancy={way: totals[way] for way in _WAYS if totals[way]},
        leaves=tuple(leaves),
        state_bytes=sum(leaf.nbytes for leaf, role in roles if role != "record"),
        kept=tuple(kept),
        held={step: saved for step, saved in saved_with.items() if step not in present},
        checked=dict(Counter(e.checked or "not checked" for e in ends if isinstance(e, Delta))),
        logs=tuple(logs),
        norms_note=note if len(logs) < len(walk.steps) else "",
    )


def _chosen(walk: Walk, asked: int | None) -> list[int]:
    """The steps to restore: as many as asked, else all of a small run and none of a larger one."""
    steps = walk.numbers
    if asked is None:
        run_bytes = len(steps) * sum(leaf.nbytes for leaf in walk.lineage(steps[-1]).base.leaves)
        is_small = len(steps) <= SMALL_STEP_COUNT and run_bytes <= SMALL_RUN_BYTES
        asked = len(steps) if is_small else 0
    count = min(asked, len(steps))
    return [steps[(n + 1) * len(steps) // count - 1] for n in range(count)]  # evenly spread


def tally_of(lineages: Iterable[Lineage]) -> _Tally:
    """Tell what became of the bytes of each state that a lineage ends at, before compression."""
    tally = _Tally()
    for lineage in lineages:
        end = lineage.end
        if isinstance(end, Delta):
            _count_delta(tally, lineage, end)
        else:
            elsewhere = dict.fromkeys((i for i, _ in end.kept), KEPT)
            elsewhere |= dict.fromkeys((i for i, _ in end.aliases), EQUAL)
            for index, leaf in enumerate(end.leaves):
                tally[elsewhere.get(index, BASES), leaf.path] += leaf.nbytes
    return tally


def _count_delta(tally: _Tally, lineage: Lineage, delta: Delta) -> None:
    """Count a delta by what it stores, what equals another leaf's, and what a code spares."""
    leaves = lineage.leaves
    equal = {(process, n) for process, pack in enumerate(delta.packs) for n, _ in pack.aliases}
    numbers, held = Counter[int](), Counter[int]()  # extents of a process, and bytes of a leaf
    for extent in plan_of(leaves, delta).extents:
        leaf, process = leaves[extent.leaf], extent.process
        whole_bytes = extent.box.size * leaf.itemsize_bytes
        kind = EQUAL if (process, numbers[process]) in equal else DELTAS
        tally[kind, leaf.path] += extent.size_bytes
        tally[CODED, leaf.path] += whole_bytes - extent.size_bytes
        numbers[process] += 1
        held[extent.leaf] += whole_bytes
    computed = computed_by(lineage.base.update, delta)
    for index, leaf in enumerate(leaves):
        kind = REPLAYED if index in computed else UNCHANGED
        tally[kind, leaf.path] += leaf.nbytes - held[index]
