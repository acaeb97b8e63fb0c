"""What the benchmarks share: a small language model on real text, and what is told of a run."""

from __future__ import annotations

import functools
import os
import platform
import socket
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from adacheck_jax.save.commit import versions
from adacheck_jax.store.steps import folders, manifest_file
from examples.train_lm import corpus

CONTEXT, BATCH = 64, 16
_HEAD_WIDTH = 32
_LINKS = (folders.LINEAGE, f"{manifest_file.DIRECTORY}/kept")
"""Folders of a step that hold nothing but links to earlier steps."""


def new_bytes(step_directory: Path) -> int:
    """Bytes of a step's files, without its links to earlier steps."""
    return sum(
        path.stat().st_size
        for path in step_directory.rglob("*")
        if path.is_file() and not any(folder in str(path) for folder in _LINKS)
    )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment() -> dict[str, Any]:
    """Hardware and versions that a result holds for."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "versions": versions(),
    }


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input, computed in ``dtype``."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        heads = (*x.shape[:2], width // _HEAD_WIDTH, _HEAD_WIDTH)
        qkv = jnp.split(dense(3 * width, name="qkv")(norm()(x)), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(*(t.reshape(heads) for t in qkv), is_causal=True)
        x = x + dense(width, name="attention_out")(mixed.reshape(x.shape))
        hidden = dense(4 * width, name="up")(norm()(x))
        return x + dense(width, name="down")(nn.gelu(hidden))


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes; the embedding is also the output layer."""

    width: int
    dtype: Any = jnp.float32
    layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes (batch, time) to float32 logits (batch, time, 256)."""
        embed = nn.Embed(256, self.width, dtype=self.dtype)
        places = nn.Embed(CONTEXT, self.width, dtype=self.dtype)
        x = embed(tokens) + places(jnp.arange(CONTEXT))
        for _ in range(self.layers):
            x = Block(self.dtype)(x)
        return embed.attend(nn.RMSNorm(dtype=self.dtype)(x)).astype(jnp.float32)

    def initial(self) -> Any:
        """Random float32 params."""
        return self.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Mean cross entropy of each byte's successor."""
        logits: Any = self.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def width_for(params_count: int, layers: int = 2) -> int:
    """The width at which a :class:`LanguageModel` has about that many params."""
    return solved_width(params_count, 12 * layers, 256 + CONTEXT, _HEAD_WIDTH)


def solved_width(params_count: int, quadratic: int, linear: int, multiple: int) -> int:
    """The width at which ``quadratic * width**2 + linear * width`` params are about that many."""
    width = (np.sqrt(linear**2 + 4 * quadratic * params_count) - linear) / (2 * quadratic)
    return max(1, round(width / multiple)) * multiple


def tokens_of(step: int, batch: int = BATCH, text: np.ndarray | None = None) -> np.ndarray:
    """One batch of text of Python's standard library, a function of its number."""
    text = corpus() if text is None else text
    starts = np.random.default_rng(step).integers(0, text.size - CONTEXT - 1, batch)
    tokens = np.stack([text[start : start + CONTEXT + 1] for start in starts])
    return tokens.astype(np.int32)


def words(array: Any) -> np.ndarray:
    """The bits of an array's elements as flat unsigned integers."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")
