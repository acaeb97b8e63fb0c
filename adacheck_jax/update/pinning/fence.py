"""The fence: an operation that changes no bit, and that no compiler moves a rounding across.

A fence is ``bitcast(bitcast(x, uint) | z)``. The integer ``z`` is zero at run time, but no compiler
knows that. A fence fuses like any element-wise operation. Yet a product before it and a sum behind
it stay two roundings, a conversion to a short data type is not dropped, and a quotient is not
rewritten together with its surroundings. It is an *or*, since two *xor* fences in a row cancel.

Many bit patterns are NaN, and the NaN that a sum of two NaNs gives depends on the order of its
operands. A canonical fence also replaces every NaN by the platform's default one.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir, xla
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

NAME = "adacheck_fence"
_FENCED_BITS = (8, 16, 32, 64)


def zero_of(count: jax.Array) -> jax.Array:
    """The ``z`` of fences, made of an update counter: 0 for every count that is not negative."""
    nothing = jax.lax.min(count, jax.lax.full_like(count, 0))
    return jax.lax.convert_element_type(nothing, jnp.uint32)


def can_fence(dtype: Any) -> bool:
    """True for the floating-point types that a fence can hold."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    return jnp.finfo(dtype).bits in _FENCED_BITS


def fence(x: Any, z: Any, *, canonical: bool = False) -> Any:
    """Fence an array.

    Args:
        x: any array; integers, Booleans, keys and complex numbers are returned as they are.
        z: uint32 scalar, zero at run time.
        canonical: True to replace every NaN by the platform's own.

    Returns:
        The same values. The derivative is the identity.
    """
    if not can_fence(x.dtype):
        return x
    varying = _varying(z) - _varying(x)
    if varying:
        x = jax.lax.pcast(x, tuple(varying), to="varying")
    return fence_p.bind(x, z, canonical=canonical)


fence_p = core.Primitive(NAME)


def _varying(value: Any) -> frozenset[Any]:
    """Mesh axes along which a value inside ``shard_map`` varies."""
    return frozenset(getattr(jax.typeof(value), "vma", ()))


fence_p.def_impl(functools.partial(xla.apply_primitive, fence_p))  # compiled, always


@fence_p.def_abstract_eval
def _abstract(x: Any, z: Any, *, canonical: bool) -> Any:
    del canonical
    if z.shape or z.dtype != jnp.uint32:
        raise TypeError(f"expected the z of a fence to be a uint32 scalar, found {z}.")
    return x


def _jvp(primals: Any, tangents: Any, *, canonical: bool) -> Any:
    return fence_p.bind(*primals, canonical=canonical), tangents[0]


def _batch(arguments: Any, axes: Any, *, canonical: bool) -> Any:
    (x, z), (x_axis, z_axis) = arguments, axes
    if z_axis is not None:  # all are zero: take the first
        z = jax.lax.index_in_dim(z, 0, z_axis, keepdims=False)
    return fence_p.bind(x, z, canonical=canonical), x_axis


ad.primitive_jvps[fence_p] = _jvp
batching.primitive_batchers[fence_p] = _batch


def _lower(ctx: Any, x: Any, z: Any, *, canonical: bool, platform: str) -> Any:
    aval = ctx.avals_in[0]
    unsigned = np.dtype(f"uint{jnp.finfo(aval.dtype).bits}")
    element = mlir.dtype_to_ir_type(unsigned)
    words = ir.RankedTensorType.get(aval.shape, element)

    none = mlir.dense_int_array([])
    zero = stablehlo.convert(ir.RankedTensorType.get((), element), z)
    bits = stablehlo.or_(
        stablehlo.bitcast_convert(words, x), stablehlo.broadcast_in_dim(words, zero, none)
    )
    result = stablehlo.bitcast_convert(x.type, bits)
    if canonical:
        scalar = ir.RankedTensorType.get((), x.type.element_type)
        nan = stablehlo.bitcast_convert(scalar, mlir.ir_constant(_nan(aval.dtype, platform)))
        nan = stablehlo.broadcast_in_dim(x.type, nan, none)
        unequal = stablehlo.ComparisonDirectionAttr.get("NE")
        result = stablehlo.select(stablehlo.compare(x, x, unequal), nan, result)
    return [result]


def _nan(dtype: Any, platform: str) -> np.ndarray:
    """The bits of the NaN that invalid operations give on a platform."""
    info = jnp.finfo(dtype)
    positive = np.abs(np.array(np.nan, dtype)).view(f"uint{info.bits}")
    sign = np.array(1 << (info.bits - 1), positive.dtype)
    if platform == "cuda" and 8 < info.bits < 64:
        return sign - positive.dtype.type(1)
    return positive | sign


mlir.register_lowering(fence_p, functools.partial(_lower, platform="cpu"))
mlir.register_lowering(fence_p, functools.partial(_lower, platform="cuda"), platform="cuda")
