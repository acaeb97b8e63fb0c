"""Sets of positions come back, and take little more than their entropy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.format.encodings import sets


def entropy(share: float) -> float:
    """Bits an element of a set of independent elements."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def drawn(size: int, share: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(size) < share


@pytest.mark.parametrize("share", [0.001, 0.01, 0.03, 0.1, 0.2, 0.4, 0.5])
def test_a_set_takes_little_more_than_its_entropy(share):
    size = 1 << 21
    mask = drawn(size, share)
    code = sets.encode(mask)
    assert np.array_equal(sets.decode(sets.Reader(code), size), np.flatnonzero(mask))
    assert 8 * code.size < 1.18 * entropy(share) * size + 100


@given(st.integers(0, 5000), st.floats(0, 1), st.integers(0, 9))
def test_every_set_comes_back_and_no_more_is_read(size, share, seed):
    mask = drawn(size, share, seed)
    code = sets.encode(mask)
    reader = sets.Reader(np.concatenate([code, np.uint8([7])]))
    assert np.array_equal(sets.decode(reader, size), np.flatnonzero(mask))
    assert reader.take(1).tolist() == [7]
    reader.end()
    assert code.size <= size / 8 + 9 + 3, "a bitmap is hardly shorter"  # head, ends of parts


@given(st.sampled_from([0.02, 0.4]), st.data())
def test_other_bytes_are_refused_or_are_a_set(share, data):
    size = 5000
    code = sets.encode(drawn(size, share)).tolist()
    for _ in range(data.draw(st.integers(1, 4))):
        code[data.draw(st.integers(0, len(code) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = sets.decode(sets.Reader(np.array(code, np.uint8)), size)
    except ValueError:
        return
    assert (np.diff(found) > 0).all()
    assert found.size == 0 or (found[0] >= 0 and found[-1] < size)
