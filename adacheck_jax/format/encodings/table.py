"""The encodings of a block of elements in a pack: one table, by the letters that manifests have.

To add one: a module of this room (a model is :mod:`~adacheck_jax.format.encodings.codes`), its
entry in :data:`ENCODINGS`, the rule of :mod:`~adacheck_jax.format.encodings.choice`, and its letter
in :class:`~adacheck_jax.format.manifest.Encoding`, with a new ``FORMAT_VERSION`` and its upgrade
(:mod:`~adacheck_jax.format.manifest_json`): an older release does not know it. Layout, writing and
reading ask the table. Tests that know letters: ``_pack`` in ``tests/restore/test_patches.py``, and
``tests/fuzz/manifest.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adacheck_jax.format.encodings import codes, planes
from adacheck_jax.format.manifest import Encoding


@dataclass(frozen=True, slots=True)
class Parts:
    """Bytes of an encoded block in the two arrays of a pack, of which one is compressed.

    Attributes:
        raw_bytes, compressed_bytes: number of bytes in either array.
        planes: number of planes of bytes, the lowest first; 0 if the bytes are not split.
        compressed: number of planes, the highest ones, in the compressed array.
    """

    raw_bytes: int
    compressed_bytes: int
    planes: int = 0
    compressed: int = 0


class BlockEncoding(ABC):
    """One way to store the elements of a block.

    Attributes:
        needs_old: True if the parent step's elements are needed, to encode and to decode.
        is_viewed: True if the stored bytes are the elements, which a reader need not copy.
        has_own_size: True if its length depends on the elements: the manifest has it, and a reader
            of some rows needs all of it. Then ``choice`` makes a :class:`~codes.Code`, which the
            writer copies without :meth:`encode`, and no old elements can be needed.
    """

    needs_old = False
    is_viewed = False
    has_own_size = False

    @abstractmethod
    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        """Bytes that a block takes.

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


class _Raw(BlockEncoding):
    """Elements as they are."""

    is_viewed = True

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        return Parts(whole_bytes, 0)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        np.copyto(low.view(new.dtype).reshape(new.shape), new)

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        block[...] = low.view(block.dtype).reshape(block.shape)


@dataclass(frozen=True, slots=True)
class _Planes(BlockEncoding):
    """Planes of bytes (:mod:`~adacheck_jax.format.encodings.planes`).

    Attributes:
        letter: its letter.
        compresses_all: True if all planes are compressed, False for the highest alone.
    """

    letter: Encoding
    compresses_all: bool = True
    needs_old: bool = False

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        compressed = word_bytes if self.compresses_all else 1
        compressed_bytes = whole_bytes // word_bytes * compressed
        return Parts(whole_bytes - compressed_bytes, compressed_bytes, word_bytes, compressed)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        words = new.nbytes // planes.word_bytes(new.dtype)
        rows = (each.reshape(each.size // words if words else 0, words) for each in (low, high))
        planes.encode(self.letter, new, old, *rows)

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        planes.decode(self.letter, block, low, high)


class _Coded(BlockEncoding):
    """A code of few distinct elements (:mod:`~adacheck_jax.format.encodings.codes`)."""

    has_own_size = True

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        if size is None or not 0 < sum(size) <= whole_bytes + codes.MAX_HEAD_BYTES:
            raise ValueError(f"a code of {size} bytes for a box of {whole_bytes}")
        return Parts(*size)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        codes.encode(new).write(low, high)

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        codes.decode(np.concatenate([low.reshape(-1), high.reshape(-1)]), block)


ENCODINGS: Mapping[Encoding, BlockEncoding] = {
    Encoding.RAW: _Raw(),
    Encoding.EXPONENTS: _Planes(Encoding.EXPONENTS, compresses_all=False),
    Encoding.PLANES: _Planes(Encoding.PLANES),
    Encoding.CODED: _Coded(),
    Encoding.XOR: _Planes(Encoding.XOR, needs_old=True),
    Encoding.SUBTRACT: _Planes(Encoding.SUBTRACT, needs_old=True),
}
"""All encodings of what is stored; of ``SAME`` nothing is."""
