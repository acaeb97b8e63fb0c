"""Each operation does what it says to shapes and elements, and its inverse gives the bits back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adacheck_jax.layout import operations as ops
from adacheck_jax.layout.operations import Kind
from tests.strategies import DTYPES, any_bits


@st.composite
def cases(draw):
    """An operation that loses nothing, and the shapes that it takes."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    new = draw(st.integers(-len(shape) - 1, len(shape)))
    count, groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))

    def longer(length):
        changed = list(shape)
        changed[axis] = length
        return tuple(changed)

    sizes = [groups * n for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))]
    return draw(
        st.sampled_from(
            [
                (ops.Stack(new), [shape] * count),
                (ops.Unstack(shape[axis], axis), [shape]),
                (ops.Fuse(axis, groups), [longer(n) for n in sizes]),
                (ops.Split(axis, tuple(sizes), groups), [longer(sum(sizes))]),
                (ops.Resize(axis, shape[axis] + count - 1, is_longer=True), [shape]),
                (ops.Stack(new, count), [shape]),
                (ops.Transpose(tuple(draw(st.permutations(range(len(shape)))))), [shape]),
            ]
        )
    )


@given(cases(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_the_inverse_gives_the_bits_back(case, dtype, seed):
    operation, shapes = case
    kinds = [Kind(shape, dtype) for shape in shapes]
    arrays = [any_bits(np.random.default_rng(seed + k), s, dtype) for k, s in enumerate(shapes)]
    results = operation.apply(np, arrays)
    assert [Kind(x.shape, str(x.dtype)) for x in results] == operation.kinds(kinds)
    inverse = operation.inverse(kinds)
    assert inverse is not None
    back = inverse.apply(np, results)
    assert inverse.kinds(operation.kinds(kinds)) == kinds
    for old, new in zip(arrays, back, strict=True):
        assert old.tobytes() == np.ascontiguousarray(new).tobytes()


@given(cases())
def test_the_axes_of_a_leaf_are_found_again_in_the_result(case):
    operation, shapes = case
    (result, *_) = operation.kinds([Kind(shape, "int32") for shape in shapes])
    for shape in shapes:
        axes = operation.source_axes(len(shape))
        assert len(axes) == len(shape)
        known = [k for k in axes if k is not None]
        assert len({*known}) == len(known)
        assert all(0 <= k < len(result.shape) for k in known)


def test_groups_put_the_halves_beside_each_other():
    q, k = np.arange(4), np.arange(10, 14)
    (fused,) = ops.Fuse(0, 2).apply(np, [q, k])
    np.testing.assert_array_equal(fused, [0, 1, 10, 11, 2, 3, 12, 13])


def test_an_average_of_narrow_elements_is_taken_in_float32():
    copies = jnp.full((300, 2), 1.0078125, jnp.bfloat16)
    for xp, array in ((jnp, copies), (np, np.asarray(copies))):
        (mean,) = ops.Average(0).apply(xp, [array])
        assert str(mean.dtype) == "bfloat16"
        np.testing.assert_array_equal(np.asarray(mean, np.float32), [1.0078125] * 2)


@pytest.mark.parametrize(
    ("operation", "taken", "told"),
    [
        (ops.Stack(0), [Kind((2,), "int8"), Kind((3,), "int8")], "one shape"),
        (ops.Stack(3), [Kind((2,), "int8")], "axis 3"),
        (ops.Unstack(3, 0), [Kind((2,), "int8")], "expected 3"),
        (ops.Fuse(0, 2), [Kind((3,), "int8")], "groups that divide 3"),
        (ops.Fuse(0), [Kind((3, 1), "int8"), Kind((3, 2), "int8")], "one shape"),
        (ops.Split(0, (1, 1)), [Kind((3,), "int8")], "add up to 3"),
        (ops.Resize(0, 2, is_longer=True), [Kind((3,), "int8")], "at least 3"),
        (ops.Resize(0, 4, is_longer=False), [Kind((3,), "int8")], "at most 3"),
        (ops.Stack(0, 0), [Kind((3,), "int8")], "at least one copy"),
        (ops.Average(0), [Kind((3,), "int8")], "have a mean"),
        (ops.Transpose((0, 0)), [Kind((3, 2), "int8")], "in some order"),
    ],
)
def test_what_an_operation_cannot_take_is_refused(operation, taken, told):
    with pytest.raises(ValueError, match=told):
        operation.kinds(taken)
