"""Models of flax linen and nnx, and a few in which much is fused with the update."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.campaigns.models import (
    LENGTH,
    MODELS,
    WORDS,
    Model,
    cross_entropy,
    normal,
    squared,
    tokens,
    vectors,
)


def filled(rng: np.random.Generator, shapes: Any, dtype: Any) -> Any:
    """Arrays for abstract ones: drawn at random, but for what starts at zero or one."""

    def fill(path: Any, leaf: Any) -> jax.Array:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        kept = leaf.dtype if not jnp.issubdtype(leaf.dtype, jnp.floating) else dtype
        if {"scale", "var"}.intersection(names):
            return jnp.ones(leaf.shape, kept)
        if {"bias", "mean"}.intersection(names):
            return jnp.zeros(leaf.shape, kept)
        return normal(rng, leaf.shape, kept, 0.1)

    return jax.tree_util.tree_map_with_path(fill, shapes)


class _Convolution(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), param_dtype=x.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, param_dtype=x.dtype)(x))
        x = nn.Dropout(0.2, deterministic=False)(x)
        return nn.Dense(16, param_dtype=x.dtype)(x.mean((1, 2)))


class _Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.RNN(nn.LSTMCell(32, param_dtype=x.dtype))(x)
        return nn.Dense(16, param_dtype=x.dtype)(x[:, -1])


def _linen(module: nn.Module, shape: tuple[int, ...]) -> Model:
    """A regression with a linen module over inputs of some shape."""

    def initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        shapes = jax.eval_shape(module.init, keys, jnp.zeros((2, *shape), dtype))
        rest = {name: filled(rng, tree, dtype) for name, tree in shapes.items() if name != "params"}
        return filled(rng, shapes["params"], dtype), {**rest, "key": jax.random.key(3)}

    def loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, y = batch
        key, drop = jax.random.split(carried["key"])
        rest = {name: tree for name, tree in carried.items() if name != "key"}
        dtype = jax.tree.leaves(params)[0].dtype
        found, changed = module.apply(
            {"params": params, **rest}, x.astype(dtype), rngs={"dropout": drop}, mutable=list(rest)
        )
        kept = jax.tree.map(lambda a, b: a.astype(b.dtype), {**rest, **changed}, rest)
        return squared(found, y), {**kept, "key": key}

    def batch(rng: np.random.Generator, examples: int) -> Any:
        x = rng.standard_normal((examples, *shape)).astype(np.float32)
        return x, rng.standard_normal((examples, 16)).astype(np.float32)

    return Model(initial, loss, batch)


def _layer(h: jax.Array, block: Any) -> jax.Array:
    q, k, v = jnp.split(h @ block["qkv"], 3, -1)
    scores = q @ jnp.swapaxes(k, -1, -2) * 0.17
    h = h + jax.nn.softmax(scores) @ v
    return h + jnp.tanh(h @ block["up"]) @ block["down"]


def _scanned(remat: bool) -> Model:
    """A transformer whose layers are scanned, and computed again in the backward pass."""
    width, layers = 32, 2

    def initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
        blocks = {
            "qkv": normal(rng, (layers, width, 3 * width), dtype),
            "up": normal(rng, (layers, width, 2 * width), dtype),
            "down": normal(rng, (layers, 2 * width, width), dtype),
        }
        return {"embed": normal(rng, (WORDS, width), dtype), "blocks": blocks}, {}

    def loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, y = batch
        layer = jax.checkpoint(_layer) if remat else _layer
        h, _ = jax.lax.scan(lambda h, b: (layer(h, b), None), params["embed"][x], params["blocks"])
        return cross_entropy(h @ params["embed"].T, y), carried

    return Model(initial, loss, tokens)


def _elementwise_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    params = {"a": normal(rng, (64, 96), dtype), "b": normal(rng, (96,), dtype)}
    return {**params, "c": normal(rng, (64, 96), dtype)}, {}


def _elementwise_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    """Gradients that end in element-wise operations, which are fused with the update."""
    x, y = batch
    scale = x.mean() + 1.5
    total = jnp.sum(jnp.tanh(params["a"] * scale) * params["c"] + params["b"] ** 3)
    return (total * 1e-2 + y.sum() * 0).astype(jnp.float32), carried


class _Norms(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        self.table = nnx.Embed(WORDS, 16, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.LayerNorm(16, rngs=rngs, param_dtype=dtype)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(16, WORDS, rngs=rngs, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.drop(jnp.tanh(self.norm(self.table(x)))))


@functools.cache
def _norms(dtype: str) -> Any:
    return nnx.split(_Norms(nnx.Rngs(0), jnp.dtype(dtype)), nnx.Param, ...)


def _norms_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    _, params, rest = _norms(jnp.dtype(dtype).name)
    return filled(rng, params, dtype), jax.tree.map(jnp.copy, rest)


def _norms_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    carried = jax.tree.map(lambda leaf: leaf, carried)
    model = nnx.merge(_norms(jax.tree.leaves(params)[0].dtype.name)[0], params, carried)
    x, y = batch
    loss = cross_entropy(model(x), y)
    return loss, nnx.split(model, nnx.Param, ...)[2]


ALL = {
    **MODELS,
    "linen convolution": _linen(_Convolution(), (8, 8, 3)),
    "linen LSTM": _linen(_Recurrent(), (LENGTH, 16)),
    "scanned transformer": _scanned(remat=False),
    "rematerialized transformer": _scanned(remat=True),
    "element-wise loss": Model(_elementwise_initial, _elementwise_loss, vectors(8, 8)),
    "nnx embedding": Model(_norms_initial, _norms_loss, tokens),
}
