"""What saving every step of Llama 2 7B would cost, before there is a machine to train it on.

Nothing is allocated and no device is needed::

    adacheck plan examples/plan_llama.py:data_parallel
    adacheck plan examples/plan_llama.py:fsdp_tensor_parallel

A parameter takes 14 bytes: 2 in bfloat16, and 4 each for its float32 master weight and Adam's two
moments. The Recorder adds the gradient that the update consumes: 2 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import adacheck_jax as adacheck

VOCABULARY, WIDTH, HIDDEN, LAYERS = 32_000, 4_096, 11_008, 32


class MasterState(NamedTuple):
    """Float32 params, and the state of the optimizer that updates them."""

    master: Any
    inner: Any


def master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets ``tx`` update float32 copies of the params, to which these are rounded."""

    def widen(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def init(params: Any) -> MasterState:
        master = widen(params)
        return MasterState(master, tx.init(master))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, MasterState]:
        updates, inner = tx.update(widen(grads), state.inner, state.master)
        master = optax.apply_updates(state.master, updates)
        # apply_updates adds this to the params in float32, and rounds.
        step = jax.tree.map(lambda new, old: new - old, master, widen(params))
        return step, MasterState(master, inner)

    return optax.GradientTransformation(init, update)


def abstract_params(mesh: AbstractMesh) -> dict[str, Any]:
    """The model, cut along those of the axes that the mesh has."""

    def leaf(shape: tuple[int, ...], *axes: str) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec(*(axis if axis in mesh.shape else None for axis in axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    layer = {
        "attention_norm": leaf((WIDTH,)),
        **{name: leaf((WIDTH, WIDTH), "fsdp", "tensor") for name in ("wq", "wk", "wv")},
        "wo": leaf((WIDTH, WIDTH), "tensor", "fsdp"),
        "mlp_norm": leaf((WIDTH,)),
        **{name: leaf((WIDTH, HIDDEN), "fsdp", "tensor") for name in ("gate", "up")},
        "down": leaf((HIDDEN, WIDTH), "tensor", "fsdp"),
    }
    return {
        "embedding": leaf((VOCABULARY, WIDTH), "tensor", "fsdp"),
        "layers": [layer] * LAYERS,
        "norm": leaf((WIDTH,)),
        "head": leaf((WIDTH, VOCABULARY), "fsdp", "tensor"),
    }


def abstract_state(mesh: AbstractMesh) -> tuple[dict[str, Any], adacheck.Recorder]:
    """The train state on a mesh, and the recorder in its optimizer."""
    recorder = adacheck.Recorder(master_weights(optax.adamw(3e-4)))
    tx = optax.chain(optax.clip_by_global_norm(1.0), recorder)

    def like(sharding: NamedSharding, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params, everywhere = abstract_params(mesh), NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        tx,
        lambda leaf, param: like(param.sharding, leaf),  # moments lie where their params lie
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda leaf: like(everywhere, leaf),
    )
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return {"step": step, "params": params, "opt_state": opt_state}, recorder


def data_parallel() -> tuple[Any, adacheck.Recorder]:
    """128 devices that all hold everything."""
    return abstract_state(AbstractMesh((128,), ("data",)))


def fsdp_tensor_parallel() -> tuple[Any, adacheck.Recorder]:
    """2,048 devices: matrices cut 256 times along one axis and 8 times along the other."""
    return abstract_state(AbstractMesh((256, 8), ("fsdp", "tensor")))
