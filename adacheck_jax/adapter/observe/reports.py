"""Records of a save that was committed, and of the seconds that a restore took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.save.commit import Save
from adacheck_jax.store.steps import folders
from adacheck_jax.store.storage.location import AnyPath


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save that was committed.

    Attributes:
        step: step number.
        kind: ``"base"`` or ``"delta"``.
        reason: the reason why it is one, such as ``"the lineage has 20 deltas"``.
        parent: number of the step that a delta builds on; None for a base.
        deferred: numbers of the deferred steps that were saved with it, oldest first.
        new_bytes: bytes of the files that it added, in all processes, without links; None in an
            object store, which does not tell sizes.
        checked: comparison of the delta's replay with its state: ``"full"``, ``"sample"``,
            ``"identity"``, ``"stored"`` if nothing of it is replayed, or ``""`` for none. None for
            a base, which is not replayed.
        blocking_s: seconds for which this library kept the caller. A manager adds its own.
        check_s: seconds for which the save waited for the check, in the background.
        durable_s: seconds from its beginning until it was committed.
    """

    step: int
    kind: Literal["base", "delta"]
    reason: str
    parent: int | None
    deferred: tuple[int, ...]
    new_bytes: int | None
    checked: str | None
    blocking_s: float
    check_s: float
    durable_s: float


OnSave = Callable[[SaveReport], None]
"""The caller's callback."""


@dataclass(frozen=True, slots=True)
class RestoreTimes:
    """Seconds of a restore.

    Attributes:
        total_s: all of it, from its beginning to the verified state.
        base_s: reading the base.
        replay_s: reading and replaying the deltas.
        compile_wait_s: waiting for the compiler, which begins while the base is read.
    """

    total_s: float
    base_s: float
    replay_s: float
    compile_wait_s: float


def report_of(save: Save, directory: AnyPath, begin_s: float, returned_s: float) -> SaveReport:
    """The report of a save that this process has just committed.

    Args:
        save: the save.
        directory: the item's directory, which may still have its temporary name.
        begin_s: reading of its clock when the caller called.
        returned_s: reading when the rest was left to the background.

    Raises:
        AdaCheckError: this process has not committed it.
    """
    if (committed := save.committed) is None or save.durable_s is None:
        raise AdaCheckError(f"step {save.staged.own.step}: expected a save that was committed")
    manifest = committed.manifest
    delta = manifest if isinstance(manifest, DeltaManifest) else None
    return SaveReport(
        step=manifest.step,
        kind="base" if delta is None else "delta",
        reason=save.staged.plan.decision.reason,
        parent=None if delta is None else delta.parent.step,
        deferred=() if delta is None else tuple(each.step for each in delta.recorded),
        new_bytes=folders.new_bytes(directory),
        checked=None if delta is None else delta.checked,
        blocking_s=returned_s - begin_s,
        check_s=save.check_s,
        durable_s=save.durable_s - begin_s,
    )
