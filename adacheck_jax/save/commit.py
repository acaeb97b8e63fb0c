"""The way of a save after it was staged: write in the background, then commit; knows no Orbax.

Every process writes its data and then its *part*, the note of what it wrote
(:mod:`~adacheck_jax.save.exchange`), and checks that all parts agree. One process then commits: it
writes the manifest, which makes the step exist.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from adacheck_jax.device import fingerprint
from adacheck_jax.device.replicas import Check
from adacheck_jax.errors import AdaCheckError, MismatchError, storage_named
from adacheck_jax.format import durable, lineage
from adacheck_jax.format import manifest as manifests
from adacheck_jax.format.boxes import Blocks
from adacheck_jax.format.lineage import Entry, Lineage
from adacheck_jax.format.manifest import (
    BaseManifest,
    Caution,
    Delta,
    DeltaManifest,
    Encoding,
    Link,
    Pack,
    Update,
)
from adacheck_jax.save import exchange, policy
from adacheck_jax.save.exported_update import Program, Programs
from adacheck_jax.save.snapshot import Structure
from adacheck_jax.store import claims, delta_writer, equality, links, volumes
from adacheck_jax.store.base_writer import BaseShare
from adacheck_jax.store.delta_writer import DeltaShare
from adacheck_jax.update import program as update_program


@dataclass(slots=True)
class Attempt:
    """One attempt to save a step.

    Orbax gives up on a step as soon as one of its items fails, while others are still being
    written; and the step may be saved again at once, into a directory of the same name.

    Attributes:
        turn: held by the save of a line of steps that writes: one at a time.
        token: of that line, which marks what is written for it.
        is_over: whether the step is being saved again.
    """

    turn: threading.Lock
    token: str
    is_over: bool = False


@dataclass(slots=True)
class StepShare:
    """What this process holds of one step that is to be saved.

    Attributes:
        step: its number.
        decision: base or delta.
        fingerprints: of its state.
        delta: what is written of a delta.
        local: all of each leaf that every process has for itself, as this one has it.
        counts: the update counters; none without a recorder, None before they are settled.
        settle: makes sure that the step is what it was expected to be, where that was not known
            when its state was there: sets decision, counts, and what of the delta depends on them.
        verify: replays the delta and compares it with the state; None where it was compared.
        unchanged: the leaves that must have the bits of the step before.
        unreplayed: the computed leaves that are stored, or the parent's, and not replayed.
        checked: how its replay was compared, once it was.
        refused: why the step cannot be saved, once that is known.
        sums: what this process contributes to each leaf's fingerprint, once that is known.
    """

    step: int
    decision: policy.Decision
    fingerprints: fingerprint.Parts
    delta: DeltaShare | None
    local: Mapping[int, Blocks]
    counts: policy.Counts | None = None
    settle: Callable[[], None] | None = None
    verify: Callable[[], None] | None = None
    unchanged: tuple[int, ...] = ()
    unreplayed: frozenset[int] = frozenset()
    checked: str = ""
    refused: AdaCheckError | None = None
    sums: dict[int, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    verify_lock: threading.RLock = field(default_factory=threading.RLock)

    def drain(self) -> None:
        """Brings what is held to the host, and sums up the fingerprints; waits for the devices."""
        self.bring()
        self.sum_up()

    def bring(self) -> None:
        """Brings what a delta stores to the host."""
        with self.lock:
            if (delta := self.delta) is not None:  # a save may let go of it meanwhile
                for index in delta.blocks:
                    _ = delta.blocks[index]

    def sum_up(self) -> None:
        """Sums up the fingerprints."""
        with self.lock:
            if not self.sums:
                self.sums |= self.fingerprints.sums()

    def summed(self) -> Mapping[int, int]:
        """What this process contributes to each leaf's fingerprint; waits for the devices."""
        self.sum_up()
        return self.sums

    def release(self) -> None:
        """Lets go of all that is held of the state."""
        self.delta, self.local = None, {}
        self.settle = self.verify = None


@dataclass(slots=True)
class Save:
    """A save that has been decided and staged, and is to be written and committed.

    Attributes:
        steps: the recorded steps that are saved with it, oldest first, and the step itself.
        final_directory: the item's directory once it is committed.
        directory_step: the number in the name of the step's directory, None if there is none.
        base: what this process writes of a base.
        before: the step that the saved one followed, recorded or saved; itself if there is none.
        caution: what checks found before this step.
        parent_files: what belongs to the parent; empty if this process does not know.
        attempt: whose turn it is to write.
        error: why this process could not write its share.
        whole: where the process that commits notes the files of the step, for the next one.
        parts: what every process told of its share, once that is known.
        described: digests of the files that describe a base's arrays; from whoever wrote them.
        manifest: that was written, by the process that committed.
        stamp: of its file.
    """

    programs: Programs
    links: bool
    steps: Sequence[StepShare]
    structure: Structure
    parent: Lineage | None
    final_directory: Path
    directory_step: int | None
    replayable: bool
    custom_metadata: Any
    base: BaseShare | None
    before: int
    caution: Caution
    replicas: Check
    parent_files: frozenset[str]
    whole: dict[Path, frozenset[str]]
    attempt: Attempt
    parts: list[exchange.Part] = field(default_factory=list)
    described: dict[str, str] = field(default_factory=dict)
    manifest: manifests.Manifest | None = None
    stamp: tuple[int, int, int] | None = None
    error: Exception | None = None

    @property
    def own(self) -> StepShare:
        """The saved step itself."""
        return self.steps[-1]

    @property
    def step(self) -> int:
        """Its number."""
        return self.own.step

    @property
    def depth(self) -> int:
        """Number of deltas between the base and the saved step, its own included."""
        return self.parent.manifest.depth + len(self.steps) if self.parent else 0

    @property
    def agreed_caution(self) -> Caution:
        """What the checks of any process found, as all know it once their shares are written."""
        told = [part["caution"] for part in self.parts]
        reasons = [self.caution.reason, *(reason for reason, _ in told)]
        distrusted = {*self.caution.distrusted, *(i for _, own in told for i in own)}
        return Caution(next(filter(None, reasons), ""), tuple(sorted(distrusted)))

    @property
    def is_base(self) -> bool:
        """Whether the caller has to write a stock checkpoint of the full state."""
        return self.own.decision.is_base

    def write(self, directory: Path) -> None:
        """Writes this process's share; the directory is the item's temporary one.

        Raises:
            AdaCheckError: names the recorded steps that are lost with this one; of the kinds that
                :meth:`_write_share` raises, or a ReplayError: replay does not give a state that is
                gone.
        """
        try:
            self._write_share(directory)
        except AdaCheckError as error:
            self.error = error
            if recorded := [each.step for each in self.steps[:-1]]:
                shown = lineage.shown_steps(recorded)
                raise type(error)(
                    f"{error} Not saved either, as they were to be written with it: the recorded "
                    f"steps {shown}."
                ) from error
            raise
        except Exception as error:
            self.error = error
            raise

    def _write_share(self, directory: Path) -> None:
        """Writes it, and judges it by what all processes tell.

        Raises:
            AdaCheckError: another process failed, or they did not decide alike; or the step is
                being saved again.
            MismatchError: what each process has for itself is not equal.
            ReplicaError: replicas differ, and the handler was told to refuse such steps.
            StorageError: the disk is full, gone, or cannot be written.
        """
        process, count = jax.process_index(), jax.process_count()
        try:
            with self.attempt.turn, storage_named(self.final_directory):
                if self.attempt.is_over:
                    raise AdaCheckError(f"step {self.step}: given up, it is being saved again")
                with claims.writing(directory, process, self.attempt.token):
                    _clear(directory, process)
                    self.parts = [self._write(directory, process)]
        except Exception as error:
            if count > 1 and not self.attempt.is_over:
                exchange.fail(directory, process, error)
            raise
        finally:  # a save that failed is kept until the next one, its copies of the state are not
            self.base = None
            for each in self.steps:
                each.release()
        if count > 1 and not self.attempt.is_over:
            exchange.write(directory, process, self.parts[0])
            self.parts = exchange.gather(directory, count)
        self._judge(self.parts)

    def _write(self, directory: Path, process: int) -> exchange.Part:
        for each in self.steps:
            each.bring()
            if each.fingerprints.holds_blocks:
                each.sum_up()  # else packing could not let go of them
            if each.settle is not None:
                each.settle()
        part: exchange.Part = {
            "is_base": self.is_base,
            "parent": self.parent.manifest.checksum if self.parent else None,
            "numbers": [each.step for each in self.steps],
            "caution": [self.caution.reason, self.caution.distrusted],
        }
        written: Sequence[dict[str, Any]] = [{}]
        if self.is_base:
            self.own.sum_up()  # what an earlier base holds is told by them
            if process == 0:
                for platform, data in self._program().files.items():
                    durable.write(directory / manifests.update_file(platform), data)
            assert self.base is not None
            part |= self.base.write(directory, process, self.own.sums)
        else:
            if process == 0 and self.parent and self.links:
                # First of all: what is linked can no longer be deleted under this step.
                links.link_ancestors(self.parent, directory, self.parent_files)
            written = self._write_deltas(directory, process)
        # Fingerprints are computed by the devices, and meanwhile the delta was written.
        part["steps"] = [
            self._told(each) | own for each, own in zip(self.steps, written, strict=True)
        ]
        for each in self.steps:  # no manifest speaks of a delta whose replay was not compared
            if each.verify is not None:
                each.verify()
        return part

    def _told(self, share: StepShare) -> dict[str, Any]:
        """What all processes have to know of a step besides what is written of it."""
        share.sum_up()
        return {
            "replicas": self.replicas.part(share.fingerprints.replicas),
            "fingerprints": [value for _, value in sorted(share.sums.items())],
            "local": [(i, _digest(blocks)) for i, blocks in sorted(share.local.items())],
        }

    def _write_deltas(self, directory: Path, process: int) -> list[dict[str, Any]]:
        assert self.own.delta is not None
        buffers, codec = self.own.delta.buffers, self.own.delta.codec
        packed = []
        for each in self.steps:
            assert each.delta is not None
            packed.append(each.delta.packed(process, jax.process_count()))
            each.delta = None  # a run is as large as memory allows: let go of it as it is packed
        return delta_writer.write(packed, lineage.pack_in(directory, process), codec, buffers)

    def _program(self) -> Program:
        if not self.replayable:
            return Program({}, {}, "cast")
        return self.programs.of(self.structure)

    def _judge(self, told: Sequence[exchange.Part]) -> None:
        """Whether the step may be committed, as every process finds alike."""
        decisions = {(part["is_base"], part["parent"], *part["numbers"]) for part in told}
        if len(decisions) != 1:
            raise AdaCheckError(
                f"step {self.step}: the {len(told)} processes did not decide alike: {decisions}. "
                "Expected all of them to see the same root; check that it is a shared file system. "
                "The step is not saved; the next one will be a base."
            )
        before = self.parent.end.fingerprints if self.parent else ()
        for each, own in zip(self.steps, _by_step(told), strict=True):
            self._judge_local(each.step, own)
            found = _fingerprints(own)
            self._judge_unchanged(each, before, found)
            self.replicas.settle(each.step, [part["replicas"] for part in own])
            before = found

    def _judge_local(self, step: int, told: Sequence[exchange.Part]) -> None:
        for i, expected in told[0]["local"]:
            other = [p for p, part in enumerate(told) if dict(part["local"])[i] != expected]
            if other:
                raise MismatchError(
                    f"leaf {self.structure.leaves[i].path}: it lies on every process by itself, so "
                    f"it is expected to be equal on all {len(told)}; processes "
                    f"{', '.join(map(str, other[:10]))} hold other bits than process 0. Step "
                    f"{step} is not saved. Make it one global array "
                    "(jax.make_array_from_process_local_data), or leave it out of the state."
                )

    def _judge_unchanged(
        self, share: StepShare, before: Sequence[int], found: Sequence[int]
    ) -> None:
        changed = next((i for i in share.unchanged if found[i] != before[i]), None)
        if changed is not None:
            raise AdaCheckError(
                f"{self.final_directory}: expected at step {share.step} the state of the step "
                "before, since the update counter is the same; but "
                f"{self.structure.leaves[changed].path} changed without an update (edited by hand, "
                f"or rolled back in memory?). Step {self.step} is not saved; the next one will be "
                "a base."
            )

    def committing(self, directory: Path) -> AbstractContextManager[None]:
        """Makes certain that a directory holds this save and no other; see :mod:`claims`."""
        return claims.committing(directory, jax.process_index(), self.attempt.token)

    def commit(self, directory: Path) -> None:
        """Writes the manifest, on one process.

        The bytes of all that it speaks of are durable before this is called; the names of the
        files, links and directories are made so here.

        Raises:
            StorageError: the disk is full, gone, or cannot be written.
        """
        with storage_named(self.final_directory):
            self._commit(directory)

    def _commit(self, directory: Path) -> None:
        if len(self.parts) > 1:
            exchange.remove(directory)
        if self.parent is None:
            contents: dict[str, Sequence[str] | None] = {}
            for part in self.parts:
                contents |= part["volumes"]
            volumes.merge(directory, contents)
            manifest: manifests.Manifest = self._base_manifest()
        else:
            manifest = self._delta_manifest(self.parent)
        claims.remove(directory)
        # The manifest makes the step exist, and nothing is written after it. All that is not
        # durable yet becomes so at once, which the journal of a file system takes as one. Orbax's
        # rename comes next.
        self.manifest = manifests.write(directory, manifest)
        durable.sync_tree(directory, directory / manifests.FILE)
        self.stamp = manifests.stamp(directory)
        self.whole[self.final_directory] = links.files_of(Entry(self.manifest, directory))

    def _base_manifest(self) -> BaseManifest:
        structure, program, update = self.structure, self._program(), None
        if structure.bindings and self.replayable:
            params, inner, record, extra = structure.arguments
            update = Update(
                params=params,
                inner=inner,
                record=record,
                extra=extra,
                counts=structure.counts,
                parts=structure.parts,
                reducing=program.reducing,
                passed=program.passed,
                placement=structure.placement if program.reducing else "",
                problem=program.problem,
                programs=program.digests,
                jax_version=jax.__version__,
                pinned=program.pinned,
            )
        return BaseManifest(
            step=self.step,
            counts=self.own.counts or (),
            leaves=self.structure.leaves,
            fingerprints=_fingerprints(_by_step(self.parts)[-1]),
            update=update,
            reason=self.own.decision.reason,
            aliases=self._agreed("aliases"),
            kept=self._agreed("kept"),
            process_count=jax.process_count(),
            versions=versions(),
            environment=update_program.environment(),
            described=self.described,
            directory_step=self.directory_step,
            caution=self.agreed_caution,
        )

    def _agreed(self, key: str) -> tuple[tuple[int, int], ...]:
        """The pairs of a leaf and something that hold in every process that owns some of it."""
        told = [dict(part[key]) for part in self.parts]
        pairs = []
        for i in sorted(set().union(*told)):
            values = {told[owner].get(i) for owner in self.structure.leaves[i].owners}
            if len(values) == 1 and None not in values:
                pairs.append((i, values.pop()))
        return tuple(pairs)

    def _delta_manifest(self, parent: Lineage) -> DeltaManifest:
        reference = lineage.reference(self.final_directory, parent.entries[-1].holder)
        assert reference is not None
        pairs = zip(self.steps, _by_step(self.parts), strict=True)
        *recorded, own = [_delta(each, told) for each, told in pairs]
        return DeltaManifest(
            step=own.step,
            counts=own.counts,
            updates=own.updates,
            parent=Link(parent.manifest.step, reference, parent.manifest.checksum),
            depth=self.depth,
            stored=own.stored,
            unreplayed=own.unreplayed,
            packs=own.packs,
            fingerprints=own.fingerprints,
            checked=own.checked,
            custom_metadata=self.custom_metadata,
            directory_step=self.directory_step,
            recorded=tuple(recorded),
            caution=self.agreed_caution,
        )


def _delta(share: StepShare, told: Sequence[exchange.Part]) -> Delta:
    """The delta of a step, from what each process told of it."""
    letters: list[dict[int, str]] = [dict(part["letters"]) for part in told]
    stored = tuple(sorted(set().union(*letters)))
    packs = tuple(
        Pack(
            encodings="".join(own.get(i, Encoding.SAME) for i in stored),
            aliases=_pairs(part["aliases"]),
            raw_bytes=part["sizes_bytes"][0],
            compressed_bytes=part["sizes_bytes"][1],
            raw_zeros=_pairs(part["zeros"][0]),
            compressed_zeros=_pairs(part["zeros"][1]),
        )
        for own, part in zip(letters, told, strict=True)
    )
    return Delta(
        step=share.step,
        counts=share.counts or (),
        updates=share.decision.updates,
        stored=stored,
        unreplayed=tuple(sorted(share.unreplayed)) if share.decision.updates else (),
        packs=packs,
        fingerprints=_fingerprints(told),
        checked=share.checked if share.decision.updates else "stored",
    )


def _by_step(told: Sequence[exchange.Part]) -> list[tuple[exchange.Part, ...]]:
    """For each step what every process told of it."""
    return [*zip(*(part["steps"] for part in told), strict=True)]


def _fingerprints(told: Sequence[exchange.Part]) -> tuple[int, ...]:
    """Of all leaves, from what each process contributes to them."""
    columns = zip(*(part["fingerprints"] for part in told), strict=True)
    return tuple(fingerprint.combine(column) for column in columns)


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
    """A digest by which processes tell, without an exchange of data, whether they hold the same."""
    digest = hashlib.sha256()
    for _, block in sorted(blocks.items()):
        digest.update(equality.flat_bytes(block).data)
    return digest.hexdigest()


def _pairs(values: Sequence[Sequence[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((a, b) for a, b in values)


@functools.cache
def versions() -> dict[str, str]:
    """Versions of this library and of those whose behaviour a checkpoint depends on."""
    names = ("adacheck-jax", "jax", "orbax-checkpoint", "tensorstore", "optax", "flax", "numpy")
    return {name: importlib.metadata.version(name) for name in names}
