"""One save: its steps and its place, what was planned, and how it went so far."""

# Threads: an attempt is made on the caller's thread, and written on Orbax's. ``Attempt.turn`` is
# held by the save that writes, through all its file operations and the questions of a base in
# between; no other lock is taken before it.

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax.device import replicas
from adacheck_jax.device.primary import Primary
from adacheck_jax.device.transfer import Joined
from adacheck_jax.errors import ReplicaError, is_refusal
from adacheck_jax.format.manifest import Caution, DeltaManifest, Manifest
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.processes.meetings import ALONE, Exchange, Judge
from adacheck_jax.processes.messages import Report
from adacheck_jax.save.pending import Pending
from adacheck_jax.schedule.stopwatch import Clock, Measurement
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.store.base_writer import BaseWriter
from adacheck_jax.store.steps import marks
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Attributes:
        turn: lock held by the save that writes, of all saves of a training run: one at a time.
        token: mark of all files that the training run writes.
        exchange: exchange with the other processes.
        earlier: exchanges of attempts before, which some process may still read.
        is_over: True once nothing more of it is written: it has failed, or is made again.
        claim: identity of this process's claim in a store; see :mod:`~adacheck_jax.store.claims`.
    """

    turn: threading.Lock
    token: str
    exchange: Exchange = ALONE
    earlier: Sequence[Exchange] = ()
    is_over: bool = False
    claim: Stamp | None = None

    def next(self, exchange: Exchange, *, repeats: bool) -> Attempt:
        """The attempt that follows; this one is over if it ``repeats`` the same step."""
        self.is_over |= repeats
        return Attempt(self.turn, self.token, exchange, [*self.earlier, self.exchange])

    def stop(self) -> None:
        """Waits until nothing of it is written any more; of a process alone nothing more begins.

        Several processes hear of its share, or that it failed, in any case.
        """
        self.is_over |= self.exchange.is_alone
        with self.turn:
            pass

    def agree(self, topic: str, own: Report, judge: Judge) -> Report:
        """As :meth:`Exchange.agree`."""
        answer = self.exchange.agree(topic, own, judge, lambda: self.is_over)
        # All processes have begun this attempt, so none waits in an earlier one.
        for each in self.earlier:
            each.forget()
        self.earlier = ()
        return answer


@dataclass(frozen=True, slots=True)
class Agreed:
    """The answer to the shares that all processes wrote of a save.

    Attributes:
        caution: findings of the checks of any process.
        background: bases made in the background, possible if all processes say so.
        memory: True where memory is to keep records, and the reason why the next save is a base.
        replicas: for each step the device whose replica was written; empty if all are equal.
        primary: the device whose replica the next saves write.
    """

    caution: Caution
    background: BackgroundFacts
    memory: tuple[bool, str]
    replicas: Sequence[str]
    primary: Primary
    reports: Callable[[], Sequence[Report]]


@dataclass(frozen=True, slots=True)
class Committed:
    """A step as this process committed it.

    Attributes:
        stamp: identity of the manifest's file, by which another one in its place is noticed.
        files: names of the step's files, while it was whole.
    """

    manifest: Manifest
    stamp: Stamp
    files: frozenset[str]


@dataclass(slots=True, eq=False, kw_only=True)
class Save:
    """A planned save whose state may be donated by now.

    Attributes:
        steps: the deferred steps that are saved with it, oldest first, and the saved step itself.
        directory: the item's directory once it is committed.
        number: the number in the name of the step's directory, None if there is none.
        parent: lineage that a delta follows; None for a base.
        parent_identity: see :attr:`~adacheck_jax.save.line.parents.Parent.identity`.
        links: True if the parent's files are hard-linked.
        caution: findings of checks before this step.
        replayable: True if no leaf of an update is stored in another data type.
        exporting: gives the update of a base that is exported after its save; else None.
        custom_metadata: the caller's own JSON.
        measured: seconds that this process measured since the last save; once the shares are
            written those that all processes learned of with it.
        background: facts of this process.
        memory: see :meth:`~adacheck_jax.memory.shadow.ShadowThread.report`.
        base: copies of what a base stores; None for a delta.
        keeps: True if what it writes stays in memory until the step has its name: where storage
            refuses it, it can be written again.
        is_repeated: True once it is written again, by another save of the same steps.
        before_commit: called in the background when this process's part is written.
        durable_s: reading of the clock when this process's part was durable; None before.
        error: reason why the step is not on the disk.
        agreed: what all processes agreed on when they had written their shares; None before.
        committed: the step, if this process committed it.
    """

    steps: Sequence[Pending]
    directory: AnyPath
    number: int | None
    parent: Lineage | None
    parent_identity: tuple[frozenset[str], Stamp | None]
    links: bool
    caution: Caution
    replicas: replicas.ReplicaCheck
    attempt: Attempt
    measured: Sequence[Measurement]
    background: BackgroundFacts
    memory: Callable[[int], tuple[str, str]]
    clock: Clock
    before_commit: Callable[[], None]
    replayable: bool = True
    exporting: Future[ExportedUpdate] | None = None
    custom_metadata: Any = None
    base: BaseWriter | None = None
    keeps: bool = False
    is_repeated: bool = False
    durable_s: float | None = None
    error: Exception | None = None
    agreed: Agreed | None = None
    committed: Committed | None = None

    @property
    def own(self) -> Pending:
        """The saved step itself."""
        return self.steps[-1]

    @property
    def plan(self) -> SavePlan:
        """Its plan."""
        return self.own.plan

    @property
    def is_base(self) -> bool:
        """True if the caller has to write a stock checkpoint of the full state."""
        return self.plan.is_base

    @property
    def structure(self) -> Structure:
        """Structure of the saved state."""
        return self.plan.structure

    @property
    def update(self) -> ExportedUpdate:
        """The update that a base holds; waits until it is exported."""
        if self.exporting is not None:
            return self.exporting.result()
        return self.plan.update if self.replayable else ExportedUpdate(problem="cast")

    @property
    def is_kept(self) -> bool:
        """True if storage refused it, and all that it writes is still in memory."""
        if not self.keeps or not is_refusal(self.error) or any(x.refused for x in self.steps):
            return False
        return self.base is not None if self.is_base else all(x.is_in_memory for x in self.steps)

    @property
    def is_lost(self) -> bool:
        """True if the step is known not to be saved, and cannot be written again."""
        return self.error is not None and not self.is_kept

    @property
    def is_computing(self) -> bool:
        """True while devices and compilers have to do with it, and not storage alone."""
        is_exporting = self.exporting is not None and not self.exporting.done()
        return is_exporting or any(each.is_moving for each in self.steps)

    def detach(self) -> None:
        """Takes what it writes out of the caller's arrays, which may change before it is written.

        Raises:
            AdaCheckError: a step is not what it was planned as.
        """
        for each in self.steps:
            each.verify()
        if self.base is not None and isinstance(blocks := self.base.blocks, Joined):
            for i in blocks:
                blocks.replace(i, lambda _index, _box, block: np.array(block))

    def release(self) -> None:
        """Lets go of what it would write, unless that is another save's now."""
        for each in () if self.is_repeated else self.steps:
            each.release()
        self.base = None

    @property
    def depth(self) -> int:
        """Number of deltas since the base that began its line, its own included."""
        return self.parent.manifest.depth + len(self.steps) if self.parent else 0

    def lineage(self) -> Lineage | None:
        """Its lineage as this process committed it, if it is on the disk unchanged."""
        if (committed := self.committed) is None:
            return None
        # In a store looks cost requests: they are left to the save itself, in the background.
        if at(self.directory).on_file_system:
            try:
                if not marks.is_there(self.directory, committed.stamp):
                    return None
            except OSError:
                return None
        parent, manifest = self.parent, committed.manifest
        if isinstance(manifest, DeltaManifest):
            linked = self.links
            return parent.followed_by(manifest, self.directory, linked=linked) if parent else None
        return Lineage((LineageStep(manifest, self.directory),))

    @property
    def agreed_primary(self) -> Primary:
        """The device whose replica the next saves write, as all processes know it."""
        own = self.structure.primary
        if isinstance(self.error, ReplicaError) and self.replicas.mode == "warn":
            return Primary(own.position, is_apart=True)
        return self.agreed.primary if self.agreed else own

    @property
    def check_s(self) -> float:
        """Seconds for which the slowest process waited for the check, once shares are written."""
        reports = self.agreed.reports() if self.agreed else ()
        return max((report["check_s"] for report in reports), default=0.0)
