"""One process's share of a save: written, and reported to the other processes.

Each process posts a report, in the background and before Orbax's own barrier. So if one has failed,
or they do not agree, all of them raise, instead of one that raises while the others wait for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from adacheck_jax.device.primary import Primary
from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.format.manifest import Caution
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.processes.messages import Report
from adacheck_jax.save import validation
from adacheck_jax.save.one_save import Agreed, Save
from adacheck_jax.save.pending import Pending
from adacheck_jax.store import claims, delta_writer, links
from adacheck_jax.store.base_writer import ArrayLayout
from adacheck_jax.store.steps import folders, manifest_file, roots
from adacheck_jax.store.steps import lineage as lineages
from adacheck_jax.store.steps.marks import FINALIZED, IN_PLACE
from adacheck_jax.store.storage.location import AnyPath, at

_SHARES = "shares"
"""Topic of the exchange about what each process wrote."""


class _GivenUpError(AdaCheckError):
    """A share is not written, since the save has failed already; that error is known."""


def write(save: Save, directory: AnyPath, layout: ArrayLayout) -> None:
    """Writes this process's share, and agrees on it with all processes.

    Raises:
        AdaCheckError: another process failed or is gone, or they did not decide alike; or the step
            is being saved again. Any error names the deferred steps that are lost with this one.
        MismatchError, ReplicaError, ReplayError: see :mod:`~adacheck_jax.save.validation`.
        StorageError: the disk is full, gone, or cannot be written.
    """
    try:
        save.agreed = _agreed(save, directory, layout)
        save.durable_s = save.clock()
        save.before_commit()
    except Exception as error:
        if save.error is None or not isinstance(error, _GivenUpError):
            save.error = error
        if save.is_kept:
            with contextlib.suppress(AdaCheckError):  # told to who asks if it is kept
                save.detach()
        deferred = [each.step for each in save.steps[:-1]]
        if isinstance(error, AdaCheckError) and deferred and not save.is_kept:
            raise type(error)(
                f"{error} Not saved either, as they were to be written with it: the recorded "
                f"steps {lineages.shown_steps(deferred)}."
            ) from error
        raise
    finally:
        # What may have to be written again is kept until Orbax has given the step its name.
        if not (save.keeps if save.error is None else save.is_kept):
            save.release()


def _agreed(save: Save, directory: AnyPath, layout: ArrayLayout) -> Agreed:
    process, attempt = jax.process_index(), save.attempt
    exchange = attempt.exchange
    try:
        with attempt.turn, storage_named(save.directory):
            if attempt.is_over:
                raise _GivenUpError(f"step {save.own.step}: given up, since its save has failed")
            if at(directory).on_file_system and roots.is_written_in_place(directory):
                # Before any other file: it marks the directory as not committed (is_committed).
                mark = at(directory / IN_PLACE)
                mark.write(b"")
                mark.sync()
                at(directory / FINALIZED).delete()  # of an earlier save into the same directory
            with claims.writing(directory, process, attempt.token) as attempt.claim:
                own = _write(save, directory, layout)
    except Exception as error:
        if not attempt.is_over:
            exchange.fail(error)
        raise
    answer = attempt.agree(_SHARES, own, functools.partial(validation.validated, save))
    save.measured = [(name, seconds, deltas) for name, seconds, deltas in answer["measured"]]
    return Agreed(
        caution=Caution(answer["reason"], tuple(answer["distrusted"])),
        background=BackgroundFacts(*answer["background"]),
        memory=(bool(answer["memory"][0]), answer["memory"][1]),
        replicas=answer["replicas"],
        primary=Primary(*answer["primary"]),
        reports=lambda: [own] if exchange.is_alone else exchange.reports(_SHARES),
    )


def _write(save: Save, directory: AnyPath, layout: ArrayLayout) -> Report:
    process, base = jax.process_index(), save.base
    for each in save.steps:
        each.settled()
    report: Report = {
        "is_base": base is not None,
        "becomes_base": save.plan.becomes_base,
        "parent": save.parent.manifest.saved_checksum if save.parent else None,
        "numbers": [each.step for each in save.steps],
        "caution": [save.caution.reason, save.caution.distrusted],
        "measured": save.measured if process == 0 else (),
        "background": dataclasses.astuple(save.background),
    }
    written: Sequence[dict[str, Any]] = [{}]
    if base is not None:
        sums = save.own.sums()  # by which an earlier base's unchanged files are found
        written_from = {i: base.blocks[i] for i in base.blocks}  # copies may take their place
        try:
            report |= base.write(directory, process, sums, layout, save.attempt.agree)
        finally:  # before anything else is blamed
            save.own.look(written_from, written_from)
            save.own.expect_unchanged()
        written_from.clear()
        if process == 0:
            for platform, data in save.update.files().items():
                program = at(directory / manifest_file.update_file(platform))
                program.write(data)
                program.sync()
    else:
        if process == 0 and save.parent and save.links:
            # First of all: what is linked can no longer be deleted under this step.
            links.link_ancestors(save.parent, directory, *save.parent_identity)
        with ThreadPoolExecutor(1) as thread:  # in a store requests need not wait for each other
            looked = None
            if process == 0 and save.parent and not save.links:
                _, stamp = save.parent_identity
                looked = thread.submit(links.check_ancestors, save.parent, stamp, directory)
            packed = [each.packed() for each in save.steps]
            written = delta_writer.write(packed, folders.pack_in(directory, process))
            if looked is not None:
                looked.result()
    # Devices compute fingerprints while the delta is written.
    report["steps"] = [
        _reported(save, each) | own for each, own in zip(save.steps, written, strict=True)
    ]
    begin_s = save.clock()
    for each, step_report in zip(save.steps, report["steps"], strict=True):
        each.verify()  # no manifest speaks of a delta whose replay was not compared
        step_report["replayed"] = None if each.replayed is None else sorted(each.replayed.items())
    report["memory"] = save.memory(len(save.steps))
    report["check_s"] = save.clock() - begin_s
    save.own.leave_arrays()
    save.own.expect_unchanged()  # nor what was copied of a base for the saves after it
    return report


def _reported(save: Save, step: Pending) -> dict[str, Any]:
    """The report of one step, but for the files that were written of it."""
    sums = step.sums()
    return {
        "replicas": save.replicas.part(step.fingerprints.replicas),
        "unhealed": step.plan.unhealed,
        "fingerprints": [value for _, value in sorted(sums.items())],
        "local": sorted(step.local.items()),
    }
