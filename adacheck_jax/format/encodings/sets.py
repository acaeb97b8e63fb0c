"""Sets of positions in few bits: an Elias-Fano code, or a bitmap where that is shorter.

A code is the number of low bits of each position (a byte), the number of positions (8 bytes), these
low bits as planes, and a bit string in which the n-th one bit stands at the n-th position's high
bits plus n (Fano, 1971). It takes about half a bit a position more than the entropy. That positions
ascend inside their range is seen by one comparison, and every step is an operation of numpy on a
whole array.

Codes come from files: :func:`decode` refuses any that :func:`encode` cannot have made in such a way
that a read could go past its memory.
"""

from __future__ import annotations

import struct

import numpy as np

_HEAD = struct.Struct("<BQ")
_BITMAP = 255
"""In place of a number of low bits: the positions are a bitmap."""
_MAX_SHIFT = 62


class Reader:
    """Takes the bytes of a code one after another.

    Args:
        data: the bytes, uint8.
    """

    def __init__(self, data: np.ndarray) -> None:
        self._data, self._position = data, 0

    def take(self, count: int) -> np.ndarray:
        """The next bytes; raises ValueError if they are not there."""
        if count > self._data.size - self._position:
            raise ValueError(f"a code of {self._data.size} bytes ends in the middle")
        self._position += count
        return self._data[self._position - count : self._position]

    def bits(self, count: int) -> np.ndarray:
        """The next bits, as :func:`packed` makes bytes of them."""
        data = self.take(-(-count // 8))
        return np.unpackbits(data, count=count, bitorder="little").view(np.bool_)

    def end(self) -> None:
        """Raises ValueError if there are more bytes."""
        if self._position != self._data.size:
            raise ValueError(f"{self._data.size - self._position} bytes follow the code")


def packed(bits: np.ndarray) -> np.ndarray:
    """Bytes of bits, the lowest of each byte first."""
    return np.packbits(bits, bitorder="little")


def encode(mask: np.ndarray) -> np.ndarray:
    """Code of a set, uint8."""
    count = int(np.count_nonzero(mask))
    shift = _shift_of(count, mask.size)
    head = np.frombuffer(_HEAD.pack(shift, count), np.uint8)
    if shift == _BITMAP:
        return np.concatenate([head, packed(mask)])
    places = np.flatnonzero(mask)
    high = np.zeros(_high_bits(count, mask.size, shift), np.bool_)
    high[(places >> shift) + np.arange(count)] = True
    low = [packed(places >> bit & 1) for bit in range(shift)]
    return np.concatenate([head, *low, packed(high)])


def decode(reader: Reader, size: int) -> np.ndarray:
    """The positions in a set, ascending int64.

    Raises:
        ValueError: the bytes are no code of such a set.
    """
    shift, count = _HEAD.unpack(reader.take(_HEAD.size).tobytes())
    if count > size or (shift > _MAX_SHIFT and shift != _BITMAP):
        raise ValueError(f"{count} of {size} words with {shift} low bits")
    if shift == _BITMAP:
        places = np.flatnonzero(reader.bits(size))
        if places.size != count:
            raise ValueError(f"a bitmap of other than {count} words")
        return places
    low = [reader.bits(count) for _ in range(shift)]
    ones = np.flatnonzero(reader.bits(_high_bits(count, size, shift)))
    if ones.size != count:
        raise ValueError(f"{ones.size} places of {count} words")
    places = ones - np.arange(count) << shift
    for bit, plane in enumerate(low):
        places |= plane.astype(np.int64) << bit
    if count and (places[-1] >= size or (np.diff(places) <= 0).any()):
        raise ValueError("places that do not ascend, or lie outside the block")
    return places


def _shift_of(count: int, size: int) -> int:
    """Number of low bits that makes an Elias-Fano code shortest, or a bitmap if that is shorter."""
    bits, shift = min(
        (count * shift + _high_bits(count, size, shift), shift)
        for shift in range(max(1, size.bit_length()))
    )
    return shift if bits < size else _BITMAP


def _high_bits(count: int, size: int, shift: int) -> int:
    return count + (max(size, 1) - 1 >> shift) + 1
