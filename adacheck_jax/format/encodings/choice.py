"""The choice of an encoding for one process's boxes of a leaf, by what is in them."""

from __future__ import annotations

from collections.abc import Mapping

from adacheck_jax.format.boxes import Blocks, Box
from adacheck_jax.format.encodings import codes, planes
from adacheck_jax.format.encodings.codes import Code
from adacheck_jax.format.manifest import Encoding

LASTING = frozenset({Encoding.RAW, Encoding.EXPONENTS})
"""Encodings that the next delta of a leaf takes over without a look. ``PLANES`` is none of them: it
may be due to zeros of one step alone."""


def choose(
    blocks: Blocks, previous: Blocks | None, last: Encoding | None, *, compresses: bool
) -> tuple[Encoding, Mapping[Box, Code]]:
    """The encoding of some boxes; and each box's code, if the encoding has its own size.

    Args:
        blocks: the elements of each box.
        previous: elements of the parent step, which a difference may be taken from; None for none.
        last: encoding of an earlier delta, if it is :data:`LASTING`.
        compresses: True if a part of the bytes is compressed.
    """
    if not blocks:
        return Encoding.SAME, {}
    if previous is not None:
        pairs = ((block, previous[box]) for box, block in blocks.items())
        return planes.choose_difference(pairs), {}
    if codes.may_pay(max(blocks.values(), key=lambda block: block.size)):
        made = {box: codes.encode(block) for box, block in blocks.items()}
        if codes.pay(made.values(), blocks.values()):
            return Encoding.CODED, made
    if not compresses:
        return Encoding.RAW, {}
    return last or planes.choose_whole(blocks.values()), {}
