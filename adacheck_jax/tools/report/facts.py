"""All that a report of a run says: records of plain values, which become JSON as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from adacheck_jax.tools.listing import FOREIGN, STOCK

DEFERRED, DAMAGED = "deferred", "damaged"
KINDS = ("base", "delta", DEFERRED, STOCK, FOREIGN, DAMAGED)
"""Kinds of the rows of a report."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """One step: saved, recorded with a later one, or not ours.

    Attributes:
        step: step number, None if neither manifest nor directory name has it.
        kind: one of :data:`KINDS`.
        item: path of its item directory, relative to the root; None for a deferred step, and for
            one that was deleted and is held by a later step's directory.
        held_by: number of the step whose directory holds it, if it has none of its own.
        saved_at: time when Orbax committed it, in ISO 8601; None if there is no note.
        waited_s: seconds since the commit of the saved step before it; None if unknown.
        metrics: numbers that were given with the save, by name.
        parent: for a delta the step that it builds on.
        depth: number of deltas since the base.
        recorded: deferred steps that were saved with it.
        checked: comparison of its own delta with the state when it was saved, as in
            :class:`~adacheck_jax.tools.listing.StepSummary`; None for a base.
        new_bytes, size_bytes: bytes that it added, and bytes of all files in its directory.
        changed_count: number of leaves whose fingerprint differs from the recorded step before it.
        gradient_norm, update_norm, params_norm, learning_rate: as in
            :class:`~adacheck_jax.tools.history.log.StepLog`; None where it was not restored.
        error: the reason why it cannot be restored, or the damage that was found in it.
    """

    step: int | None
    kind: str
    item: str | None = None
    held_by: int | None = None
    saved_at: str | None = None
    waited_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    parent: int | None = None
    depth: int | None = None
    recorded: tuple[int, ...] = ()
    checked: str | None = None
    new_bytes: int | None = None
    size_bytes: int | None = None
    changed_count: int | None = None
    gradient_norm: float | None = None
    update_norm: float | None = None
    params_norm: float | None = None
    learning_rate: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Ways:
    """Bytes of leaves over many steps, by the way in which they are kept.

    Attributes:
        replayed: bytes that the update computes, and no delta has.
        unchanged: bytes that are the parent's, or those of an earlier base.
        equal: bytes of leaves that share the data of another one in a base.
        differences: bytes of leaves whose bits are stored as differences.
        recorded: bytes that the update consumed, stored in deltas.
        stored: bytes that are stored as they are.
    """

    replayed: int = 0
    unchanged: int = 0
    equal: int = 0
    differences: int = 0
    recorded: int = 0
    stored: int = 0


@dataclass(frozen=True, slots=True)
class LeafBytes:
    """Bytes of one leaf over all recorded steps.

    Attributes:
        path: leaf path.
        description: data type and shape.
        role: ``params``, ``optimizer state``, ``record`` or ``other``.
        leaf_bytes: its size in memory, in bytes.
        ways: its bytes at all recorded steps together, by the way in which they are kept.
    """

    path: str
    description: str
    role: str
    leaf_bytes: int
    ways: Ways


@dataclass(frozen=True, slots=True)
class Savings:
    """Bytes of a run beside those of the same steps in full.

    Attributes:
        step_count: number of recorded steps.
        train_state_bytes: bytes of the state at the newest step, without what the Recorder adds.
        full_bytes: bytes of all recorded steps, each in full as stock Orbax writes it, before any
            compression and without what the Recorder adds.
        train_state: these bytes by the way in which they are kept.
        added: bytes of what the Recorder adds, likewise.
        zero_bytes: bytes of zeros that deltas left out.
        disk_bytes: bytes of all files under the root; None in an object store, as the next two.
        base_bytes, delta_bytes: bytes that the bases, and the deltas, with a directory of their own
            added.
    """

    step_count: int
    train_state_bytes: int
    full_bytes: int
    train_state: Ways
    added: Ways
    zero_bytes: int
    disk_bytes: int | None
    base_bytes: int | None
    delta_bytes: int | None


@dataclass(frozen=True, slots=True)
class Changes:
    """Leaves that changed from recorded step to recorded step, told by fingerprints alone.

    Attributes:
        paths: leaf paths, in tree order; the largest leaves if there are many.
        roles: role of each.
        left_out: number of leaves that are not among them.
        columns: first and last step of each column; one step each where there are few steps.
        shares: for each leaf the share of the steps in each column at which it changed; None where
            no step before tells.
        norm_steps: steps whose relative change was computed.
        norms: for each leaf its norm of the change at each of them, relative to the leaf before;
            None where there is none.
    """

    paths: tuple[str, ...]
    roles: tuple[str, ...]
    left_out: int
    columns: tuple[tuple[int, int], ...]
    shares: tuple[tuple[float | None, ...], ...]
    norm_steps: tuple[int, ...] = ()
    norms: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """Checks made now, and when steps were saved.

    Attributes:
        structure_count: number of saved steps whose structure was checked for this report.
        damaged_count: number of steps that cannot be restored, or in which damage was found.
        not_looked_at: parts that were not checked, described for people.
        at_save: number of deltas by the comparison that they passed when they were saved.
        leftovers: paths under the root that are no steps, with what they are.
    """

    structure_count: int
    damaged_count: int
    not_looked_at: tuple[str, ...]
    at_save: dict[str, int]
    leftovers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The output of ``adacheck report``.

    Attributes:
        root: the checkpoint root.
        made_at: time of the report, in ISO 8601.
        version: version of this library.
        disk_bytes: bytes of all files under the root; None in an object store.
        saved_count: number of step directories.
        recorded_count: number of steps that can be restored, deferred ones included.
        newest: number of the newest step.
        leaf_count: number of leaves of the newest step's state; None if no step can be restored.
        update: the way in which its deltas are made, for people.
        steps: rows, by ascending step number.
        savings: bytes of the run; None if no step can be restored, as the next two.
        leaves: bytes by leaf, in tree order.
        changes: changes by leaf and step.
        restored_count: number of steps that were restored for norms.
        norms_note: what there is to say of steps without norms; empty if all were restored.
        verification: what was checked.
    """

    root: str
    made_at: str
    version: str
    disk_bytes: int | None
    saved_count: int
    recorded_count: int
    newest: int | None
    leaf_count: int | None
    update: str
    steps: tuple[StepFacts, ...]
    savings: Savings | None
    leaves: tuple[LeafBytes, ...]
    changes: Changes | None
    restored_count: int
    norms_note: str
    verification: Verification
