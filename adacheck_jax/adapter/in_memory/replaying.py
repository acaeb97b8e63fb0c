"""Records in memory, replayed as the deltas of a restore are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import transfer
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.manifest import Delta, Leaf, Update
from adacheck_jax.memory.files.step_file import Recorded
from adacheck_jax.restore import compiled_update, working_set
from adacheck_jax.restore.compiled_update import Shardings, abstract_leaf
from adacheck_jax.restore.deltas.patches import put_in_place
from adacheck_jax.restore.deltas.records import Consumed
from adacheck_jax.restore.progress import Progress
from adacheck_jax.restore.replay import Replay
from adacheck_jax.update import exported_program

_Read = Callable[[int, int, Box], np.ndarray]


class _Reader:
    """Implements :class:`~adacheck_jax.restore.deltas.patches.StoredLeaves` for one record."""

    def __init__(self, number: int, record: Recorded, read: _Read) -> None:
        self._number, self._read = number, read
        replayed = record.updates, record.stored, record.unreplayed
        self.delta = Delta(number, (), *replayed, packs=(), fingerprints=(), checked="")

    def stores_whole(self, index: int) -> bool:
        """True: no differences are kept."""
        return True

    def read(self, index: int, box: Box) -> np.ndarray:
        """One box of a leaf that is stored."""
        return self._read(self._number, index, box)

    def patch(self, index: int, box: Box, block: np.ndarray) -> None:
        """Puts one box of a leaf into its place; see the protocol."""
        block[...] = self.read(index, box)

    def prefetched(self, wanted: Mapping[int, Sequence[Box]]) -> contextlib.nullcontext[None]:
        """Nothing: all is in memory."""
        return contextlib.nullcontext()


def replay(
    leaves: Sequence[Any],
    specs: Sequence[Leaf],
    update: Update,
    program: bytes,
    records: Sequence[Recorded],
    read: _Read,
    ready: Callable[[], None],
) -> Sequence[Any]:
    """Implements :class:`~adacheck_jax.memory.recovered.RecordReplay`."""
    readers = [_Reader(number, record, read) for number, record in enumerate(records)]
    if not any(each.delta.has_update for each in readers):
        return put_in_place(leaves, specs, readers)
    shardings = working_set.replay_shardings(leaves, update)
    exported = exported_program.own(program)
    compiled = compiled_update.compiled(exported, update, specs, shardings, "memory")

    def advance(*args: Any) -> Any:
        ready()
        return compiled(*args)

    with Progress("recovering a state from memory") as progress:
        replaying = Replay(leaves, specs, update, advance, shardings, progress)
        return replaying.run(readers, _consumed(readers, update, specs, shardings))


def _consumed(
    readers: Sequence[_Reader], update: Update, specs: Sequence[Leaf], shardings: Shardings
) -> Iterator[Consumed]:
    """Record and state that each update consumes, on the shardings for replay; one placed ahead."""
    wanted = [abstract_leaf(specs[i], shardings[i]) for i in update.consumed]

    def placed(reader: _Reader) -> Consumed:
        own = update.consumed_by(reader.delta.updates)

        def read(n: int, box: Box) -> np.ndarray:
            if update.consumed[n] in own:
                # An array may use this memory, and the file's is overwritten one day.
                return np.array(reader.read(update.consumed[n], box))
            return np.zeros(box.shape, jax.numpy.dtype(wanted[n].dtype))

        return transfer.place_all(wanted, read)

    return (placed(each) for each in readers if each.delta.has_update)
