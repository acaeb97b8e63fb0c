"""The commit of a save: one process writes the manifest, which makes the step exist."""

from __future__ import annotations

import dataclasses
import errno
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence

import jax

from adacheck_jax.errors import AdaCheckError, storage_named
from adacheck_jax.format.encodings.form import Encoding
from adacheck_jax.format.manifest import (
    BaseManifest,
    Delta,
    DeltaManifest,
    Grid,
    Link,
    Manifest,
    Pack,
)
from adacheck_jax.processes.messages import Report
from adacheck_jax.save import validation
from adacheck_jax.save.one_save import Agreed, Committed, Save
from adacheck_jax.save.pending import Pending
from adacheck_jax.store import base_writer, claims, links
from adacheck_jax.store.steps import lookup, manifest_file
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update import program as update_program


def commit(save: Save, directory: AnyPath, described: Mapping[str, str]) -> None:
    """Writes the manifest, on one process; makes the names of all that it speaks of durable.

    Raises:
        StorageError: the disk is full, gone, or cannot be written.
    """
    try:
        with storage_named(save.directory):
            save.committed = _committed(save, directory, described)
    except Exception as error:
        save.error = error
        raise
    save.durable_s = save.clock()


def _committed(save: Save, directory: AnyPath, described: Mapping[str, str]) -> Committed:
    agreed = save.agreed
    assert agreed is not None  # a save is written before it is committed
    place, claim = at(directory), save.attempt.claim
    if claim is not None and save.parent is None:  # its files lie where another's would
        claims.check(directory, claim)
    if save.parent is None:
        base_writer.merge(directory, agreed.reports())
        manifest: Manifest = _base_manifest(save, agreed, described)
    else:
        manifest = _delta_manifest(save, save.parent, agreed)
    claims.remove(directory)
    # The manifest makes the step exist, and nothing is written after it. All that is not durable
    # yet becomes so at once, which the journal of a file system takes as one. Orbax's rename comes
    # next.
    if place.on_file_system and not place.is_folder:  # another writer is to make it itself
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(directory))
    try:
        manifest, stamp = manifest_file.write(directory, manifest, claim)
    except FileExistsError:
        raise claims.lost(directory) from None
    place.sync(place / manifest_file.FILE, deep=True)
    files = frozenset[str]()
    if place.on_file_system:
        files = links.files_of(LineageStep(manifest, directory))
    return Committed(manifest, stamp, files)


def _base_manifest(save: Save, agreed: Agreed, described: Mapping[str, str]) -> BaseManifest:
    structure, exported, update = save.structure, save.update, None
    reports = agreed.reports()
    if structure.bindings and save.replayable:
        update = exported.described(structure, exported.files())
    writers = {i: leaf.owners for i, leaf in enumerate(structure.leaves)}
    return BaseManifest(
        step=save.own.step,
        counts=save.plan.counts or (),
        leaves=structure.leaves,
        fingerprints=validation.fingerprints_of(validation.by_step(reports)[-1]),
        update=update,
        reason=save.plan.decision.reason,
        aliases=base_writer.agreed(reports, "aliases", writers),
        kept=base_writer.agreed(reports, "kept", writers),
        process_count=jax.process_count(),
        versions=versions(),
        environment=update_program.environment(),
        described=described,
        directory_step=save.number,
        caution=agreed.caution,
        replica=agreed.replicas[-1],
    )


def _delta_manifest(save: Save, parent: Lineage, agreed: Agreed) -> DeltaManifest:
    before, deltas = parent.end, list[Delta]()
    by_step = validation.by_step(agreed.reports())
    for step, reports, replica in zip(save.steps, by_step, agreed.replicas, strict=True):
        before = _delta(step, reports, before, replica)
        deltas.append(before)
    *deferred, own = deltas
    reference, leaves = lookup.reference(save.directory, parent.entries[-1].holder), ()
    is_recut = len(own.packs) != parent.manifest.process_count
    if is_recut or save.structure.leaves != parent.leaves:
        leaves = save.structure.leaves
    if reference is None:
        raise AdaCheckError(
            f"step {own.step}: its parent does not lie under the same root any more"
        )
    return DeltaManifest(
        **{field.name: getattr(own, field.name) for field in dataclasses.fields(own)},
        parent=Link(parent.manifest.step, reference, parent.manifest.saved_checksum),
        depth=save.depth,
        custom_metadata=save.custom_metadata,
        directory_step=save.number,
        recorded=tuple(deferred),
        caution=agreed.caution,
        grids=tuple(Grid(each.cuts, each.owners) for each in leaves),
    )


def _delta(
    step: Pending, reports: Sequence[Report], before: BaseManifest | Delta, replica: str
) -> Delta:
    """The delta of a step, from the reports of all processes on it, after another step."""
    letters: list[dict[int, str]] = [dict(report["letters"]) for report in reports]
    stored, plan = tuple(sorted(set().union(*letters))), step.plan
    is_full = plan.decision.updates and validation.is_proved(reports)
    packs = tuple(
        Pack(
            encodings="".join(own.get(i, Encoding.SAME) for i in stored),
            aliases=_pairs(report["aliases"]),
            raw_bytes=report["sizes_bytes"][0],
            compressed_bytes=report["sizes_bytes"][1],
            raw_zeros=_pairs(report["zeros"][0]),
            compressed_zeros=_pairs(report["zeros"][1]),
            coded=_pairs(report["coded"]),
        )
        for own, report in zip(letters, reports, strict=True)
    )
    known, fingerprints = dict(before.stale), [*validation.fingerprints_of(reports)]
    for i in plan.stale:  # a restore gives what the step before has of them
        fingerprints[i] = before.fingerprints[i]
    return Delta(
        step=plan.step,
        counts=plan.counts or (),
        updates=plan.decision.updates,
        stored=stored,
        unreplayed=tuple(sorted(plan.unreplayed)) if plan.decision.updates else (),
        packs=packs,
        fingerprints=tuple(fingerprints),
        checked="full" if is_full else plan.checked_by,
        stale=tuple((i, known.get(i, before.step)) for i in plan.stale),
        replica=replica,
    )


def _pairs(values: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a, b in values)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of this library and of those whose behaviour a checkpoint depends on."""
    names = ("adacheck-jax", "jax", "orbax-checkpoint", "tensorstore", "optax", "flax", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
