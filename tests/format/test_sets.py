"""Sets of positions come back, and take about their entropy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format import sets


def entropy(share: float) -> float:
    """Bits an element of a set of independent elements."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 0.99])
def test_a_set_takes_three_per_cent_more_than_its_entropy(share):
    size = 1 << 21
    positions = np.flatnonzero(np.random.default_rng(0).random(size) < share)
    code = sets.encode(positions, size)
    assert np.array_equal(sets.decode(sets.Reader(code), size), positions)
    assert 8 * len(code) < 1.03 * entropy(share) * size + 8 * 2 * size / sets.BLOCK


def test_stretches_that_change_much_are_coded_apart():
    size, rng = 1 << 20, np.random.default_rng(0)
    mask = np.zeros(size, np.bool_)
    mask[: size // 64] = rng.random(size // 64) < 0.5
    positions = np.flatnonzero(mask)
    assert 8 * len(sets.encode(positions, size)) < 1.05 * size // 64 + 1000


@given(st.integers(0, 3 * sets.BLOCK + 5), st.floats(0, 1), st.integers(0, 9))
def test_every_set_comes_back(size, share, seed):
    positions = np.flatnonzero(np.random.default_rng(seed).random(size) < share)
    reader = sets.Reader(sets.encode(positions, size))
    assert np.array_equal(sets.decode(reader, size), positions)
    reader.finish()


@given(st.data())
def test_other_bytes_are_refused_or_are_a_set(data):
    size = 2 * sets.BLOCK + 100
    positions = np.flatnonzero(np.random.default_rng(0).random(size) < 0.02)
    code = bytearray(sets.encode(positions, size))
    for _ in range(data.draw(st.integers(1, 4))):
        code[data.draw(st.integers(0, len(code) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = sets.decode(sets.Reader(bytes(code)), size)
    except ValueError:
        return
    assert (np.diff(found) > 0).all()
    assert found.size == 0 or (found[0] >= 0 and found[-1] < size)
