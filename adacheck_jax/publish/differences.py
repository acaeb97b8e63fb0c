"""Codes of the elements that changed: the set of their positions, and the steps of their bits.

The bits of an element are a word; its step is the signed difference modulo the word's size.
Floating-point numbers that move by an ulp or two have steps of 1 or 2, small numbers close to zero
larger ones. Of each step the sign is a bit; the number of bits of its magnitude is coded as nested
sets (:mod:`~adacheck_jax.format.encodings.sets`): those of more than one bit, among these those of
more than two, and so on; the bits below the highest follow as they are.
"""

from __future__ import annotations

import numpy as np

from adacheck_jax.format.encodings import sets
from adacheck_jax.format.encodings.sets import Reader

SEGMENT = 1 << 24
"""Words that are coded together at most."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of a word."""


def encode(positions: np.ndarray, steps: np.ndarray, size: int) -> bytes:
    """Code of the changed words of a segment.

    Args:
        positions: ascending, in the segment.
        steps: difference of each word from before, none of them zero; unsigned, as wide as words.
        size: number of words in the segment.
    """
    signed = steps.view(f"i{steps.itemsize}")
    magnitudes = np.abs(signed).view(steps.dtype)  # of the lowest number itself, as it should be
    bits = _bits(magnitudes) - 1
    changed = np.zeros(size, np.bool_)
    changed[positions] = True
    parts = [*_encode_set(changed), sets.packed(signed < 0)]
    wide, depth = bits, 0
    while wide.size:
        depth += 1
        chosen = wide >= depth
        parts += _encode_set(chosen)
        wide = wide[chosen]
    parts += _encode_low_bits(magnitudes, bits)
    return b"".join(each.tobytes() for each in parts)


def decode(data: bytes | memoryview, size: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and steps that :func:`encode` took.

    Raises:
        ValueError: the bytes are no code of such words.
    """
    reader = Reader(np.frombuffer(data, np.uint8))
    positions = _decode_set(reader, size)
    is_negative = reader.bits(positions.size)
    bits = np.zeros(positions.size, np.int64)
    chosen, depth = np.arange(positions.size), 0
    while chosen.size:
        depth += 1
        chosen = chosen[_decode_set(reader, chosen.size)]
        if chosen.size and depth >= 8 * width:
            raise ValueError(f"expected steps of {8 * width} bits, found more")
        bits[chosen] = depth
    word = np.dtype(f"u{width}").type
    magnitudes = _decode_low_bits(reader, bits, word)
    magnitudes |= word(1) << bits.astype(word)
    reader.end()
    return positions, np.where(is_negative, word(0) - magnitudes, magnitudes)


def _encode_set(mask: np.ndarray) -> list[np.ndarray]:
    """Code of a set: of its complement, if that has fewer positions."""
    is_complement = 2 * np.count_nonzero(mask) > mask.size
    return [np.array([is_complement], np.uint8), sets.encode(~mask if is_complement else mask)]


def _decode_set(reader: Reader, size: int) -> np.ndarray:
    is_complement = reader.take(1)[0]
    places = sets.decode(reader, size)
    if not is_complement:
        return places
    mask = np.ones(size, np.bool_)
    mask[places] = False
    return np.flatnonzero(mask)


def _encode_low_bits(values: np.ndarray, bits: np.ndarray) -> list[np.ndarray]:
    """So many low bits of each value, the lowest of all values first."""
    planes = []
    for bit in range(int(bits.max(initial=0))):
        taken = values[bits > bit] >> values.dtype.type(bit)
        planes.append(sets.packed(taken & values.dtype.type(1)))
    return planes


def _decode_low_bits(reader: Reader, bits: np.ndarray, dtype: type) -> np.ndarray:
    values = np.zeros(bits.size, dtype)
    for bit in range(int(bits.max(initial=0))):
        chosen = bits > bit
        stored = reader.bits(int(np.count_nonzero(chosen)))
        values[chosen] |= stored.astype(dtype) << dtype(bit)
    return values


def _bits(words: np.ndarray) -> np.ndarray:
    """Number of bits of each word."""
    bits = np.zeros(words.size, np.int64)
    rest = words.copy()
    while rest.any():
        bits += rest > 0
        rest >>= words.dtype.type(1)
    return bits
