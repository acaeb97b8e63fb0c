"""Leaves that are asked for in other data types than they were saved in."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import trees
from adacheck_jax.errors import MismatchError
from tests.support import manager_of, mesh_of

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (2, 4, 8, 16, 32, 64))
FLOATS = (
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz"),
    *("float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float16", "bfloat16", "float32"),
)


def state_of(step: int) -> dict[str, Any]:
    """Leaves on the host, and cut over devices."""
    cut = jax.sharding.NamedSharding(mesh_of((4, 2)), jax.P("data"))
    return {
        "count": np.array(3_000_000_000 + step),
        "few": np.arange(4) + step,
        "cut": jax.device_put(jnp.array([0, 1, 1, -5 * step]), cut),
        "rate": jnp.float32(step / 3),
    }


@pytest.fixture(params=["ours", "stock"])
def root(request, tmp_path):
    """A root with steps 1 and 2: a base and a delta, or steps of stock Orbax."""
    handler = adacheck.AdaCheckHandler(delta="bits")
    save: Any = adacheck.SaveArgs
    if request.param == "stock":
        handler, save = ocp.StandardCheckpointHandler(), ocp.args.StandardSave
    with manager_of(tmp_path, handler) as manager:
        for step in (1, 2):
            manager.save(step, args=save(state_of(step)))
    return tmp_path


def restored(root: Any, step: int, asked: Any, **options: Any) -> tuple[Any, Any]:
    handler = adacheck.AdaCheckHandler()
    with manager_of(root, handler) as manager:
        found = manager.restore(step, args=adacheck.RestoreArgs(asked, **options))
    assert handler.restored is not None
    return found, handler.restored.converted


def test_integers_that_do_not_fit_are_refused(root):
    """As ``jax.eval_shape`` asks for them, which makes 32 bits of numpy arrays of 64."""
    step, state = 2, state_of(2)
    for path, dtype, number in (
        ("count", "int32", 3_000_000_000 + step),
        ("count", "int16", 3_000_000_000 + step),
        ("cut", "uint32", -5 * step),
        ("cut", "int2", -5 * step),
    ):
        leaf = state[path]
        asked = jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=getattr(leaf, "sharding", None))
        with pytest.raises(MismatchError, match=rf"{path}: {number} \({leaf.dtype} as {dtype}\)"):
            restored(root, step, {**state, path: asked})
    with pytest.raises(MismatchError, match=r"in 1 leaves: count: 30.*put the arrays themselves"):
        restored(root, step, jax.eval_shape(lambda: state))


@pytest.mark.parametrize("step", [1, 2])
def test_leaves_that_were_converted_are_told_with_their_types(root, step):
    state = state_of(step)
    for path, kind in (("cut", jnp.float32), ("cut", jnp.bool_), ("rate", jnp.int32)):
        with pytest.raises(MismatchError, match=f"{path}: saved {state[path].dtype}"):
            restored(root, step, {**state, path: state[path].astype(kind)})
    asked = state | {
        "few": np.zeros(4, np.uint8),
        "cut": state["cut"].astype(jnp.int8),
        "rate": jnp.bfloat16(0),
    }
    found, converted = restored(root, step, asked)
    for path, leaf in asked.items():
        assert (found[path].dtype, type(found[path])) == (leaf.dtype, type(leaf)), path
        expected = np.asarray(state[path]).astype(leaf.dtype)
        assert np.asarray(found[path]).tobytes() == expected.tobytes(), path
    assert converted == {
        "cut": ("int32", "int8"),
        "few": ("int64", "uint8"),
        "rate": ("float32", "bfloat16"),
    }


def test_host_arrays_keep_their_bits_where_shapes_may_differ(root):
    """They went through jax, which makes 32 bits of 64."""
    count = restored(root, 1, {"count": np.zeros((), np.int64)}, partial_restore=True)[0]
    asked = {"few": np.zeros(6, np.int64)}
    few = restored(root, 1, asked, strict=False, partial_restore=True)[0]["few"]
    assert (int(count["count"]), few.dtype, few.tolist()) == (
        *(3_000_000_001, np.int64),
        [1, 2, 3, 4, 0, 0],
    )


@pytest.mark.parametrize("kinds", [INTEGERS, FLOATS], ids=["integers", "floats"])
def test_each_type_of_a_kind_is_had_from_each_other(tmp_path, kinds, caplog):
    """jax names no type for some pairs, and numpy has no casts between some small ones."""
    state = {
        f"{a} {b} {place}": np.ones(2, a) if place == "host" else jnp.ones(2, a)
        for place in ("host", "device")
        for a, b in itertools.product(kinds, kinds)
        if place == "host" or "64" not in a
    }
    asked = {
        path: np.zeros(2, b) if place == "host" else jax.ShapeDtypeStruct((2,), b)
        for path in state
        for _, b, place in (path.split(),)
        if place == "host" or "64" not in b
    }
    with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
        manager.save(0, args=adacheck.SaveArgs(state))
    found, converted = restored(tmp_path, 0, asked, partial_restore=True)
    for path, leaf in found.items():
        assert leaf.dtype == asked[path].dtype, path
        assert np.asarray(leaf).astype(np.float64).tolist() == [1, 1], path
    pairs = {path: tuple(path.split()[:2]) for path in asked}
    assert converted == {path: pair for path, pair in pairs.items() if len({*pair}) == 2}


def test_a_type_loses_what_the_other_does_not_have():
    def lost(a: str, b: str) -> bool:
        bits = np.arange(256, dtype=np.uint8).view(a).astype(np.float64)
        with np.errstate(all="ignore"):
            there = bits.astype(np.float32).astype(b).astype(np.float64)
        return bits.tobytes() != np.where(np.isnan(bits) & np.isnan(there), bits, there).tobytes()

    eight = [x for x in FLOATS if x.startswith("float8") and not x.endswith("uz")]
    for a, b in itertools.product(eight, [x for x in FLOATS if not x.endswith("uz")]):
        assert trees.loses(jnp.dtype(a), jnp.dtype(b)) == lost(a, b), (a, b)
    for a, b in itertools.product(INTEGERS, INTEGERS):
        one, other = jnp.iinfo(a), jnp.iinfo(b)
        fits = other.min <= one.min and one.max <= other.max
        assert trees.loses(jnp.dtype(a), jnp.dtype(b)) != fits
