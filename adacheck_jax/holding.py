"""What a save gets hold of before the state may be donated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from adacheck_jax import fingerprint, staging
from adacheck_jax.snapshot import Snapshot
from adacheck_jax.staging import Blocks, Joined, Staged


@dataclass(frozen=True, slots=True)
class Held:
    """What a save has got hold of.

    Attributes:
        staged: this process's boxes of what it needs on the host.
        kept: those of them that the next save will compare with.
        parts: the fingerprints.
        values: the small leaves that tell whether the state is what was expected.
        waiting: what has to be on the host before the state may be donated.
    """

    staged: Joined
    kept: Mapping[int, Blocks]
    parts: fingerprint.Parts
    values: Mapping[int, Any]
    waiting: list[Staged | fingerprint.Parts]

    def wait(self) -> None:
        """Waits until the state may be donated."""
        while self.waiting:
            self.waiting[-1].wait()
            self.waiting.pop()


def hold(
    snapshot: Snapshot,
    wanted: Collection[int],
    kept: Collection[int],
    small: Collection[int],
    *,
    waits: bool,
    defers: bool,
    every_replica: bool,
) -> Held:
    """Gets hold of all that a save will need of a state, which may be donated then.

    Args:
        snapshot: the state.
        wanted: the leaves that this save needs on the host.
        kept: those that the next one will compare with.
        small: those by whose values the state is judged later.
        waits: whether this may wait for the running step. If not, what is still being computed
            or lies on an accelerator is copied there first.
        defers: whether the state stays as it is until it was waited for.
        every_replica: whether replicas are fingerprinted too.
    """
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    # One program makes the copies of all processes; on CPU devices each would make its own.
    owned = not waits and (
        jax.process_count() == 1 or any(map(staging.on_accelerator, snapshot.arrays))
    )
    if owned:
        copied = {*wanted, *kept, *small}
        copied |= {i for i in arrays if i not in summing.placed}
        arrays |= staging.copies({i: arrays[i] for i in copied})
    groups = [tuple(kept), tuple(i for i in wanted if i not in kept)]
    staged = [Staged({i: arrays[i] for i in each}, structure.picks) for each in groups]
    if not owned:  # all transfers are started before the first is awaited
        for each in staged:
            each.begin()
    joined = Joined({i: group for group in staged for i in group})
    parts = fingerprint.Parts(
        arrays,
        structure.picks,
        structure.whole_picks,
        every_replica=every_replica,
        staged=joined,
        owned=owned or defers,
        summing=summing,
    )
    values = {i: arrays[i] if owned else np.array(arrays[i]) for i in small}
    return Held(joined, staged[0], parts, values, [] if owned else [*staged, parts])
