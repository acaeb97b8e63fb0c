"""Codes of changed elements give back what they took, in few bits, and refuse other bytes."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import IntegrityError
from adacheck_jax.publish import differences, weights
from adacheck_jax.publish.records import Leaves, PublishedLeaf


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


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
@pytest.mark.parametrize("most", [64, differences.SEGMENT])
def test_a_delta_leads_from_one_version_to_the_next(share, most, monkeypatch):
    segments = weights.segments_of
    monkeypatch.setattr(weights, "segments_of", lambda leaves: segments(leaves, most))
    before = drawn(0)
    after = changed(before, share, 5)
    found = weights.Weights(LEAVES, [np.array(each) for each in before])
    changes = found.changes_to(after)
    data = weights.encode(LEAVES, changes)
    found.apply(weights.decode(LEAVES, data, "here"))
    assert bits_of(found.arrays) == bits_of(after)
    assert weights.changed_count(changes) == sum(
        int((weights.words_of(x, e) != weights.words_of(y, e)).sum())
        for x, y, e in zip(before, after, LEAVES.leaves, strict=True)
    )


def test_segments_hold_each_word_once():
    for most in (1, 7, 64, 10_000):
        seen = [np.zeros(each.nbytes // each.word_bytes, int) for each in LEAVES.leaves]
        for segment in weights.segments_of(LEAVES, most):
            assert segment.size <= most
            for piece in segment.pieces:
                assert LEAVES.leaves[piece.leaf].word_bytes == segment.width
                seen[piece.leaf][piece.start : piece.stop] += 1
        assert all((each == 1).all() for each in seen)


def test_a_base_comes_back_part_by_part(monkeypatch):
    monkeypatch.setattr(weights, "PART_BYTES", 100)
    before = weights.Weights(LEAVES, drawn(3))
    after = weights.Weights.empty(LEAVES)
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
    changes = weights.Weights(leaves, [before]).changes_to([after])
    share = weights.changed_count(changes) / master.size
    assert 0.008 < share < 0.012
    assert 100 * len(weights.encode(leaves, changes)) < leaves.nbytes


@given(st.data())
def test_bytes_that_are_no_delta_are_refused_or_lead_to_some_words(data):
    before = drawn(0)
    code = bytearray(
        weights.encode(LEAVES, weights.Weights(LEAVES, before).changes_to(changed(before, 0.3, 1)))
    )
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(code) - 1))
        code[at] = data.draw(st.integers(0, 255))
    code = code[: data.draw(st.sampled_from([len(code), len(code) - 1, len(code) // 2]))]
    try:
        found = weights.decode(LEAVES, bytes(code), "here")
    except IntegrityError:
        return
    for each in found:
        size = LEAVES.leaves[each.leaf].nbytes // LEAVES.leaves[each.leaf].word_bytes
        assert (np.diff(each.positions) > 0).all()
        assert each.positions[0] >= 0
        assert each.positions[-1] < size
