"""Promises of every encoding in the table, for all types and sizes."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings.form import MAX_HEAD_BYTES, Candidate, Encoding
from adacheck_jax.format.encodings.planes import word_bytes
from adacheck_jax.format.encodings.table import ENCODINGS, choose
from tests.strategies import DTYPES, any_bits
from tests.support import encoded

PAGE = Path(__file__).parents[2] / "docs/reference/format.md"
OWN_SIZE = [letter for letter, how in ENCODINGS.items() if how.has_own_size]


def pairs(dtype):
    """New and old elements of some sizes: none, few or all are others, or not zero."""
    rng = np.random.default_rng(0)
    for size, share in itertools.product([0, 1, 7, 513, 16_385], [0, 0.03, 1]):
        old, others = any_bits(rng, (2, size, 1), dtype)
        for before, after in ((old, others), (np.zeros_like(old), old)):
            yield np.where(rng.random((size, 1)) < share, after, before).astype(dtype), old


def test_every_letter_is_in_the_table_and_in_the_reference():
    assert {*ENCODINGS, Encoding.SAME} == {*Encoding}
    assert [x for x in Encoding if f"\n- `{x}`: " not in PAGE.read_text()] == [], f"tell in {PAGE}"


@pytest.mark.parametrize("letter", ENCODINGS)
@pytest.mark.parametrize("dtype", [*map(jnp.dtype, DTYPES)], ids=str)
def test_every_bit_comes_back_at_the_size_that_is_planned(letter, dtype):
    how = ENCODINGS[letter]
    for new, old in pairs(dtype):
        low, high = encoded(letter, new, old)
        sizes = low.size, high.size
        parts = how.parts(new.nbytes, word_bytes(dtype), sizes if how.has_own_size else None)
        assert (parts.raw_bytes, parts.compressed_bytes) == sizes
        counts = parts.planes - parts.compressed, parts.compressed
        rows = [
            x.reshape(n or 1, -1) if x.size else x.reshape(0, 0)
            for x, n in zip((low, high), counts, strict=True)
        ]
        block = old.copy() if how.needs_old else np.full_like(new, 1)
        how.decode(block, *rows)
        assert block.tobytes() == new.tobytes()


@pytest.mark.parametrize("letter", OWN_SIZE)
def test_sizes_that_no_code_has_and_other_bytes_are_refused_or_fill_the_block(letter):
    how, rng = ENCODINGS[letter], np.random.default_rng(0)
    for size in (None, (0, 0), (2**60, 2**60), (40, MAX_HEAD_BYTES + 1)):
        with pytest.raises(ValueError, match="a code of"):
            how.parts(40, 4, size)
    for new, _ in pairs(jnp.dtype("float32")):
        stream = np.concatenate(encoded(letter, new))
        for end in rng.integers(1, stream.size + 1, 20):
            changed = stream[:end].copy()
            changed[rng.integers(0, end, 3)] ^= 0x55
            try:
                how.decode(np.zeros_like(new), changed[None], changed[None, :0])
            except ValueError:
                continue


@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("dtype", [*map(jnp.dtype, DTYPES)], ids=str)
def test_any_box_gets_an_encoding_that_can_store_it(dtype, compresses):
    for (new, old), has_old in itertools.product(pairs(dtype), [True, False]):
        box = Box.full(new.shape)
        letter, made = choose(
            Candidate({box: new}, {box: old} if has_old else None, None, compresses)
        )
        assert (letter is Encoding.SAME) == (has_old and new.tobytes() == old.tobytes())
        if letter is not Encoding.SAME:
            assert [*made] == [box] * ENCODINGS[letter].has_own_size
            assert has_old or not ENCODINGS[letter].needs_old
