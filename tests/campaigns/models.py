"""Small models of many kinds, as pure functions over params and whatever else they carry along."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

EXAMPLES = 16
"""Examples of a full batch."""
WORDS = 512
LENGTH = 8
"""Tokens of one example."""


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        initial: ``(generator, dtype) -> (params, carried)``; carried are batch statistics, keys,
            frozen weights.
        loss: ``(params, carried, batch) -> (loss, carried)``.
        batch: ``(generator, examples) -> arrays`` on the host.
    """

    initial: Callable[[np.random.Generator, Any], tuple[Any, Any]]
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 0.2
) -> jax.Array:
    """Drawn by numpy: JAX would compile a program for each shape."""
    return jnp.asarray((rng.standard_normal(shape) * scale).astype(dtype))


def vectors(width: int, outputs: int) -> Callable[[np.random.Generator, int], Any]:
    """Batches of a regression."""

    def batch(rng: np.random.Generator, examples: int) -> Any:
        x = rng.standard_normal((examples, width)).astype(np.float32)
        return x, rng.standard_normal((examples, outputs)).astype(np.float32)

    return batch


def tokens(rng: np.random.Generator, examples: int) -> Any:
    x = rng.integers(0, WORDS, (examples, LENGTH + 1)).astype(np.int32)
    return x[:, :-1], x[:, 1:]


def squared(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.mean((found.astype(jnp.float32) - expected) ** 2)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], -1))


def mlp(width: int, hidden: int, outputs: int) -> Model:
    def initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
        inner = {"kernel": normal(rng, (width, hidden), dtype), "bias": jnp.zeros(hidden, dtype)}
        outer = {"kernel": normal(rng, (hidden, outputs), dtype), "bias": jnp.zeros(outputs, dtype)}
        return {"in": inner, "out": outer}, {}

    def loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
        x, y = batch
        x = x.astype(params["in"]["kernel"].dtype)
        hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
        return squared(hidden @ params["out"]["kernel"] + params["out"]["bias"], y), carried

    return Model(initial, loss, vectors(width, outputs))


class _Head(nnx.Module):
    """Its output layer starts at zero, so that nothing flows back at first."""

    def __init__(self, rngs: nnx.Rngs, dtype: Any) -> None:
        self.hidden = nnx.Linear(32, 64, rngs=rngs, param_dtype=dtype)
        self.norm = nnx.BatchNorm(64, rngs=rngs, param_dtype=dtype)
        zeros = nnx.initializers.zeros_init()
        self.out = nnx.Linear(64, 16, rngs=rngs, kernel_init=zeros, param_dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.norm(self.hidden(x))))


@functools.cache
def _head(dtype: str) -> Any:
    return nnx.split(_Head(nnx.Rngs(0), jnp.dtype(dtype)), nnx.Param, ...)


def _head_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    _, params, rest = _head(jnp.dtype(dtype).name)
    scale = rng.uniform(0.5, 1.5)
    return (
        jax.tree.map(lambda leaf: jnp.asarray((np.asarray(leaf) * scale).astype(dtype)), params),
        jax.tree.map(jnp.copy, rest),
    )


def _head_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    carried = jax.tree.map(lambda leaf: leaf, carried)  # nnx changes no variables of outer traces
    model = nnx.merge(_head(jax.tree.leaves(params)[0].dtype.name)[0], params, carried)
    x, y = batch
    loss = squared(model(x), y)
    return loss, nnx.split(model, nnx.Param, ...)[2]


def _lora_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    params = {"a": normal(rng, (64, 4), dtype), "b": jnp.zeros((4, 96), dtype)}
    return params, {"frozen": normal(rng, (64, 96), dtype), "out": normal(rng, (96, 16), dtype)}


def _lora_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    x, y = batch
    x = x.astype(params["a"].dtype)
    hidden = jnp.tanh(x @ carried["frozen"] + (x @ params["a"]) @ params["b"])
    return squared(hidden @ carried["out"], y), carried


def _attention(x: jax.Array, block: Any) -> jax.Array:
    q, k, v = jnp.split(x @ block["qkv"], 3, -1)
    scores = q @ jnp.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v @ block["out"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6).astype(x.dtype) * scale


def _transformer_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    width = 32
    block = {
        "qkv": normal(rng, (width, 3 * width), dtype),
        "out": normal(rng, (width, width), dtype),
        "up": normal(rng, (width, 2 * width), dtype),
        "down": normal(rng, (2 * width, width), dtype),
        "scale": jnp.ones(width, dtype),
    }
    table = normal(rng, (WORDS, width), dtype)
    return {"embed": table, "block": block}, {"key": jax.random.key(int(rng.integers(2**31)))}


def _transformer_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    x, y = batch
    key, mask = jax.random.split(carried["key"])
    block, h = params["block"], params["embed"][x]
    h = h + _attention(_norm(h, block["scale"]), block)
    h = jnp.where(jax.random.bernoulli(mask, 0.9, h.shape), h, 0)
    h = h + jax.nn.gelu(_norm(h, block["scale"]) @ block["up"]) @ block["down"]
    return cross_entropy(h @ params["embed"].T, y), {"key": key}


def _moe_initial(rng: np.random.Generator, dtype: Any) -> tuple[Any, Any]:
    width, experts = 16, 4
    params = {
        "embed": normal(rng, (WORDS, width), dtype),
        "gate": normal(rng, (width, experts), dtype),
        "experts": normal(rng, (experts, width, 2 * width), dtype),
        "out": normal(rng, (2 * width, WORDS), dtype, 0.05),
        "temperature": jnp.ones((), dtype),
    }
    return params, {}


def _moe_loss(params: Any, carried: Any, batch: Any) -> tuple[jax.Array, Any]:
    x, y = batch
    h = params["embed"][x]
    gates = jax.nn.softmax(h @ params["gate"] * params["temperature"])
    top = jax.nn.one_hot(jnp.argmax(gates, -1), gates.shape[-1], dtype=gates.dtype) * gates
    mixed = jnp.einsum("bte,btd,edf->btf", top, h, params["experts"])
    return cross_entropy(jax.nn.relu(mixed) @ params["out"], y), carried


MODELS = {
    "mlp": mlp(32, 64, 16),
    "wide": mlp(64, 128, 64),
    "head": Model(_head_initial, _head_loss, vectors(32, 16)),
    "lora": Model(_lora_initial, _lora_loss, vectors(64, 16)),
    "transformer": Model(_transformer_initial, _transformer_loss, tokens),
    "moe": Model(_moe_initial, _moe_loss, tokens),
}
LARGE = ("wide", "transformer", "moe")
"""Models with leaves of more than 4,096 elements."""
ZERO = ("head", "lora")
"""Models with layers that start at zero."""
