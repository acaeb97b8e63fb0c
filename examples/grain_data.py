"""Trains on a shuffled grain dataset, and saves the iterator's position beside every step.

The data are lines of Python's standard library. Kill it and run it again: state and data go on
where they were, so that no batch is read twice or left out::

    python examples/grain_data.py --root /tmp/grain --steps 20

In the end both items of the step before the last one are restored, trained with once more, and the
result is compared with the last step bit by bit.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import adacheck_jax as adacheck

CONTEXT, BATCH = 32, 16

recorder = adacheck.Recorder(optax.adamw(3e-3))  # (1) wrap the optimizer, last in the chain

State = dict[str, Any]


def dataset() -> grain.IterDataset:
    """Batches of bytes, of which the model guesses each from the one before it."""
    stdlib = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    lines = [line for file in stdlib for line in file.read_bytes().splitlines()]
    lines = [line[:CONTEXT] for line in lines if len(line) >= CONTEXT]
    shuffled = grain.MapDataset.source(lines).seed(0).shuffle().repeat()
    as_array = shuffled.map(lambda line: np.frombuffer(line, np.uint8).astype(np.int32))
    return as_array.to_iter_dataset().batch(BATCH)


def init_state() -> State:
    params = {"embed": jax.random.normal(jax.random.key(0), (256, 32)), "out": jnp.zeros((32, 256))}
    return {"params": params, "opt_state": recorder.init(params)}


@jax.jit(donate_argnums=0)
def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        logits = params["embed"][tokens[:, :-1]] @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def restore(
    manager: ocp.CheckpointManager, step: int, state: State, batches: grain.DatasetIterator
) -> State:
    """Restores a state, and sets the iterator to the position that was saved beside it."""
    items = {
        "state": adacheck.RestoreArgs(state),
        "data": grain.checkpoint.CheckpointRestore(batches),
    }
    return manager.restore(step, args=ocp.args.Composite(**items))["state"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on grain's batches, save every step.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=20, help="steps in all (default 20)")
    args = parser.parse_args()
    items = {"data": grain.checkpoint.CheckpointHandler()}  # beside the state, named "state"
    batches = iter(dataset())
    # (2) a stock Orbax manager
    with adacheck.checkpoint_manager(args.root, recorder, items=items) as manager:
        state, first = init_state(), 1
        if (newest := manager.latest_step()) is not None:  # (3) resume
            state, first = restore(manager, newest, state, batches), newest + 1
            print(f"resuming after step {newest}")
        for step in range(first, args.steps + 1):
            state, loss = train_step(state, next(batches))
            position = grain.checkpoint.CheckpointSave(batches)
            both = ocp.args.Composite(state=adacheck.SaveArgs(state), data=position)
            manager.save(step, args=both)  # (4) save every step
            print(f"step {step}, loss {loss:.4f}")
        manager.wait_until_finished()
        last = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
        batches = iter(dataset())
        before = restore(manager, args.steps - 1, state, batches)
        again, _ = train_step(before, next(batches))
        assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(again)] == last
    print(f"step {args.steps - 1}, restored and trained once more, is step {args.steps} bit by bit")


if __name__ == "__main__":
    main()
