"""Compaction of one saved step: restored on this machine, and written as a base in its place.

A library and ``adacheck compact``; a running manager may go on meanwhile, and the steps before and
after are as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from adacheck_jax.adapter.stock.base_checkpoint import StockCheckpoints
from adacheck_jax.device import transfer
from adacheck_jax.errors import AdaCheckError
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.manifest import BaseManifest, Leaf
from adacheck_jax.store.compaction import in_place
from adacheck_jax.store.steps import roots
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.store.storage.location import AnyPath, at
from adacheck_jax.tools import verification
from adacheck_jax.tools.handover import recorded_step
from adacheck_jax.tools.handover.recorded_step import RecordedStep
from adacheck_jax.tools.recompute import cannot_replay_here, wide_integers
from adacheck_jax.tools.steps import InputError, resolved, undeleted


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """The output of ``adacheck compact``.

    Attributes:
        root: the checkpoint root.
        step: step number.
        item: path of the item directory, relative to the root.
        is_dry_run: True if nothing was changed.
        base: step number of the base that the step was restored from.
        delta_count: number of deltas that a restore read, and reads no more.
        replayed_count: number of updates that a restore replayed.
        state_bytes: bytes of the state.
        lost_steps: steps that its directory alone held: deferred steps that were saved with it, and
            earlier steps without a directory of their own. They are gone.
    """

    root: str
    step: int
    item: str
    is_dry_run: bool
    base: int
    delta_count: int
    replayed_count: int
    state_bytes: int
    lost_steps: tuple[int, ...]


def compact(
    root: AnyPath, number: int | None = None, item: str | None = None, *, dry_run: bool = False
) -> CompactionReport:
    """Turn a saved delta into a base, in its place.

    The step is restored as any restore does it, bit-exact and verified, onto the devices that it
    was saved from, else onto one; on CPU devices that takes the memory of the state once.

    Raises:
        InputError: there is no such root, step or item, or the step cannot be compacted: it is a
            base, a deferred step, a step that stock Orbax saved, or lies in an object store.
        AdaCheckError: the step is damaged, or cannot be restored exactly here; it is as it was. Or
            it was deleted meanwhile.
    """
    root = root.absolute()
    if not at(root).on_file_system:
        raise InputError(
            f"{root}: expected a root on a file system, found one in an object store, where "
            "nothing can be renamed, so that no step changes at one moment. Nothing was changed; "
            "copy the root to a file system, or let the training save a base."
        )
    step = recorded_step.find(root, number, item)
    if not step.is_own:
        holder = step.lineage.manifest.step
        raise InputError(
            f"{root}: expected a saved step, found that step {number} was recorded and lies in "
            f"step {holder}, with which it was saved. Only saved steps can be compacted: give "
            f"{holder}."
        )
    with undeleted(step.directory):
        return _compacted(root, step, dry_run)


def _compacted(root: AnyPath, step: RecordedStep, dry_run: bool) -> CompactionReport:
    lineage, base = step.lineage, step.lineage.base
    if isinstance(lineage.manifest, BaseManifest):
        left = ""
        if in_place.leftovers(step.directory):
            left = " What an interrupted compaction left there adacheck repair removes."
        raise InputError(
            f"{step.directory}: expected a delta, found that step {base.step} is a base already: "
            f"nothing is left to be done.{left}"
        )
    report = CompactionReport(
        root=str(root),
        step=lineage.manifest.step,
        item=at(step.directory).below(at(root)),
        is_dry_run=dry_run,
        base=base.step,
        delta_count=lineage.delta_count,
        replayed_count=lineage.replayed_count,
        state_bytes=sum(leaf.nbytes for leaf in base.leaves),
        lost_steps=_lost(step.directory, lineage),
    )
    if dry_run:
        verification.check(step.directory, read_data=False)
        if problem := cannot_replay_here(lineage):
            raise InputError(f"{step.directory}: it cannot be restored here: {problem}.")
        return report
    with wide_integers(leaf.dtype for leaf in base.leaves):
        found = step.restored(StockCheckpoints())
        assert found.lineage is not None
        in_place.compact(found.lineage, _blocks(found.lineage.base.leaves, found.leaves))
    return report


def _lost(directory: AnyPath, lineage: Lineage) -> tuple[int, ...]:
    """Steps before the lineage's last one that no other directory holds."""
    # A number alone would be too little: after a restart a step may be saved anew.
    left = {(each.step, each.fingerprints) for each in (lineage.base, *lineage.deltas[:-1])}
    every = roots.steps_of(*roots.place_of(directory).line)
    others = (each for each in every if each.directory != directory)
    for _, other in resolved(others):
        for entry in () if isinstance(other, AdaCheckError) else other.entries:
            manifest = entry.manifest
            if at(entry.holder).resolve() != at(directory).resolve():
                held = [manifest] if isinstance(manifest, BaseManifest) else manifest.deltas
                left -= {(each.step, each.fingerprints) for each in held}
    return tuple(sorted(step for step, _ in left))


def _blocks(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[int, Blocks]:
    """Elements of restored leaves, each as one box; of an array on a CPU device not copied."""
    blocks = {}
    for index, (leaf, value) in enumerate(zip(leaves, values, strict=True)):
        if leaf.nbytes:
            elements = np.asarray(transfer.raw(value)).astype(np.dtype(leaf.dtype), copy=False)
            blocks[index] = {Box.full(leaf.shape): elements}
    return blocks
