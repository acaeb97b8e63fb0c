"""One process's share of a save: written, reported to the other processes, validated with theirs.

Each process publishes a report, one small JSON file on the shared root, waits for the reports of
all, in the background and before Orbax's own barrier, and validates them as all others do. So if
one has failed, or they do not agree, all of them raise, instead of one that raises while the others
wait for it. Nothing here makes a step exist: that is left to :mod:`~adacheck_jax.save.commit`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from adacheck_jax.device import replicas
from adacheck_jax.errors import AdaCheckError, MismatchError, ReplayError, storage_named
from adacheck_jax.format import durable
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import Caution
from adacheck_jax.save.exported_update import ExportedUpdate
from adacheck_jax.save.plan import SavePlan
from adacheck_jax.save.snapshot import Structure
from adacheck_jax.save.staged import StagedStep
from adacheck_jax.store import claims, delta_writer, equality, links
from adacheck_jax.store.base_writer import BaseWriter, Name
from adacheck_jax.store.steps import lineage, manifest_file
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.steps.manifest_file import DIRECTORY

Report = dict[str, Any]
"""Account of what one process wrote, as JSON (:func:`write`)."""

FOLDER = f"{DIRECTORY}/parts"
TIMEOUT_S = 600.0
"""Longest wait for another process's report: as long as Orbax waits by default."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class Destination:
    """Place of a save on the disk.

    Attributes:
        directory: the item's directory once it is committed.
        step: the number in the name of the step's directory, None if there is none.
    """

    directory: Path
    step: int | None


class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Args:
        turn: lock held by the save that writes, of all saves of a training run: one at a time.
        token: mark of all files that the training run writes.
    """

    def __init__(self, turn: threading.Lock, token: str) -> None:
        self.turn, self.token, self.is_over = turn, token, False

    @classmethod
    def first(cls) -> Attempt:
        """The first attempt of a training run."""
        return cls(threading.Lock(), claims.new_token())

    def next(self, *, repeats: bool) -> Attempt:
        """The attempt that follows.

        Args:
            repeats: True if it saves the same step: then this attempt is over.
        """
        self.is_over = repeats
        return Attempt(self.turn, self.token)


@dataclass(frozen=True, slots=True)
class StagedSave:
    """A planned save whose state may be donated by now.

    Attributes:
        steps: the deferred steps that are saved with it, oldest first, and the saved step itself.
        destination: place on the disk.
        parent: lineage that a delta follows; None for a base.
        parent_files: names of the parent's files; empty if this process does not know them.
        links: True if the parent's files are hard-linked.
        before: number of the step that the saved one followed, saved or deferred; its own number if
            there is none.
        caution: findings of checks before this step.
        replicas: comparison of the replicas.
        attempt: the attempt that this save is.
        replayable: True if no leaf of an update is stored in another data type.
        custom_metadata: the caller's own JSON.
    """

    steps: Sequence[StagedStep]
    destination: Destination
    parent: Lineage | None
    parent_files: frozenset[str]
    links: bool
    before: int
    caution: Caution
    replicas: replicas.Check
    attempt: Attempt
    replayable: bool
    custom_metadata: Any

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
        """Number of deltas between the base and the saved step, its own included."""
        return self.parent.manifest.depth + len(self.steps) if self.parent else 0


def write(
    staged: StagedSave, directory: Path, base: BaseWriter | None, names: Mapping[str, Name]
) -> Sequence[Report]:
    """Writes this process's share, and validates it with the reports of all processes.

    Args:
        staged: the save.
        directory: the item's temporary directory.
        base: copies of what a base stores; None for a delta.
        names: arrays of a base, by leaf path; all else (a number) Orbax writes.

    Returns:
        The reports of all processes.

    Raises:
        AdaCheckError: another process failed, or they did not decide alike; or the step is being
            saved again.
        MismatchError: leaves that each process has for itself are not equal.
        ReplicaError: replicas differ, and the handler was told to refuse such steps.
        ReplayError: replay does not give a state that is gone.
        StorageError: the disk is full, gone, or cannot be written.
    """
    process, count, attempt = jax.process_index(), jax.process_count(), staged.attempt
    try:
        with attempt.turn, storage_named(staged.destination.directory):
            if attempt.is_over:
                raise AdaCheckError(f"step {staged.own.step}: given up, it is being saved again")
            with claims.writing(directory, process, attempt.token):
                _clear(directory, process)
                reports = [_write(staged, directory, process, base, names)]
    except Exception as error:
        if count > 1 and not attempt.is_over:
            _publish_failure(directory, process, error)
        raise
    finally:
        for each in staged.steps:
            each.release()
    if count > 1 and not attempt.is_over:
        _publish(directory, process, reports[0])
        reports = _gather(directory, count)
    _validate(staged, reports)
    return reports


def _write(
    staged: StagedSave,
    directory: Path,
    process: int,
    base: BaseWriter | None,
    names: Mapping[str, Name],
) -> Report:
    for each in staged.steps:
        each.bring()
        if each.fingerprints.holds_blocks:
            each.sums()  # else packing could not let go of them
        each.settled()
    report: Report = {
        "is_base": base is not None,
        "parent": staged.parent.manifest.checksum if staged.parent else None,
        "numbers": [each.step for each in staged.steps],
        "caution": [staged.caution.reason, staged.caution.distrusted],
    }
    written: Sequence[dict[str, Any]] = [{}]
    if base is not None:
        if process == 0:
            for platform, data in staged.update.files.items():
                durable.write(directory / manifest_file.update_file(platform), data)
        sums = staged.own.sums()  # by which an earlier base's unchanged files are found
        report |= dataclasses.replace(base, names=names).write(directory, process, sums)
    else:
        if process == 0 and staged.parent and staged.links:
            # First of all: what is linked can no longer be deleted under this step.
            links.link_ancestors(staged.parent, directory, staged.parent_files)
        written = _write_deltas(staged.steps, directory, process)
    # Devices compute fingerprints while the delta is written.
    report["steps"] = [
        _reported(staged, each) | own for each, own in zip(staged.steps, written, strict=True)
    ]
    for each in staged.steps:  # no manifest speaks of a delta whose replay was not compared
        each.verify()
    return report


def _write_deltas(
    steps: Sequence[StagedStep], directory: Path, process: int
) -> list[dict[str, Any]]:
    if (own := steps[-1].delta) is None:
        raise AdaCheckError(f"step {steps[-1].step} was given up before it was written")
    codec, buffers, packed = own.codec, own.memory, []
    del own
    for each in steps:
        # Deferred steps fill the memory that they may: each is let go of as it is packed.
        packed.append(_pack(each, process))
    return delta_writer.write(packed, lineage.pack_in(directory, process), codec, buffers)


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


def _validate(staged: StagedSave, reports: Sequence[Report]) -> None:
    """Raises where the step may not be committed; in every process alike."""
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
        staged.replicas.settle(each.step, [report["replicas"] for report in own])
        before = found


def _validate_local(step: int, reports: Sequence[Report], structure: Structure) -> None:
    for i, expected in reports[0]["local"]:
        other = [p for p, report in enumerate(reports) if dict(report["local"])[i] != expected]
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


def by_step(reports: Sequence[Report]) -> list[tuple[Report, ...]]:
    """The reports of all processes on each step."""
    return [*zip(*(report["steps"] for report in reports), strict=True)]


def fingerprints_of(reports: Sequence[Report]) -> tuple[int, ...]:
    """Fingerprints of all leaves, from each process's contribution to them."""
    columns = zip(*(report["fingerprints"] for report in reports), strict=True)
    return tuple(combine(column) for column in columns)


def _clear(item_directory: Path, process: int) -> None:
    """Removes what an earlier attempt, or another handler, wrote after Orbax had made room."""
    own = [f"{lineage.BASE}/{process}{rest}" for rest in ("", ".*")]
    own += [f"{lineage.KEPT}/*.{process}{rest}" for rest in ("", ".*")]
    for pattern in [*own, lineage.LINEAGE] if process == 0 else own:
        for path in item_directory.glob(pattern):
            shutil.rmtree(path)
    pack = lineage.pack_in(item_directory, process)
    names = [f"{pack.name}.*", "update.*"] if process == 0 else [f"{pack.name}.*"]
    for path in (each for name in names for each in pack.parent.glob(name)):
        path.unlink()


def _digest(blocks: Blocks) -> str:
    """A digest by which processes see, without an exchange of data, whether they hold the same."""
    digest = hashlib.sha256()
    for _, block in sorted(blocks.items()):
        digest.update(equality.flat_bytes(block).data)
    return digest.hexdigest()


def _publish(item_directory: Path, process: int, report: Report) -> None:
    """Writes a process's report; a reader sees all of it or nothing."""
    path = item_directory / FOLDER / f"{process}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(report))
    os.replace(temporary, path)


def _publish_failure(item_directory: Path, process: int, error: BaseException) -> None:
    """Reports that this process has failed, if the disk still takes a report."""
    with contextlib.suppress(OSError):
        text, is_replay = f"{type(error).__name__}: {error}", isinstance(error, ReplayError)
        _publish(item_directory, process, {"error": text, "is_replay": is_replay})


def _gather(item_directory: Path, process_count: int) -> list[Report]:
    """Reports of all processes, in the order of the processes; waits for them.

    Raises:
        AdaCheckError: a process has failed, or its report does not come.
        ReplayError: a process found that replay does not give its state.
    """
    deadline_s, pause_s = time.monotonic() + TIMEOUT_S, _FIRST_PAUSE_S
    found: list[Report] = []
    while len(found) < process_count:
        path = item_directory / FOLDER / f"{len(found)}.json"
        try:
            report = json.loads(path.read_text())
        except FileNotFoundError:
            if time.monotonic() > deadline_s:
                raise AdaCheckError(
                    f"{path}: expected what process {len(found)} wrote of this step, found nothing "
                    f"for {TIMEOUT_S:.0f} s. Check that all processes see the same root, and that "
                    "it is alive. The step is not saved."
                ) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
            continue
        if "error" in report:
            kind = ReplayError if report["is_replay"] else AdaCheckError
            raise kind(
                f"process {len(found)} could not write its share ({report['error']}). The step is "
                "not saved."
            )
        found.append(report)
    return found


def remove_reports(item_directory: Path) -> None:
    """Removes the reports: the manifest holds all that outlives the save."""
    shutil.rmtree(item_directory / FOLDER)
