"""Which blocks are equal, against comparing all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.store import equality
from tests.strategies import DTYPES, any_bits


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


@st.composite
def copies(draw):
    """Blocks among which are many copies: of other shapes, otherwise in memory, a bit off."""
    blocks, shapes = [], st.lists(st.integers(0, 12), max_size=3)
    for _ in range(draw(st.integers(0, 10))):
        if not blocks or draw(st.integers(0, 3)) == 0:
            rng = np.random.default_rng(draw(st.integers(0, 2**32)))
            block = any_bits(rng, draw(shapes), draw(st.sampled_from(DTYPES)))
            blocks.append(np.zeros_like(block) if draw(st.booleans()) else block)
            continue
        block = draw(st.sampled_from(blocks)).copy()
        if draw(st.booleans()):
            block = block.reshape(-1)
        if block.nbytes and draw(st.integers(0, 2)) == 0:  # another bit
            data = bytearray(block.tobytes())
            data[draw(st.sampled_from([0, len(data) // 2, len(data) - 1]))] ^= 1
            block = np.frombuffer(bytes(data), block.dtype).reshape(block.shape)
        form = draw(st.sampled_from(["C", "F", "strided", "part", "read-only"]))
        blocks.append(shown(block, form))
    own = [block.dtype.name for block in blocks]
    return blocks, draw(st.sampled_from([own, ["alike"] * len(blocks), list(range(len(blocks)))]))


@given(copies(), st.booleans())
def test_the_first_equal_block_is_found_also_where_all_have_one_hash(drawn, collide):
    blocks, kinds = drawn
    every = [block.tobytes() for block in blocks]
    keys = [*zip(kinds, every, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        if collide:
            patch.setattr(equality.xxhash, "xxh3_128_digest", lambda data: b"always this")
        assert equality.firsts(blocks, kinds) == [keys.index(key) for key in keys]
    assert [equality.flat_bytes(block).tobytes() for block in blocks] == every


def test_contiguous_blocks_are_not_copied_and_those_that_differ_at_once_are_not_hashed(monkeypatch):
    def digest(data):
        raise AssertionError("hashed")

    monkeypatch.setattr(equality.xxhash, "xxh3_128_digest", digest)
    blocks = list(np.random.default_rng(0).normal(size=(50, 100)))
    assert equality.firsts(blocks, [0] * 50) == [*range(50)]
    assert np.shares_memory(equality.flat_bytes(blocks[0]), blocks[0])
