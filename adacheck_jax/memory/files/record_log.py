"""A file with a whole state and the steps since it, as each of them was received.

It is kept where the host's arithmetic cannot follow: at a recovery devices replay the steps onto
the state. Nothing that is there is overwritten but by a whole state, before which the header says
that there is no step. A step is stored behind the last one; the header, which tells where its end
is, makes it the file's.

In a run of several processes the state and each step begin with a fingerprint of every box: a bit
that changes here later costs the box, and not the step. Another process may have a copy of the box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from mmap import PAGESIZE
from typing import Any

import numpy as np

from adacheck_jax.format.boxes import Blocks
from adacheck_jax.memory.files.shadow_file import ShadowFile, ShadowFileError, framed, unframed
from adacheck_jax.memory.files.step_file import (
    LEAF_HEADER_BYTES,
    FilePlace,
    Found,
    Places,
    Recorded,
    StepChange,
    StepFile,
    aligned,
    sums_of,
)
from adacheck_jax.memory.holdings import Held, LeafBox, OfBoxes
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import UnfitError, fill

LEAST_RECORDS = 8
"""Records that have to fit behind a state: each time that they are there a base is due."""
_IN_FLIGHT = 4
"""Steps that may be on their way when it is said that no more fit."""
_SUM_BYTES = 8


class RecordLog(StepFile):
    """The file of a whole state and the steps since it.

    Args:
        place: its place.
        structure: structure of the states.
        update: its exported update.
        held: the boxes in it.
        most_bytes: the most bytes that it may take.

    Attributes:
        least_bytes: bytes that it takes with few records.
    """

    kind = "records"

    def __init__(
        self,
        place: FilePlace,
        structure: Structure,
        update: ExportedUpdate,
        held: Held,
        most_bytes: int,
    ) -> None:
        super().__init__(place, structure, update, held)
        leaves = range(len(structure.leaves))
        self._leaves = [i for i in leaves if structure.leaves[i].nbytes and held.boxes(i)]
        self._places, self._state_bytes = self._placed(self._leaves, 0)
        replayed = structure.computed - update.stored
        received = [i for i in self._leaves if i not in replayed]
        head = framed({"head": [[], [], received]})  # about what a step's is
        self._record_bytes = self._placed(received, 0)[1] + aligned(len(head))
        self._end = self._reserved_bytes = self._state_bytes
        header_bytes = 1024 + LEAF_HEADER_BYTES * len(structure.leaves) * (2 if place.run else 1)
        sizes = self._description_bytes, header_bytes
        least = ShadowFile(place.path, *sizes, 0).size_bytes
        self.file = ShadowFile(
            place.path, *sizes, max(most_bytes - least, 0) // PAGESIZE * PAGESIZE
        )
        wanted_bytes = self._state_bytes + LEAST_RECORDS * self._record_bytes
        self.least_bytes = least + -(-wanted_bytes // PAGESIZE) * PAGESIZE

    @property
    def _layout(self) -> str:
        return f"{self._places} {self.file.size_bytes}"

    def is_filled(self, ahead: int = 0) -> bool:
        """True if a new state is due, after which there is room again.

        So many steps are ``ahead`` of it, besides those on their way; or as half of the room takes.
        """
        size_bytes = len(self.file.data)
        half_bytes = max(_IN_FLIGHT * self._record_bytes, (size_bytes - self._state_bytes) // 2)
        room_bytes = min((_IN_FLIGHT + ahead) * self._record_bytes, half_bytes)
        return size_bytes - self._end < room_bytes

    def stores_all(self, change: StepChange) -> bool:
        """True if a step stores all leaves, so that it needs none before it."""
        return {*change.stored}.issuperset(self._leaves)

    def put_state(self, blocks: Mapping[int, Blocks]) -> OfBoxes:
        """Store a whole state, in place of what is there; gives the fingerprints of its boxes.

        They are those of several processes alone, as of each step.

        Raises:
            UnfitError: the blocks are not all of it.
        """
        self._end = self._state_bytes
        return self._put(self._places, blocks, 0)

    def append(self, change: StepChange, blocks: Mapping[int, Blocks]) -> OfBoxes:
        """Store a step behind the last one; gives the fingerprints of its boxes.

        Raises:
            UnfitError: the blocks are not all that it stores.
            ShadowFileError: there is no room for it.
        """
        leaves = [i for i in change.stored if i in self._places]
        recorded = Recorded(change.updates, tuple(sorted(change.unreplayed)), change.stored, {})
        head = framed({"head": recorded.head})
        begin = self._end + aligned(len(head))
        places, end = self._placed(leaves, begin)
        if end > len(self.file.data):
            raise ShadowFileError(f"{self.file.path}: no room is left for the record of a step")
        self.file.reserve(end)
        sums = self._put(places, blocks, begin)
        self.file.data[self._end : self._end + len(head)] = np.frombuffer(head, np.uint8)
        self._end, self._record_bytes = end, max(self._record_bytes, end - self._end)
        return sums

    def _placed(self, leaves: Sequence[int], start: int) -> tuple[Places, int]:
        """Places for the boxes of some leaves, behind their fingerprints."""
        count = sum(len(self.held.boxes(i)) for i in leaves) if self.place.run else 0
        return self._lay_out(leaves, start + aligned(_SUM_BYTES * count))

    def _put(self, places: Places, blocks: Mapping[int, Blocks], start: int) -> OfBoxes:
        for i, own in self._views(places).items():
            if i not in blocks or not (brought := blocks[i]):
                path = self._structure.leaves[i].path
                raise UnfitError(f"a step did not bring {path}, which it stores")
            for box, memory in own.items():
                fill(memory, box, brought)
        if not self.place.run:
            return {}
        sums = sums_of(self._views(places))
        self._stored_sums(len(sums), start)[:] = [*sums.values()]
        return sums

    def _stored_sums(self, count: int, start: int) -> np.ndarray:
        return self.file.data[start : start + _SUM_BYTES * count].view(np.uint64)

    def _changed(self, views: Mapping[int, Blocks], start: int) -> frozenset[LeafBox]:
        """The boxes whose elements are not those that were stored."""
        if not self.place.run:
            return frozenset()
        sums = sums_of(views)
        recorded = self._stored_sums(len(sums), start).tolist()
        pairs = zip(sums.items(), recorded, strict=True)
        return frozenset(each for (each, found), expected in pairs if found != expected)

    def _views(self, places: Places) -> dict[int, Blocks]:
        return {i: self._view(i, placed) for i, placed in places.items()}

    def _own_header(self, updates: Sequence[int]) -> Mapping[str, Any]:
        return {"end": self._end}

    def resume(self, step: int | None = None) -> Found:
        """The state and the steps since it; see :meth:`StepFile.resume`."""
        header = self._header_of(step)
        records, self._end, state = list[Recorded](), self._state_bytes, self._views(self._places)
        changed = self._changed(state, 0)
        while self._end < header["end"]:
            head, head_bytes = unframed(self.file.data[self._end :])
            begin = self._end + aligned(head_bytes)
            recorded = Recorded.of(head["head"], {})
            leaves = [i for i in recorded.stored if i in self._places]
            places, self._end = self._placed(leaves, begin)
            records.append(replace(recorded, blocks=self._views(places)))
            changed |= self._changed(records[-1].blocks, begin)
        return Found(header["step"], state, header["sums"], changed, records=records)
