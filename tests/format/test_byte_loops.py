"""Compiled loops and numpy give the same bits, and nobody waits for the compiler."""

import functools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format import byte_loops, compiled_loops, fingerprint

WIDTHS_BYTES = (1, 2, 4, 8)
WAYS = (byte_loops.ROTATE, byte_loops.XOR, byte_loops.SUBTRACT)
sums_of = functools.cache(compiled_loops.multilinear)
split_of = functools.cache(compiled_loops.split)
join_of = functools.cache(compiled_loops.join)

seeds = st.integers(0, 2**32)
sizes = st.sampled_from([0, 1, 7, 4095, 4097, 16384, 16385, 40000])
shapes = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.sampled_from(
        [[1024], [1025], [5000], [70_000], [140_000], [3, 70_000], [2049, 3], [70_000, 2]]
    ),
    st.sampled_from([[300, 257], [1, 1030, 2], [2, 3, 4, 5, 6], [1, 1, 200_000]]),
)
EACH_WIDTH = pytest.mark.parametrize("width_bytes", WIDTHS_BYTES)


def words_of(rng, shape, width_bytes):
    return rng.integers(0, 2 ** (8 * width_bytes), shape, np.dtype(f"u{width_bytes}"))


@given(st.data(), seeds, shapes, st.sampled_from(WIDTHS_BYTES[:3]))
def test_sums_are_equal(data, seed, shape, width_bytes):
    words = words_of(np.random.default_rng(seed), shape, width_bytes)
    positions = st.integers(0, 5000)
    starts = data.draw(st.lists(positions, min_size=len(shape), max_size=len(shape)))
    assert sums_of(width_bytes)(words, starts) == fingerprint.multilinear(words, starts)


@given(st.lists(st.tuples(seeds, shapes, st.sampled_from(["u1", "u2", "u4", "f8"])), max_size=5))
def test_many_blocks_are_summed_up_in_one_call(given_blocks):
    blocks = [
        (np.random.default_rng(seed).integers(0, 255, shape).astype(dtype), (seed % 3000,))
        for seed, shape, dtype in given_blocks
    ]
    found = byte_loops.Fingerprints(blocks)
    for _ in range(2):  # numpy may do the first
        starts = [(*start, *[0] * (block.ndim - 1)) for block, start in blocks]
        pairs = zip((block for block, _ in blocks), starts, strict=True)
        assert found.sums() == [byte_loops.fingerprint_of(x, s) for x, s in pairs]
        byte_loops.wait_until_compiled()
        for block, _ in blocks:
            np.add(block, 1, out=block)


@EACH_WIDTH
@pytest.mark.parametrize("way", WAYS)
@given(seed=seeds, size=sizes, low_count=st.integers(0, 8))
def test_planes_are_equal_and_undone(way, width_bytes, seed, size, low_count):
    rng = np.random.default_rng(seed)
    old = words_of(rng, size, width_bytes)
    new = (
        old + rng.integers(0, 3, size).astype(old.dtype)
        if seed % 2
        else words_of(rng, size, width_bytes)
    )
    both = []
    for split in (split_of(width_bytes), byte_loops.split_by_numpy):
        planes = np.zeros((width_bytes, size), np.uint8)
        split(new, old, way, planes[:low_count], planes[low_count:])
        both.append(planes)
    assert np.array_equal(*both)
    for join in (join_of(width_bytes), byte_loops.join_by_numpy):
        words = old.copy()
        join(words, way, both[0][:low_count], both[0][low_count:])
        assert np.array_equal(words, new)


def test_calls_compile_nothing_further():
    array = np.arange(4096, dtype=np.uint32)
    frozen = np.frombuffer(array.tobytes(), np.uint32)  # of other flags
    planes = np.zeros((4, 4096), np.uint8)
    run_sum, run_split, run_join = sums_of(4), split_of(4), join_of(4)
    loops = (compiled_loops.multilinear_4, compiled_loops._split, compiled_loops._join)
    before = [len(loop.signatures) for loop in loops]
    for words in (array, frozen):
        run_sum(words, (0,))
        run_split(words, array, byte_loops.XOR, planes, planes[:0])
        run_join(words.copy(), byte_loops.XOR, planes, planes[:0])
    assert [len(loop.signatures) for loop in loops] == before


FIRST_USE = """
import sys, threading
import numpy as np
from adacheck_jax.format import byte_loops, planes
from adacheck_jax.device import fingerprint
assert "numba" not in sys.modules
array = np.arange(5000, dtype=np.float32)
started = threading.Event()
byte_loops.lower_priority = started.wait  # keeps the compiler from beginning
sums = [byte_loops.fingerprint_of(array)]
assert "numba" not in sys.modules
started.set()
byte_loops.wait_until_compiled()
assert "numba" in sys.modules
sums.append(byte_loops.fingerprint_of(array))
assert sums[0] == sums[1], sums
assert byte_loops._compiler.loop("multilinear", 4) is not None
"""


@pytest.mark.slow
def test_the_first_call_does_not_wait_for_the_compiler():
    subprocess.run([sys.executable, "-c", FIRST_USE], check=True, timeout=300)


NO_COMPILER = """
import sys
sys.modules["numba"] = None
import numpy as np
from adacheck_jax.format import byte_loops
words = np.arange(5000, dtype=np.uint32)
planes = np.zeros((4, 5000), np.uint8)
for _ in range(2):
    byte_loops.split(words, None, byte_loops.ROTATE, planes, planes[:0])
    byte_loops.wait_until_compiled()
byte_loops.join(found := np.zeros_like(words), byte_loops.ROTATE, planes, planes[:0])
assert np.array_equal(found, words)
"""


def test_without_a_compiler_numpy_goes_on():
    subprocess.run([sys.executable, "-c", NO_COMPILER], check=True, timeout=300, env={**os.environ})
