"""The contents of a shadow's file, in an order that lets a killed process get its state back.

Beside the copy that updates advance (:mod:`~adacheck_jax.update.elements.host_fold`) the file has
the leaves that no update computes, as each step was received, and a header for each step: its
number, its fingerprints, the numbers that the update takes, and where all of it lies.

1. What a step brings is stored where the step before has nothing.
2. The header says that it is there. From here on the file holds the new step, before here the old.
3. The update goes over the copy, chunk by chunk; after each the word says how many are complete.
   No chunk is overwritten before its successor is complete, so whoever finds the file may go on.

What is put over the copy as it lies (a base; leaves that replay gets wrong) has no such order: the
header says first that there is no step, and then that there is one.

Of several processes each has a file, with the boxes that it holds (``holdings``). There a step has
three headers: it is stored; it has passed the gate (``peers``), with the fingerprints of all
processes; it is folded. Until the fold of a step begins the file can go back to the one before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.proof.agreement import Offer, OfferedStep
from adacheck_jax.proof.holdings import Held
from adacheck_jax.proof.peers import Peers
from adacheck_jax.proof.shadow_file import (
    SUFFIX,
    ShadowFile,
    ShadowFileError,
    peek,
    remove_unused,
)
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.host_fold import HostFold, fill

_FORMAT = 2
_DESCRIPTION_BYTES = 1 << 14
_LEAF_HEADER_BYTES = 128
"""Bytes of a leaf in a header, at most: a fingerprint, and a number of 16 bytes in hexadecimal."""
_ALIGNMENT_BYTES = 64
_DONE_BITS = 32


@dataclass(frozen=True, slots=True)
class FilePlace:
    """The place of a file.

    Attributes:
        directory: path of its directory.
        root: the root of the steps that the state belongs to, without symbolic links.
        item: name of the item in each step; empty if a step has none.
        run: name of the run of several processes; empty for a process alone.
        process: index of the process that writes it, in that run.
        count: number of its processes.
    """

    directory: str
    root: str
    item: str
    run: str = ""
    process: int = 0
    count: int = 1

    @property
    def path(self) -> Path:
        """Path of the file; each process of each run has its own."""
        run = f"{self.run[:12]}." if self.run else ""
        return Path(self.directory, f"{self.item or 'state'}.{run}{self.process}{SUFFIX}")

    def of(self, peers: Peers | None) -> FilePlace:
        """The place of this process's file in a run."""
        if peers is None:
            return self
        count = len(peers.domains)
        return replace(self, run=peers.run, process=jax.process_index(), count=count)


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file in a directory, as it tells of itself.

    Attributes:
        place: its place.
        held: the boxes in it; None for all of a process alone.
    """

    place: FilePlace
    held: Held | None


def files_in(directory: str) -> list[FoundFile]:
    """The files in a directory, of all runs and processes."""
    found = list[FoundFile]()
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        if (told := peek(path)) and told.get("format") == _FORMAT:
            place = FilePlace(directory, *(told[name] for name in _PLACE))
            if place.path == path:
                held = None if told["held"] is None else Held.of_json(told["held"])
                found.append(FoundFile(place, held))
    return found


def remove_others(place: FilePlace) -> bool:
    """Removes what earlier runs of the same steps have left beside a file; True if there was any.

    What a process has is left.
    """
    others = [each.place for each in files_in(place.directory)]
    own = place.root, place.item
    earlier = [x for x in others if (x.root, x.item) == own and x.run != place.run]
    removed = [each for each in earlier if remove_unused(each.path)]
    return bool(removed)


@dataclass(frozen=True, slots=True)
class Found:
    """A step that a file holds.

    Attributes:
        step: its number.
        blocks: boxes of each leaf that has elements, by leaf index: views of the file.
        sums: the fingerprint of each leaf, or what the file's process contributes to it.
        folded: fingerprints of the boxes, by position of the leaf's box in the file, as they were
            when they had been folded; None if they are not known.
    """

    step: int
    blocks: Mapping[int, Blocks]
    sums: Sequence[int]
    folded: Mapping[str, Sequence[int]] | None = None


class Journal:
    """The file of one structure's states.

    The fold's memory is the file's once that is there.
    """

    def __init__(
        self,
        place: FilePlace,
        structure: Structure,
        update: ExportedUpdate,
        fold: HostFold,
        held: Held,
    ) -> None:
        self.place, self._structure, self._fold = place, structure, fold
        self._digest, self._held = update.digest, held
        # A leaf that the update passes through is received, and the copy has it too.
        self._put_after = sorted(i for i in update.stored if fold.holds(i))
        self._places: dict[int, list[tuple[Box, int]]] = {}
        own_bytes = 0
        for i, leaf in enumerate(structure.leaves):
            if leaf.nbytes and (i in update.stored or not fold.holds(i)):
                self._places[i] = []
                for box in held.boxes(i):
                    self._places[i].append((box, own_bytes))
                    nbytes = box.size * leaf.itemsize_bytes
                    own_bytes += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._own_bytes = own_bytes
        self._told_held = held.to_json() if place.run else None
        numbers_bytes = 2 * sum(x.nbytes for x in fold.scalars.values())
        boxes_bytes = len(json.dumps(self._told_held))
        header_bytes = 1024 + numbers_bytes + _LEAF_HEADER_BYTES * len(structure.leaves)
        if place.run:
            header_bytes += boxes_bytes + 2 * _LEAF_HEADER_BYTES * len(structure.leaves)
        # The copy may begin at any multiple of its alignment.
        data_bytes = 2 * own_bytes + fold.size_bytes(twice=True) + _ALIGNMENT_BYTES
        description_bytes = _DESCRIPTION_BYTES + boxes_bytes
        self.file = ShadowFile(place.path, description_bytes, header_bytes, data_bytes)
        self._number = 0

    @property
    def received(self) -> Collection[int]:
        """The leaves that are stored as each step brings them."""
        return self._places.keys()

    def create(self) -> None:
        """Make the file; it holds no step.

        Raises:
            ShadowFileError: it cannot be had.
        """
        self.file.create(self._description())

    def open(self) -> None:
        """Take the file that another process has left.

        Raises:
            ShadowFileError: there is none, or it is of something else.
        """
        found, own = self.file.open(), json.loads(json.dumps(self._description()))
        for name, value in own.items():
            if found.get(name) != value:
                self.file.close()
                raise ShadowFileError(
                    f"{self.file.path}: {_TOLD.get(name, name)} ({name}: expected {value}, found "
                    f"{found.get(name)})"
                )
        if not self.file.is_open:
            self.file.close()
            raise ShadowFileError(
                f"{self.file.path}: expected {self.file.size_bytes} bytes, found "
                f"{self.file.found_bytes}; "
                "it was cut off, or bytes were added"
            )

    def _description(self) -> Mapping[str, Any]:
        leaves = [
            (each.path, each.shape, each.dtype, each.key_type) for each in self._structure.leaves
        ]
        return {
            "format": _FORMAT,
            "boot": boot(),
            **{name: getattr(self.place, name) for name in _PLACE},
            "held": self._told_held,
            "leaves": _digest_of(repr(leaves)),
            "update": self._digest,
            "settings": update_program.environment(),
            "layout": _digest_of(f"{self._fold.layout}\n{self._places}"),
        }

    @property
    def memory(self) -> np.ndarray:
        """Memory for the copy."""
        return self.file.data[2 * self._own_bytes :]

    def lift(self) -> None:
        """Say that there is no step, before the copy is overwritten as it lies."""
        self._write({"step": None})

    def receive(self, taken: Collection[int], blocks: Mapping[int, Blocks]) -> None:
        """Store what a step brings beside that of the step before."""
        before = {i: self.own(i) for i in self._places}
        brought = [i for i in taken if blocks.get(i)]
        self._fold.turn(frozenset(taken).difference(brought))
        for i in brought:
            self._fold.put(i, blocks[i])
        for i, old in before.items():
            brings = blocks.get(i)
            for box, new in self.own(i).items():
                if brings:
                    fill(new, box, brings)
                else:
                    new[...] = old[box]

    def begin(
        self,
        step: int,
        updates: Sequence[int],
        sums: Mapping[int, int],
        passed: Sequence[int] | None = None,
        folded: Mapping[str, Sequence[int]] | None = None,
        bad: Collection[int] = (),
    ) -> None:
        """Say that all is there of a step, but for what its updates compute.

        Args:
            step: its number.
            updates: positions of the recorders whose update is still to be folded.
            sums: fingerprints, or this process's contributions to them.
            passed: the fingerprints, once all processes have stored the step.
            folded: fingerprints of the boxes, once the step is folded.
            bad: owners of the copies that were found bad.
        """
        numbers = {str(i): x.tobytes().hex() for i, x in self._fold.scalars.items()}
        header: dict[str, Any] = {
            "step": step,
            "updates": [*updates],
            "place": self._fold.place,
            "numbers": numbers,
            "sums": [sums.get(i, 0) for i in range(len(self._structure.leaves))],
        }
        if self.place.run:
            header |= {"passed": passed, "folded": folded, "bad": [*bad]}
        self._write(header)

    def note(self, count: int) -> None:
        """Say how many chunks of the update are complete."""
        self.file.word = self._number << _DONE_BITS | count

    def _write(self, header: Mapping[str, Any]) -> None:
        self._number += 1
        self.file.write_header(self._number, header)
        self.note(0)

    def offer(self) -> Offer:
        """Boxes in the file, and the steps that it may be brought to.

        Raises:
            ShadowFileError: the file holds no whole step.
        """
        steps = dict[int, OfferedStep]()
        for header in self._headers():
            passed = header.get("passed")
            sums = None if passed is None else tuple(passed)
            own, bad = tuple(header["sums"]), tuple(header.get("bad", ()))
            if not self.place.run:
                sums = own
            steps.setdefault(header["step"], OfferedStep(header["step"], sums, own, bad))
        place = self.place
        return Offer(place.run, place.process, place.count, self._held, tuple(steps.values()))

    def _headers(self) -> list[Mapping[str, Any]]:
        """The headers of the steps that the file may be brought to, the newest first.

        Raises:
            ShadowFileError: there is none.
        """
        path, headers = self.file.path, self.file.headers()
        if not headers:
            raise ShadowFileError(f"{path}: no step was complete when its process ended")
        header, (number, done) = headers[0], divmod(self.file.word, 1 << _DONE_BITS)
        self._number = header["number"]
        if header["step"] is None:
            raise ShadowFileError(f"{path}: its process ended while it took a whole state")
        if number not in (self._number, self._number - 1):
            raise ShadowFileError(f"{path}: its last header is damaged")
        has_begun = number == self._number and done > 0
        if has_begun or not self.place.run:
            return [header]
        older = (each for each in headers[1:] if each["step"] is not None)
        return [header, *(each for each in older if not each["updates"])]

    def resume(self, step: int | None = None) -> Found:
        """Go on where the process that left the file was stopped; the copy has the memory.

        Args:
            step: the step to bring it to, of those that it offers; None for the newest.

        Raises:
            ShadowFileError: the file holds no whole step, or not that one.
        """
        every = self._headers()
        header = next((x for x in every if step in (None, x["step"])), None)
        if header is None:
            raise ShadowFileError(f"{self.file.path}: expected step {step}, found another")
        number, done = divmod(self.file.word, 1 << _DONE_BITS)
        fold = self._fold
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
        return Found(header["step"], self._blocks(), header["sums"], header.get("folded"))

    def _blocks(self) -> Mapping[int, Blocks]:
        """All boxes that the file holds for sure."""
        found = {i: self.own(i) for i in self._places}
        for i, leaf in enumerate(self._structure.leaves):
            if leaf.nbytes and i not in found and self._held.boxes(i):
                found[i] = self._fold.blocks(i)
        return found

    def own(self, leaf: int) -> Blocks:
        """A leaf as the step brought it."""
        dtype, found = jax.numpy.dtype(self._structure.leaves[leaf].dtype), dict[Box, np.ndarray]()
        for box, offset in self._places[leaf]:
            start = offset + self._fold.place[1] * self._own_bytes
            memory = self.file.data[start : start + box.size * dtype.itemsize]
            found[box] = memory.view(dtype).reshape(box.shape)
        return found


_PLACE = ("root", "item", "run", "process", "count")
"""Attributes of a place that its file tells."""
_TOLD = {
    "format": "another version of this library wrote it",
    "boot": "the machine was started anew since",
    "root": "it belongs to another root",
    "item": "it belongs to another item",
    "leaves": "its state has other leaves",
    "run": "another run wrote it",
    "process": "another process wrote it",
    "count": "a run of another number of processes wrote it",
    "held": "it has other boxes",
    "update": "its update is another one",
    "settings": "its process had other settings of arithmetic",
    "layout": "its elements lie in another order",
}


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def boot() -> str:
    """A name of this start of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
