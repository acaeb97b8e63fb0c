"""Codes of changed elements give back what they took, in few bits, and refuse other bytes."""

import hashlib
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.errors import IntegrityError
from adacheck_jax.format.boxes import Box
from adacheck_jax.format.byte_loops import fingerprint_of
from adacheck_jax.format.manifest import ITEMSIZES_BYTES, Leaf
from adacheck_jax.publish import differences, weights
from adacheck_jax.publish.records import Leaves
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


KINDS = {
    "a": ((300, 5), "bfloat16"),
    "b": ((), "float32"),
    "c": ((0, 3), "float32"),
    "d": ((7,), "complex64"),
    "e": ((40,), "bool"),
    "f": ((11,), "float64"),
    "g": ((800,), "bfloat16"),
    "h": ((6, 9), "complex128"),
}


def leaves_in(shares: int) -> Leaves:
    """Leaves of which each share has pieces, by turns cut along the first and the last axis."""
    leaves = []
    for number, (path, (shape, dtype)) in enumerate(KINDS.items()):
        cuts = [(0, length) if length else (0,) for length in shape]
        if shape and shape[axis := -(number % 2)] > 1:
            ends = np.linspace(0, shape[axis], 2 * shares + 1)[1:] if shares > 1 else shape[axis:]
            cuts[axis] = tuple(sorted({0, *(int(end) for end in ends[: 2 * shares])}))
        count = math.prod(max(1, len(points) - 1) for points in cuts)
        owners = tuple((number + n) % shares for n in range(count))
        leaves.append(Leaf(path, shape, dtype, ITEMSIZES_BYTES[dtype], None, tuple(cuts), owners))
    return Leaves(tuple(leaves), shares)


LEAVES = leaves_in(1)
SHARED = pytest.mark.parametrize("leaves", [LEAVES, leaves_in(3)], ids=["alone", "shared"])


def drawn(seed: int) -> list[np.ndarray]:
    made = []
    for leaf in LEAVES.leaves:
        bits = hashlib.shake_128(f"{seed} {leaf.path}".encode()).digest(leaf.nbytes)
        data = np.frombuffer(bits, np.uint8) & (1 if leaf.dtype == "bool" else 255)
        made.append(data.astype(np.uint8).view(leaf.dtype).reshape(leaf.shape))
    return made


def changed(arrays: list[np.ndarray], share: float, seed: int) -> list[np.ndarray]:
    rng, others = np.random.default_rng(seed), drawn(seed + 1)
    return [
        np.where(rng.random(x.shape) < share, y, x) for x, y in zip(arrays, others, strict=True)
    ]


def bits_of(arrays: list[np.ndarray]) -> list[bytes]:
    return [each.tobytes() for each in arrays]


def weights_of(leaves: Leaves, arrays: list[np.ndarray]) -> Weights:
    made = Weights(leaves, range(leaves.shares))
    for index, array in enumerate(arrays):
        for box in made.blocks[index]:
            made.put(index, box, array[(*box.slices, ...)])
    return made


def arrays_of(found: Weights) -> list[np.ndarray]:
    return [found.block(i, Box.full(x.shape)) for i, x in enumerate(found.leaves.leaves)]


def words_of(array: np.ndarray, leaf: Leaf) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{leaf.word_bytes}")


@SHARED
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 1])
@pytest.mark.parametrize("most", [64, 1000, differences.SEGMENT])
def test_deltas_of_all_shares_lead_from_one_version_to_the_next(share, most, leaves, monkeypatch):
    monkeypatch.setattr(differences, "SEGMENT", most)
    before, after = drawn(0), changed(drawn(0), share, 5)
    found, made = weights_of(leaves, before), weights_of(leaves, after)
    changes, count = [], 0
    for number in range(leaves.shares):
        data, own = weights.encode(found, made, number)
        assert bool(data) == bool(share) == bool(own)
        changes += weights.decode(leaves, number, data, "here") if data else []
        count += own
    found.apply(changes)
    assert bits_of(arrays_of(found)) == bits_of(after)
    assert found.fingerprints() == [fingerprint_of(x) for x in after]
    places = {i: np.sort(np.concatenate(each)) for i, each in found.changed(changes).items()}
    for i, (leaf, old, new) in enumerate(zip(leaves.leaves, before, after, strict=True)):
        wanted = np.flatnonzero(words_of(old, leaf) != words_of(new, leaf))
        assert np.array_equal(places.pop(i, []), wanted), leaf
        count -= wanted.size
    assert not places
    assert not count


def test_the_code_of_a_delta_stays_as_it_is():
    """Other bytes would be another format version."""
    pairs = zip(drawn(0), drawn(1), strict=True)
    after = [np.where(np.arange(x.size).reshape(x.shape) % 7 == 0, y, x) for x, y in pairs]
    for leaves, digest in ((LEAVES, "1ac67adefce768d4"), (leaves_in(3), "e6dcd0782a5a6124")):
        made = [weights_of(leaves, x) for x in (drawn(0), after)]
        data = b"".join(weights.encode(*made, share)[0] for share in range(leaves.shares))
        assert hashlib.sha256(data).hexdigest()[:16] == digest


@SHARED
def test_a_base_comes_back_part_by_part(leaves, monkeypatch):
    monkeypatch.setattr(weights, "PART_BYTES", 100)
    before, after = weights_of(leaves, drawn(3)), Weights(leaves, range(leaves.shares))
    for share in range(leaves.shares):
        for number in range(weights.part_count(leaves, share)):
            data = before.part(share, number)
            after.set_part(share, number, data)
            with pytest.raises(IntegrityError, match="part"):
                after.set_part(share, number, data[:-1])
    assert bits_of(arrays_of(after)) == bits_of(drawn(3))


def test_small_steps_of_bfloat16_take_a_hundredth_where_one_per_cent_changes():
    rng = np.random.default_rng(0)
    master = rng.standard_normal(1 << 20, np.float32) * np.float32(0.02)
    moved = master + np.float32(2e-7) * np.sign(rng.standard_normal(master.size, np.float32))
    leaf = Leaf("w", master.shape, "bfloat16", 2, None, ((0, master.size),), (0,))
    leaves = Leaves((leaf,), 1)
    before, after = (x.astype(ml_dtypes.bfloat16) for x in (master, moved))
    data, count = weights.encode(weights_of(leaves, [before]), weights_of(leaves, [after]), 0)
    assert 0.008 < count / master.size < 0.012
    assert 100 * len(data) < leaves.nbytes


@given(st.data())
def test_bytes_that_are_no_delta_are_refused_or_lead_to_some_words(data):
    before = drawn(0)
    after = changed(before, 0.3, 1)
    code = bytearray(weights.encode(weights_of(LEAVES, before), weights_of(LEAVES, after), 0)[0])
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(code) - 1))
        code[at] = data.draw(st.integers(0, 255))
    code = code[: data.draw(st.sampled_from([len(code), len(code) - 1, len(code) // 2]))]
    try:
        found = weights.decode(LEAVES, 0, bytes(code), "here")
    except IntegrityError:
        return
    for each in found:
        assert (np.diff(each.positions) > 0).all()
        assert each.positions[0] >= 0
        assert each.positions[-1] < Weights(LEAVES, [0]).words[0, each.width].size
