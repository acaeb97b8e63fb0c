import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format.encodings import planes as codecs
from adacheck_jax.format.manifest import Encoding
from tests import support
from tests.strategies import DTYPES, any_bits

DIFFERENCES = (Encoding.XOR, Encoding.SUBTRACT)
EACH_DIFFERENCE = pytest.mark.parametrize("encoding", DIFFERENCES)
WHOLE = (Encoding.EXPONENTS, Encoding.PLANES)
EACH_WHOLE = pytest.mark.parametrize("encoding", WHOLE)
EACH = pytest.mark.parametrize("encoding", [*DIFFERENCES, *WHOLE])
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)

seeds = st.integers(0, 2**32)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from(DTYPES).map(jnp.dtype)


def words_of(array):
    return array.copy().reshape(-1).view(f"u{codecs.word_bytes(array.dtype)}")


def nudged(rng, old):
    """An array some of whose words are some steps away, or all or none of them."""
    new = old.copy()
    words = words_of(new)
    if old.dtype.kind == "b":
        words ^= rng.integers(0, 2, words.size, dtype=np.uint8)
    else:
        words += (rng.integers(-3, 4, words.size) * rng.integers(0, 2)).astype(words.dtype)
    return words.view(old.dtype).reshape(old.shape)


def one_bit_flipped(old, position):
    """A copy that differs in one bit."""
    data = bytearray(old.tobytes())
    data[position // 8] ^= 1 << position % 8
    return np.frombuffer(bytes(data), old.dtype).reshape(old.shape)


@st.composite
def pairs(draw):
    """New and old elements in any memory order, from unlike to alike bits."""
    rng = np.random.default_rng(draw(seeds))
    shape = draw(shapes)
    wide = (*shape[:-1], 2 * shape[-1]) if shape else ()
    dtype = draw(dtypes)
    old = any_bits(rng, wide, dtype)
    new = any_bits(rng, wide, dtype) if draw(st.booleans()) else nudged(rng, old)

    def arranged(array):
        array = array[..., ::2] if array.ndim else array
        forms = [array, np.copy(array, order="F"), array.copy()]
        found = draw(st.sampled_from([*forms, array[::-1][::-1]] if array.ndim else forms))
        found.flags.writeable = draw(st.booleans())
        return found

    return arranged(new), arranged(old)


@EACH
@given(pair=pairs())
def test_apply_undoes_encode_bit_for_bit(encoding, pair):
    new, old = pair
    before = new.tobytes(), old.tobytes()
    planes = support.planes_of(encoding, new, old)
    assert (new.tobytes(), old.tobytes()) == before
    width_bytes = codecs.word_bytes(new.dtype)
    planes.flags.writeable = False
    assert planes.dtype == np.uint8
    assert planes.shape == (width_bytes, new.nbytes // width_bytes)
    block = old.copy()
    support.without_planes(encoding, block, planes)
    assert block.dtype == new.dtype
    assert block.shape == new.shape
    assert block.tobytes() == new.tobytes()


@EACH
@EACH_DTYPE
def test_every_extreme_of_a_type_can_follow_every_other(encoding, dtype):
    dtype = jnp.dtype(dtype)
    width = 8 * codecs.word_bytes(dtype)
    powers = {1 << bit for bit in range(width)}
    extremes = {0, *powers, *(p - 1 for p in powers), *((1 << width) - p for p in powers)}
    if width == 8:
        extremes = range(2 if dtype.kind == "b" else 256)
    words = np.array(sorted(extremes), f"u{width // 8}")
    new, old = (each.ravel().view(dtype) for each in np.meshgrid(words, words))
    block = old.copy()
    support.without_planes(encoding, block, support.planes_of(encoding, new, old))
    assert block.tobytes() == new.tobytes()


@EACH_DIFFERENCE
@given(pair=pairs())
def test_the_difference_of_equal_bits_is_zero_and_of_others_is_not(encoding, pair):
    new, old = pair
    assert not support.planes_of(encoding, new, new.copy()).any()
    differ = new.tobytes() != old.tobytes()
    assert support.planes_of(encoding, new, old).any() == differ


@EACH_WHOLE
@given(pair=pairs())
def test_elements_by_themselves_need_no_old_ones(encoding, pair):
    new, old = pair
    planes = support.planes_of(encoding, new)
    assert planes.tobytes() == support.planes_of(encoding, new, old).tobytes()
    for before in (old, new):
        block = before.copy()
        support.without_planes(encoding, block, planes)
        assert block.tobytes() == new.tobytes()


@given(pair=pairs())
def test_both_ways_of_storing_elements_by_themselves_make_the_same_planes(pair):
    planes = [support.planes_of(encoding, pair[0]) for encoding in WHOLE]
    assert planes[0].tobytes() == planes[1].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
def test_the_highest_plane_has_the_exponent_and_the_lowest_bit_has_the_sign(dtype):
    dtype = jnp.dtype(dtype)
    values = np.array([1.0, -1.0, 1.5, -1.5, 2.0, 0.0, -0.0]).astype(dtype)
    planes = support.planes_of(Encoding.EXPONENTS, values)
    assert (planes[0] & 1).tolist() == [0, 1, 0, 1, 0, 0, 1]
    without_sign = support.planes_of(Encoding.EXPONENTS, np.abs(values))
    assert (planes[-1] == without_sign[-1]).all()
    bits = np.abs(values).view(f"u{dtype.itemsize}")
    assert (planes[-1] == (bits << 1) >> (8 * dtype.itemsize - 8)).all()


@given(pair=pairs())
def test_the_first_plane_has_the_lowest_byte_of_every_word(pair):
    new, old = pair
    planes = support.planes_of(Encoding.XOR, new, old)
    changed = words_of(new) ^ words_of(old)
    for place, plane in enumerate(planes):
        assert (plane == (changed >> (8 * place)) & 0xFF).all()


@pytest.mark.parametrize("width_bytes", [1, 2, 4, 8])
def test_small_steps_up_and_down_become_small_words(width_bytes):
    steps = [0, -1, 1, -2, 2, -64, 63]
    old = np.full(len(steps), 1 << (8 * width_bytes - 1), f"u{width_bytes}")
    planes = support.planes_of(Encoding.SUBTRACT, old + np.array(steps).astype(old.dtype), old)
    assert planes[0].tolist() == [0, 1, 2, 3, 4, 127, 126]
    assert not planes[1:].any()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_the_parts_of_a_complex_number_are_words_of_their_own(dtype):
    old = np.array([1 + 2j, 3 + 4j], dtype)
    new = old.copy()
    new.imag[0] = np.nextafter(old.imag[0], old.imag.dtype.type(9))
    planes = support.planes_of(Encoding.SUBTRACT, new, old)
    assert codecs.word_bytes(old.dtype) == old.itemsize // 2
    assert planes[0].tolist() == [0, 2, 0, 0]
    assert not planes[1:].any()


# How a leaf is stored.


@given(st.lists(pairs(), max_size=3), st.booleans())
def test_a_leaf_is_the_same_only_if_no_bit_of_any_block_differs(drawn, alike):
    blocks = [(old.copy(), old) if alike else (new, old) for new, old in drawn]
    is_same = all(new.tobytes() == old.tobytes() for new, old in blocks)
    assert (codecs.choose_difference(iter(blocks)) is Encoding.SAME) == is_same


@EACH_DTYPE
@given(seed=seeds, data=st.data())
def test_one_flipped_bit_is_not_the_same(dtype, seed, data):
    old = any_bits(np.random.default_rng(seed), (5, 3), dtype)
    flipped = data.draw(st.integers(0, old.nbytes - 1)) * 8
    if dtype != "bool":
        flipped += data.draw(st.integers(0, 7))
    new = one_bit_flipped(old, flipped)
    blocks = [(old, old), (new, old), (old, old)]
    assert codecs.choose_difference(blocks) is not Encoding.SAME
    assert codecs.choose_difference([(old, old)] * 3) is Encoding.SAME


@pytest.mark.parametrize("size", [4, 4000])
@pytest.mark.parametrize(
    ("new", "old"),
    [(0.0, -0.0), (0x7FC00000, 0x7FC00001), (0x7FC00000, 0xFFC00000), (0x7F800001, 0x7FC00001)],
    ids=str,
)
def test_zeros_of_other_sign_and_nans_of_other_bits_are_not_the_same(new, old, size):
    def filled(value):
        if isinstance(value, int):
            return np.full(size, value, np.uint32).view(np.float32)
        return np.full(size, value, np.float32)

    assert codecs.choose_difference([(filled(new), filled(old))]) is not Encoding.SAME
    assert codecs.choose_difference([(filled(new), filled(new))]) is Encoding.SAME


def test_a_difference_needs_more_than_a_kibibyte_of_changed_blocks():
    empty, old = np.empty((3, 0), np.float32), np.arange(100_000, dtype=np.float32)
    assert codecs.choose_difference([(empty, empty.copy())]) is Encoding.SAME
    assert codecs.choose_difference([]) is Encoding.SAME
    for changed, expected in [(1, Encoding.RAW), (256, Encoding.RAW), (257, Encoding.XOR)]:
        small = old[:changed]
        new = one_bit_flipped(small, 0)
        assert codecs.choose_difference([(new, small)]) is expected
        assert codecs.choose_difference([(old, old), (new, small), (old, old)]) is expected
    few = [(one_bit_flipped(old[:100], 0), old[:100])] * 3
    assert codecs.choose_difference(few[:2]) is Encoding.RAW
    assert codecs.choose_difference(few) in DIFFERENCES


@pytest.mark.parametrize("position", [0, 5000, 50_000, 99_999])
def test_a_change_that_no_sample_meets_is_still_stored_as_a_difference(position):
    old = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    new = one_bit_flipped(old, 32 * position)
    assert codecs.choose_difference([(new, old)]) in DIFFERENCES
    assert codecs.choose_difference([(old, old), (new, old)]) in DIFFERENCES


RNG = np.random.default_rng(0)
DIRECTION = RNG.normal(size=50_000)
WEIGHTS = RNG.normal(scale=0.02, size=50_000).astype(np.float32)
SMALL_STEPS = RNG.integers(-3, 4, 50_000)
COUNTS, NOISE = (RNG.integers(0, 2**31, size).astype(np.int32) for size in (9000, 400))


def stepped(values):
    """Some ulps away."""
    words = values.view(f"u{values.itemsize}")
    return (words + SMALL_STEPS.astype(words.dtype)).view(values.dtype), values


def lowered(rate, dtype="float32"):
    """Weights after a step of one size for each."""
    old = WEIGHTS.astype(jnp.dtype(dtype))
    return (old.astype(np.float32) - rate * np.sign(DIRECTION)).astype(old.dtype), old


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
    assert codecs.choose_difference([(new, old)]) is Encoding.SUBTRACT
    xor, subtract = (stored_bytes(each, new, old) for each in DIFFERENCES)
    assert subtract < xor < 1.1 * old.nbytes
    square = [each[:8100].reshape(90, 90) for each in (new, old)]
    for order in ("F", "C"):
        copies = [np.copy(each, order=order) for each in square]
        for pair in ((copies[0], square[1]), (square[0], copies[1])):
            assert codecs.choose_difference([pair]) is Encoding.SUBTRACT
        assert codecs.choose_difference([(copies[1], square[1])]) is Encoding.SAME


def stored_bytes(encoding, new, old):
    return len(zlib.compress(support.planes_of(encoding, new, old), 1))


def test_other_changes_are_stored_otherwise():
    new, old = lowered(1e-6, "bfloat16")
    assert 0.005 < (new != old).mean() < 0.5
    chosen = codecs.choose_difference([(new, old)])
    assert chosen in DIFFERENCES
    assert stored_bytes(chosen, new, old) < new.nbytes / 10
    toggled = RNG.integers(0, 2, COUNTS.size).astype(np.int32) << 6
    assert codecs.choose_difference([(COUNTS ^ toggled, COUNTS)]) is Encoding.XOR
    for dtype in DTYPES:
        bits = RNG.integers(0, 256, (2, 60_000), np.uint8).view(jnp.dtype(dtype))
        assert codecs.choose_difference([tuple(bits)]) is Encoding.RAW, dtype


def test_the_largest_changed_block_decides():
    alike, counted = (COUNTS, COUNTS), (COUNTS[:6000] + 1, COUNTS[:6000])
    for blocks in ([(NOISE, COUNTS[:400]), counted], [counted, (NOISE, COUNTS[:400])]):
        assert codecs.choose_difference([alike, *blocks]) is Encoding.SUBTRACT
    replaced = RNG.permutation(COUNTS)
    assert codecs.choose_difference([counted, (replaced, COUNTS)]) is Encoding.RAW


# How a leaf is stored by itself.


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1e-6, 0.02, 1.0, 1e4])
def test_only_the_exponents_of_noise_are_compressed(dtype, scale):
    noise = np.random.default_rng(0).normal(scale=scale, size=50_000).astype(jnp.dtype(dtype))
    assert codecs.choose_whole([noise]) is Encoding.EXPONENTS
    planes = support.planes_of(Encoding.EXPONENTS, noise)
    highest_bytes = len(zlib.compress(planes[-1], 1))
    assert highest_bytes < 0.6 * noise.size
    assert len(zlib.compress(planes[:-1], 1)) > 0.99 * planes[:-1].nbytes  # noise, indeed
    assert len(zlib.compress(noise.tobytes(), 1)) > planes[:-1].nbytes + highest_bytes


def sparse(dtype):
    rng = np.random.default_rng(0)
    return (rng.normal(size=20_000) * (rng.random(20_000) < 0.1)).astype(jnp.dtype(dtype))


PREDICTABLE = {
    "sparse float32": sparse("float32"),
    "sparse bfloat16": sparse("bfloat16"),
    "small integers": np.random.default_rng(0).integers(-50, 50, 20_000).astype(np.int32),
    "whole numbers": np.random.default_rng(0).integers(0, 9, 20_000).astype(np.float32),
    "few values": np.random.default_rng(0).choice([0.5, -0.25, 3.0], 20_000).astype(jnp.bfloat16),
    "bfloat16 in float32": np.random.default_rng(0)
    .normal(size=20_000)
    .astype(jnp.bfloat16)
    .astype(np.float32),
    "zeros": np.zeros(20_000, np.float64),
    "complex zeros": np.zeros(20_000, np.complex64),
}


@pytest.mark.parametrize("name", PREDICTABLE)
def test_every_plane_of_sparse_and_integer_like_elements_is_compressed(name):
    values = PREDICTABLE[name]
    assert codecs.choose_whole([values]) is Encoding.PLANES
    planes = support.planes_of(Encoding.PLANES, values)
    low_bytes = len(zlib.compress(planes[:-1], 1))
    assert low_bytes < 0.95 * planes[:-1].nbytes


@EACH_DTYPE
def test_random_bits_and_elements_of_one_byte_by_themselves(dtype):
    bits = any_bits(np.random.default_rng(0), (60_000,), dtype)
    expected = Encoding.RAW if dtype != "bool" else Encoding.EXPONENTS
    assert codecs.choose_whole([bits]) is expected
    few = np.random.default_rng(0).integers(0, 2, 20_000).astype(jnp.dtype(dtype))
    if few.itemsize == 1:  # they are their own highest plane
        assert codecs.choose_whole([few]) is Encoding.EXPONENTS
        assert support.planes_of(Encoding.EXPONENTS, few).shape == (1, few.size)


def test_the_largest_block_decides_how_a_leaf_is_stored_by_itself_and_small_ones_are_raw():
    noise = np.random.default_rng(0).normal(size=9000).astype(np.float32)
    zeros = np.zeros(8000, np.float32)
    words = np.random.default_rng(0).integers(0, 2**32, 400_000, dtype=np.uint32)
    half = words.copy()
    half[200_000:] = 0
    for blocks, expected in (
        ([noise, zeros], Encoding.EXPONENTS),
        ([noise[:7000], zeros], Encoding.PLANES),
        ([zeros[:256]], Encoding.RAW),
        ([zeros[:257]], Encoding.PLANES),
        ([zeros[:9], zeros[:257], zeros[:0]], Encoding.PLANES),
        ([zeros[:0]], Encoding.RAW),
        ([words], Encoding.RAW),
        ([half], Encoding.PLANES),  # a sample meets every part
        ([half[::-1]], Encoding.PLANES),
    ):
        for each in (blocks, blocks[::-1]):
            assert codecs.choose_whole(iter(each)) is expected


@pytest.mark.parametrize("whole", ["EXPONENTS", "PLANES", "RAW"])
def test_elements_that_do_not_follow_from_the_old_ones_are_stored_in_their_own_best_way(whole):
    rng = np.random.default_rng(0)
    new, old = {
        "EXPONENTS": tuple(rng.normal(size=(2, 20_000)).astype(np.float32)),
        "PLANES": (PREDICTABLE["small integers"], rng.integers(0, 2**31, 20_000).astype(np.int32)),
        "RAW": tuple(rng.integers(0, 2**32, (2, 20_000), dtype=np.uint32)),
    }[whole]
    assert codecs.choose_difference([(new, old)]) is Encoding[whole]
    assert codecs.choose_whole([new]) is Encoding[whole]


@given(seed=seeds, shape=shapes, dtype=dtypes)
def test_the_choice_of_storing_by_itself_is_never_a_difference(seed, shape, dtype):
    block = any_bits(np.random.default_rng(seed), shape, dtype)
    assert codecs.choose_whole([block]) in (Encoding.RAW, *WHOLE)


@EACH
@pytest.mark.parametrize("size", [16_383, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("low_count", [0, 1, 4])
def test_many_words_are_split_block_by_block(encoding, size, low_count):
    rng = np.random.default_rng(size)
    old, new = (rng.integers(0, 2**32, size, np.uint32) for _ in range(2))
    low, high = np.empty((low_count, size), np.uint8), np.empty((4 - low_count, size), np.uint8)
    codecs.encode(encoding, new, old, low, high)
    assert np.array_equal(np.concatenate([low, high]), support.planes_of(encoding, new, old))
    codecs.decode(encoding, old, low, high)
    assert np.array_equal(old, new)
