"""A planned save whose state may be donated: its steps, its place, and what was found so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adacheck_jax.device import replicas
from adacheck_jax.format.manifest import Caution
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.save.attempt import Attempt
from adacheck_jax.save.pending import Pending
from adacheck_jax.schedule.stopwatch import Measurement
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath


@dataclass(frozen=True, slots=True)
class Destination:
    """Place of a save on the disk.

    Attributes:
        directory: the item's directory once it is committed.
        step: the number in the name of the step's directory, None if there is none.
    """

    directory: AnyPath
    step: int | None


@dataclass(frozen=True, slots=True)
class StagedSave:
    """A planned save whose state may be donated by now.

    Attributes:
        steps: the deferred steps that are saved with it, oldest first, and the saved step itself.
        destination: place on the disk.
        parent: lineage that a delta follows; None for a base.
        parent_files: names of the parent's files; empty if this process does not know them.
        parent_stamp: identity of the parent's manifest; None if this process did not write it.
        links: True if the parent's files are hard-linked.
        before: number of the step that the saved one followed, saved or deferred; its own number if
            there is none.
        caution: findings of checks before this step.
        replicas: comparison of the replicas.
        attempt: the attempt that this save is.
        replayable: True if no leaf of an update is stored in another data type.
        custom_metadata: the caller's own JSON.
        measured: seconds that this process measured since the last save.
        background: what this process knows of bases made in the background.
    """

    steps: Sequence[Pending]
    destination: Destination
    parent: Lineage | None
    parent_files: frozenset[str]
    parent_stamp: Stamp | None
    links: bool
    before: int
    caution: Caution
    replicas: replicas.ReplicaCheck
    attempt: Attempt
    replayable: bool
    custom_metadata: Any
    measured: Sequence[Measurement]
    background: BackgroundFacts

    @property
    def own(self) -> Pending:
        """The saved step itself."""
        return self.steps[-1]

    @property
    def plan(self) -> SavePlan:
        """The plan of the saved step."""
        return self.own.plan

    @property
    def structure(self) -> Structure:
        """Structure of the saved state."""
        return self.plan.structure

    @property
    def update(self) -> ExportedUpdate:
        """The update that a base holds."""
        return self.plan.update if self.replayable else ExportedUpdate(problem="cast")

    @property
    def depth(self) -> int:
        """Number of deltas since the base that began its line, its own included."""
        return self.parent.manifest.depth + len(self.steps) if self.parent else 0
