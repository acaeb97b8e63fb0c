"""The record of a report: plain values, which become JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from adacheck_jax.tools.audit import RootReport
from adacheck_jax.tools.history.log import StepLog
from adacheck_jax.tools.listing import RootSummary
from adacheck_jax.tools.statistics import RootStatistics


@dataclass(frozen=True, slots=True)
class Report:
    """The output of ``adacheck report``: that of other commands about the same steps, and changes.

    Attributes:
        made_at: time of the report, in ISO 8601.
        summary: the steps under the root, as ``adacheck ls`` has them.
        verified: their structure, as ``adacheck verify`` has it; None if they are too many.
        damage: the reason for each saved step that cannot be restored, or in which damage was
            found, by its item directory relative to the root.
        statistics: their bytes, as ``adacheck stats`` has them; None if no step can be restored.
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
    statistics: RootStatistics | None = None
    state_bytes: int = 0
    kept: tuple[int, ...] = ()
    held: dict[int, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    logs: tuple[StepLog, ...] = ()
    norms_note: str = ""
    changed: dict[str, int] = field(default_factory=dict)
    changes: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
