"""Hypothesis strategies for grids of boxes, and arrays to fill them with."""

import math

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from adacheck_jax.format.boxes import Box

DTYPES = [
    *("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("bool", "int4", "uint4", "complex64", "complex128"),
]
"""Every type of elements that a leaf may have."""


def cuts(max_axes=3, max_length=12, max_pieces=4):
    """Cut points of a grid, zero-length axes and scalars included."""
    inner = st.sets(st.integers(1, max_length), max_size=max_pieces)
    return st.lists(inner.map(lambda points: (0, *sorted(points))), max_size=max_axes).map(tuple)


def shape_of(cuts):
    return tuple(points[-1] for points in cuts)


@st.composite
def box_pairs(draw, max_axes=3, max_length=8):
    """A shape and two boxes inside it, empty ones included."""
    shape = tuple(draw(st.lists(st.integers(0, max_length), max_size=max_axes)))
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def boxes_in(shape):
    def ordered(length):
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)

    return st.tuples(*map(ordered, shape)).map(
        lambda bounds: Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    )


def elements(box, shape):
    """The elements of a box, as a mask over an array of this shape."""
    mask = np.zeros(shape, bool)
    mask[box.slices] = True
    return mask


def numbered(shape):
    """An array whose elements are all different."""
    return np.arange(math.prod(shape)).reshape(shape)


def any_bits(rng, shape, dtype):
    """An array of random bits; NaN with any payload, subnormal numbers and -0.0 are among them."""
    dtype = jnp.dtype(dtype)
    data = rng.integers(0, 256, math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return (data & 1 if dtype.kind == "b" else data).view(dtype).reshape(shape)
