"""The way of a save after it was staged: write in the background, then commit; knows no Orbax.

Every process writes its data and then a *part*, the note of what it wrote. One process commits when
all parts are there: it checks that they agree, and writes the manifest, which makes the step exist.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from adacheck_jax import arrays, fingerprint, lineage, policy, redundancy
from adacheck_jax import manifest as manifests
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import Lineage
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Link, Update
from adacheck_jax.programs import Program, Programs
from adacheck_jax.redundancy import WritePlan
from adacheck_jax.snapshot import Structure
from adacheck_jax.staging import Blocks

_PARTS = f"{manifests.DIRECTORY}/parts"


@dataclass(slots=True)
class Save:
    """A save that has been decided and staged, and is to be written and committed."""

    programs: Programs
    links: bool
    step: int
    count: int | None
    structure: Structure
    parent: Lineage | None
    decision: policy.Decision
    stored: tuple[int, ...]
    final_directory: Path
    replayable: bool
    fingerprints: fingerprint.Parts
    custom_metadata: Any
    blocks: dict[int, Blocks]
    before: dict[int, Blocks]
    after: dict[int, Blocks]
    x64: bool

    @property
    def is_base(self) -> bool:
        """Whether the caller has to write a stock checkpoint of the full state."""
        return self.decision.is_base

    def write(self, directory: Path) -> None:
        """Writes this process's share; the directory is the item's temporary one.

        Raises:
            OSError: from the file system.
        """
        process = jax.process_index()
        sums = self.fingerprints.sums()
        if self.is_base:
            if process == 0:
                for platform, data in self._program().files.items():
                    manifests.write_durably(directory / manifests.update_file(platform), data)
        else:
            if process == 0 and self.parent and self.links:
                # First of all: what is linked can no longer be deleted under this step.
                lineage.link_ancestors(self.parent, directory)
            # A leaf that replay does not reproduce is stored whole: no step is lost to a wrong
            # assumption, and the saver builds nothing on this one.
            wrong = self._prove()
            self.stored = tuple(sorted({*self.stored, *wrong}))
            self.blocks |= {i: self.after[i] for i in wrong}
            self.before, self.after = {}, {}
            self._write_pack(directory / lineage.DELTA / str(process), process)
        part = {
            "is_base": self.is_base,
            "parent": self.parent.manifest.checksum if self.parent else None,
            "fingerprints": [value for _, value in sorted(sums.items())],
        }
        path = directory / _PARTS / f"{process}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(part))

    def _prove(self) -> list[int]:
        """The leaves that replaying this delta does not reproduce; none where it is not proved."""
        if not self.before:
            return []
        return self.programs.prove(
            self.structure, self.before | self.blocks, self.after, self.step, self.x64
        )

    def _write_pack(self, directory: Path, process: int) -> None:
        plan = self._plan()
        blocks = [
            (extent.offset_bytes, self.blocks[extent.leaf][extent.box])
            for extent in plan.extents
            if extent.process == process
        ]
        arrays.write_pack(directory, plan.process_bytes[process], blocks)
        self.blocks = {}

    def _plan(self) -> WritePlan:
        return redundancy.plan_delta(self.structure.leaves, self.stored, jax.process_count())

    def _program(self) -> Program:
        if not self.replayable:
            return Program({}, "cast")
        return self.programs.of(self.structure)

    def commit(self, directory: Path) -> None:
        """Links what the step builds on and writes the manifest, on one process.

        Everything that the manifest speaks of is durable before this is called.

        Raises:
            AdaCheckError: the processes did not decide alike.
            OSError: from the file system.
        """
        fingerprints = self._combine_parts(directory)
        if self.parent is None:
            manifest: manifests.Manifest = self._base_manifest(fingerprints)
        else:
            manifest = self._delta_manifest(self.parent, fingerprints)
        # The manifest makes the step exist: nothing is written after it.
        manifests.write(directory, manifest)

    def _combine_parts(self, directory: Path) -> tuple[int, ...]:
        parts = [
            json.loads((directory / _PARTS / f"{process}.json").read_text())
            for process in range(jax.process_count())
        ]
        decisions = {(part["is_base"], part["parent"]) for part in parts}
        if len(decisions) != 1:
            raise AdaCheckError(
                f"step {self.step}: the {len(parts)} processes did not decide alike: {decisions}. "
                "Expected all of them to see the same root; check that it is a shared file system. "
                "The step is not saved; the next one will be a base."
            )
        shutil.rmtree(directory / _PARTS)
        columns = zip(*(part["fingerprints"] for part in parts), strict=True)
        return tuple(fingerprint.combine(column) for column in columns)

    def _base_manifest(self, fingerprints: tuple[int, ...]) -> BaseManifest:
        binding, program, update = self.structure.binding, self._program(), None
        if binding is not None and program.files:
            positions = self.structure.positions
            update = Update(
                params=positions(binding.params),
                inner=positions(binding.inner),
                record=positions(binding.record),
                extra=positions(binding.extra),
                count=self.structure.index[binding.count],
                programs=program.digests,
                jax_version=jax.__version__,
            )
        return BaseManifest(
            step=self.step,
            count=self.count,
            leaves=self.structure.leaves,
            fingerprints=fingerprints,
            update=update,
            reason=self.decision.reason,
            process_count=jax.process_count(),
            versions=versions(),
        )

    def _delta_manifest(self, parent: Lineage, fingerprints: tuple[int, ...]) -> DeltaManifest:
        reference = lineage.reference(self.final_directory, parent.entries[-1].directory)
        assert reference is not None
        assert self.count is not None
        return DeltaManifest(
            step=self.step,
            count=self.count,
            has_update=self.decision.update_count == 1,
            parent=Link(parent.manifest.step, reference, parent.manifest.checksum),
            depth=len(parent.entries),
            stored=self.stored,
            fingerprints=fingerprints,
            process_bytes=self._plan().process_bytes,
            custom_metadata=self.custom_metadata,
        )


@functools.cache
def versions() -> dict[str, str]:
    """Versions of this library and of those whose behaviour a checkpoint depends on."""
    names = ("adacheck-jax", "jax", "orbax-checkpoint", "tensorstore", "optax", "flax", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
