"""Lineages: a base and the contiguous deltas that follow it.

Where the file system has hard links, a delta's directory holds links to every file of its base and
of the deltas before it, under ``adacheck/lineage/``: each step is complete in itself, and no
retention policy, deletion or move of another step can break it. Links are cheap and directories are
not, so only the base gets a directory there, ``<step>/``; the files of a delta, all from its
``adacheck`` folder, are linked as ``<step>.<name>``. Without hard links a delta refers to its
parent by a relative path, and :class:`~adacheck_jax.store.retention.KeepLineage` keeps that alive.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from adacheck_jax.errors import IntegrityError, LineageError
from adacheck_jax.format.manifest import BaseManifest, Delta, DeltaManifest, Leaf, Manifest
from adacheck_jax.store.steps import manifest_file
from adacheck_jax.store.steps.folders import DELTA, LINEAGE
from adacheck_jax.store.storage.location import AnyPath, at


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One saved step of a lineage, and the directory that its files are read from.

    Attributes:
        manifest: the step's manifest.
        holder: its own item directory, or that of a later step with links to its files.
        is_link: True if ``holder`` is the directory of a later step.
        known: leaves of a delta, once it is part of a lineage; see :attr:`leaves`.
    """

    manifest: Manifest
    holder: AnyPath
    is_link: bool = False
    known: tuple[Leaf, ...] = ()

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf, in the boxes that the step stores it in."""
        return self.manifest.leaves if isinstance(self.manifest, BaseManifest) else self.known

    def behind(self, before: LineageStep) -> LineageStep:
        """This delta, with its leaves: in boxes of its own, or else in those of the step before.

        Raises:
            IntegrityError: it is no delta of that step.
        """
        delta, leaves = self.manifest, before.leaves
        assert isinstance(delta, DeltaManifest)
        if len(delta.fingerprints) != len(leaves):
            raise IntegrityError(
                f"{self.place}: expected a fingerprint for each of {len(leaves)} "
                f"leaves of the base, found {len(delta.fingerprints)}. Restore another step."
            )
        if delta.grids:
            pairs = [*zip(leaves, delta.grids, strict=True)]
            if other := next((leaf for leaf, grid in pairs if leaf.shape != grid.shape), None):
                raise IntegrityError(
                    f"{self.place}: expected boxes of {other.path} with the shape {other.shape}, "
                    "found others. Restore another step."
                )
            leaves = tuple(
                dataclasses.replace(leaf, cuts=grid.cuts, owners=grid.owners)
                for leaf, grid in pairs
            )
        elif delta.process_count != before.manifest.process_count:
            raise IntegrityError(
                f"{self.place}: expected packs of {before.manifest.process_count} processes, as "
                f"the step before has them, found {delta.process_count}. Restore another step."
            )
        return dataclasses.replace(self, known=leaves)

    @property
    def directory(self) -> AnyPath:
        """For a base: directory of the stock Orbax checkpoint."""
        return self.holder / LINEAGE / str(self.manifest.step) if self.is_link else self.holder

    @property
    def place(self) -> AnyPath:
        """Path for messages: the beginning of those of its arrays, and of no other step's."""
        return self.directory if isinstance(self.manifest, BaseManifest) else self.path(DELTA)

    @property
    def manifest_path(self) -> AnyPath:
        """Path of the manifest."""
        if isinstance(self.manifest, BaseManifest):
            return self.directory / manifest_file.FILE
        return self.path(manifest_file.NAME)

    def path(self, name: str) -> AnyPath:
        """Path of a file of a delta."""
        if self.is_link:
            return self.holder / LINEAGE / f"{self.manifest.step}.{name}"
        return self.holder / manifest_file.DIRECTORY / name

    def pack(self, process: int) -> AnyPath:
        """Beginning of the paths of one process's pack."""
        return self.path(f"{DELTA}.{process}")


@dataclass(frozen=True, slots=True)
class Lineage:
    """Everything that one step is restored from: the base first, the step itself last.

    Attributes:
        entries: the saved steps.
        left_out: number of deltas at the end of the last save that are not part of the lineage,
            which may end at a deferred step (:meth:`to`).
    """

    entries: tuple[LineageStep, ...]
    left_out: int = 0

    @property
    def base(self) -> BaseManifest:
        """The base's manifest."""
        first = self.entries[0].manifest
        assert isinstance(first, BaseManifest)
        return first

    @property
    def base_directory(self) -> AnyPath:
        """Directory of the stock Orbax checkpoint to start from."""
        return self.entries[0].directory

    @property
    def saves(self) -> list[tuple[DeltaManifest, LineageStep]]:
        """Saved steps after the base, oldest first."""
        return [
            (entry.manifest, entry)
            for entry in self.entries
            if isinstance(entry.manifest, DeltaManifest)
        ]

    @property
    def deltas(self) -> list[Delta]:
        """Deltas after the base, those of deferred steps included, oldest first."""
        every = [delta for manifest, _ in self.saves for delta in manifest.deltas]
        return every[: len(every) - self.left_out]

    @property
    def manifest(self) -> Manifest:
        """The manifest of the saved step at the end."""
        return self.entries[-1].manifest

    @property
    def end(self) -> BaseManifest | Delta:
        """The step itself, which may be a deferred one."""
        deltas = self.deltas
        return deltas[-1] if deltas else self.base

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Every leaf, in the boxes of the saved step at the end."""
        return self.entries[-1].leaves

    @property
    def is_recut(self) -> bool:
        """True if a delta has other boxes than the base."""
        return any(saved.grids for saved, _ in self.saves)

    @property
    def problem(self) -> str:
        """Reason why no update can be replayed onto the step; empty if updates can."""
        update = self.base.update
        problems = [update.problem if update else "", *(saved.problem for saved, _ in self.saves)]
        return next(filter(None, problems), "")

    @property
    def steps(self) -> list[int]:
        """Numbers of all steps that can be restored from the lineage, ascending."""
        return [self.base.step, *(delta.step for delta in self.deltas)]

    @property
    def delta_count(self) -> int:
        """Number of deltas after the base."""
        return self.manifest.depth - self.base.depth - self.left_out

    @property
    def replayed_count(self) -> int:
        """Number of updates that a restore of the step replays."""
        return sum(delta.has_update for delta in self.deltas)

    def to(self, step: int) -> Lineage:
        """The lineage of an earlier step, which may be a deferred one.

        Raises:
            LineageError: the lineage has no such step.
        """
        for count, entry in enumerate(self.entries, start=1):
            steps = entry.manifest.steps
            if step in steps:
                return Lineage(self.entries[:count], len(steps) - 1 - steps.index(step))
        raise LineageError(
            f"{self.entries[-1].holder}: expected step {step} in what was saved there, found "
            f"the steps {shown_steps(self.steps)}."
        )

    def until(self, step: int) -> Lineage:
        """The lineage of a step, or of the last one before it.

        Raises:
            LineageError: the lineage begins after the step.
        """
        return self.to(max((each for each in self.steps if each <= step), default=step))

    @property
    def checksums(self) -> tuple[str, ...]:
        """Checksums of all manifests: others where a step has become a base meanwhile."""
        return tuple(entry.manifest.checksum for entry in self.entries)

    def exists(self) -> bool:
        """True if every step is still on disk; in a store, where looks cost, it is taken for so."""
        if not at(self.entries[-1].holder).on_file_system:
            return True
        first, last = self.entries[0], self.entries[-1]
        # Links in the last step are deleted with it: two looks tell as much as one at each.
        chosen = (first, last) if first.holder == last.holder else self.entries
        return all(at(entry.manifest_path).exists for entry in chosen)

    def followed_by(self, manifest: DeltaManifest, directory: AnyPath, *, linked: bool) -> Lineage:
        """The lineage of the next delta.

        Raises:
            IntegrityError: it is no delta of this step.
        """
        last, entries = LineageStep(manifest, directory).behind(self.entries[-1]), self.entries
        if linked:
            entries = tuple(
                LineageStep(entry.manifest, directory, is_link=True, known=entry.known)
                for entry in entries
            )
        return Lineage((*entries, last))


def shown_steps(steps: Sequence[int]) -> str:
    """Step numbers for a message, as ranges; of many ranges the last ones."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    names = [f"{a} to {b}" if a < b else f"{a}" for a, b in runs]
    return ", ".join(["...", *names[-10:]] if len(names) > 10 else names) or "none"
