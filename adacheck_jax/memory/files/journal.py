"""The contents of a shadow's file, in an order that lets a killed process get its state back.

Beside the copy that updates advance (:mod:`~adacheck_jax.update.elements.host_fold`) the file has
the leaves that no update computes, as each step was received, and a header for each step: its
number, its fingerprints, the numbers that the update takes, and where all of it lies.

1. The leaves that a step brings are stored where the step before has nothing.
2. The header says that it is there. From here on the file holds the new step, before here the old.
3. The update goes over the copy, chunk by chunk; after each the word says how many are complete.
   No chunk is overwritten before its successor is complete, so whoever finds the file may go on.

A base, and leaves that replay gets wrong, are put over the copy as it lies, in any order: the
header says first that there is no step, and then that there is one.

Of several processes each has a file, with the boxes that it holds (``holdings``). There a step has
three headers: it is stored; it has passed the gate (``peers``), with the fingerprints of all
processes; it is folded. Until the fold of a step begins the file can go back to the one before it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.memory.files.shadow_file import ShadowFile, ShadowFileError
from adacheck_jax.memory.files.step_file import (
    ALIGNMENT_BYTES,
    LEAF_HEADER_BYTES,
    FilePlace,
    Found,
    StepFile,
    sums_of,
)
from adacheck_jax.memory.holdings import Held, LeafBox
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update.elements.host_fold import HostFold, fill

_DONE_BITS = 32


class Journal(StepFile):
    """The file of a state that a fold moves on; its memory is the fold's.

    Attributes:
        fold: the fold.
    """

    kind = "state"

    def __init__(
        self,
        place: FilePlace,
        structure: Structure,
        update: ExportedUpdate,
        fold: HostFold,
        held: Held,
    ) -> None:
        super().__init__(place, structure, update, held)
        self.fold = fold
        # A leaf that the update passes through is received, and the copy has it too.
        self._put_after = sorted(i for i in update.stored if fold.holds(i))
        received = (
            i
            for i, leaf in enumerate(structure.leaves)
            if leaf.nbytes and (i in update.stored or not fold.holds(i))
        )
        self._places, own_bytes = self._lay_out(received, 0)
        self._own_bytes = own_bytes
        numbers_bytes = 2 * sum(x.nbytes for x in fold.scalars.values())
        header_bytes = 1024 + numbers_bytes + LEAF_HEADER_BYTES * len(structure.leaves)
        if place.run:
            header_bytes += len(json.dumps(self._held_json)) + 2 * LEAF_HEADER_BYTES * len(
                structure.leaves
            )
        # The copy may begin at any multiple of its alignment.
        data_bytes = 2 * own_bytes + fold.size_bytes(twice=True) + ALIGNMENT_BYTES
        self.file = ShadowFile(place.path, self._description_bytes, header_bytes, data_bytes)

    @property
    def received(self) -> Collection[int]:
        """The leaves that are stored as each step brings them."""
        return self._places.keys()

    @property
    def memory(self) -> np.ndarray:
        """Memory for the copy."""
        return self.file.data[2 * self._own_bytes :]

    def receive(self, taken: Collection[int], blocks: Mapping[int, Blocks]) -> None:
        """Store what a step brings beside that of the step before."""
        before = {i: self.own(i) for i in self._places}
        brought = [i for i in taken if blocks.get(i)]
        self.fold.turn(frozenset(taken).difference(brought))
        for i in brought:
            self.fold.put(i, blocks[i])
        for i, old in before.items():
            brings = blocks.get(i)
            for box, new in self.own(i).items():
                if brings:
                    fill(new, box, brings)
                else:
                    new[...] = old[box]

    def ready(self) -> None:
        """Give the fold its memory, and compile it."""
        self.fold.allocate(self.memory)
        self.fold.compile()

    @property
    def _layout(self) -> str:
        return f"{self.fold.layout}\n{self._places}"

    def _write(self, header: Mapping[str, Any]) -> None:
        super()._write(header)
        self.note(0)

    def _headers(self) -> list[Mapping[str, Any]]:
        header, *older = super()._headers()
        number, done = divmod(self.file.word, 1 << _DONE_BITS)
        if number not in (self._number, self._number - 1):
            raise ShadowFileError(f"{self.file.path}: its last header is damaged")
        has_begun = number == self._number and done > 0
        if has_begun or not self.place.run:
            return [header]
        return [header, *(each for each in older if not each["updates"])]

    def _own_header(self, updates: Sequence[int]) -> Mapping[str, Any]:
        numbers = {str(i): x.tobytes().hex() for i, x in self.fold.scalars.items()}
        return {"updates": [*updates], "place": self.fold.place, "numbers": numbers}

    def note(self, count: int) -> None:
        """Say how many chunks of the update are complete."""
        self.file.word = self._number << _DONE_BITS | count

    def resume(self, step: int | None = None) -> Found:
        """Go on with the fold; see :meth:`StepFile.resume`. The copy has the memory."""
        header = self._header_of(step)
        number, done = divmod(self.file.word, 1 << _DONE_BITS)
        fold = self.fold
        fold.go_to(*header["place"])
        for i, number_of in header["numbers"].items():
            old = fold.scalars[int(i)]
            value = np.frombuffer(bytes.fromhex(number_of), old.dtype).reshape(old.shape)
            fold.put(int(i), {Box.full(old.shape): value})
        if header["updates"]:
            begin = done if number == self._number else 0
            fold.advance(header["updates"], begin, self.note)
        for i in self._put_after:
            fold.put(i, self.own(i))
        blocks = self._blocks()
        if not self.place.run:  # nobody has a copy
            return Found(header["step"], blocks, header["sums"])
        sums, changed = sums_of(blocks), set[LeafBox]()
        for i, stored in (header["folded"] or {}).items():
            boxes = [(int(i), box) for box in self.held.boxes(int(i))]
            changed |= {x for x, old in zip(boxes, stored, strict=True) if sums[x] != old}
        return Found(header["step"], blocks, header["sums"], changed, sums)

    def _blocks(self) -> Mapping[int, Blocks]:
        """All boxes that the file holds for sure."""
        found = {i: self.own(i) for i in self._places}
        for i, leaf in enumerate(self._structure.leaves):
            if leaf.nbytes and i not in found and self.held.boxes(i):
                found[i] = self.fold.blocks(i)
        return found

    def own(self, leaf: int) -> Blocks:
        """A leaf as the step brought it."""
        return self._view(leaf, self._places[leaf], self.fold.place[1] * self._own_bytes)
