"""The encodings of a block of elements in a pack: one table, by the letters that manifests have.

To add one: a module of this folder with ``ENCODINGS`` and ``chosen``, the rule by which it takes a
leaf or leaves it to the next (models are :class:`_Raw` below, and ``_Coded`` and ``chosen`` in
:mod:`~adacheck_jax.format.encodings.codes`); its place in :data:`MODULES`; its letter in
:class:`~adacheck_jax.format.encodings.form.Encoding`; and a line of ``docs/reference/format.md``.
Layout, writing, reading and tests ask the table. An older release refuses the letter by name.
An encoding takes any block, also one that its rule would leave alone, in at most 64 bytes more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from adacheck_jax.format.encodings import codes, planes
from adacheck_jax.format.encodings.form import BlockEncoding, Candidate, Choice, Encoding, Parts

MODULES = (codes, planes)
"""Modules of encodings; the first whose rule takes a leaf stores it."""


class _Raw(BlockEncoding):
    """Elements as they are: where no module takes a leaf."""

    letter, is_viewed, lasts = Encoding.RAW, True, True

    def parts(self, whole_bytes: int, word_bytes: int, size: tuple[int, int] | None) -> Parts:
        return Parts(whole_bytes, 0)

    def encode(
        self, new: np.ndarray, old: np.ndarray | None, low: np.ndarray, high: np.ndarray
    ) -> None:
        np.copyto(low.view(new.dtype).reshape(new.shape), new)

    def decode(self, block: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
        block[...] = low.view(block.dtype).reshape(block.shape)


ENCODINGS: Mapping[Encoding, BlockEncoding] = {
    each.letter: each for each in (_Raw(), *(each for x in MODULES for each in x.ENCODINGS))
}
"""All encodings of what is stored; of ``SAME`` nothing is."""


def choose(candidate: Candidate) -> Choice:
    """The encoding of some boxes; ``previous`` may tell of boxes in which no bit changed, too."""
    if not candidate.blocks:
        return Encoding.SAME, {}
    if candidate.previous is not None:
        pairs = ((box, new, candidate.previous[box]) for box, new in candidate.blocks.items())
        other = ((box, planes.words_of(new), old) for box, new, old in pairs if new is not old)
        changed = {x: old for x, new, old in other if not np.array_equal(new, planes.words_of(old))}
        if not changed:
            return Encoding.SAME, {}
        candidate = dataclasses.replace(candidate, previous=changed)
    found = (each.chosen(candidate) for each in MODULES)
    return next((choice for choice in found if choice is not None), (Encoding.RAW, {}))
