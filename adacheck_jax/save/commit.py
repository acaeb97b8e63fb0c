"""The commit of a save: one process writes the manifest, which makes the step exist."""

from __future__ import annotations

import errno
import functools
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import jax

from adacheck_jax.device.lead import Lead
from adacheck_jax.errors import AdaCheckError, ReplicaError, storage_named
from adacheck_jax.format.manifest import (
    BaseManifest,
    Caution,
    Delta,
    DeltaManifest,
    Encoding,
    Link,
    Manifest,
    Pack,
    Update,
)
from adacheck_jax.plan.situation import BackgroundFacts
from adacheck_jax.save import share, validation
from adacheck_jax.save.attempt import Report
from adacheck_jax.save.share import Written
from adacheck_jax.save.staged import StagedStep
from adacheck_jax.save.staged_save import StagedSave
from adacheck_jax.schedule.stopwatch import Clock, Measurement
from adacheck_jax.store import claims, links, volumes
from adacheck_jax.store.base_writer import ArrayLayout, BaseWriter, agreed
from adacheck_jax.store.steps import lineage, lookup, manifest_file
from adacheck_jax.store.steps.lineage import Lineage, LineageStep
from adacheck_jax.store.storage.interface import Stamp
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.update import program as update_program


@dataclass(frozen=True, slots=True)
class Committed:
    """A step as this process committed it.

    Attributes:
        manifest: the manifest as it was written.
        stamp: identity of its file, by which another one in its place is noticed.
        files: names of the step's files, while it was whole.
    """

    manifest: Manifest
    stamp: Stamp
    files: frozenset[str]


class Save:
    """A save that has been planned and staged, to be written and committed.

    Args:
        staged: the save.
        base: copies of what a base stores; None for a delta.
        clock: a monotonic clock.
        before_commit: called in the background when this process's part is written.

    Attributes:
        staged: the save.
        durable_s: reading of the clock when this process's part was durable; None before.
        error: reason why this process could not write its share.
        committed: the step, if this process committed it.
    """

    def __init__(
        self,
        staged: StagedSave,
        base: BaseWriter | None,
        clock: Clock = time.monotonic,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        self.staged, self._clock, self._before_commit = staged, clock, before_commit
        self.durable_s: float | None = None
        self.error: Exception | None = None
        self.committed: Committed | None = None
        self._base = base
        self._written: Written | None = None
        self._measured: Sequence[Measurement] = ()

    @property
    def is_base(self) -> bool:
        """True if the caller has to write a stock checkpoint of the full state."""
        return self.staged.plan.is_base

    @property
    def agreed_caution(self) -> Caution:
        """Findings of the checks of any process, as all know them once their shares are written."""
        return self._written.caution if self._written else self.staged.caution

    @property
    def agreed_lead(self) -> Lead:
        """The device whose replica the next saves write, as all processes know it."""
        own = self.staged.structure.lead
        if isinstance(self.error, ReplicaError) and self.staged.replicas.mode == "warn":
            return Lead(own.position, is_apart=True)
        return self._written.lead if self._written else own

    @property
    def agreed_background(self) -> BackgroundFacts | None:
        """Facts that all processes agreed on about bases in the background; None before that.

        A save that failed says that none can be made.
        """
        if self.error is not None:
            return BackgroundFacts()
        return self._written.background if self._written else None

    @property
    def check_s(self) -> float:
        """Seconds for which the slowest process waited for the check, once shares are written."""
        reports = self._written.reports() if self._written else ()
        return max((report["check_s"] for report in reports), default=0.0)

    def take_measured(self) -> Sequence[Measurement]:
        """The seconds that all processes learned of with this save; once."""
        measured, self._measured = self._measured, ()
        return measured

    def write(self, directory: AnyPath, layout: ArrayLayout) -> None:
        """Writes this process's share.

        Args:
            directory: the item's temporary directory.
            layout: form of the arrays of a base.

        Raises:
            AdaCheckError: as :func:`~adacheck_jax.save.share.write` raises it; names the deferred
                steps that are lost with this one.
        """
        base, self._base = self._base, None  # a save that failed is kept, the copies are not
        try:
            self._written = share.write(self.staged, directory, base, layout, self._clock)
            self._measured, self.durable_s = self._written.measured, self._clock()
            self._before_commit()
        except AdaCheckError as error:
            self.error = error
            if deferred := [each.step for each in self.staged.steps[:-1]]:
                shown = lineage.shown_steps(deferred)
                raise type(error)(
                    f"{error} Not saved either, as they were to be written with it: the recorded "
                    f"steps {shown}."
                ) from error
            raise
        except Exception as error:
            self.error = error
            raise

    def committing(self, directory: AnyPath) -> AbstractContextManager[None]:
        """Makes certain that a directory holds this save and no other; see :mod:`claims`."""
        return claims.committing(directory, jax.process_index(), self.staged.attempt.token)

    def commit(self, directory: AnyPath, described: Mapping[str, str]) -> None:
        """Writes the manifest, on one process.

        The bytes of all that it speaks of are durable before this is called; the names of the
        files, links and directories are made so here.

        Args:
            directory: the item's temporary directory.
            described: digests of the files that describe a base's arrays.

        Raises:
            StorageError: the disk is full, gone, or cannot be written.
        """
        with storage_named(self.staged.destination.directory):
            self.committed = self._commit(directory, described)
        self.durable_s = self._clock()

    def _commit(self, directory: AnyPath, described: Mapping[str, str]) -> Committed:
        staged, written = self.staged, self._written
        assert written is not None  # a save is written before it is committed
        place, claim = at(directory), staged.attempt.claim
        if claim is not None and staged.parent is None:  # its files lie where another's would
            claims.check(directory, claim)
        if staged.parent is None:
            contents: dict[str, Sequence[str] | None] = {}
            for report in written.reports():
                contents |= report["volumes"]
            volumes.merge(directory, contents)
            manifest: Manifest = _base_manifest(staged, written, described)
        else:
            manifest = _delta_manifest(staged, staged.parent, written)
        claims.remove(directory)
        # The manifest makes the step exist, and nothing is written after it. All that is not
        # durable yet becomes so at once, which the journal of a file system takes as one. Orbax's
        # rename comes next.
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


def _base_manifest(
    staged: StagedSave, written: Written, described: Mapping[str, str]
) -> BaseManifest:
    structure, exported, update = staged.structure, staged.update, None
    reports = written.reports()
    if structure.bindings and staged.replayable:
        params, inner, record, extra = structure.arguments
        update = Update(
            params=params,
            inner=inner,
            record=record,
            extra=extra,
            counts=structure.counts,
            parts=structure.parts,
            reducing=exported.reducing,
            passed=exported.passed,
            placement=structure.placement if exported.reducing else "",
            problem=exported.problem,
            programs=exported.digests,
            jax_version=jax.__version__,
            pinned=exported.pinned,
        )
    writers = {i: leaf.owners for i, leaf in enumerate(structure.leaves)}
    return BaseManifest(
        step=staged.own.step,
        counts=staged.plan.counts or (),
        leaves=structure.leaves,
        fingerprints=validation.fingerprints_of(validation.by_step(reports)[-1]),
        update=update,
        reason=staged.plan.decision.reason,
        aliases=agreed(reports, "aliases", writers),
        kept=agreed(reports, "kept", writers),
        process_count=jax.process_count(),
        versions=versions(),
        environment=update_program.environment(),
        described=described,
        directory_step=staged.destination.step,
        caution=written.caution,
        replica=written.replicas[-1],
    )


def _delta_manifest(staged: StagedSave, parent: Lineage, written: Written) -> DeltaManifest:
    before, deltas = parent.end, list[Delta]()
    told = validation.by_step(written.reports())
    for step, own, replica in zip(staged.steps, told, written.replicas, strict=True):
        before = _delta(step, own, before, replica)
        deltas.append(before)
    *deferred, own = deltas
    reference = lookup.reference(staged.destination.directory, parent.entries[-1].holder)
    if reference is None:
        raise AdaCheckError(
            f"step {own.step}: its parent does not lie under the same root any more"
        )
    return DeltaManifest(
        step=own.step,
        counts=own.counts,
        updates=own.updates,
        parent=Link(parent.manifest.step, reference, parent.manifest.saved_checksum),
        depth=staged.depth,
        stored=own.stored,
        unreplayed=own.unreplayed,
        packs=own.packs,
        fingerprints=own.fingerprints,
        checked=own.checked,
        custom_metadata=staged.custom_metadata,
        directory_step=staged.destination.step,
        recorded=tuple(deferred),
        caution=written.caution,
        stale=own.stale,
        replica=own.replica,
    )


def _delta(
    step: StagedStep, reports: Sequence[Report], before: BaseManifest | Delta, replica: str
) -> Delta:
    """The delta of a step, from the reports of all processes on it, behind another step."""
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
