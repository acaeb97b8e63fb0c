"""Codes of changed elements give back what they took, in few bits, and refuse other bytes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import IntegrityError
from adacheck_jax.publish import differences, weights
from adacheck_jax.publish.records import Leaves, PublishedLeaf
from adacheck_jax.publish.weights import Weights


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5000), st.integers(0, 9), st.integers(1, 64))
def test_every_step_comes_back(width, size, seed, bits):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**63, size, np.uint64) << np.uint64(1)
    steps = (words >> np.uint64(64 - min(bits, 8 * width))).astype(f"u{width}")
    steps[:: 1 + seed] = 1 << (8 * width - 1)  # the lowest number, which has no opposite
    positions = np.flatnonzero(steps)
    code = differences.encode(positions, steps[positions], size)
    found, values = differences.decode(code, size, width)
    assert np.array_equal(found, positions)
    assert np.array_equal(values, steps[positions])
    assert values.dtype == steps.dtype


LEAVES = Leaves(
    (
        PublishedLeaf("a", (300, 5), "bfloat16"),
        PublishedLeaf("b", (), "float32"),
        PublishedLeaf("c", (0, 3), "float32"),
        PublishedLeaf("d", (7,), "complex64"),
        PublishedLeaf("e", (40,), "bool"),
        PublishedLeaf("f", (11,), "float64"),
        PublishedLeaf("g", (800,), "bfloat16"),
    )
)


def drawn(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    made = []
    for leaf in LEAVES.leaves:
        data = rng.integers(0, 2 if leaf.dtype == "bool" else 256, leaf.nbytes, np.uint8)
        made.append(data.view(leaf.dtype).reshape(leaf.shape))
    return made


def changed(arrays: list[np.ndarray], share: float, seed: int) -> list[np.ndarray]:
    rng, others = np.random.default_rng(seed), drawn(seed + 1)
    return [
        np.where(rng.random(x.shape) < share, y, x) for x, y in zip(arrays, others, strict=True)
    ]


def bits_of(arrays: list[np.ndarray]) -> list[bytes]:
    return [each.tobytes() for each in arrays]


def weights_of(leaves: Leaves, arrays: list[np.ndarray]) -> Weights:
    made = Weights(leaves)
    for memory, array in zip(made.arrays, arrays, strict=True):
        memory[...] = array
    return made


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
@pytest.mark.parametrize("most", [64, 1000, differences.SEGMENT])
def test_a_delta_leads_from_one_version_to_the_next(share, most, monkeypatch):
    monkeypatch.setattr(differences, "SEGMENT", most)
    before, after = drawn(0), changed(drawn(0), share, 5)
    found, made = weights_of(LEAVES, before), weights_of(LEAVES, after)
    data, count = weights.encode(found, made)
    assert bool(data) == bool(share)
    changes = weights.decode(LEAVES, data, "here") if data else []
    found.apply(changes)
    assert bits_of(found.arrays) == bits_of(after)
    places = {i: np.concatenate(each) for i, each in found.changed(changes).items()}
    old = weights_of(LEAVES, before)
    for i, leaf in enumerate(LEAVES.leaves):
        wanted = np.flatnonzero(old.words_of(i) != made.words_of(i))
        assert np.array_equal(places.pop(i, []), wanted), leaf
        count -= wanted.size
    assert not places
    assert not count


def test_words_lie_one_after_another_in_the_order_of_their_leaves():
    made = weights_of(LEAVES, drawn(1))
    words = {1: "e", 2: "ag", 4: "bcd", 8: "f"}
    for width, names in words.items():
        bits = b"".join(
            made.arrays[i].tobytes() for i, leaf in enumerate(LEAVES.leaves) if leaf.path in names
        )
        assert made.words[width].tobytes() == bits


def test_a_base_comes_back_part_by_part(monkeypatch):
    monkeypatch.setattr(weights, "PART_BYTES", 100)
    before, after = weights_of(LEAVES, drawn(3)), Weights(LEAVES)
    for number in range(weights.part_count(LEAVES)):
        data = before.part(number)
        after.set_part(number, data)
        with pytest.raises(IntegrityError, match="part"):
            after.set_part(number, data[:-1])
    assert bits_of(after.arrays) == bits_of(before.arrays)


def test_small_steps_of_bfloat16_take_a_hundredth_where_one_per_cent_changes():
    rng = np.random.default_rng(0)
    master = rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)
    moved = master + np.float32(2e-7) * np.sign(rng.standard_normal(master.size, np.float32))
    leaves = Leaves((PublishedLeaf("w", master.shape, "bfloat16"),))
    before, after = (x.astype(ml_dtypes.bfloat16) for x in (master, moved))
    data, count = weights.encode(weights_of(leaves, [before]), weights_of(leaves, [after]))
    assert 0.008 < count / master.size < 0.012
    assert 100 * len(data) < leaves.nbytes


@given(st.data())
def test_bytes_that_are_no_delta_are_refused_or_lead_to_some_words(data):
    before = drawn(0)
    after = changed(before, 0.3, 1)
    code = bytearray(weights.encode(weights_of(LEAVES, before), weights_of(LEAVES, after))[0])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(code) - 1))
        code[at] = data.draw(st.integers(0, 255))
    code = code[: data.draw(st.sampled_from([len(code), len(code) - 1, len(code) // 2]))]
    try:
        found = weights.decode(LEAVES, bytes(code), "here")
    except IntegrityError:
        return
    for each in found:
        assert (np.diff(each.positions) > 0).all()
        assert each.positions[0] >= 0
        assert each.positions[-1] < Weights(LEAVES).words[each.width].size
