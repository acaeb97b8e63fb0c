"""Replay: deltas folded onto the leaves of a base.

Records are read ahead and folded by the compiled update; then the leaves that no update explains
are put in place. Knows no Orbax: the base was read already.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax

from adacheck_jax.errors import FormatError, IntegrityError
from adacheck_jax.format.manifest import BaseManifest, Delta, Leaf, Update
from adacheck_jax.restore import check
from adacheck_jax.restore.agreed import ALONE, Agreed
from adacheck_jax.restore.compiled_update import CompiledUpdates, Shardings
from adacheck_jax.restore.deltas.delta_reader import DeltaReader, readers_of
from adacheck_jax.restore.deltas.patches import Patches, StoredLeaves, put_in_place
from adacheck_jax.restore.deltas.records import Consumed, Records
from adacheck_jax.restore.progress import Progress
from adacheck_jax.restore.shared_reads import ReadOnce
from adacheck_jax.restore.working_set import WorkingSet, replay_shardings
from adacheck_jax.store.steps.lineage import Lineage
from adacheck_jax.update import program as update_program
from adacheck_jax.update.program import UpdateFunction

_log = logging.getLogger(__name__)


def replay_onto(
    leaves: Sequence[Any],
    lineage: Lineage,
    programs: CompiledUpdates,
    read_once: ReadOnce = False,
    *,
    readers: Sequence[DeltaReader] | None = None,
    checked: bool = True,
    agreed: Agreed = ALONE,
) -> list[Any]:
    """Bring leaves to the step that ends their lineage, or on by some of its deltas.

    Args:
        leaves: leaves of the step before the deltas, as they were read onto their target shardings;
            None for one that nobody asked for, or its ``jax.ShapeDtypeStruct`` if updates consume
            it, which take it from the deltas, as the result does from the last of them. Those that
            the update computes are donated.
        lineage: the base, and the deltas that follow it.
        programs: update programs that may be compiled already; one that is compiled here is added.
        read_once: True to read each box of a record in one process, as for the base; collective.
        readers: readers of deltas that follow one another, oldest first; None for those of all.
        checked: False if the caller compares every leaf with its fingerprint, and calls
            :func:`check_stored` if one differs: then the records' checksums are left unread.
        agreed: agreement of the processes, of which one alone may not read a delta.

    Returns:
        The leaves of the step after the deltas, of the types and on the shardings of the given
        ones; None for one that was given so, and abstract what the last delta did not bring.

    Raises:
        IntegrityError, FormatError: the stored data is damaged or cannot be read.
    """
    if readers is None:
        readers = readers_of(lineage)
        if count := lineage.replayed_count:
            steps = lineage.base.step, lineage.end.step
            _log.info("Replaying %d updates onto the base of step %d, for step %d.", count, *steps)
    specs, update, where = lineage.base.leaves, lineage.base.update, lineage.base_directory
    if not any(reader.delta.has_update for reader in readers):
        return put_in_place(leaves, specs, readers)
    if update is None or not update.programs:
        raise FormatError(
            f"{where}: expected the base of a delta to hold an update program, found none. "
            "Restore a base step."
        )
    shardings = replay_shardings(leaves, update)
    args = specs, update, readers, shardings, read_once, where
    records = Records(*args, checked=checked, agreed=agreed)
    if not (records.are_shared or _may_exchange(shardings)):
        agreed = ALONE  # but at the end, where the caller has it
    with Progress(f"restoring step {lineage.end.step}") as bar, records.read_ahead() as consumed:
        with agreed():
            program = programs.get(lineage, update, shardings, bar)
        replay = Replay(leaves, specs, update, program, shardings, bar, agreed)
        result = replay.run(readers, consumed)
        if agreed is not ALONE:  # on CPU devices the caller's next collective may overtake
            jax.block_until_ready(result)
        return result


def check_stored(lineage: Lineage) -> None:
    """Read all stored bytes of a lineage's deltas.

    Raises:
        IntegrityError, FormatError: names the first leaf whose bytes are damaged.
    """
    for reader in readers_of(lineage):
        reader.check()


def newest_exact(
    leaves: Sequence[Any],
    lineage: Lineage,
    programs: CompiledUpdates,
    *,
    rounded: Collection[int] = (),
    read_once: ReadOnce = None,
    agreed: Agreed = ALONE,
) -> Lineage | None:
    """The newest step of a lineage that has the bits that were saved.

    Every delta is applied once, and every step compared with its fingerprints. Arguments are those
    of :func:`replay_onto`; leaves of the indices ``rounded`` need only be right to rounding.

    Returns:
        The part of the lineage that ends at that step; None if not even the base is exact.
    """
    found = lineage.to(lineage.base.step) if _is_exact(leaves, lineage.base, ()) else None
    try:
        with agreed():
            readers = readers_of(lineage)
        for reader, delta in zip(readers, lineage.deltas, strict=True):
            with agreed():
                args = leaves, lineage, programs, read_once
                leaves = replay_onto(*args, readers=[reader], agreed=agreed)
            if _is_exact(leaves, delta, rounded):
                found = lineage.to(delta.step)
    except (IntegrityError, FormatError) as error:  # no later step can be built
        _log.debug("%s: replayed no further: %s", lineage.base_directory, error)
    return found


def _may_exchange(shardings: Shardings) -> bool:
    """True if processes may exchange elements where an update is replayed on these shardings.

    Only of what is replicated each has all; a pinned sum of what is cut is not among the leaves
    that a base says to be of sums.
    """
    is_alone = all(each.is_fully_addressable for each in shardings.values())
    return not is_alone and not all(each.is_fully_replicated for each in shardings.values())


def _is_exact(leaves: Sequence[Any], step: BaseManifest | Delta, rounded: Collection[int]) -> bool:
    return not check.differing(leaves, step.fingerprints).difference(rounded)


class Replay:
    """Updates replayed one after another onto some leaves, by one compiled program."""

    def __init__(
        self,
        leaves: Sequence[Any],
        specs: Sequence[Leaf],
        update: Update,
        program: UpdateFunction,
        shardings: Shardings,
        progress: Progress,
        agreed: Agreed = ALONE,
    ) -> None:
        self._update, self._program, self._progress = update, program, progress
        self._agreed = agreed
        self._working = WorkingSet(leaves, shardings)
        self._patches = Patches(self._working, specs)
        self._shardings = [*shardings.values()]
        self._passed = frozenset(update.passed)
        self._switches: dict[tuple[int, ...], jax.Array] = {}
        self._take()

    def run(self, readers: Sequence[StoredLeaves], consumed: Iterator[Consumed]) -> list[Any]:
        """Replay deltas, and give all leaves as they are then; once."""
        sizes = [sum(p.raw_bytes + p.compressed_bytes for p in x.delta.packs) for x in readers]
        for done, reader in enumerate(readers):
            what = f"replayed {done} of {len(readers)} deltas, "
            self._progress.tell(sum(sizes[:done]), sum(sizes), what)
            if not reader.delta.has_update:
                self._patches.add(reader)
                continue
            own = self._replay(reader, consumed)
            if reader is readers[-1]:  # then the arrays that it consumed are leaves of the state
                brought = self._update.brought_by(reader.delta)
                for index, array in zip(self._update.consumed, own, strict=True):
                    if index in brought:
                        self._patches.replace(index, array)
            del own  # else it would lie beside what the next update consumes
        self._put_back()
        self._patches.apply(range(len(self._working.leaves)))
        return self._working.leaves

    def _replay(self, reader: StoredLeaves, consumed: Iterator[Consumed]) -> Consumed:
        with self._agreed():
            # A dispatched update holds its inputs. Waiting for the one before bounds the memory to
            # what is read ahead.
            jax.block_until_ready((self._params, self._inner))
            own = next(consumed)
            unreplayed = self._patch_before(reader)
        updates = reader.delta.updates
        if updates not in self._switches:
            counts = len(self._update.counts)
            self._switches[updates] = update_program.switches(counts, updates, self._shardings)
        record, extra = own[: (count := len(self._update.record))], own[count:]
        self._params, self._inner = self._program(
            self._params, self._inner, record, extra, self._switches[updates]
        )
        if unreplayed:
            self._put_back()
            for index, leaf in unreplayed.items():
                self._working[index] = leaf
            self._take()
        return own

    def _patch_before(self, reader: StoredLeaves) -> dict[int, Any]:
        """Put in place what the update of a delta takes, and note what the delta stores.

        Leaves that the update passes through take their stored values before it runs; leaves that
        are not replayed keep the values of the parent.

        Returns:
            The parent's leaves that the delta does not replay, by index.
        """
        update, patches = self._update, self._patches
        computed = update.explained - self._passed
        if not (
            reader.delta.unreplayed
            or patches.touches(update.explained)
            or not self._passed.isdisjoint(reader.delta.stored)
        ):
            patches.add(reader)
            return {}
        self._put_back()
        patches.apply(computed)
        patches.add(reader)
        patches.apply(self._passed)
        unreplayed = {i: self._working[i] for i in reader.delta.unreplayed}
        self._take(copied=unreplayed)
        return unreplayed

    def _take(self, copied: Collection[int] = ()) -> None:
        self._params = self._working.take(self._update.params, copied)
        self._inner = self._working.take(self._update.inner, copied)

    def _put_back(self) -> None:
        self._working.put_back(self._update.params, self._params)
        self._working.put_back(self._update.inner, self._inner)
        self._params, self._inner = [], []
