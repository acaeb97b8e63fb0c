"""Trains a small language model on a device mesh and saves every step.

Kill it at any moment and run it again: it goes on from the newest step, bit for bit as if nothing
had happened. On another mesh it goes on from the very same state::

    python examples/train_lm.py --root /tmp/lm --steps 200 --devices 8 --mesh 4x2
    python examples/train_lm.py --root /tmp/lm --steps 300 --devices 8 --mesh 2x4

The model reads the sources of Python's standard library, byte by byte. (1) to (4) mark all that a
training loop needs to save every step.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.progress import Progress

import adacheck_jax as adacheck

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 2, 128, 4, 64, 16

# (1) Wrap the optimizer in a Recorder, last in the chain, so that it records what adamw receives.
# A bfloat16 record rounds the gradient before adamw sees it and halves what a delta writes.
schedule = optax.warmup_constant_schedule(0.0, 2e-3, warmup_steps=20)
recorder = adacheck.Recorder(optax.adamw(schedule), dtype=jnp.bfloat16)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), recorder)


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input: float32 params, bfloat16 compute."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (batch, time, width) to the same shape."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        qkv = jnp.split(dense(3 * WIDTH, name="qkv")(nn.RMSNorm(dtype=jnp.bfloat16)(x)), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(*(t.reshape(heads) for t in qkv), is_causal=True)
        x = x + dense(WIDTH, name="attention_out")(mixed.reshape(x.shape))
        hidden = dense(4 * WIDTH, name="up")(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return x + dense(WIDTH, name="down")(nn.gelu(hidden))


class Transformer(nn.Module):
    """A decoder-only transformer over bytes; the embedding is also the output layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes (batch, time) to float32 logits (batch, time, 256)."""
        embed = nn.Embed(256, WIDTH, dtype=jnp.bfloat16)  # a token is a byte
        x = embed(tokens) + nn.Embed(CONTEXT, WIDTH, dtype=jnp.bfloat16)(jnp.arange(CONTEXT))
        for _ in range(LAYERS):
            x = Block()(x)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


model = Transformer()


def init_state() -> TrainState:
    """Random params and a fresh optimizer."""
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def parse_mesh(text: str) -> Mesh:
    """A mesh from its shape, such as ``"4x2"``: axes ``data`` and ``model``."""
    shape = tuple(map(int, text.split("x")))
    count, devices = math.prod(shape), jax.devices()
    if count > len(devices):
        raise SystemExit(f"mesh {text}: needs {count} devices, found {len(devices)}; see --devices")
    return jax.make_mesh(shape, ("data", "model"), (AxisType.Auto,) * 2, devices=devices[:count])


def abstract_state(mesh: Mesh, init: Callable[[], TrainState] = init_state) -> TrainState:
    """Shapes, data types and shardings of the state on a mesh: what a restore is asked for.

    One rule by shape serves params, moments and record alike: matrices are cut along both mesh
    axes, the rest is replicated. Every leaf lies on the whole mesh, as the compiled step expects.
    """

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, jax.P("data", "model") if leaf.ndim == 2 else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init))


def shardings(mesh: Mesh) -> TrainState:
    """The sharding of every leaf."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh))


def new_state(mesh: Mesh) -> TrainState:
    """The state before the first step, made where it belongs."""
    return jax.jit(init_state, out_shardings=shardings(mesh))()


def compile_step(mesh: Mesh) -> Any:
    """The training step ``(state, tokens) -> (state, loss)``; the state's buffers are donated."""

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    # The state leaves the step as it entered, so that the step is compiled once.
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings(mesh), None))


@functools.cache
def corpus() -> np.ndarray:
    """The bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The tokens of one step, a function of its number: resuming needs no iterator state."""
    starts = np.random.default_rng(step).integers(0, corpus().size - CONTEXT - 1, BATCH)
    tokens = np.stack([corpus()[start : start + CONTEXT + 1] for start in starts])
    return jax.device_put(tokens.astype(np.int32), NamedSharding(mesh, jax.P("data")))


def open_manager(root: Path) -> ocp.CheckpointManager:
    """(2) A stock CheckpointManager, whose handler decides between bases and deltas."""
    return adacheck.checkpoint_manager(root, recorder, max_to_keep=5)


def train(mesh: Mesh, steps: int, manager: ocp.CheckpointManager) -> Iterator[tuple[int, float]]:
    """Trains up to a number of steps and yields each step's number and loss."""
    newest = manager.latest_step()
    if newest is not None:
        print(f"resuming after step {newest}")  # (3) on this mesh, whichever it was saved on
        state = manager.restore(newest, args=adacheck.RestoreArgs(abstract_state(mesh)))
    else:
        state = new_state(mesh)
    step_fn = compile_step(mesh)
    for step in range((newest or 0) + 1, steps + 1):
        state, loss = step_fn(state, batch(step, mesh))
        manager.save(step, args=adacheck.SaveArgs(state))  # (4) returns; writing goes on
        yield step, float(loss)


def main() -> None:
    """Reads the command line and trains."""
    parser = argparse.ArgumentParser(description="Train a small language model, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=200, help="steps in all (default 200)")
    parser.add_argument("--mesh", default="1x1", help="data x model, such as 4x2 (default 1x1)")
    parser.add_argument("--devices", type=int, help="virtual devices to make of a CPU")
    args = parser.parse_args()
    if args.devices:  # before anything else asks JAX for its devices
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = parse_mesh(args.mesh)
    with open_manager(args.root) as manager, Progress(disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("compiling", total=args.steps)
        for step, loss in train(mesh, args.steps, manager):
            bar.update(task, completed=step, description=f"step {step}, loss {loss:.4f}")
            if bar.disable and step % 10 == 0:
                print(f"step {step}, loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
