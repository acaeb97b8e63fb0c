"""Codes of sparse and of few-valued blocks: every bit comes back, and no other bytes are taken."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from adacheck_jax.format.encodings import codes, planes
from tests.strategies import DTYPES, any_bits

seeds = st.integers(0, 2**32)
dtypes = st.sampled_from(DTYPES).map(jnp.dtype)
shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
densities = st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0])
value_counts = st.sampled_from([1, 2, 3, 4, 5, 16, 17, 255, 256, 257, 10**6])


def words_of(array):
    return planes.words_of(array).tolist()


def stream_of(block):
    code = codes.encode(block)
    whole = code.body.size + code.rest.size
    assert code.sizes(is_split=True) == (code.body.size, code.rest.size)
    assert code.sizes(is_split=False) == (whole, 0)
    return np.concatenate([code.body, code.rest])


def decoded(stream, like):
    block = any_bits(
        np.random.default_rng(1), like.shape, like.dtype
    )  # what was there is written over
    codes.decode(stream, block)
    return block


@st.composite
def blocks(draw):
    """Blocks of any bits, of which some are zero and the others have few or many values."""
    rng, shape, dtype = np.random.default_rng(draw(seeds)), draw(shapes), draw(dtypes)
    values = any_bits(rng, (draw(value_counts),), dtype)
    block = values[rng.integers(0, values.size, shape)]
    zeros = np.zeros_like(block)
    return np.where(rng.random(shape) < draw(densities), block, zeros).astype(dtype)


@given(blocks(), st.booleans())
def test_every_bit_comes_back(block, is_transposed):
    block = block.T if is_transposed else block
    stream = stream_of(block)
    assert words_of(decoded(stream, block)) == words_of(block)
    assert stream.size <= block.nbytes + codes.MAX_HEAD_BYTES


def topk(share, dtype="bfloat16", size=1 << 20):
    rng = np.random.default_rng(0)
    values = rng.normal(size=size).astype(jnp.dtype(dtype))
    return np.where(rng.random(size) < share, values, np.zeros_like(values))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.4])
def test_places_take_little_more_than_their_entropy(share):
    block = topk(share)
    count = np.count_nonzero(block)
    p = count / block.size
    entropy_bytes = -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) * block.size / 8
    assert sum(codes.encode(block).sizes(is_split=True)) - 2 * count < 1.13 * entropy_bytes + 32


@pytest.mark.parametrize(
    ("levels", "expected"), [(1, 0), (2, 1 / 8), (3, 1 / 4), (15, 1 / 2), (255, 1), (256, 1)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantized_values_take_the_bits_of_their_integers(levels, expected, dtype):
    rng = np.random.default_rng(0)
    scale = np.float32(0.0137)
    block = ((rng.integers(0, levels, 1 << 18) + 7) * scale).astype(jnp.dtype(dtype))
    size_bytes = sum(codes.encode(block).sizes(is_split=True))
    distinct = len(set(words_of(block)))
    assert distinct * block.dtype.itemsize <= size_bytes - expected * block.size <= 2048
    assert codes.may_pay(block)


def test_values_that_no_look_has_seen_are_found():
    block = np.zeros(1 << 20, np.float32)
    block[:] = 1.5
    odd = np.array([0x7FC00001, 0xFF800001, 0x80000000, 0x00000001, 0x7F800000], np.uint32)
    block.view(np.uint32)[[3, 70_001, 500_000, 700_000, 1_000_003]] = odd
    assert sum(codes.encode(block).sizes(is_split=True)) < block.size / 2 + 100
    assert words_of(decoded(stream_of(block), block)) == words_of(block)


def test_a_dense_block_is_not_worth_a_look_and_a_compressed_one_is():
    noise = np.random.default_rng(0).normal(size=(1024, 1024)).astype(jnp.bfloat16.dtype)
    assert not codes.may_pay(noise)
    assert not codes.may_pay(noise[::2, ::2])
    assert not codes.may_pay(noise.astype(np.float32))
    assert codes.may_pay(topk(0.01).reshape(1024, 1024)[::2, ::2])
    assert codes.may_pay(np.sign(noise))
    assert not codes.may_pay(np.zeros(8, np.float32))  # small ones are stored as they are


def test_rows_of_zeros_do_not_pay_since_they_take_no_bytes():
    rows = np.zeros((1024, 1024), np.float32)
    assert not codes.pay([codes.encode(rows)], [rows])
    rows[5:9] = np.random.default_rng(0).normal(size=(4, 1024))
    assert not codes.pay([codes.encode(rows)], [rows])
    scattered = topk(0.01, "float32")
    assert codes.pay([codes.encode(scattered)], [scattered])


@given(blocks(), seeds, st.data())
@example(np.zeros(3, np.float32), 0, None)
def test_changed_and_other_bytes_are_refused_or_fill_the_block(block, seed, data):
    stream = stream_of(block)
    rng = np.random.default_rng(seed)
    changed = bytearray(stream.tobytes())
    for _ in range(data.draw(st.integers(1, 4)) if data else 0):
        at = int(rng.integers(0, min(len(changed), data.draw(st.sampled_from([12, 64, 10**9])))))
        changed[at] = int(rng.integers(0, 256))
    others = [b"", data.draw(st.binary(max_size=64))] if data else [b""]
    for each in (bytes(changed), *others):
        target = np.zeros(block.shape, block.dtype)
        try:
            codes.decode(np.frombuffer(each, np.uint8), target)
        except ValueError:
            continue
        assert each in others or len(each) == stream.size


@given(blocks())
def test_codes_that_are_cut_or_longer_are_refused(block):
    stream = stream_of(block)
    for length in {0, stream.size // 2, stream.size - 1}:
        with pytest.raises(ValueError, match="code"):
            decoded(stream[:length], block)
    with pytest.raises(ValueError, match="follow"):
        decoded(np.concatenate([stream, np.zeros(1, np.uint8)]), block)


def sparse(shift, count, rest):
    head = bytes([1, shift]) + count.to_bytes(8, "little")
    return np.frombuffer(head + bytes(rest), np.uint8)


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
    stream = np.frombuffer(bytes(stream), np.uint8)
    with pytest.raises(ValueError, match=message):
        codes.decode(stream, np.zeros(8, np.uint16))


def test_places_have_to_ascend_inside_the_block():
    block = np.zeros(1000, np.uint16)
    block[[500, 501]] = 7
    stream = stream_of(block).tolist()
    found = set()
    for at, bit in itertools.product(range(10, len(stream)), range(8)):
        changed = list(stream)
        changed[at] ^= 1 << bit
        target = np.zeros_like(block)
        try:
            codes.decode(np.array(changed, np.uint8), target)
        except ValueError as error:
            found.add(str(error).split(",")[0])
            continue
        assert np.count_nonzero(target) <= 2
    assert any("ascend" in each for each in found)
