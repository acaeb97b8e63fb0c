"""Codes of sparse and of few-valued blocks: every bit comes back, and no other bytes are taken."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format.encodings import codes, planes
from adacheck_jax.format.encodings.form import MAX_HEAD_BYTES
from tests.strategies import DTYPES, any_bits

seeds = st.integers(0, 2**32)
value_counts = st.sampled_from([1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 10**6])


def words_of(array):
    return planes.words_of(array).tolist()


def size_of(block):
    return sum(codes.encode(block).sizes(is_split=True))


def stream_of(block):
    code = codes.encode(block)
    assert code.sizes(is_split=True) == (code.body.size, code.rest.size)
    assert code.sizes(is_split=False) == (code.body.size + code.rest.size, 0)
    return np.concatenate([code.body, code.rest])


def decoded(stream, like):
    """What a code fills a block with, whatever was there."""
    block = any_bits(np.random.default_rng(1), like.shape, like.dtype)
    codes.decode(stream, block)
    return block


@st.composite
def blocks(draw):
    """Blocks of any bits, of which some are zero and the others have few or many values."""
    rng, dtype = np.random.default_rng(draw(seeds)), jnp.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 40), max_size=3))
    values = any_bits(rng, (draw(value_counts),), dtype)
    block = values[rng.integers(0, values.size, shape)]
    density = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0]))
    block = np.where(rng.random(shape) < density, block, np.zeros_like(block)).astype(dtype)
    return block.T if draw(st.booleans()) else block


@given(blocks())
def test_every_bit_comes_back_and_codes_that_are_cut_or_longer_are_refused(block):
    stream = stream_of(block)
    assert words_of(decoded(stream, block)) == words_of(block)
    assert stream.size <= block.nbytes + MAX_HEAD_BYTES
    for length in {0, stream.size // 2, stream.size - 1}:
        with pytest.raises(ValueError, match="code"):
            decoded(stream[:length], block)
    with pytest.raises(ValueError, match="follow"):
        decoded(np.concatenate([stream, np.zeros(1, np.uint8)]), block)


@given(blocks(), st.data())
def test_other_bytes_are_refused_or_fill_the_block(block, data):
    changed = stream_of(block)
    places = st.integers(0, min(changed.size, data.draw(st.sampled_from([12, 64, 10**9]))) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(places)] = data.draw(st.integers(0, 255))
    for each in (changed, np.frombuffer(data.draw(st.binary(max_size=64)), np.uint8)):
        try:
            decoded(each, block)
        except ValueError:
            continue


def topk(share, dtype="bfloat16", size=1 << 20):
    rng = np.random.default_rng(0)
    values = rng.normal(size=size).astype(jnp.dtype(dtype))
    return np.where(rng.random(size) < share, values, np.zeros_like(values))


@pytest.mark.parametrize(
    ("levels", "expected"), [(1, 0), (2, 1 / 8), (3, 1 / 4), (15, 1 / 2), (255, 1), (256, 1)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_values_take_the_bits_of_their_integers(levels, expected, dtype):
    rng = np.random.default_rng(0)
    scale = np.float32(0.0137)
    block = ((rng.integers(0, levels, 1 << 18) + 7) * scale).astype(jnp.dtype(dtype))
    distinct = len(set(words_of(block)))
    assert distinct * block.dtype.itemsize <= size_of(block) - expected * block.size <= 2048
    assert codes.may_pay(block)


def test_values_that_no_look_has_seen_are_found():
    block = np.full(1 << 20, 1.5, np.float32)
    odd = np.array([0x7FC00001, 0xFF800001, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    block.view(np.uint32)[[3, 70_001, 500_000, 700_000, 1_000_003]] = odd
    assert size_of(block) < block.size / 2 + 100
    assert words_of(decoded(stream_of(block), block)) == words_of(block)


def test_a_code_pays_for_scattered_zeros_and_few_values_and_neither_for_noise_nor_rows_of_zeros():
    noise = np.random.default_rng(0).normal(size=(1024, 1024)).astype(jnp.bfloat16.dtype)
    for dense in (noise, noise[::2, ::2], noise.astype(np.float32), np.zeros(8, np.float32)):
        assert not codes.may_pay(dense)
    scattered = topk(0.01, "float32")
    for worthwhile in (scattered.reshape(1024, 1024)[::2, ::2], np.sign(noise)):
        assert codes.may_pay(worthwhile)
    assert codes.pay([codes.encode(scattered)], [scattered])
    rows = np.zeros((1024, 1024), np.float32)  # rows of zeros take no bytes
    assert not codes.pay([codes.encode(rows)], [rows])
    rows[5:9] = np.random.default_rng(0).normal(size=(4, 1024))
    assert not codes.pay([codes.encode(rows)], [rows])


def sparse(shift, count, rest):
    return bytes([SPARSE, shift]) + count.to_bytes(8, "little") + bytes(rest)


BITMAP, PLAIN, SPARSE, PALETTE = 255, 0, 1, 2
HOSTILE = {
    "unknown kind": (bytes([9]), "unknown kind"),
    "more words than there are": (sparse(0, 2**63, []), "words"),
    "shift too large": (sparse(63, 1, []), "low bits"),
    "bitmap of other words": (sparse(BITMAP, 2, [0b1, PLAIN, 0, 0, 0, 0]), "bitmap"),
    "ends in the middle": (sparse(2, 8, []), "ends in the middle"),
    "nested": (sparse(BITMAP, 1, [0b1, SPARSE, 0, 0, 0, 0, 0, 0, 0, 0, 0]), "unknown kind"),
    "past the table": (bytes([PALETTE, 2, 1, 0, 2, 0, 3, 0, 0xFF, 0xFF]), "table"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_codes_are_refused(name):
    stream, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        codes.decode(np.frombuffer(stream, np.uint8), np.zeros(8, np.uint16))


def test_places_have_to_ascend_inside_the_block():
    block = np.zeros(1000, np.uint16)
    block[[500, 501]] = 7
    stream, found = stream_of(block), set()
    for at, bit in itertools.product(range(10, stream.size), range(8)):
        changed = stream.copy()
        changed[at] ^= 1 << bit
        try:
            assert np.count_nonzero(decoded(changed, block)) <= 2
        except ValueError as error:
            found.add(str(error).split(",")[0])
    assert any("ascend" in each for each in found)
