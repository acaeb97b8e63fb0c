"""The way of a save after it was staged: write in the background, then commit; knows no Orbax.

Every process writes its data and then a *part*, the note of what it wrote. One process commits when
all parts are there: it checks that they agree, and writes the manifest, which makes the step exist.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adacheck_jax import arrays, codecs, fingerprint, lineage, policy, redundancy
from adacheck_jax import manifest as manifests
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.lineage import Lineage
from adacheck_jax.manifest import BaseManifest, DeltaManifest, Encoding, Link, Pack, Update
from adacheck_jax.programs import Program, Programs
from adacheck_jax.snapshot import Structure
from adacheck_jax.staging import Blocks

_PARTS = f"{manifests.DIRECTORY}/parts"


@dataclass(slots=True)
class Proof:
    """What it takes to replay the update of a delta as it is saved; by proof sites.

    Attributes:
        before: blocks of everything that the update takes.
        after: blocks of what it computes, as they were trained.
        shardings: of every leaf.
        x64: whether the train step ran with 64-bit types enabled.
    """

    before: dict[int, Blocks]
    after: dict[int, Blocks]
    shardings: dict[int, Any]
    x64: bool


@dataclass(slots=True)
class Save:
    """A save that has been decided and staged, and is to be written and committed.

    Attributes:
        candidates: the leaves that a delta stores unless they are what they would be without it.
        blocks: this process's boxes of the candidates, and of whatever a proof may find wrong.
        previous: the same of the parent, of the leaves that may be stored as differences.
        proof: None where this save proves nothing.
    """

    programs: Programs
    links: bool
    step: int
    count: int | None
    structure: Structure
    parent: Lineage | None
    decision: policy.Decision
    candidates: tuple[int, ...]
    final_directory: Path
    replayable: bool
    fingerprints: fingerprint.Parts
    custom_metadata: Any
    blocks: dict[int, Blocks]
    previous: Mapping[int, Blocks]
    proof: Proof | None

    @property
    def is_base(self) -> bool:
        """Whether the caller has to write a stock checkpoint of the full state."""
        return self.decision.is_base

    def write(self, directory: Path) -> None:
        """Writes this process's share; the directory is the item's temporary one.

        Raises:
            OSError: from the file system.
        """
        try:
            self._write(directory)
        finally:  # a save that failed is kept until the next one, its copies of the state are not
            self.blocks, self.previous, self.proof = {}, {}, None

    def _write(self, directory: Path) -> None:
        process = jax.process_index()
        sums = self.fingerprints.sums()
        part: dict[str, Any] = {
            "is_base": self.is_base,
            "parent": self.parent.manifest.checksum if self.parent else None,
            "fingerprints": [value for _, value in sorted(sums.items())],
        }
        if self.is_base:
            if process == 0:
                for platform, data in self._program().files.items():
                    manifests.write_durably(directory / manifests.update_file(platform), data)
        else:
            if process == 0 and self.parent and self.links:
                # First of all: what is linked can no longer be deleted under this step.
                lineage.link_ancestors(self.parent, directory)
            # A leaf that replay does not reproduce is stored whole: no step is lost to a wrong
            # assumption, and the saver replays nothing onto this one.
            wrong = self._prove()
            part["problem"] = self._problem(wrong)
            part |= self._write_pack(directory / lineage.DELTA / str(process), process, wrong)
        path = directory / _PARTS / f"{process}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(part))

    def _prove(self) -> list[int]:
        """The leaves that replaying this delta does not reproduce; none where it is not proved."""
        proof, self.proof = self.proof, None
        if proof is None:
            return []
        return self.programs.prove(
            self.structure, proof.before, proof.after, proof.shardings, proof.x64
        )

    def _problem(self, wrong: Sequence[int]) -> str:
        if not wrong:
            return ""
        paths = [self.structure.leaves[i].path for i in wrong]
        return (
            f"replaying the update did not reproduce {len(wrong)} leaves of step {self.step} "
            f"({', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}), which were stored "
            "whole. The train step does not apply the update as it is replayed: it is not "
            "compiled as one program (jax.jit), has a transformation after the Recorder, changes "
            "the params by something else, or the compiler fused the gradient's computation into "
            "the update; adacheck.separate_update mends the first and the last"
        )

    def _write_pack(self, directory: Path, process: int, wrong: Sequence[int]) -> dict[str, Any]:
        """Writes this process's pack; returns how, for the manifest."""
        letters = {i: self._encoding(i) for i in self.candidates}
        letters |= {i: Encoding.RAW for i in wrong if self.blocks.get(i)}
        letters = {i: each for i, each in sorted(letters.items()) if each is not Encoding.SAME}
        own = "".join(letters.values())
        encodings = [
            own if each == process else Encoding.SAME * len(own)
            for each in range(jax.process_count())
        ]
        plan = redundancy.plan_delta(self.structure.leaves, tuple(letters), encodings)
        raw: list[tuple[int, np.ndarray]] = []
        differences: list[tuple[int, np.ndarray]] = []
        for extent in plan.extents:
            block = self.blocks[extent.leaf][extent.box]
            if extent.encoding is Encoding.RAW:
                raw.append((extent.offset_bytes, block))
            else:
                old = self.previous[extent.leaf][extent.box]
                planes = codecs.encode(extent.encoding, block, old)
                differences.append((extent.offset_bytes, planes))
        sizes = plan.raw_bytes[process], plan.difference_bytes[process]
        contents = [(arrays.RAW, sizes[0], raw), (arrays.DIFFERENCE, sizes[1], differences)]
        _, elided = arrays.write_pack(directory, contents)
        return {"letters": list(letters.items()), "sizes_bytes": sizes, "elided": elided}

    def _encoding(self, index: int) -> Encoding:
        """How this process stores its boxes of one leaf."""
        blocks, previous = self.blocks[index], self.previous.get(index)
        if not blocks:
            return Encoding.SAME
        if previous is None:
            return Encoding.RAW
        return codecs.choose((block, previous[box]) for box, block in blocks.items())

    def _program(self) -> Program:
        if not self.replayable:
            return Program({}, {}, "cast")
        return self.programs.of(self.structure)

    def commit(self, directory: Path) -> None:
        """Links what the step builds on and writes the manifest, on one process.

        Everything that the manifest speaks of is durable before this is called.

        Raises:
            AdaCheckError: the processes did not decide alike.
            OSError: from the file system.
        """
        parts = self._read_parts(directory)
        columns = zip(*(part["fingerprints"] for part in parts), strict=True)
        fingerprints = tuple(fingerprint.combine(column) for column in columns)
        if self.parent is None:
            manifest: manifests.Manifest = self._base_manifest(fingerprints)
        else:
            manifest = self._delta_manifest(self.parent, parts, fingerprints)
        # The manifest makes the step exist: nothing is written after it.
        manifests.write(directory, manifest)

    def _read_parts(self, directory: Path) -> list[dict[str, Any]]:
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
        return parts

    def _base_manifest(self, fingerprints: tuple[int, ...]) -> BaseManifest:
        structure, program, update = self.structure, self._program(), None
        if structure.binding is not None and self.replayable:
            params, inner, record, extra = structure.arguments
            update = Update(
                params=params,
                inner=inner,
                record=record,
                extra=extra,
                count=structure.index[structure.binding.count],
                reducing=program.reducing,
                passed=program.passed,
                placement=structure.placement if program.reducing else "",
                problem=program.problem,
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

    def _delta_manifest(
        self, parent: Lineage, parts: Sequence[dict[str, Any]], fingerprints: tuple[int, ...]
    ) -> DeltaManifest:
        reference = lineage.reference(self.final_directory, parent.entries[-1].directory)
        assert reference is not None
        letters: list[dict[int, str]] = [dict(part["letters"]) for part in parts]
        stored = tuple(sorted(set().union(*letters)))
        packs = tuple(
            Pack(
                encodings="".join(own.get(i, Encoding.SAME) for i in stored),
                raw_bytes=part["sizes_bytes"][0],
                difference_bytes=part["sizes_bytes"][1],
                elided=tuple((a, b) for a, b in part["elided"]),
            )
            for own, part in zip(letters, parts, strict=True)
        )
        return DeltaManifest(
            step=self.step,
            count=self.count,
            has_update=self.decision.update_count == 1,
            parent=Link(parent.manifest.step, reference, parent.manifest.checksum),
            depth=len(parent.entries),
            stored=stored,
            packs=packs,
            fingerprints=fingerprints,
            problem=next((part["problem"] for part in parts if part["problem"]), ""),
            custom_metadata=self.custom_metadata,
        )


@functools.cache
def versions() -> dict[str, str]:
    """Versions of this library and of those whose behaviour a checkpoint depends on."""
    names = ("adacheck-jax", "jax", "orbax-checkpoint", "tensorstore", "optax", "flax", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
