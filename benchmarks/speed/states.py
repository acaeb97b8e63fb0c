"""Train states whose size and number of leaves are chosen, and a train step over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import adacheck_jax as adacheck

WIDTH = 64
BYTES_A_PARAM = 14
"""float32 weight and two moments, and the bfloat16 record."""


def recorder() -> adacheck.Recorder:
    """AdamW, whose gradients are recorded in bfloat16."""
    return adacheck.Recorder(optax.adamw(1e-3), dtype=jnp.bfloat16)


def train_state(
    params_count: int, leaf_count: int, recorder: adacheck.Recorder, parts: int = 0
) -> Any:
    """A state of about so many params, in so many arrays; noise, its rows cut into parts.

    Each part lies on as many devices as any other; one on each if their number is 0.
    """
    count = jax.device_count()
    parts = parts or count
    rows = max(1, params_count // leaf_count // WIDTH // count) * count
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((rows, WIDTH), np.float32)
    mesh = jax.make_mesh(
        (count // parts, parts), ("copies", "all"), axis_types=(AxisType.Auto,) * 2
    )
    cut, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("all",), ()))

    def placed(array: np.ndarray) -> jax.Array:
        sharding = cut if array.ndim else whole
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    params = {f"layer_{i:05}": placed(noise * (i + 1)) for i in range(leaf_count)}
    state = {
        "params": params,
        "opt_state": recorder.init(params),
        "step": placed(np.zeros((), np.int32)),
    }
    shardings = jax.tree.map(lambda leaf: cut if leaf.ndim else whole, state)
    return jax.jit(lambda s: s, out_shardings=shardings)(state)


def train_step_of(recorder: adacheck.Recorder) -> Callable[[Any], Any]:
    """A step whose gradients are noise, and cheap; it donates the state.

    Gradients and update are two programs, so that no compiler fuses the one into the other.
    """

    def updated(state: Any, gradients: Any) -> Any:
        params = state["params"]
        updates, opt_state = recorder.update(gradients, state["opt_state"], params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}

    gradients_of = jax.jit(lambda params: jax.tree.map(lambda p: jnp.sin(p * 1e3) * 1e-2, params))
    update = jax.jit(updated, donate_argnums=(0, 1))
    return lambda state: update(state, gradients_of(state["params"]))


def size_bytes(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def abstract(tree: Any, onto: int = 0) -> Any:
    """What to ask a restore for to get such a tree, on so many of its devices; 0 for all."""
    mesh = jax.make_mesh((onto,), ("all",), devices=jax.devices()[:onto]) if onto else None

    def wanted(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        sharding: Any = leaf.sharding
        if mesh is not None:
            sharding = NamedSharding(mesh, sharding.spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(wanted, tree)


def without_record(state: Any) -> Any:
    """What a run without this library has to save."""
    inner = state["opt_state"].adacheck_inner
    return {"params": state["params"], "opt_state": inner, "step": state["step"]}
