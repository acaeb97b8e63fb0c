"""Copies of a state, taken before the caller may donate it.

On CPU devices some are views until the save has ended, and the arrays may lie in memory that the
caller fills anew after that. So what is read later is copied behind the caller's back
(:func:`detach`), and what is stored is fingerprinted as it was stored (:func:`look`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import fingerprint, transfer
from adacheck_jax.device.transfer import Joined, Merged, Staged
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.byte_loops import fingerprints_of
from adacheck_jax.format.fingerprint import combine
from adacheck_jax.format.manifest import Leaf
from adacheck_jax.plan.save_plan import SavePlan
from adacheck_jax.state.snapshot import Snapshot
from adacheck_jax.store import equality

_COPIED_BYTES = 1 << 18
"""Largest leaf that is copied where it could be viewed."""

NOTHING: Mapping[int, Blocks] = {}
"""Copies of no leaf."""


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Copies of a state; some of them are perhaps still on their way.

    Attributes:
        staged: this process's boxes of the leaves that the save stores or keeps.
        spare: those of the leaves that it may have to store; nothing waits for them.
        kept: those of them that the next save will compare with.
        fingerprints: the fingerprints, perhaps still being computed.
        counters: the update counters, by leaf index, of a speculative plan; perhaps given later.
        seconds: boxes of other processes of which this one's shadow keeps copies.
        viewed: leaves that are viewed where the caller has them.
        waiting: what reads the state until it returns.
    """

    staged: Joined
    spare: Mapping[int, Blocks]
    kept: Staged
    fingerprints: fingerprint.Contributions
    counters: Mapping[int, Any]
    seconds: Mapping[int, Blocks]
    viewed: Collection[int]
    waiting: list[Callable[[], Any]]

    @property
    def held(self) -> Mapping[int, Blocks]:
        """All boxes of the leaves that the save stores, keeps or may have to store."""
        blocks = dict.fromkeys(self.staged, self.staged) | dict.fromkeys(self.spare, self.spare)
        return Merged(Joined(blocks), self.seconds) if self.seconds else Joined(blocks)

    def wait(self) -> None:
        """Waits until the state may be donated."""
        while self.waiting:
            self.waiting[-1]()
            self.waiting.pop()


def take_copies(
    snapshot: Snapshot,
    plan: SavePlan,
    seconds: Mapping[int, Sequence[transfer.Pick]] = MappingProxyType({}),
    *,
    every_replica: bool,
) -> HostCopies:
    """Takes all that a save needs of a state; it may be donated after :meth:`HostCopies.wait`.

    Where calls are gathered they have to be dispatched before. It takes boxes of other processes
    too, its ``seconds``.
    """
    structure, arrays = snapshot.structure, dict(enumerate(snapshot.arrays))
    summing = structure.summing(snapshot.arrays)
    counters = structure.counts if plan.is_speculative else ()
    copies, viewed = _copied(snapshot, plan, {*counters, *arrays.keys() - summing.placed.keys()})
    owned, held = copies is not None, {**arrays, **(copies or {})}
    viewed = viewed if owned or structure.on_accelerator else arrays.keys()
    kept = frozenset(plan.kept)
    groups = [plan.kept, tuple(i for i in plan.stored if i not in kept)]
    staged = [Staged({i: held[i] for i in each}, structure.picks) for each in groups]
    if not owned:  # all transfers are started before the first is awaited
        for each in staged:
            each.begin()
    joined = Joined({i: group for group in staged for i in group})
    fingerprints = fingerprint.Contributions(
        arrays,
        structure.picks,
        structure.whole_picks,
        every_replica=every_replica,
        staged=joined,
        copied=held if owned else None,
        summing=summing,
    )
    values = {i: held[i] if owned else np.array(arrays[i]) for i in counters}
    waiting: list[Callable[[], Any]] = [*(each.wait for each in staged), fingerprints.wait]
    if owned:
        waiting = [lambda: [joined[i] for i in viewed if i in joined]]
        if not joined.keys() >= {*viewed}:
            waiting.append(fingerprints.wait)
    spare = Staged({i: held[i] for i in plan.spare}, structure.picks)
    others = Staged({i: held[i] for i in seconds}, seconds)
    if not owned or others.keys() & {*viewed}:
        waiting.append(others.wait)
    if not owned:
        waiting.append(spare.wait)
    return HostCopies(joined, spare, staged[0], fingerprints, values, others, viewed, waiting)


def _copied(
    snapshot: Snapshot, plan: SavePlan, others: Collection[int]
) -> tuple[Mapping[int, Any] | None, Collection[int]]:
    """Copies on the devices of what the plan takes and of ``others``; and what is viewed instead.

    What lies on an accelerator, or is still being computed, is copied there, and nothing waits for
    that. So are small leaves of a delta that is computed, since one program for all is quicker than
    a look at each; large ones are viewed where the host can. Without copies all has to be viewed.
    """
    structure = snapshot.structure
    if plan.is_base and not plan.is_speculative:
        return None, ()
    # One program makes the copies of all processes; on CPU devices each would make its own.
    if jax.process_count() > 1 and not structure.on_accelerator:
        return None, ()
    wanted, viewed = {*plan.stored, *plan.kept, *plan.spare, *others}, list[int]()
    is_computed = not structure.on_accelerator and transfer.are_ready(snapshot.arrays)
    if is_computed:  # views of what is spare would be in the way
        large = (i for i in wanted if structure.leaves[i].nbytes > _COPIED_BYTES)
        viewed = [i for i in large if i not in plan.spare]
    copying = structure.copying(wanted.difference(viewed), snapshot.arrays)
    if is_computed and not copying.is_compiled():
        return None, ()  # each is viewed until one program is compiled for all
    return copying.copies(dict(enumerate(snapshot.arrays))), viewed


def detach(
    copies: HostCopies, leaves: Iterable[int], known: Mapping[int, Blocks] = NOTHING
) -> None:
    """Copies what is viewed of some kept leaves, unless the same bits are ``known``."""

    def copied(i: int, box: Box, block: np.ndarray) -> np.ndarray:
        own = known.get(i, {}).get(box)  # the leaf may have had another type, or be another one
        if own is not None and own.dtype == block.dtype and equality.same_bits(own, block):
            return own
        return np.array(block)

    for i in copies.kept.keys() & copies.viewed & {*leaves}:
        copies.kept.replace(i, copied)


def look(blocks: Mapping[int, Blocks], leaves: Collection[int]) -> dict[int, int]:
    """This process's contributions to the fingerprints of some leaves, by what blocks have now."""
    found, every = dict.fromkeys(leaves, 0), [(i, *x) for i in leaves for x in blocks[i].items()]
    given = ((block, box.start) for _, box, block in every)
    for (i, *_), value in zip(every, fingerprints_of(given), strict=True):
        found[i] = combine([found[i], value])
    return found


def cut_as_restored(saved: Sequence[Leaf], snapshot: Snapshot) -> tuple[Leaf, ...]:
    """The leaves of a restored state, in the boxes that the next save should find them in.

    Nothing tells of a host array where it goes: to where it was saved, if these processes can.
    """
    everyone = range(jax.process_count())
    triples = zip(saved, snapshot.structure.leaves, snapshot.arrays, strict=True)
    return tuple(
        new if isinstance(x, jax.Array) or not {*old.owners}.issubset(everyone) else old
        for old, new, x in triples
    )


def copies_of_restored(
    specs: Sequence[Leaf], leaves: Sequence[Any], kept: Collection[int] | None
) -> Mapping[int, Blocks]:
    """Copies of a restored state that the first save after it may be stored as differences from.

    The boxes that ``specs`` have of the leaves ``kept`` are copied; without ``kept`` those of all
    leaves. A leaf that was left out is None.
    """
    process = jax.process_index()
    plain = {i: transfer.raw(leaf) for i, leaf in enumerate(leaves) if leaf is not None}
    boxes = {i: specs[i].boxes_of(process) for i in plain if kept is None or i in kept}
    picks = {i: transfer.picks_of(plain[i], wanted) for i, wanted in boxes.items()}
    picks = {i: found for i, found in picks.items() if len(found) == len(boxes[i])}
    return transfer.stage({i: plain[i] for i in picks}, picks)


def comparable(copies: Mapping[int, Blocks], plan: SavePlan) -> Mapping[int, Blocks]:
    """The parent's leaves from which differences may be stored.

    A record is read by itself. One process may store its boxes of a leaf that another one replays:
    then all of them do without the elements that were there before.
    """
    if plan.is_base or plan.stores_all:
        return NOTHING
    if plan.decision.kind == "bits" or not copies:
        return copies
    without = plan.structure.consumed
    if jax.process_count() > 1:
        without |= plan.structure.computed
    return Joined({i: copies for i in copies if i not in without})  # perhaps still on their way
