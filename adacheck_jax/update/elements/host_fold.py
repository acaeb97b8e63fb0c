"""The update over host memory: a copy of the leaves that updates compute, advanced in place.

Leaves that go through the same operations lie one behind another in a vector, and are computed a
chunk at a time by one small program. With each step a vector slides by one chunk, forward and back
in turns, so that no chunk is overwritten before its successor is complete: a step that was stopped
in the middle is gone on with, if it is known how many chunks are complete.

Leaves that a step brings and that are not kept, such as the record, *pass*: they have no memory
here, and are read where they lie, a chunk at a time.

All work on a copy is done by one thread at a time; there is no lock.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from adacheck_jax.device import jax_settings
from adacheck_jax.device.jax_settings import Arithmetic
from adacheck_jax.device.trees import is_narrow
from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.pieces import ROW, Batch, Pieces, Role

CHUNK_ELEMENTS = 1 << 18
"""Elements of a chunk: 3 MB of adamw's state. Of a fourth a fold took three times as long."""
_ALIGNMENT_BYTES = 64
"""XLA:CPU uses memory in place that begins at a multiple of this."""


class UnfitError(Exception):
    """An update cannot be computed from the boxes that this process has."""


@dataclass(slots=True)
class _Vector:
    """Elements of one role, in chunks; a computed vector slides by one chunk at each step."""

    dtype: np.dtype
    elements: int  # in use, without padding
    chunk: int  # elements of a chunk
    slides: bool
    passes: bool = False
    memory: np.ndarray = field(default_factory=lambda: np.empty(0))
    given: dict[int, np.ndarray] = field(default_factory=dict)  # flat elements that pass, by place
    spare: int = 0  # chunks: one if it slides, all of them once more if it is put twice
    shift: int = 0  # first element in use

    @property
    def count(self) -> int:
        """Number of chunks."""
        return -(-self.elements // self.chunk)

    def spared(self, *, twice: bool) -> int:
        """Number of chunks to spare, where what is only taken is put twice or not."""
        return 1 if self.slides else twice * self.count

    def size_bytes(self, *, twice: bool) -> int:
        """Bytes of the memory, aligned."""
        if self.passes:
            return 0
        size_bytes = (self.count + self.spared(twice=twice)) * self.chunk * self.dtype.itemsize
        return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def go_to(self, *, spare: bool) -> None:
        """Use the elements from the first on, or those behind as many as there are to spare."""
        self.shift = spare * self.spare * self.chunk

    def part(self, start: int, size: int) -> np.ndarray:
        """Elements in use, counted from the first."""
        if not self.passes:
            return self.memory[self.shift + start : self.shift + start + size]
        places = [*self.given]  # ascending
        first = max(bisect.bisect_right(places, start) - 1, 0)
        whole = self.given[places[first]] if places else np.empty(0, self.dtype)
        if places and start + size <= places[first] + whole.size:
            return whole[start - places[first] :][:size]
        made = np.zeros(size, self.dtype)  # of what is not given nothing is taken, as of padding
        for place in places[first : bisect.bisect_left(places, start + size)]:
            flat = self.given[place][max(start - place, 0) :][: start + size - max(start, place)]
            made[max(place - start, 0) :][: flat.size] = flat
        return made


@dataclass(frozen=True, slots=True)
class _Work:
    """One batch, with the vectors that it takes and computes."""

    batch: Batch
    taken: list[_Vector]
    computed: list[_Vector]

    def order(self) -> tuple[Sequence[int], int]:
        """The chunks in the order of a step, and the first element in use after it."""
        first = self.computed[0]
        if first.shift:
            return range(first.count), 0
        return range(first.count)[::-1], first.chunk  # the spare chunk is behind the last one

    def compute(self, program: Any, values: Mapping[int, Any], number: int, shift: int) -> None:
        """Compute a chunk, into the place of the chunk before or after it."""
        chunk = self.computed[0].chunk
        start, stop = number * chunk, (number + 1) * chunk
        results = program(values, [each.part(start, chunk) for each in self.taken])
        for each, result in zip(self.computed, results, strict=True):
            each.memory[shift + start : shift + stop] = result


class HostFold:
    """A copy of what updates compute in host memory, which each step moves on.

    Args:
        pieces: the update.
        boxes: the boxes of each leaf.
        recorder_count: number of recorders.
        arithmetic: arithmetic of the devices.
        passing: leaves that each update takes from what was put for it, and are not kept.

    Raises:
        UnfitError: leaves that are computed together are not held in the same boxes, or have
            elements of less than a byte.
    """

    def __init__(
        self,
        pieces: Pieces,
        boxes: Mapping[int, Sequence[Box]],
        recorder_count: int,
        arithmetic: Arithmetic,
        passing: Collection[int] = (),
    ) -> None:
        self._pieces, self._recorder_count, self._arithmetic = pieces, recorder_count, arithmetic
        self._device = jax.local_devices(backend="cpu")[0]
        specs = {i: pieces.specs[i] for i in pieces.scalar_leaves}
        self._scalars = {i: np.zeros(x.shape, x.dtype) for i, x in specs.items()}
        self._places: dict[int, tuple[_Vector, list[tuple[Box, int]]]] = {}
        self._is_turned = False
        self._vectors: list[_Vector] = []
        self._work: list[_Work] = []
        for batch in pieces.batches:
            held = {
                role: [tuple(boxes[leaf]) for leaf in role]
                for role in (*batch.taken, *batch.outputs)
            }
            first, *others = held.values()
            if any(each != first for each in others):
                raise UnfitError("leaves that are computed together are cut otherwise")
            elements = sum(box.size for each in first for box in each)
            chunk = min(CHUNK_ELEMENTS, -(-max(elements, 1) // ROW) * ROW)
            made: dict[Role, _Vector] = {}
            for role in held:
                dtype = np.dtype(pieces.specs[role[0]].dtype)
                if is_narrow(dtype):
                    raise UnfitError("the host keeps elements of less than a byte otherwise")
                slides = role in batch.outputs
                passes = not slides and {*role} <= {*passing}
                made[role] = _Vector(dtype, elements, chunk, slides, passes)
                self._place(made[role], role, boxes)
            self._vectors += made.values()
            taken, outputs = ([made[x] for x in each] for each in (batch.taken, batch.outputs))
            self._work.append(_Work(batch, taken, outputs))
        self._programs: list[Any] = []

    def _place(
        self, vector: _Vector, leaves: Sequence[int], boxes: Mapping[int, Sequence[Box]]
    ) -> None:
        start = 0
        for leaf in leaves:
            if leaf in self._places:
                raise UnfitError("a leaf plays two parts")
            places = []
            for box in boxes[leaf]:
                places.append((box, start))
                start += box.size
            self._places[leaf] = (vector, places)

    @property
    def layout(self) -> str:
        """A text that tells where in the memory each element of each leaf lies."""
        lines = []
        for number, each in enumerate(self._vectors):
            leaves = [(i, places) for i, (v, places) in self._places.items() if v is each]
            lines.append(f"{number}: {each.dtype} {each.elements} {each.chunk} {each.slides}")
            lines += [f"  {i}: {places}" for i, places in leaves]
        return "\n".join(lines)

    def size_bytes(self, *, twice: bool = False) -> int:
        """Host memory that the copy takes; see :meth:`allocate`."""
        return sum(each.size_bytes(twice=twice) for each in self._vectors)

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy of all that an update takes and computes."""
        return sum(each.elements * each.dtype.itemsize for each in self._vectors)

    def allocate(self, memory: np.ndarray | None = None) -> None:
        """Take the memory.

        Args:
            memory: bytes to use, aligned to a page, as many as ``size_bytes(twice=True)``: what an
                update only takes has two places in it, see :meth:`turn`. None for memory of the
                copy's own, in which it has one.
        """
        twice = memory is not None
        if memory is None:
            memory = np.zeros(self.size_bytes() + _ALIGNMENT_BYTES, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        for each in self._vectors:
            stop = start + each.size_bytes(twice=twice)
            each.memory, start = memory[start:stop].view(each.dtype), stop
            each.spare = each.spared(twice=twice)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        with jax_settings.own(), self._arithmetic.applied(), jax.default_device(self._device):
            yield

    def compile(self) -> None:
        """Compile the programs of a step, for the host."""
        spec = jax.ShapeDtypeStruct
        with self._settings():
            switches = update_program.switches(self._recorder_count)
            given = {i: spec(x.shape, x.dtype) for i, x in self._scalars.items()}
            needed = sorted({ref for work in self._work for ref in work.batch.shared})

            def scalars(given: Mapping[int, Any], switches: Any) -> Any:
                results, values = self._pieces.scalars(given, switches)
                return results, {ref: values[ref] for ref in needed}

            _, values = jax.eval_shape(scalars, given, switches)
            programs = [jax.jit(scalars).lower(given, switches).compile()]
            for work in self._work:
                arrays = [spec((each.chunk,), each.dtype) for each in work.taken]
                shared = {ref: values[ref] for ref in work.batch.shared}
                programs.append(jax.jit(work.batch.mapped).lower(shared, arrays).compile())
        self._programs = programs

    def put(self, leaf: int, blocks: Blocks) -> None:
        """Copy elements of a leaf into the memory; of a leaf that no update takes nothing.

        The blocks have to cover the boxes of the copy. Those of a leaf that passes stay as they are
        until the next update has ended.
        """
        if leaf in self._scalars:
            whole = np.empty_like(self._scalars[leaf])
            if sum(box.size for box in blocks) < whole.size:
                raise UnfitError("this process has not all results of sums")
            for box, block in blocks.items():
                whole[box.slices] = block
            self._scalars[leaf] = whole
            return
        if leaf not in self._places:
            return
        vector, places = self._places[leaf]
        for box, start in places:
            if vector.passes:
                vector.given[start] = _flat(box, blocks, vector.dtype)
                continue
            fill(vector.part(start, box.size).reshape(box.shape), box, blocks)

    @property
    def place(self) -> tuple[bool, bool]:
        """True for computed elements in the spare chunk; for those taken, in a second place."""
        return any(each.shift for each in self._vectors if each.slides), self._is_turned

    def go_to(self, computed: bool, taken: bool) -> None:
        """Use elements where they lay at a :attr:`place`."""
        for each in self._vectors:
            each.go_to(spare=computed if each.slides else taken)
        self._is_turned = taken

    def turn(self, kept: Collection[int]) -> None:
        """Put what an update only takes into its other place, so that what was put before stays.

        Args:
            kept: leaves for which nothing will be put: they are copied.
        """
        computed, taken = self.place
        before = {i: self.blocks(i) for i in kept if i in self._places}
        self.go_to(computed, not taken)
        for i, blocks in before.items():
            self.put(i, blocks)

    def holds(self, leaf: int) -> bool:
        """True if the copy has a leaf: one that the update takes or computes, and does not pass."""
        vector, _ = self._places.get(leaf, (None, ()))
        return leaf in self._scalars or (vector is not None and not vector.passes)

    def blocks(self, leaf: int) -> Blocks:
        """Elements of a leaf, by box: views, until the next step."""
        if leaf in self._scalars:
            return {Box.full(self._scalars[leaf].shape): self._scalars[leaf]}
        vector, places = self._places[leaf]
        return {box: vector.part(start, box.size).reshape(box.shape) for box, start in places}

    @property
    def scalars(self) -> Mapping[int, np.ndarray]:
        """The leaves that are single numbers, and the results of sums, by leaf index."""
        return self._scalars

    def advance(
        self,
        updates: Sequence[int],
        begin: int = 0,
        done: Callable[[int], None] | None = None,
    ) -> None:
        """Make one update, with what was put for it.

        Args:
            updates: positions of the recorders that made an update.
            begin: number of chunks that are complete already.
            done: to be called with the number of complete chunks, after each. Where the copy is
                stopped after that, the update can be begun again with that number.
        """
        of_scalars, *programs = self._programs
        passing = [each for each in self._vectors if each.passes]
        for each in passing:
            each.given = dict(sorted(each.given.items()))
        with self._settings(), contextlib.ExitStack() as ends:
            for each in passing:
                ends.callback(each.given.clear)
            switches = update_program.switches(self._recorder_count, updates)
            results, values = jax.device_get(of_scalars(self._scalars, switches))
            complete = 0
            for work, program in zip(self._work, programs, strict=True):
                given = {ref: values[ref] for ref in work.batch.shared}
                numbers, shift = work.order()
                for number in numbers:
                    complete += 1
                    if complete <= begin:
                        continue
                    work.compute(program, given, number, shift)
                    # All of a chunk is there before it is said to be: the next one overwrites what
                    # it took.
                    if done is not None:
                        done(complete)
                for each in work.computed:
                    each.shift = shift
        self._scalars.update(results)


def _flat(box: Box, blocks: Blocks, dtype: np.dtype) -> np.ndarray:
    """The elements of a box, one behind another: those of a block where it is one.

    Raises:
        UnfitError: the blocks do not cover the box.
    """
    block = blocks.get(box)
    if block is None or not block.flags.c_contiguous:
        fill(block := np.empty(box.shape, dtype), box, blocks)
    return block.reshape(-1)


def fill(target: np.ndarray, box: Box, blocks: Blocks) -> None:
    """Copies the elements of a box from blocks that have to cover it.

    Raises:
        UnfitError: they do not.
    """
    found = 0
    for other, block in blocks.items():
        if (common := _common(box, other)) is not None:
            into, out, size = common
            np.copyto(target[(*into, ...)], block[(*out, ...)], casting="no")
            found += size
    if found != box.size:
        raise UnfitError("this process has not all elements that a leaf is computed from")


@functools.lru_cache(maxsize=1 << 16)
def _common(box: Box, other: Box) -> tuple[Any, Any, int] | None:
    """Slices of two boxes where their common elements lie, and the number of these."""
    common = box.intersect(other) if box.shape else box
    if common is None:
        return None
    into, out = (common.relative_to(each.start).slices for each in (box, other))
    return into, out, common.size
