"""Promises of every encoding in the table, for all types and sizes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings.form import MAX_HEAD_BYTES, Candidate, Encoding
from adacheck_jax.format.encodings.planes import word_bytes
from adacheck_jax.format.encodings.table import ENCODINGS, MODULES, choose
from tests.strategies import DTYPES, any_bits
from tests.support import encoded

EACH = pytest.mark.parametrize("letter", ENCODINGS)
SIZES = [0, 1, 7, 513, 16_385]
SHARES = [0.0, 0.03, 1.0]


def pairs(dtype, sizes=SIZES):
    """New and old elements of some sizes, of which few, some or all have bits of their own."""
    rng = np.random.default_rng(0)
    for size in sizes:
        for share in SHARES:
            old = any_bits(rng, (size, 1), dtype)
            kept = rng.random(old.shape) >= share
            yield np.where(kept, old, any_bits(rng, old.shape, dtype)).astype(old.dtype), old
            yield np.where(kept, np.zeros_like(old), old).astype(old.dtype), old


def test_every_letter_is_in_the_table_and_in_the_description_of_the_form_on_disk():
    page = (Path(__file__).parents[2] / "docs/reference/format.md").read_text()
    assert {*ENCODINGS, Encoding.SAME} == {*Encoding}
    assert len(ENCODINGS) == 1 + sum(len(module.ENCODINGS) for module in MODULES)
    for letter in Encoding:
        assert f"\n- `{letter}`: " in page, f"tell of {letter.name} in docs/reference/format.md"


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_comes_back_at_the_size_that_is_planned(letter, dtype):
    how, dtype = ENCODINGS[letter], jnp.dtype(dtype)
    for new, old in pairs(dtype):
        low, high = encoded(letter, new, old)
        size = (low.size, high.size) if how.has_own_size else None
        parts = how.parts(new.nbytes, word_bytes(dtype), size)
        assert (parts.raw_bytes, parts.compressed_bytes) == (low.size, high.size)
        assert low.size + high.size <= new.nbytes + MAX_HEAD_BYTES * how.has_own_size
        counts = parts.planes - parts.compressed, parts.compressed
        planes = [
            x.reshape(n or 1, -1) if x.size else x.reshape(0, 0)
            for x, n in zip((low, high), counts, strict=True)
        ]
        block = old.copy() if how.needs_old else np.full_like(new, 1)
        how.decode(block, *planes)
        assert block.tobytes() == new.tobytes()


@pytest.mark.parametrize("letter", [x for x, each in ENCODINGS.items() if each.has_own_size])
def test_sizes_that_no_code_has_and_other_bytes_are_refused_or_fill_the_block(letter):
    how, rng = ENCODINGS[letter], np.random.default_rng(0)
    for size in (None, (0, 0), (2**60, 2**60), (40, MAX_HEAD_BYTES + 1)):
        with pytest.raises(ValueError, match="a code of"):
            how.parts(40, 4, size)
    for new, _ in pairs("float32", [1, 7, 513]):
        low, high = encoded(letter, new)
        for _ in range(20):
            changed = np.concatenate([low, high])[: rng.integers(low.size + high.size + 1)]
            changed[rng.integers(0, changed.size or 1, 3 if changed.size else 0)] ^= 0x55
            try:
                how.decode(np.zeros_like(new), changed[: low.size], changed[low.size :])
            except ValueError:
                continue


@pytest.mark.parametrize("compresses", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_boxes_get_an_encoding_that_can_store_them(dtype, compresses):
    for new, old in pairs(jnp.dtype(dtype)):
        box = Box.full(new.shape)
        for previous in (None, {box: old}):
            letter, made = choose(Candidate({box: new}, previous, None, compresses))
            is_same = previous is not None and new.tobytes() == old.tobytes()
            assert (letter is Encoding.SAME) == is_same
            assert is_same or ENCODINGS[letter].has_own_size == bool(made)
            assert is_same or previous or not ENCODINGS[letter].needs_old
