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
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.proof.shadow_file import (
    SUFFIX,
    ShadowFile,
    ShadowFileError,
    peek,
)
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program
from adacheck_jax.update.elements.host_fold import HostFold

_FORMAT = 1
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
    """

    directory: str
    root: str
    item: str

    @property
    def path(self) -> Path:
        """Path of the file; each process has its own."""
        return Path(self.directory, f"{self.item or 'state'}.{jax.process_index()}{SUFFIX}")


def places_in(directory: str) -> list[FilePlace]:
    """The places of the files of this process in a directory, as the files tell them."""
    paths = sorted(Path(directory).glob(f"*.{jax.process_index()}{SUFFIX}"))
    found = map(peek, paths)
    return [FilePlace(directory, each["root"], each["item"]) for each in found if each]


@dataclass(frozen=True, slots=True)
class Found:
    """A step that a file holds.

    Attributes:
        step: its number.
        arrays: each leaf that has elements, by leaf index: views of the file.
        sums: the fingerprint of each leaf.
    """

    step: int
    arrays: Mapping[int, np.ndarray]
    sums: Sequence[int]


class Journal:
    """The file of one structure's states.

    The fold's memory is the file's once that is there.
    """

    def __init__(
        self, place: FilePlace, structure: Structure, update: ExportedUpdate, fold: HostFold
    ) -> None:
        self._place, self._structure, self._fold = place, structure, fold
        self._digest = update.digest
        # A leaf that the update passes through is received, and the copy has it too.
        self._put_after = sorted(i for i in update.stored if fold.holds(i))
        self._places: dict[int, int] = {}
        own_bytes = 0
        for i, leaf in enumerate(structure.leaves):
            if leaf.nbytes and (i in update.stored or not fold.holds(i)):
                self._places[i] = own_bytes
                own_bytes += -(-leaf.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._own_bytes = own_bytes
        numbers_bytes = 2 * sum(x.nbytes for x in fold.scalars.values())
        header_bytes = 1024 + numbers_bytes + _LEAF_HEADER_BYTES * len(structure.leaves)
        # The copy may begin at any multiple of its alignment.
        data_bytes = 2 * own_bytes + fold.size_bytes(twice=True) + _ALIGNMENT_BYTES
        self.file = ShadowFile(place.path, _DESCRIPTION_BYTES, header_bytes, data_bytes)
        self._number = 0

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
        found, own = self.file.open(), self._description()
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
            "boot": _boot(),
            "root": self._place.root,
            "item": self._place.item,
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
        before = {i: self._own(i) for i in self._places}
        brought = [i for i in taken if blocks.get(i)]
        self._fold.turn(frozenset(taken).difference(brought))
        for i in brought:
            self._fold.put(i, blocks[i])
        for i, old in before.items():
            new = self._own(i)
            if blocks.get(i):
                for box, block in blocks[i].items():
                    new[box.slices] = block
            else:
                new[...] = old

    def begin(self, step: int, updates: Sequence[int], sums: Mapping[int, int]) -> None:
        """Say that all is there of a step, but for what its updates compute."""
        numbers = {str(i): x.tobytes().hex() for i, x in self._fold.scalars.items()}
        self._write(
            {
                "step": step,
                "updates": [*updates],
                "place": self._fold.place,
                "numbers": numbers,
                "sums": [sums.get(i, 0) for i in range(len(self._structure.leaves))],
            }
        )

    def note(self, count: int) -> None:
        """Say how many chunks of the update are complete."""
        self.file.word = self._number << _DONE_BITS | count

    def _write(self, header: Mapping[str, Any]) -> None:
        self._number += 1
        self.file.write_header(self._number, header)
        self.note(0)

    def resume(self) -> Found:
        """Go on where the process that left the file was stopped; the copy has the memory.

        Raises:
            ShadowFileError: the file holds no whole step.
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
            fold.put(i, {Box.full(self._structure.leaves[i].shape): self._own(i)})
        return Found(header["step"], self._arrays(), header["sums"])

    def _arrays(self) -> Mapping[int, np.ndarray]:
        found = {i: self._own(i) for i in self._places}
        for i, leaf in enumerate(self._structure.leaves):
            if leaf.nbytes and i not in found:
                (found[i],) = self._fold.blocks(i).values()
        return found

    def _own(self, leaf: int) -> np.ndarray:
        """A leaf as the step brought it."""
        described = self._structure.leaves[leaf]
        dtype = jax.numpy.dtype(described.dtype)
        start = self._places[leaf] + self._fold.place[1] * self._own_bytes
        size_bytes = math.prod(described.shape) * dtype.itemsize
        memory = self.file.data[start : start + size_bytes]
        return memory.view(dtype).reshape(described.shape)


_TOLD = {
    "format": "another version of this library wrote it",
    "boot": "the machine was started anew since",
    "root": "it belongs to another root",
    "item": "it belongs to another item",
    "leaves": "its state has other leaves",
    "update": "its update is another one",
    "settings": "its process had other settings of arithmetic",
    "layout": "its elements lie in another order",
}


def _digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _boot() -> str:
    """A name of this start of the machine; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
