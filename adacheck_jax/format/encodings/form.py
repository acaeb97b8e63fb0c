"""The form of a block of elements in a pack: letters of encodings, and the interface of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from adacheck_jax.format.boxes import Blocks, Box

if TYPE_CHECKING:  # ``adacheck ls`` starts without numpy
    import numpy as np

MAX_HEAD_BYTES = 64
"""Bytes that a code may take beyond those of its block."""


class Encoding(StrEnum):
    """Letter in a manifest: the encoding of one process's boxes of one leaf in a delta.

    ``docs/reference/format.md`` tells of each; of ``SAME`` nothing is stored.
    """

    RAW = "r"
    EXPONENTS = "e"
    PLANES = "p"
    CODED = "c"
    XOR = "x"
    SUBTRACT = "s"
    SAME = "="


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of an encoded block in the two arrays of a pack, of which one is compressed.

    Attributes:
        raw_bytes, compressed_bytes: number of bytes in either array.
        planes: number of planes of bytes, the lowest first; 1 if the bytes are not split.
        compressed: number of planes, the highest ones, in the compressed array.
    """

    raw_bytes: int
    compressed_bytes: int
    planes: int = 1
    compressed: int = 0


@dataclass(frozen=True, slots=True)
class Code:
    """A block in an encoding that has its own size: the bytes of both parts, one after the other.

    Attributes:
        body: bytes that no compressor makes shorter.
        rest: bytes that one may make shorter: exponents, positions in a table.
    """

    body: np.ndarray
    rest: np.ndarray

    def sizes(self, *, is_split: bool) -> tuple[int, int]:
        """Bytes for a raw and for a compressed array: all of them raw, or split by part."""
        body, rest = self.body.size, self.rest.size
        return (body, rest) if is_split else (body + rest, 0)

    def write(self, raw: np.ndarray, compressed: np.ndarray) -> None:
        """Writes it into memory of these sizes."""
        raw[: self.body.size] = self.body
        (compressed if compressed.size else raw[self.body.size :])[...] = self.rest


@dataclass(frozen=True, slots=True)
class Candidate:
    """One process's boxes of a leaf, for which an encoding is chosen.

    Attributes:
        blocks: the elements of each box.
        previous: elements of the parent step, for a difference, of the boxes in which a bit
            changed; None for none.
        last: encoding of an earlier delta that :attr:`BlockEncoding.lasts`, or None.
        compresses: True if a part of the bytes is compressed.
    """

    blocks: Blocks
    previous: Blocks | None
    last: Encoding | None
    compresses: bool


Choice: TypeAlias = "tuple[Encoding, Mapping[Box, Code]]"
"""An encoding, and each box's code if it has its own size."""


class BlockEncoding(ABC):
    """One way to store the elements of a block.

    Attributes:
        letter: its letter.
        needs_old: True if the parent step's elements are needed, to encode and to decode.
        is_viewed: True if the stored bytes are the elements, which a reader need not copy.
        lasts: True if the next delta of a leaf takes it over without a look.
        has_own_size: True for a :class:`OwnSize`.
    """

    letter: Encoding
    needs_old = False
    is_viewed = False
    lasts = False
    has_own_size = False

    @abstractmethod
    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        """Bytes that a block takes: by the numbers of a manifest, which are checked.

        Args:
            whole_bytes: bytes of its elements.
            word_bytes: bytes of the words that elements consist of.
            size: bytes in either array by the manifest, of an encoding that has its own size.

        Raises:
            ValueError: no such block has this size.
        """

    @abstractmethod
    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        """Writes a block's bytes.

        Args:
            new: the elements.
            old: those of the parent step, where they are needed.
            low: memory in the raw array, uint8, of ``raw_bytes``.
            high: memory in the compressed array, of ``compressed_bytes``.
        """

    @abstractmethod
    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        """Turns the parent's elements into those of this step, in place.

        Args:
            block: contiguous, writable elements; the old ones are in it, where they are needed.
            low: bytes from the raw array, one plane a row.
            high: bytes from the compressed array.

        Raises:
            ValueError: the bytes stand for no such block.
        """


class OwnSize(BlockEncoding):
    """An encoding whose length depends on the elements: it is read whole, and needs no old ones."""

    has_own_size = True

    @abstractmethod
    def code(self, block: np.ndarray) -> Code:
        """The code of a block."""

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        if size is None or not 0 < sum(size) <= whole_bytes + MAX_HEAD_BYTES:
            raise ValueError(f"a code of {size} bytes for a box of {whole_bytes}")
        return Parts(*size)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        self.code(new).write(low, high)
