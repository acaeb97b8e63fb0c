"""A file in which the steps of one structure's states lie, as it tells of itself and of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.byte_loops import fingerprints_of
from adacheck_jax.memory.agreement import Offer, OfferedStep
from adacheck_jax.memory.files.shadow_file import (
    SUFFIX,
    CutOffError,
    ShadowFile,
    ShadowFileError,
    peek,
    remove_unused,
)
from adacheck_jax.memory.holdings import Held, LeafBox, OfBoxes
from adacheck_jax.memory.peers import Peers
from adacheck_jax.state.exported_update import ExportedUpdate
from adacheck_jax.state.snapshot import Structure
from adacheck_jax.update import program as update_program

_FORMAT = 4
_DESCRIPTION_BYTES = 1 << 14
LEAF_HEADER_BYTES = 128
"""Bytes of a leaf in a header, at most: a fingerprint, and a number of 16 bytes in hexadecimal."""
ALIGNMENT_BYTES = 64

Places = dict[int, list[tuple[Box, int]]]
"""Boxes of each leaf, by leaf index, and the byte of a file's memory at which each begins."""


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

    @property
    def found_bytes(self) -> tuple[int, int]:
        """Length of the file that is there, and the memory that it takes; 0 if there is none."""
        try:
            found = self.path.stat()
        except OSError:
            return 0, 0
        return found.st_size, found.st_blocks * 512

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
        kind: kind of its contents: that of a :class:`StepFile`.
    """

    place: FilePlace
    held: Held | None
    kind: str


def files_in(directory: str) -> list[FoundFile]:
    """The files in a directory, of all runs and processes."""
    found = list[FoundFile]()
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        if (header := peek(path)) and header.get("format") == _FORMAT:
            place = FilePlace(directory, *(header[name] for name in _PLACE))
            if place.path == path:
                held = None if header["held"] is None else Held.of_json(header["held"])
                found.append(FoundFile(place, held, header.get("kind", "")))
    return found


def kind_at(path: Path) -> str:
    """The kind of a file; empty where it tells none."""
    return (peek(path) or {}).get("kind", "")


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
        changed: boxes whose bits have changed since they were stored or folded, as far as their
            fingerprints are known.
        box_sums: fingerprints of the boxes as they are; none where all that changed is known.
        records: the steps between the state in the blocks and this one, to be replayed.
    """

    step: int
    blocks: Mapping[int, Blocks]
    sums: Sequence[int]
    changed: AbstractSet[LeafBox] = frozenset()
    box_sums: OfBoxes = field(default_factory=dict)
    records: Sequence[Recorded] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as it changes the one before it.

    Attributes:
        updates: positions of the recorders whose update is replayed.
        unreplayed: leaves that the update computes and that are stored nevertheless.
        stored: leaves that are stored.
        blocks: boxes of each of them: views of the file.
    """

    updates: tuple[int, ...]
    unreplayed: tuple[int, ...]
    stored: tuple[int, ...]
    blocks: Mapping[int, Blocks]

    @property
    def head(self) -> list[list[int]]:
        """All but the blocks, as JSON."""
        return [[*self.updates], [*self.unreplayed], [*self.stored]]

    @classmethod
    def of(cls, head: Sequence[Sequence[int]], blocks: Mapping[int, Blocks]) -> Recorded:
        """The step of a :attr:`head`."""
        updates, unreplayed, stored = map(tuple, head)
        return cls(updates, unreplayed, stored, blocks)


class StepChange(Protocol):
    """A step as it changes the state before it, once its update counters are known."""

    @property
    def updates(self) -> tuple[int, ...]:
        """Positions of the recorders whose update is replayed."""
        ...

    @property
    def stored(self) -> tuple[int, ...]:
        """Leaves that are stored."""
        ...

    @property
    def unreplayed(self) -> frozenset[int]:
        """Leaves that the update computes and that are stored nevertheless."""
        ...

    @property
    def unchanged(self) -> tuple[int, ...]:
        """Leaves that must have the bits of the state before."""
        ...


class StepFile:
    """A file of one structure's states, whose headers tell which step it holds.

    Attributes:
        place: its place.
        held: the boxes in it.
        file: the file itself.
    """

    kind = ""
    file: ShadowFile
    _reserved_bytes: int | None = None
    """Bytes of the data that have memory once it is made; None for all of them."""

    def __init__(
        self, place: FilePlace, structure: Structure, update: ExportedUpdate, held: Held
    ) -> None:
        self.place, self._structure, self.held = place, structure, held
        self._state_header, self._number = state_header(structure, update), 0
        self._held_json = held.to_json() if place.run else None

    @property
    def _layout(self) -> str:
        """A text that tells where each element lies."""
        raise NotImplementedError

    @property
    def _description_bytes(self) -> int:
        return _DESCRIPTION_BYTES + len(json.dumps(self._held_json))

    def create(self) -> None:
        """Make the file; it holds no step.

        Raises:
            ShadowFileError: it cannot be had.
        """
        header = {**self._description(), "bytes": self.file.size_bytes}
        self.file.create(header, self._reserved_bytes)

    def open(self) -> None:
        """Take the file that another process has left.

        Raises:
            ShadowFileError: there is none, or it is of something else.
        """
        found, (found_bytes, _) = self.file.open(), self.place.found_bytes
        size_bytes = found.get("bytes", found_bytes)
        try:
            if size_bytes == found_bytes:
                expect_alike(self.file.path, found, self._description())
                size_bytes = self.file.size_bytes
            if size_bytes != found_bytes:
                raise CutOffError(
                    f"{self.file.path}: expected {size_bytes} bytes, found {found_bytes}; it was "
                    "cut off, or bytes were added"
                )
        except ShadowFileError:
            self.file.close()
            raise

    def _description(self) -> Mapping[str, Any]:
        return {
            "format": _FORMAT,
            "kind": self.kind,
            "boot": boot(),
            **{name: getattr(self.place, name) for name in _PLACE},
            "held": self._held_json,
            **self._state_header,
            "settings": update_program.environment(),
            "layout": _digest_of(self._layout),
        }

    def lift(self) -> None:
        """Say that there is no step, before what lies there is overwritten."""
        self._write({"step": None})

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
        leaves = range(len(self._structure.leaves))
        header = {
            "step": step,
            "sums": [sums.get(i, 0) for i in leaves],
            **self._own_header(updates),
        }
        if self.place.run:
            header |= {"passed": passed, "folded": folded, "bad": [*bad]}
        self._write(header)

    def _own_header(self, updates: Sequence[int]) -> Mapping[str, Any]:
        """The part of a step's header that its kind of file alone has."""
        raise NotImplementedError

    def _lay_out(self, leaves: Iterable[int], start: int) -> tuple[Places, int]:
        """Places for the boxes of some leaves, one behind another, and their end."""
        places: Places = {}
        for i in leaves:
            places[i] = []
            for box in self.held.boxes(i):
                places[i].append((box, start))
                start += aligned(box.size * self._structure.leaves[i].itemsize_bytes)
        return places, start

    def _view(self, leaf: int, placed: Sequence[tuple[Box, int]], offset: int = 0) -> Blocks:
        """The boxes of a leaf that lie at some places, behind an offset: views of the file."""
        dtype, found = jax.numpy.dtype(self._structure.leaves[leaf].dtype), dict[Box, np.ndarray]()
        for box, start in placed:
            memory = self.file.data[offset + start : offset + start + box.size * dtype.itemsize]
            found[box] = memory.view(dtype).reshape(box.shape)
        return found

    def _write(self, header: Mapping[str, Any]) -> None:
        self._number += 1
        self.file.write_header(self._number, header)

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
        return Offer(place.run, place.process, place.count, self.held, tuple(steps.values()))

    def _headers(self) -> list[Mapping[str, Any]]:
        """The headers of the steps that the file may be brought to, the newest first.

        Raises:
            ShadowFileError: there is none.
        """
        path, headers = self.file.path, self.file.headers()
        if not headers:
            raise ShadowFileError(f"{path}: no step was complete when its process ended")
        self._number = headers[0]["number"]
        if headers[0]["step"] is None:
            raise ShadowFileError(f"{path}: its process ended while it took a whole state")
        return [each for each in headers if each["step"] is not None]

    def _header_of(self, step: int | None) -> Mapping[str, Any]:
        """The header of a step, None for the newest one.

        Raises:
            ShadowFileError: the file holds no whole step, or not that one.
        """
        header = next((x for x in self._headers() if step in (None, x["step"])), None)
        if header is None:
            raise ShadowFileError(f"{self.file.path}: expected step {step}, found another")
        return header

    def ready(self) -> None:
        """Prepare to bring an open file to a step."""

    def resume(self, step: int | None = None) -> Found:
        """Go on where the process that left the file was stopped.

        Args:
            step: the step to bring it to, of those that it offers; None for the newest.

        Raises:
            ShadowFileError: the file holds no whole step, or not that one.
        """
        raise NotImplementedError


def state_header(structure: Structure, update: ExportedUpdate) -> Mapping[str, str]:
    """The part of a description that tells of a state and its update."""
    leaves = [(each.path, each.shape, each.dtype, each.key_type) for each in structure.leaves]
    return {"leaves": _digest_of(repr(leaves)), "update": update.digest}


def expect_alike(path: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ShadowFileError where a file's description has other values than expected."""
    for name, value in json.loads(json.dumps(own)).items():
        if found.get(name) != value:
            raise ShadowFileError(
                f"{path}: {_TOLD.get(name, name)} ({name}: expected {value}, found "
                f"{found.get(name)})"
            )


def sums_of(blocks: Mapping[int, Blocks]) -> OfBoxes:
    """Fingerprints of the boxes of some leaves."""
    every = {(i, box): block for i, own in blocks.items() for box, block in own.items()}
    sums = fingerprints_of((block, box.start) for (_, box), block in every.items())
    return dict(zip(every, sums, strict=True))


def aligned(nbytes: int) -> int:
    """Bytes up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


_PLACE = ("root", "item", "run", "process", "count")
"""Attributes of a place that its file tells."""
_TOLD = {
    "format": "another version of this library wrote it",
    "kind": "what lies in it is of another kind",
    "boot": "the machine was started anew since",
    "root": "it belongs to another root",
    "item": "it belongs to another item",
    "leaves": "its state has other leaves: another model, or another optimizer",
    "run": "another run wrote it",
    "process": "another process wrote it",
    "count": "a run of another number of processes wrote it",
    "held": "it has other boxes",
    "update": "its update is another one: another optimizer, or the same with other numbers",
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
