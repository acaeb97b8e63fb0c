"""Fine-tunes a small llama3 by google-tunix's ``PeftTrainer``, in full or by LoRA.

Kill it at any moment and run it again: tunix restores by itself what it saved last::

    python examples/trainers/tunix_sft.py --root /tmp/tunix --steps 12
    python examples/trainers/tunix_sft.py --root /tmp/lora --steps 12 --lora
    python examples/trainers/tunix_sft.py --root /tmp/mesh --steps 12 --mesh 2 2

(1) and (2) mark what differs from the same script without adacheck_jax. Without (2) tunix saves as
it does by itself, and the bits of the losses are the same. Run with google-tunix 0.1.7 and
jax 0.10.2.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import qwix
from flax import nnx
from tunix.models.llama3 import model as llama
from tunix.sft import peft_trainer

import adacheck_jax as adacheck

VOCABULARY, LENGTH, BATCH = 512, 32, 4
LAYERS = ".*q_proj|.*kv_proj|.*gate_proj|.*down_proj|.*up_proj"


def make_model(*, lora: bool) -> nnx.Module:
    """A llama3 of 0.5 million params, and low-rank adapters if asked for."""
    config = llama.ModelConfig(
        num_layers=2,
        vocab_size=VOCABULARY,
        embed_dim=128,
        hidden_dim=384,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        rope_theta=500_000,
        norm_eps=1e-5,
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    if not lora:
        return model
    provider = qwix.LoraProvider(module_path=LAYERS, rank=8, alpha=16.0)
    return qwix.apply_lora_to_model(model, provider, **model.get_model_input())


def cut(model: nnx.Module, mesh: jax.sharding.Mesh) -> nnx.Module:
    """The model on a mesh, cut as its authors annotated it."""
    state = nnx.state(model)
    nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
    return model


def batches() -> Iterator[peft_trainer.TrainingInput]:
    """Made-up batches, in the order in which tunix skips those that it has trained on."""
    generator = np.random.default_rng(0)
    while True:
        tokens = generator.integers(0, VOCABULARY, (BATCH, LENGTH))
        yield peft_trainer.TrainingInput(jnp.asarray(tokens), jnp.ones((BATCH, LENGTH), jnp.int32))


def model_input(batch: peft_trainer.TrainingInput) -> dict[str, Any]:
    """Arguments of tunix's loss function."""
    mask = batch.input_mask
    causal = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    return {
        "input_tokens": batch.input_tokens,
        "input_mask": mask,
        "positions": jnp.cumsum(mask, axis=-1) - 1,
        "attention_mask": causal[None] & (mask[:, None, :] > 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--accumulate", type=int, help="gradients an update")
    parser.add_argument("--mesh", type=int, nargs=2, metavar=("FSDP", "TP"))
    args = parser.parse_args()
    if args.mesh:
        jax.config.update(
            "jax_num_cpu_devices", args.mesh[0] * args.mesh[1]
        )  # without effect on GPUs
    config = peft_trainer.TrainingConfig(
        eval_every_n_steps=args.steps,
        max_steps=args.steps,
        gradient_accumulation_steps=args.accumulate,
        checkpoint_root_directory=args.root,
        checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, max_to_keep=3),
    )
    model, placed = make_model(lora=args.lora), contextlib.ExitStack()
    if args.mesh:
        axes = (jax.sharding.AxisType.Auto,) * 2
        mesh = placed.enter_context(jax.make_mesh(args.mesh, ("fsdp", "tp"), axis_types=axes))
        model = cut(model, mesh)
    recorder = adacheck.Recorder(optax.adamw(1e-3))  # (1)
    with placed:
        with adacheck.plug_in(recorder):  # (2)
            trainer = peft_trainer.PeftTrainer(model, recorder, config)
        print(f"begins behind step {trainer.train_steps}", flush=True)
        trainer.with_gen_model_input_fn(model_input).train(batches())
    leaves = jax.tree.leaves((nnx.state(trainer.model), nnx.state(trainer.optimizer)))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    print(f"step {trainer.train_steps}: {len(leaves)} leaves, {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
