"""Trains a small language model on a device mesh, saving every step.

Run it, kill it at any moment, run it again: it goes on from the newest step, on this mesh or on
another one, with the same losses to the last bit::

    python examples/train_lm.py --root /tmp/lm --steps 200 --devices 8 --mesh 4x2
    python examples/train_lm.py --root /tmp/lm --steps 300 --devices 8 --mesh 2x4

The model reads bytes of the Python standard library's sources. What a training loop needs for
checkpointing every step is marked with (1) to (4).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import sysconfig
from collections.abc import Iterator, Sequence
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
from jax.sharding import PartitionSpec as P
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import adacheck_jax as adacheck

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 3, 128, 4, 64, 16
VOCABULARY = 256  # a token is a byte

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
        hidden = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        query, key, value = jnp.split(dense(3 * WIDTH, name="qkv")(hidden), 3, axis=-1)
        mixed = jax.nn.dot_product_attention(
            query.reshape(heads), key.reshape(heads), value.reshape(heads), is_causal=True
        )
        x = x + dense(WIDTH, name="attention_out")(mixed.reshape(x.shape))
        hidden = dense(4 * WIDTH, name="up")(nn.RMSNorm(dtype=jnp.bfloat16)(x))
        return x + dense(WIDTH, name="down")(nn.gelu(hidden))


class Transformer(nn.Module):
    """A decoder-only transformer over bytes; the embedding is also the output layer."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps tokens (batch, time) to float32 logits (batch, time, vocabulary)."""
        embed = nn.Embed(VOCABULARY, WIDTH, dtype=jnp.bfloat16)
        x = embed(tokens) + nn.Embed(CONTEXT, WIDTH, dtype=jnp.bfloat16)(jnp.arange(CONTEXT))
        for _ in range(LAYERS):
            x = Block()(x)
        return embed.attend(nn.RMSNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


model = Transformer()


def init_state() -> TrainState:
    """The state before the first step."""
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def parse_mesh(text: str) -> Mesh:
    """A mesh from its shape, such as ``"4x2"``: axes ``data`` and ``model``."""
    data, _, tensor = text.partition("x")
    shape = (int(data), int(tensor))
    count = shape[0] * shape[1]
    if count > jax.device_count():
        raise SystemExit(
            f"a {text} mesh needs {count} devices, found {jax.device_count()}; "
            f"on a CPU give --devices {count}"
        )
    axis_types = (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh(shape, ("data", "model"), axis_types, devices=jax.devices()[:count])


def abstract_state(mesh: Mesh) -> TrainState:
    """Shapes, data types and shardings of the state on a mesh: what a restore is asked for.

    One rule by shape serves params, moments and record alike: matrices are cut along both mesh
    axes, everything else is replicated. Every leaf gets a sharding over the whole mesh, so that a
    restored state is just what the compiled step expects.
    """

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        cuts = tuple(mesh.shape.values())
        fits = leaf.ndim == 2 and not any(n % cut for n, cut in zip(leaf.shape, cuts, strict=True))
        sharding = NamedSharding(mesh, P("data", "model") if fits else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, jax.eval_shape(init_state))


def compile_step(mesh: Mesh) -> Any:
    """The training step ``(state, tokens) -> (state, loss)``; the state's buffers are donated."""

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        def loss_of(params: Any) -> jax.Array:
            logits = state.apply_fn({"params": params}, tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    # The state leaves the step as it entered, so that the step is compiled once.
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))


@functools.cache
def corpus() -> np.ndarray:
    """The bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(step: int, mesh: Mesh) -> jax.Array:
    """The tokens of one step, a function of its number: resuming needs no iterator state."""
    starts = np.random.default_rng(step).integers(0, corpus().size - CONTEXT - 1, BATCH)
    tokens = np.stack([corpus()[start : start + CONTEXT + 1] for start in starts])
    return jax.device_put(tokens.astype(np.int32), NamedSharding(mesh, P("data")))


def open_manager(root: Path, max_to_keep: int = 5) -> ocp.CheckpointManager:
    """(2) A stock CheckpointManager; the handler decides between bases and deltas."""
    return ocp.CheckpointManager(
        root.absolute(),
        item_handlers=adacheck.AdaCheckHandler(recorder),
        options=ocp.CheckpointManagerOptions(max_to_keep=max_to_keep),
    )


def train(
    mesh: Mesh, steps: int, manager: ocp.CheckpointManager | None
) -> Iterator[tuple[int, float]]:
    """Trains up to a number of steps and yields each step's number and loss."""
    abstract = abstract_state(mesh)
    newest = manager.latest_step() if manager else None
    if manager and newest is not None:
        state = manager.restore(newest, args=adacheck.RestoreArgs(abstract))  # (3) on any mesh
    else:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        state = jax.jit(init_state, out_shardings=shardings)()
    step_fn = compile_step(mesh)
    for step in range((newest or 0) + 1, steps + 1):
        state, loss = step_fn(state, batch(step, mesh))
        if manager:
            manager.save(step, args=adacheck.SaveArgs(state))  # (4) returns; writing goes on
        yield step, float(loss)
    if manager:
        manager.wait_until_finished()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model, save every step.")
    parser.add_argument("--root", type=Path, help="checkpoint directory; resumes from its newest")
    parser.add_argument("--no-save", action="store_true", help="train only")
    parser.add_argument("--steps", type=int, default=200, help="steps in all (default 200)")
    parser.add_argument("--mesh", default="1x1", help="data x model, such as 4x2 (default 1x1)")
    parser.add_argument("--devices", type=int, help="virtual devices to make of a CPU")
    parser.add_argument("--losses", type=Path, help="append 'step loss' lines, loss as float.hex()")
    args = parser.parse_args(argv)
    if not args.root and not args.no_save:
        parser.error("give --root DIRECTORY to save to, or --no-save")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Trains as the command line says."""
    args = parse_args(argv)
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = parse_mesh(args.mesh)
    columns = ("[progress.description]{task.description}", "loss {task.fields[loss]:.4f}")
    with contextlib.ExitStack() as stack:
        manager = None if args.no_save else stack.enter_context(open_manager(args.root))
        losses = stack.enter_context(args.losses.open("a", 1)) if args.losses else None
        bar = Progress(
            *map(TextColumn, columns),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            disable=not sys.stdout.isatty(),
        )
        task = stack.enter_context(bar).add_task("training", total=args.steps, loss=float("nan"))
        for step, loss in train(mesh, args.steps, manager):
            bar.update(task, completed=step, loss=loss)
            if losses:
                losses.write(f"{step} {loss.hex()}\n")  # line-buffered: on disk if we are killed
            if bar.disable and step % 10 == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
