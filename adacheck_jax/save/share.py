"""One process's share of a save: written, and reported to the other processes.

Each process posts a report, in the background and before Orbax's own barrier. One process validates
the reports of all, and all get its answer. So if one has failed, or they do not agree, all of them
raise, instead of one that raises while the others wait for it. Nothing here makes a step exist:
that is left to :mod:`~adacheck_jax.save.commit`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from adacheck_jax.device.lead import Lead
from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.manifest import Caution
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.save import validation
from adacheck_jax.save.attempt import SHARES, Report
from adacheck_jax.save.staged import StagedStep
from adacheck_jax.save.staged_save import StagedSave
from adacheck_jax.schedule.stopwatch import Clock, Measurement
from adacheck_jax.store import claims, delta_writer, equality, links
from adacheck_jax.store.base_writer import ArrayLayout, BaseWriter
from adacheck_jax.store.steps import folders, manifest_file
from adacheck_jax.store.storage.location import AnyPath, at


@dataclass(frozen=True, slots=True)
class Written:
    """The shares that all processes wrote of a save, as they agreed on them.

    Attributes:
        caution: findings of the checks of any process.
        measured: seconds that process 0 measured before this save.
        background: bases made in the background, possible if all processes say so.
        replicas: for each step the device whose replica was written; empty if all are equal.
        lead: the device whose replica the next saves write.
        reports: gives the reports of all processes.
    """

    caution: Caution
    measured: Sequence[Measurement]
    background: BackgroundFacts
    replicas: Sequence[str]
    lead: Lead
    reports: Callable[[], Sequence[Report]]


def write(
    staged: StagedSave,
    directory: AnyPath,
    base: BaseWriter | None,
    layout: ArrayLayout,
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
        ReplicaError: replicas differ, and the handler was told to refuse such steps, or parts of
            several of them were written.
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
    answer = attempt.agree(own, functools.partial(validation.validated, staged))
    return Written(
        caution=Caution(answer["reason"], tuple(answer["distrusted"])),
        measured=[(name, seconds, deltas) for name, seconds, deltas in answer["measured"]],
        background=BackgroundFacts(*answer["background"]),
        replicas=answer["replicas"],
        lead=Lead(*answer["lead"]),
        reports=lambda: exchange.reports(SHARES) if exchange else [own],
    )


def _write(
    staged: StagedSave,
    directory: AnyPath,
    process: int,
    base: BaseWriter | None,
    layout: ArrayLayout,
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
        "makes_base": staged.plan.makes_base,
        "parent": staged.parent.manifest.saved_checksum if staged.parent else None,
        "numbers": [each.step for each in staged.steps],
        "caution": [staged.caution.reason, staged.caution.distrusted],
        "measured": staged.measured if process == 0 else (),
        "background": dataclasses.astuple(staged.background),
    }
    written: Sequence[dict[str, Any]] = [{}]
    if base is not None:
        if process == 0:
            for platform, data in staged.update.files.items():
                program = at(directory / manifest_file.update_file(platform))
                program.write(data)
                program.sync()
        sums = staged.own.sums()  # by which an earlier base's unchanged files are found
        report |= base.write(directory, process, sums, layout)
    else:
        if process == 0 and staged.parent and staged.links:
            # First of all: what is linked can no longer be deleted under this step.
            links.link_ancestors(staged.parent, directory, staged.parent_files, staged.parent_stamp)
        with ThreadPoolExecutor(1) as thread:  # in a store requests need not wait for each other
            looked = None
            if process == 0 and staged.parent and not staged.links:
                looked = thread.submit(
                    links.check_ancestors, staged.parent, staged.parent_stamp, directory
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
        "unhealed": step.plan.unhealed,
        "fingerprints": [value for _, value in sorted(sums.items())],
        "local": [(i, _digest(blocks)) for i, blocks in sorted(step.local.items())],
    }


def _digest(blocks: Blocks) -> str:
    """A digest by which processes see, without an exchange of data, whether they hold the same."""
    digest = hashlib.sha256()
    for _, block in sorted(blocks.items()):
        digest.update(equality.flat_bytes(block).data)
    return digest.hexdigest()
