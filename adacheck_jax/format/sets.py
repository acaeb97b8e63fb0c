"""Sets of positions in few bits: Rice codes of gaps, block by block.

Of elements that change independently with probability p a set of positions holds H(p) bits an
element; Rice codes of its gaps take one to three per cent more, where p is that of the block. Each
block of positions gets the parameter that fits its count, so that stretches that change much and
others that do not are coded apart. A set of more than half of all positions is coded by its
complement.

Every step is an operation of numpy on a whole array: the ones of the unary parts lie in one string
of bits, and the low bits in one string for each significance.

References: R. F. Rice, "Some practical universal noiseless coding techniques", 1979; A. Kiely,
"Selecting the Golomb parameter in Rice coding", 2004 (the choice of the parameter).
"""

from __future__ import annotations

import zlib

import numpy as np

BLOCK = 1 << 14
"""Positions of a block."""
_MOST_BITS = 15
"""Largest parameter: no gap in a block has more bits."""
_GOLDEN = 31536
"""The natural logarithm of the golden ratio, in units of 2**-16."""
_LENGTHS = np.dtype("<u4")


class Reader:
    """Bytes taken from the front of a code.

    Args:
        data: the code.
    """

    def __init__(self, data: bytes | memoryview) -> None:
        self._rest = memoryview(data)

    def take(self, count: int) -> memoryview:
        """The next bytes.

        Raises:
            ValueError: there are fewer.
        """
        if count > len(self._rest):
            raise ValueError(f"expected {count} bytes more, found {len(self._rest)}")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def bits(self, count: int) -> np.ndarray:
        """The next bits, one a byte."""
        return np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8), count=count)

    def finish(self) -> None:
        """Checks that nothing is left.

        Raises:
            ValueError: something is.
        """
        if len(self._rest):
            raise ValueError(f"expected the end, found {len(self._rest)} bytes more")


def encode(positions: np.ndarray, size: int) -> bytes:
    """Code of a set of positions.

    Args:
        positions: ascending int64, each from 0 to below ``size``.
        size: number of positions that there are, at most 2**31.
    """
    is_complement = 2 * positions.size > size
    if is_complement:
        mask = np.ones(size, np.bool_)
        mask[positions] = False
        positions = np.flatnonzero(mask)
    blocks = positions // BLOCK
    counts = np.bincount(blocks, minlength=-(-size // BLOCK))
    gaps = np.diff(positions, prepend=-1) - 1
    firsts = np.cumsum(counts) - counts
    firsts = firsts[counts > 0]
    gaps[firsts] = positions[firsts] % BLOCK
    bits = np.repeat(_parameters(counts, size), counts)
    ends = np.cumsum((gaps >> bits) + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    unary[ends - 1] = 1
    packed = np.packbits(unary).tobytes()
    table = zlib.compress(counts.astype("<u2").tobytes(), 9)
    lengths = np.array([len(table), unary.size], _LENGTHS).tobytes()
    return b"".join([bytes([is_complement]), lengths, table, packed, encode_low_bits(gaps, bits)])


def decode(reader: Reader, size: int) -> np.ndarray:
    """The positions that :func:`encode` took.

    Args:
        reader: the code, and what follows it.
        size: number of positions that there are.

    Raises:
        ValueError: the bytes are no code of such a set.
    """
    is_complement = reader.take(1)[0]
    table_bytes, unary_bits = np.frombuffer(reader.take(8), _LENGTHS).tolist()
    counts = _counts(reader.take(table_bytes), size)
    bits = np.repeat(_parameters(counts, size), counts)
    ends = np.flatnonzero(reader.bits(unary_bits))
    if ends.size != bits.size or (ends.size and ends[-1] != unary_bits - 1):
        raise ValueError(f"expected {bits.size} positions, found {ends.size}")
    gaps = (np.diff(ends, prepend=-1) - 1) << bits
    gaps |= decode_low_bits(reader, bits)
    # Within a block positions are sums of gaps; sums of all gaps, less those of earlier blocks.
    sums = np.cumsum(gaps + 1)
    firsts = np.cumsum(counts) - counts
    before = np.concatenate([[0], sums])[firsts]
    starts = np.arange(counts.size) * BLOCK - 1 - before
    positions = sums + np.repeat(starts, counts)
    if positions.size:
        filled = np.flatnonzero(counts)
        last = positions[np.cumsum(counts)[filled] - 1]
        if (last >= np.minimum((filled + 1) * BLOCK, size)).any():
            raise ValueError("a position lies outside its block")
    if not is_complement:
        return positions
    mask = np.ones(size, np.bool_)
    mask[positions] = False
    return np.flatnonzero(mask)


def _counts(table: memoryview, size: int) -> np.ndarray:
    """Positions in each block."""
    length = 2 * -(-size // BLOCK)
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(table, length + 1)
    except zlib.error as error:
        raise ValueError(f"the counts cannot be read: {error}") from error
    if len(data) != length or inflated.unconsumed_tail or inflated.unused_data:
        raise ValueError(f"expected {length} bytes of counts, found others")
    counts = np.frombuffer(data, "<u2").astype(np.int64)
    if counts.size and (counts > _sizes(counts.size, size)).any():
        raise ValueError("more positions in a block than there are")
    return counts


def _sizes(count: int, size: int) -> np.ndarray:
    """Positions that there are in each block."""
    sizes = np.full(count, BLOCK, np.int64)
    if count:
        sizes[-1] = size - (count - 1) * BLOCK
    return sizes


def _parameters(counts: np.ndarray, size: int) -> np.ndarray:
    """Rice parameter of each block, a function of its count alone."""
    sizes, filled = _sizes(counts.size, size), np.maximum(counts, 1)
    # ln(golden) / -ln(1 - p), of which the last is about 1 / p - 1 / 2.
    mean = (_GOLDEN * (2 * sizes - filled)) // (2 * filled << 16)
    parameters = np.zeros(counts.size, np.int64)
    for bit in range(_MOST_BITS):
        parameters += mean >> bit > 0
    return parameters


def encode_low_bits(values: np.ndarray, bits: np.ndarray) -> bytes:
    """So many low bits of each value, the lowest of all values first.

    Args:
        values: integers.
        bits: number of bits of each.
    """
    planes = []
    for bit in range(int(bits.max(initial=0))):
        taken = values[bits > bit] if bits.min(initial=64) <= bit else values
        planes.append(((taken >> taken.dtype.type(bit)) & taken.dtype.type(1)).astype(np.uint8))
    return np.packbits(np.concatenate(planes)).tobytes() if planes else b""


def decode_low_bits(reader: Reader, bits: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """The low bits that :func:`encode_low_bits` took.

    Args:
        reader: the code, and what follows it.
        bits: number of bits of each value.
        dtype: type of the values.
    """
    stored, values, at = reader.bits(int(bits.sum())), np.zeros(bits.size, dtype), 0
    for bit in range(int(bits.max(initial=0))):
        chosen = bits > bit
        stop = at + int(np.count_nonzero(chosen))
        values[chosen] |= stored[at:stop].astype(dtype) << dtype(bit)
        at = stop
    return values
