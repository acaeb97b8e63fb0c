"""Planes of elements and of differences: every bit as it is defined, and the encoding chosen."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format.boxes import Box
from adacheck_jax.format.encodings import planes as codecs
from adacheck_jax.format.encodings import table
from adacheck_jax.format.encodings.form import Candidate, Encoding
from adacheck_jax.format.encodings.table import ENCODINGS
from tests.strategies import DTYPES, any_bits

DIFFERENCES = (Encoding.XOR, Encoding.SUBTRACT)
WHOLE = (Encoding.EXPONENTS, Encoding.PLANES)
EACH = pytest.mark.parametrize("encoding", [*DIFFERENCES, *WHOLE])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)

seeds = st.integers(0, 2**32)


def planes_of(encoding, new, old=None):
    """The planes of some elements, the lowest first."""
    width_bytes = codecs.word_bytes(new.dtype)
    planes = np.empty((width_bytes, new.nbytes // width_bytes), np.uint8)
    ENCODINGS[encoding].encode(new, old, planes, planes[:0])
    return planes


def words_of(array):
    return array.copy().reshape(-1).view(f"u{codecs.word_bytes(array.dtype)}")


def stored_word(encoding, new, old, bits):
    """The word that is stored for one of some bits, as Python counts."""
    last = (1 << bits) - 1
    if encoding is Encoding.XOR:
        return new ^ old
    if encoding is Encoding.SUBTRACT:
        step = (new - old) & last
        return 2 * step if step >> (bits - 1) == 0 else 2 * (last - step) + 1
    return (new << 1 & last) | new >> (bits - 1)


def check(encoding, new, old):
    """The planes are the bytes of the stored words, lowest first, and give the new bits back."""
    before = new.tobytes(), old.tobytes()
    planes = planes_of(encoding, new, old)
    assert (new.tobytes(), old.tobytes()) == before
    width = codecs.word_bytes(new.dtype)
    pairs = zip(words_of(new).tolist(), words_of(old).tolist(), strict=True)
    words = [stored_word(encoding, *pair, 8 * width) for pair in pairs]
    expected = [[word >> 8 * place & 0xFF for word in words] for place in range(width)]
    assert (planes.dtype, planes.tolist()) == (np.uint8, expected)
    if encoding in WHOLE:
        assert planes_of(encoding, new).tobytes() == planes.tobytes()
        old = np.zeros_like(old)
    planes.flags.writeable = False
    block = old.copy()
    ENCODINGS[encoding].decode(block, planes, planes[:0])
    assert (block.dtype, block.shape, block.tobytes()) == (new.dtype, new.shape, before[0])


@st.composite
def pairs(draw):
    """New and old elements in any memory order, from unlike to alike bits."""
    rng, dtype = np.random.default_rng(draw(seeds)), jnp.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.lists(st.integers(0, 7), max_size=3))
    wide = (*shape[:-1], 2 * shape[-1]) if shape else ()
    old = any_bits(rng, wide, dtype)
    new = any_bits(rng, wide, dtype)
    if draw(st.booleans()):  # few of whose words are others
        new = np.where(rng.random(wide) < draw(st.sampled_from([0, 0.3])), new, old).astype(dtype)

    def arranged(array):
        array = array[..., ::2] if array.ndim else array
        forms = [array, np.copy(array, order="F"), array.copy()]
        found = draw(st.sampled_from([*forms, array[::-1][::-1]] if array.ndim else forms))
        found.flags.writeable = draw(st.booleans())
        return found

    return arranged(new), arranged(old)


@EACH
@given(pair=pairs())
def test_planes_are_those_that_are_defined_and_give_every_bit_back(encoding, pair):
    check(encoding, *pair)


@EACH
@EACH_DTYPE
def test_every_extreme_of_a_type_can_follow_every_other(encoding, dtype):
    dtype = jnp.dtype(dtype)
    width = 8 * codecs.word_bytes(dtype)
    powers = {1 << bit for bit in range(width)}
    extremes = {0, *powers, *(p - 1 for p in powers), *((1 << width) - p for p in powers)}
    if width == 8:
        extremes = range(0, 2 if dtype.kind == "b" else 256, 1 if dtype.kind == "b" else 5)
    elif width == 64:
        extremes = sorted(extremes)[::7]
    words = np.array(sorted(extremes), f"u{width // 8}")
    new, old = (each.ravel().view(dtype) for each in np.meshgrid(words, words))
    check(encoding, new, old)


@EACH
@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("low_count", [0, 1, 4])
def test_many_words_are_split_block_by_block(encoding, size, low_count):
    rng = np.random.default_rng(size)
    old, new = (rng.integers(0, 2**32, size, np.uint32) for _ in range(2))
    low, high = np.empty((low_count, size), np.uint8), np.empty((4 - low_count, size), np.uint8)
    ENCODINGS[encoding].encode(new, old, low, high)
    assert np.array_equal(np.concatenate([low, high]), planes_of(encoding, new, old))
    ENCODINGS[encoding].decode(old, low, high)
    assert np.array_equal(old, new)


# The choice of an encoding.


def of_planes(blocks, previous=None):
    """The choice if there were no other encodings than planes."""
    new, old = (
        None if given is None else {Box((n,), (n + 1,)): each for n, each in enumerate(given)}
        for given in (blocks, previous)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "MODULES", (codecs,))
        return table.choose(Candidate(new, old, None, compresses=old is None))[0]


def of_difference(pairs):
    return of_planes(*zip(*pairs, strict=True))


def stored_bytes(encoding, new, old=None):
    return len(zlib.compress(planes_of(encoding, new, old), 1))


@EACH_DTYPE
@given(seed=seeds, data=st.data())
def test_a_leaf_is_the_same_only_if_no_bit_of_any_block_differs(dtype, seed, data):
    old = any_bits(np.random.default_rng(seed), (data.draw(st.integers(1, 900)), 3), dtype)
    new = old.copy()
    flipped = data.draw(st.integers(0, old.nbytes - 1))
    new.view(np.uint8).reshape(-1)[flipped] ^= 1 << (
        data.draw(st.integers(0, 7)) * (dtype != "bool")
    )
    assert of_difference([(old, old), (new, old), (old, old)]) is not Encoding.SAME
    assert of_difference([(old.copy(), old)] * 3) is Encoding.SAME
    assert of_planes([]) is Encoding.SAME


RNG = np.random.default_rng(0)
DIRECTION = RNG.normal(size=50_000)
WEIGHTS = RNG.normal(scale=0.02, size=50_000).astype(np.float32)
SMALL_STEPS = RNG.integers(-3, 4, 50_000)
COUNTS, NOISE = (RNG.integers(0, 2**31, size).astype(np.int32) for size in (9000, 400))
TOGGLED = COUNTS ^ (RNG.integers(0, 2, COUNTS.size).astype(np.int32) << 6)
WIDE = RNG.normal(size=(2, 100_000))
GAUSS = WIDE.astype(np.float32)
WORDS = RNG.integers(0, 2**32, (2, 400_000), dtype=np.uint32)


def stepped(values):
    """Some ulps away."""
    words = values.view(f"u{values.itemsize}")
    return (words + SMALL_STEPS.astype(words.dtype)).view(values.dtype), values


def lowered(rate, dtype="float32"):
    """Weights after a step of one size for each."""
    old = WEIGHTS.astype(jnp.dtype(dtype))
    return (old.astype(np.float32) - rate * np.sign(DIRECTION)).astype(old.dtype), old


def flipped(old, position=0):
    """A copy in which the lowest bit of one word is another."""
    new = old.copy()
    new.view(f"u{new.itemsize}")[position] ^= 1
    return new, old


SUBTRACTED = {
    **{
        f"{dtype} across powers of two": stepped((2.0 ** (SMALL_STEPS * 3)).astype(dtype))
        for dtype in map(jnp.dtype, ("float32", "float64", "float16", "bfloat16"))
    },
    **{f"float32 at {rate}": lowered(rate) for rate in (1e-9, 1e-8, 1e-6)},
    "counters": (COUNTS + 1, COUNTS),
}


@pytest.mark.parametrize("name", SUBTRACTED)
def test_subtraction_is_chosen_where_it_takes_fewer_bytes(name):
    new, old = SUBTRACTED[name]
    assert of_difference([(new, old)]) is Encoding.SUBTRACT
    xor, subtract = (stored_bytes(each, new, old) for each in DIFFERENCES)
    assert subtract < xor < 1.1 * old.nbytes
    square = [each[:8100].reshape(90, 90) for each in (new, old)]
    pair = np.copy(square[0], order="F"), square[1]
    assert of_difference([pair]) is Encoding.SUBTRACT


ALIKE, COUNTED = (COUNTS, COUNTS), (COUNTS[:6000] + 1, COUNTS[:6000])
SPARSE = (GAUSS[0] * (GAUSS[1] < -1.3))[:20_000]
HALF = np.where(np.arange(WORDS[0].size) < WORDS[0].size // 2, WORDS[0], 0)
CHANGED = {
    "up to a kibibyte": ([flipped(GAUSS[0][:256])], "r"),
    "more than that": ([(GAUSS[0], GAUSS[0]), flipped(GAUSS[0][:257])], "x"),
    "two small blocks": ([flipped(GAUSS[0][:100])] * 2, "r"),
    "three of them": ([flipped(GAUSS[0][:100])] * 3, "xs"),
    **{
        f"a bit at {n}, which a sample may miss": ([flipped(GAUSS[0], n)], "xs")
        for n in (0, 5000, 50_000, 99_999)
    },
    "few steps of bfloat16": ([lowered(1e-6, "bfloat16")], "xs"),
    "one bit of each": ([(TOGGLED, COUNTS)], "x"),
    "the largest changed block decides": ([ALIKE, (NOISE, COUNTS[:400]), COUNTED], "s"),
    "and not the others": ([COUNTED, (RNG.permutation(COUNTS), COUNTS)], "r"),
    "noise of its own": ([tuple(GAUSS)], "e"),
    "small integers of their own": ([(RNG.integers(-50, 50, 9000).astype(np.int32), COUNTS)], "p"),
    "bits of their own": ([tuple(WORDS)], "r"),
}
BY_ITSELF = {
    **{
        f"noise of {dtype}, {scale}": ([(WIDE[0] * scale).astype(jnp.dtype(dtype))], "e")
        for dtype in ("bfloat16", "float32", "float64")
        for scale in (1e-6, 0.02, 1.0, 1e4)
    },
    "sparse float32": ([SPARSE], "p"),
    "sparse bfloat16": ([SPARSE.astype(jnp.bfloat16)], "p"),
    "small integers": ([RNG.integers(-50, 50, 20_000).astype(np.int32)], "p"),
    "whole numbers": ([RNG.integers(0, 9, 20_000).astype(np.float32)], "p"),
    "few values": ([RNG.choice([0.5, -0.25, 3.0], 20_000).astype(jnp.bfloat16)], "p"),
    "bfloat16 in float32": ([GAUSS[0].astype(jnp.bfloat16).astype(np.float32)], "p"),
    "zeros": ([np.zeros(20_000, np.complex64)], "p"),
    "random bits": ([WORDS[0]], "r"),
    "half of them zeros": ([HALF], "p"),  # a sample meets every part
    "the other half": ([HALF[::-1]], "p"),
    "the largest block decides": ([GAUSS[0][:9000], np.zeros(8000, np.float32)], "e"),
    "and not a smaller one": ([GAUSS[0][:7000], np.zeros(8000, np.float32)], "p"),
    "a kibibyte": ([np.zeros(256, np.float32)], "r"),
    "more than a kibibyte": ([np.zeros(9), np.zeros(257, np.float32), np.zeros(0)], "p"),
    "nothing": ([np.zeros(0, np.float32)], "r"),
    "flags": ([RNG.integers(0, 2, 20_000).astype(bool)], "e"),  # their own highest plane
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_leaf_is_stored_in_its_best_way(name):
    blocks, letters = CHANGED[name]
    for each in (blocks, blocks[::-1]):
        assert of_difference(each) in letters


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_leaf_by_itself_is_stored_in_its_best_way(name):
    blocks, letters = BY_ITSELF[name]
    for each in (blocks, blocks[::-1]):
        assert of_planes(each) in letters


@EACH_DTYPE
def test_random_bits_of_any_type_are_stored_as_they_are(dtype):
    bits = any_bits(RNG, (2, 60_000), dtype)
    expected = Encoding.RAW if dtype != "bool" else Encoding.EXPONENTS
    assert of_planes([bits[0]]) is expected
    assert of_difference([tuple(bits)]) is expected
