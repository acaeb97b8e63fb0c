"""Trains a small network by kauldron, whose checkpoint has a timer and a grain iterator beside it.

Kill it at any moment and run it again: kauldron restores by itself what it saved last::

    python examples/trainers/kauldron_mlp.py --root /tmp/kauldron --steps 12

(1) and (2) mark what differs from the same script without adacheck_jax. kauldron makes its manager
when training begins, so the block is around training. Run with kauldron 1.4.2 and jax 0.10.2.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd

import adacheck_jax as adacheck


class Model(nn.Module):
    """A network of three layers."""

    inputs: kd.kontext.Key = "batch.inputs"

    @nn.compact
    def __call__(self, inputs: jax.Array) -> dict[str, jax.Array]:
        """The prediction for a batch."""
        hidden = nn.relu(nn.Dense(512)(nn.relu(nn.Dense(128)(inputs))))
        return {"outputs": nn.Dense(16)(hidden)}


class Source:
    """Made-up examples by number, as grain takes them."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        inputs = np.random.default_rng(index).standard_normal(32).astype(np.float32)
        return {"inputs": inputs, "targets": np.tanh(inputs[:16])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    recorder = adacheck.Recorder(optax.adam(1e-3))  # (1)
    trainer = kd.train.Trainer(
        seed=0,
        workdir=args.root,
        train_ds=kd.data.py.DataSource(
            data_source=Source(),
            shuffle=True,
            batch_size=32,
            num_epochs=None,
            num_workers=0,
            seed=0,
        ),
        model=Model(),
        num_train_steps=args.steps,
        train_losses={"l2": kd.losses.L2(preds="preds.outputs", targets="batch.targets")},
        optimizer=recorder,
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=1),
    )
    print(f"begins behind step {trainer.checkpointer.latest_step}", flush=True)
    with adacheck.plug_in(recorder):  # (2)
        trained: Any = trainer.train()
    state = trained[0]
    leaves = jax.tree.leaves((state.params, state.opt_state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    print(f"step {int(state.step)}: {len(leaves)} leaves, {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
