"""Which blocks are equal, against comparing all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.store import equality
from tests.strategies import DTYPES, any_bits

seeds = st.integers(0, 2**32)
shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)


def oracle(blocks, kinds):
    """What :func:`equality.firsts` promises, word for word."""
    keys = [(kind, block.tobytes()) for block, kind in zip(blocks, kinds, strict=True)]
    return [keys.index(key) for key in keys]


def shown(array, form):
    """The same elements, otherwise in memory."""
    if form == "F":
        return np.copy(array, order="F")
    if form == "strided" and array.ndim:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if form == "part" and array.ndim:
        return np.concatenate([array, array, array])[len(array) : 2 * len(array)]
    if form == "read-only":
        array = array.copy()
        array.flags.writeable = False
    return array


FORMS = st.sampled_from(["C", "F", "strided", "part", "read-only"])


@st.composite
def copies(draw):
    """Blocks among which are many copies: of other shapes, otherwise in memory, a bit off."""
    blocks = []
    for _ in range(draw(st.integers(0, 10))):
        if not blocks or draw(st.integers(0, 3)) == 0:
            rng, dtype = np.random.default_rng(draw(seeds)), draw(st.sampled_from(DTYPES))
            block = any_bits(rng, draw(shapes), dtype)
            blocks.append(np.zeros_like(block) if draw(st.booleans()) else block)
            continue
        block = draw(st.sampled_from(blocks)).copy()
        if block.size and draw(st.booleans()):  # another shape
            block = draw(
                st.sampled_from(
                    [
                        block.reshape(-1),
                        block.reshape(-1, block.shape[-1]) if block.ndim else block.reshape(1, 1),
                    ]
                )
            )
        if block.nbytes and draw(st.integers(0, 2)) == 0:  # another bit
            data = bytearray(block.tobytes())
            position = draw(st.sampled_from([0, len(data) // 2, len(data) - 1]))
            data[position] ^= 1
            block = np.frombuffer(bytes(data), block.dtype).reshape(block.shape)
        blocks.append(shown(block, draw(FORMS)))
    own = [block.dtype.name for block in blocks]
    return blocks, draw(st.sampled_from([own, ["alike"] * len(blocks), list(range(len(blocks)))]))


@given(copies())
def test_the_first_equal_block_is_found_whatever_the_blocks_are(drawn):
    blocks, kinds = drawn
    before = [block.tobytes() for block in blocks]
    assert equality.firsts(blocks, kinds) == oracle(blocks, kinds)
    assert [block.tobytes() for block in blocks] == before


@given(copies())
def test_blocks_with_one_hash_are_told_apart_by_their_bits(drawn):
    blocks, kinds = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equality.xxhash, "xxh3_128_digest", lambda data: b"always this")
        assert equality.firsts(blocks, kinds) == oracle(blocks, kinds)


@given(seed=seeds, shape=shapes, dtype=st.sampled_from(DTYPES), form=FORMS)
def test_the_bytes_of_a_block_are_those_of_its_elements_in_order(seed, shape, dtype, form):
    block = any_bits(np.random.default_rng(seed), shape, dtype)
    found = equality.flat_bytes(shown(block, form))
    assert found.dtype == np.uint8
    assert found.tobytes() == block.tobytes()


def test_the_bytes_of_a_contiguous_block_are_not_copied():
    block = np.arange(12.0).reshape(3, 4)
    assert np.shares_memory(equality.flat_bytes(block), block)


def test_blocks_that_differ_at_once_are_not_hashed(monkeypatch):
    def digest(data):
        raise AssertionError("hashed")

    monkeypatch.setattr(equality.xxhash, "xxh3_128_digest", digest)
    blocks = list(np.random.default_rng(0).normal(size=(50, 100)))
    assert equality.firsts(blocks, [0] * 50) == [*range(50)]
