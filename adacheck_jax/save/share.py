"""One process's share of a save: written, reported to the other processes, validated with theirs.

Each process posts a report, in the background and before Orbax's own barrier. One process validates
the reports of all, and all get its answer. So if one has failed, or they do not agree, all of them
raise, instead of one that raises while the others wait for it. Nothing here makes a step exist:
that is left to :mod:`~adacheck_jax.save.commit`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from adacheck_jax.device import replicas
from adacheck_jax.errors import AdaCheckError, MismatchError, ReplayError, storage_named
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import Caution
from adacheck_jax.save import staged as staged_steps
from adacheck_jax.save.exported_update import ExportedUpdate
from adacheck_jax.save.plan import SavePlan
from adacheck_jax.save.snapshot import Structure
from adacheck_jax.save.staged import StagedStep
from adacheck_jax.schedule.stopwatch import Clock, Measurement
from adacheck_jax.store import claims, delta_writer, equality, links
from adacheck_jax.store.base_writer import BaseWriter, Layout
from adacheck_jax.store.steps import ancestors, folders, manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update import program as update_program

Report = dict[str, Any]
"""Account of what one process wrote, as JSON."""

SHARES = "shares"
"""Topic of the exchange about what each process wrote."""


class Exchange(Protocol):
    """Reports of the processes of a run to each other about one attempt to save a step."""

    def agree(
        self,
        topic: str,
        own: Report,
        judge: Callable[[Sequence[Report]], Report],
        is_over: Callable[[], bool] = ...,
    ) -> Report:
        """Posts this process's report, and waits until all have posted theirs and one judged them.

        Args:
            topic: name of what is agreed on, once an attempt.
            own: report of this process.
            judge: gives the answer to the reports of all processes, in their order, or raises;
                called in process 0.
            is_over: true once nobody waits for this attempt any more.

        Returns:
            The answer, the same in all processes.

        Raises:
            AdaCheckError: a process failed, is gone, or does not report in time; or ``judge``
                raised it, and then all processes raise it.
        """
        ...

    def fail(self, topic: str, error: BaseException) -> None:
        """Tells the other processes, instead of a report, that this one failed."""

    def reports(self, topic: str) -> Sequence[Report]:
        """The reports of all processes on a topic that they agreed on."""
        ...

    def forget(self) -> None:
        """Lets go of what was told, once all processes are past this attempt."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Place of a save on the disk.

    Attributes:
        directory: the item's directory once it is committed.
        step: the number in the name of the step's directory, None if there is none.
    """

    directory: AnyPath
    step: int | None


class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Args:
        turn: lock held by the save that writes, of all saves of a training run: one at a time.
        token: mark of all files that the training run writes.
        exchange: exchange with the other processes; None if there is none.
        earlier: exchanges of attempts before, which some process may still read.

    Attributes:
        claim: identity of this process's claim in a store; see :mod:`~adacheck_jax.store.claims`.
    """

    def __init__(
        self,
        turn: threading.Lock,
        token: str,
        exchange: Exchange | None = None,
        earlier: Sequence[Exchange] = (),
    ) -> None:
        self.turn, self.token, self.is_over = turn, token, False
        self.claim: Stamp | None = None
        self.exchange, self._earlier = exchange, earlier

    @classmethod
    def first(cls) -> Attempt:
        """The first attempt of a training run."""
        return cls(threading.Lock(), claims.new_token())

    def next(self, exchange: Exchange | None, *, repeats: bool) -> Attempt:
        """The attempt that follows.

        Args:
            exchange: its exchange with the other processes; None if there is none.
            repeats: True if it saves the same step: then this attempt is over.
        """
        self.is_over = repeats
        earlier = [*self._earlier, *([self.exchange] if self.exchange else [])]
        return Attempt(self.turn, self.token, exchange, earlier)

    def agree(self, own: Report, judge: Callable[[Sequence[Report]], Report]) -> Report:
        """Agrees with the other processes on what was written; see :class:`Exchange`."""
        if self.exchange is None:
            return judge([own])
        answer = self.exchange.agree(SHARES, own, judge, lambda: self.is_over)
        # All processes have begun this attempt, so none waits in an earlier one.
        for each in self._earlier:
            each.forget()
        self._earlier = ()
        return answer


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
    """

    steps: Sequence[StagedStep]
    destination: Destination
    parent: Lineage | None
    parent_files: frozenset[str]
    parent_stamp: Stamp | None
    links: bool
    before: int
    caution: Caution
    replicas: replicas.Check
    attempt: Attempt
    replayable: bool
    custom_metadata: Any
    measured: Sequence[Measurement]

    @property
    def own(self) -> StagedStep:
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
        return self.plan.update if self.replayable else ExportedUpdate({}, {}, "cast")

    @property
    def depth(self) -> int:
        """Number of deltas since the base that began its line, its own included."""
        return self.parent.manifest.depth + len(self.steps) if self.parent else 0


@dataclass(frozen=True, slots=True)
class Written:
    """The shares that all processes wrote of a save, as they agreed on them.

    Attributes:
        caution: findings of the checks of any process.
        measured: seconds that process 0 measured before this save.
        reports: gives the reports of all processes.
    """

    caution: Caution
    measured: Sequence[Measurement]
    reports: Callable[[], Sequence[Report]]


def write(
    staged: StagedSave,
    directory: AnyPath,
    base: BaseWriter | None,
    layout: Layout,
    clock: Clock = time.monotonic,
) -> Written:
    """Writes this process's share, and agrees on it with all processes.

    Args:
        staged: the save.
        directory: the item's temporary directory.
        base: copies of what a base stores; None for a delta.
        layout: form of the arrays of a base.
        clock: a monotonic clock.

    Raises:
        AdaCheckError: another process failed or is gone, or they did not decide alike; or the step
            is being saved again.
        MismatchError: leaves that each process has for itself are not equal.
        ReplicaError: replicas differ, and the handler was told to refuse such steps.
        ReplayError: replay does not give a state that is gone.
        StorageError: the disk is full, gone, or cannot be written.
    """
    process, attempt = jax.process_index(), staged.attempt
    exchange = attempt.exchange
    try:
        with attempt.turn, storage_named(staged.destination.directory):
            if attempt.is_over:
                raise AdaCheckError(f"step {staged.own.step}: given up, it is being saved again")
            with claims.writing(directory, process, attempt.token) as attempt.claim:
                own = _write(staged, directory, process, base, layout, clock)
    except Exception as error:
        if exchange is not None and not attempt.is_over:
            exchange.fail(SHARES, error)
        raise
    finally:
        for each in staged.steps:
            each.release()
    answer = attempt.agree(own, functools.partial(_validated, staged))
    caution = Caution(answer["reason"], tuple(answer["distrusted"]))
    measured = [(name, seconds, deltas) for name, seconds, deltas in answer["measured"]]
    return Written(caution, measured, lambda: exchange.reports(SHARES) if exchange else [own])


def _write(
    staged: StagedSave,
    directory: AnyPath,
    process: int,
    base: BaseWriter | None,
    layout: Layout,
    clock: Clock,
) -> Report:
    for each in staged.steps:
        each.bring()
        if each.fingerprints.holds_blocks:
            each.sums()  # else packing could not let go of them
        if each.settled().spare:
            each.compared()  # else it would be told too late what is stored after all
        each.begin_proof()
    report: Report = {
        "is_base": base is not None,
        "parent": staged.parent.manifest.saved_checksum if staged.parent else None,
        "numbers": [each.step for each in staged.steps],
        "caution": [staged.caution.reason, staged.caution.distrusted],
        "measured": staged.measured if process == 0 else (),
    }
    written: Sequence[dict[str, Any]] = [{}]
    if base is not None:
        if process == 0:
            for platform, data in staged.update.files.items():
                program = at(directory / manifest_file.update_file(platform))
                program.write(data)
                program.sync()
        sums = staged.own.sums()  # by which an earlier base's unchanged files are found
        report |= dataclasses.replace(base, layout=layout).write(directory, process, sums)
    else:
        if process == 0 and staged.parent and staged.links:
            # First of all: what is linked can no longer be deleted under this step.
            links.link_ancestors(staged.parent, directory, staged.parent_files, staged.parent_stamp)
        with ThreadPoolExecutor(1) as thread:  # in a store requests need not wait for each other
            looked = None
            if process == 0 and staged.parent and not staged.links:
                looked = thread.submit(
                    ancestors.check, staged.parent, staged.parent_stamp, directory
                )
            written = _write_deltas(staged.steps, directory, process)
            if looked is not None:
                looked.result()
    # Devices compute fingerprints while the delta is written.
    report["steps"] = [
        _reported(staged, each) | own for each, own in zip(staged.steps, written, strict=True)
    ]
    begin_s = clock()
    for each, told in zip(staged.steps, report["steps"], strict=True):
        each.verify()  # no manifest speaks of a delta whose replay was not compared
        told["replayed"] = None if each.replayed is None else sorted(each.replayed.items())
    report["check_s"] = clock() - begin_s
    return report


def _write_deltas(
    steps: Sequence[StagedStep], directory: AnyPath, process: int
) -> list[dict[str, Any]]:
    if (own := steps[-1].delta) is None:
        raise AdaCheckError(f"step {steps[-1].step} was given up before it was written")
    codec, buffers, packed = own.codec, own.memory, []
    del own
    for each in steps:
        # Deferred steps fill the memory that they may: each is let go of as it is packed.
        packed.append(_pack(each, process))
    return delta_writer.write(packed, folders.pack_in(directory, process), codec, buffers)


def _pack(step: StagedStep, process: int) -> delta_writer.Packed:
    delta = dataclasses.replace(step.take_delta(), candidates=step.settled().stored)
    return delta.packed(process, jax.process_count())


def _reported(staged: StagedSave, step: StagedStep) -> dict[str, Any]:
    """The report of one step, but for the files that were written of it."""
    sums = step.sums()
    return {
        "replicas": staged.replicas.part(step.fingerprints.replicas),
        "fingerprints": [value for _, value in sorted(sums.items())],
        "local": [(i, _digest(blocks)) for i, blocks in sorted(step.local.items())],
    }


def _validated(staged: StagedSave, reports: Sequence[Report]) -> Report:
    """The answer to the reports of all processes; raises where the step may not be committed."""
    step = staged.own.step
    decisions = {(each["is_base"], each["parent"], *each["numbers"]) for each in reports}
    if len(decisions) != 1:
        raise AdaCheckError(
            f"step {step}: the {len(reports)} processes did not decide alike: {decisions}. "
            "Expected all of them to see the same root; check that it is a shared file system. "
            "The step is not saved; the next one will be a base."
        )
    before = staged.parent.end.fingerprints if staged.parent else ()
    for each, own in zip(staged.steps, by_step(reports), strict=True):
        _validate_local(each.step, own, staged.structure)
        found = fingerprints_of(own)
        _validate_unchanged(staged, each, before, found)
        _validate_replayed(staged, each, own, found)
        staged.replicas.settle(each.step, [report["replicas"] for report in own])
        before = found
    told = [report["caution"] for report in reports]
    return {
        "reason": next(filter(None, (reason for reason, _ in told)), ""),
        "distrusted": sorted({i for _, indices in told for i in indices}),
        "measured": reports[0]["measured"],
    }


def _validate_local(step: int, reports: Sequence[Report], structure: Structure) -> None:
    told = [dict(report["local"]) for report in reports]
    for i in sorted({index for each in told for index in each}):
        holders = [p for p, each in enumerate(told) if i in each]
        if len(holders) < len(told):
            raise MismatchError(
                f"leaf {structure.leaves[i].path}: it lies on devices of process {holders[0]} "
                "alone, where it cannot be told from one that every process has for itself. "
                f"Step {step} is not saved. Place it on devices of all processes "
                "(jax.device_put onto a global sharding), or leave it out of the state."
            )
        other = [p for p, each in enumerate(told) if each[i] != told[0][i]]
        if other:
            raise MismatchError(
                f"leaf {structure.leaves[i].path}: it lies on every process by itself, so "
                f"it is expected to be equal on all {len(reports)}; processes "
                f"{', '.join(map(str, other[:10]))} hold other bits than process 0. Step "
                f"{step} is not saved. Make it one global array "
                "(jax.make_array_from_process_local_data), or leave it out of the state."
            )


def _validate_unchanged(
    staged: StagedSave, step: StagedStep, before: Sequence[int], found: Sequence[int]
) -> None:
    changed = next((i for i in step.plan.unchanged if found[i] != before[i]), None)
    if changed is not None:
        raise AdaCheckError(
            f"{staged.destination.directory}: expected at step {step.step} the state of the step "
            "before, since the update counter is the same; but "
            f"{staged.structure.leaves[changed].path} changed without an update (edited by hand, "
            f"or rolled back in memory?). Step {staged.own.step} is not saved; the next one will "
            "be a base."
        )


def _validate_replayed(
    staged: StagedSave, step: StagedStep, reports: Sequence[Report], found: Sequence[int]
) -> None:
    """Compares the shadows of all processes, which hold the state in parts, with the state."""
    told = [report["replayed"] for report in reports]
    if len(told) == 1 or None in told or update_program.platform() != "cpu":
        return  # a process alone has compared its own; elsewhere arithmetic may differ
    sums: dict[int, list[int]] = {}
    for i, each in itertools.chain(*told):
        sums.setdefault(i, []).append(each)
    if wrong := sorted(i for i, each in sums.items() if combine(each) != found[i]):
        raise ReplayError(
            f"{staged.destination.directory}: step {step.step}: "
            f"{staged_steps.told(step.plan.structure, wrong)}. This was found after the save had "
            "returned, when the state could not be had any more: the step is not saved. "
            f"{staged_steps.CAUSES} The next save is a base."
        )


def is_proved(reports: Sequence[Report]) -> bool:
    """True if the shadows of all processes were compared with a step's state.

    Args:
        reports: of all processes on the step, which were validated.
    """
    is_compared = len(reports) == 1 or update_program.platform() == "cpu"
    return is_compared and all(report["replayed"] is not None for report in reports)


def by_step(reports: Sequence[Report]) -> list[tuple[Report, ...]]:
    """The reports of all processes on each step."""
    return [*zip(*(report["steps"] for report in reports), strict=True)]


def fingerprints_of(reports: Sequence[Report]) -> tuple[int, ...]:
    """Fingerprints of all leaves, from each process's contribution to them."""
    columns = zip(*(report["fingerprints"] for report in reports), strict=True)
    return tuple(combine(column) for column in columns)


def _digest(blocks: Blocks) -> str:
    """A digest by which processes see, without an exchange of data, whether they hold the same."""
    digest = hashlib.sha256()
    for _, block in sorted(blocks.items()):
        digest.update(equality.flat_bytes(block).data)
    return digest.hexdigest()
