"""Saves every step in the shape of MaxText's loop: items, policies, a data iterator, evaluation.

A ``Composite`` holds the state and the position of the data iterator, as JSON. Kill it at any
moment and run it again, also on other devices: state and data go on where they were::

    python examples/trainers/maxtext_like.py --root /tmp/maxtext --steps 30
    python examples/trainers/maxtext_like.py --root /tmp/maxtext --steps 60 --devices 4
    python examples/trainers/maxtext_like.py --root /tmp/maxtext --evaluate

The last line restores the params alone, without an optimizer. (1) to (3) mark what differs from the
same loop without adacheck_jax; all else is stock Orbax. The data are made up.
"""

from __future__ import annotations

import argparse
import hashlib
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
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

import adacheck_jax as adacheck

WIDTH, BATCH = 64, 32

model = nn.Sequential([nn.Dense(WIDTH), nn.gelu, nn.Dense(1)])


def make_optimizer() -> tuple[optax.GradientTransformation, adacheck.Recorder]:
    """The optimizer, and the recorder in it."""
    adamw = optax.adamw(optax.warmup_constant_schedule(0.0, 1e-3, 10))
    recorder = adacheck.Recorder(adamw)  # (1) around the update, behind the clipping
    return optax.chain(optax.clip_by_global_norm(1.0), recorder), recorder


class DataIterator:
    """Batches in a random order that is told by a state of JSON, as an iterator of grain has."""

    def __init__(self, seed: int) -> None:
        self._state = {"seed": seed, "batch": 0}

    def __next__(self) -> np.ndarray:
        self._state["batch"] += 1
        generator = np.random.default_rng((self._state["seed"], self._state["batch"]))
        return generator.standard_normal((BATCH, WIDTH)).astype(np.float32)

    def get_state(self) -> dict[str, int]:
        """The position: what the next batch follows from."""
        return dict(self._state)

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on from a position."""
        self._state = dict(state)


def init_params() -> Any:
    """Random params."""
    return model.init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"]


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Shapes, data types and shardings: matrices are cut, the rest is replicated."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, jax.P("fsdp") if leaf.ndim == 2 else jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def loss_of(params: Any, inputs: jax.Array) -> jax.Array:
    """Mean squared distance from the mean of the inputs' sines."""
    outputs = model.apply({"params": params}, inputs)
    return jnp.mean((outputs - jnp.sin(inputs).mean(axis=1, keepdims=True)) ** 2)


def train_step(state: TrainState, inputs: jax.Array) -> tuple[TrainState, jax.Array]:
    """One update."""
    loss, gradients = jax.value_and_grad(loss_of)(state.params, inputs)
    return state.apply_gradients(grads=gradients), loss


def create_manager(root: Path) -> ocp.CheckpointManager:
    """A stock manager of two items, which keeps the newest steps and every tenth."""
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=1,
        preservation_policy=AnyPreservationPolicy([LatestN(3), EveryNSteps(10)]),
    )
    handlers = {"items": ocp.PyTreeCheckpointHandler(), "iter": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(root, options=options, item_handlers=handlers)


def save_step(
    manager: ocp.CheckpointManager, step: int, state: TrainState, iterator: DataIterator
) -> None:
    """Saves a step; on preemption, waits for the disk."""
    items = ocp.args.PyTreeSave(state)
    position = ocp.args.JsonSave(iterator.get_state())
    manager.save(step, args=ocp.args.Composite(items=items, iter=position))
    if manager.reached_preemption(step):
        manager.wait_until_finished()
        raise SystemExit(f"preempted after step {step}, which is saved")


def digest_of(state: TrainState) -> str:
    """A digest of all bits."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves))
    return f"{len(leaves)} leaves, {digest.hexdigest()[:16]}"


def restore_or_init(
    manager: ocp.CheckpointManager, wanted: TrainState, init: Any, iterator: DataIterator
) -> tuple[TrainState, int]:
    """The newest saved state and the step after it; the iterator goes on from its position."""
    if (newest := manager.latest_step()) is None:
        return init(), 1
    where = ocp.checkpoint_utils.construct_restore_args(wanted)
    items = ocp.args.PyTreeRestore(wanted, restore_args=where)
    args = ocp.args.Composite(items=items, iter=ocp.args.JsonRestore())
    restored = manager.restore(newest, args=args)
    iterator.set_state(restored["iter"])
    state = restored["items"]
    print(f"resuming after step {newest}, at {restored['iter']}: {digest_of(state)}", flush=True)
    return state, newest + 1


def train(root: Path, steps: int, mesh: Mesh) -> None:
    """Trains up to a number of steps, from the newest saved one."""
    optimizer, recorder = make_optimizer()

    def init_state() -> TrainState:
        return TrainState.create(apply_fn=model.apply, params=init_params(), tx=optimizer)

    wanted = abstract(jax.eval_shape(init_state), mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    init = jax.jit(init_state, out_shardings=shardings)
    step_fn = jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
    iterator = DataIterator(seed=0)
    with adacheck.plug_in(recorder):  # (2)
        manager = create_manager(root)
    with manager:
        state, first = restore_or_init(manager, wanted, init, iterator)
        for step in range(first, steps + 1):
            inputs = jax.device_put(next(iterator), NamedSharding(mesh, jax.P("fsdp")))
            state, loss = step_fn(state, inputs)
            save_step(manager, step, state, iterator)
            print(f"step {step}, loss {loss:.4f}: {digest_of(state)}", flush=True)


def evaluate(root: Path, mesh: Mesh) -> None:
    """Restores the params of the newest step, and nothing of its optimizer."""
    with adacheck.plug_in():  # (3)
        manager = create_manager(root)
    with manager:
        wanted = {"params": abstract(jax.eval_shape(init_params), mesh)}
        items = ocp.args.PyTreeRestore(wanted, partial_restore=True)
        step = manager.latest_step()
        if step is None:
            raise SystemExit(f"{root}: no step is saved there")
        params = manager.restore(step, args=ocp.args.Composite(items=items))["items"]["params"]
        loss = loss_of(params, jnp.asarray(next(DataIterator(seed=1))))
        print(f"step {step}, loss on other data {loss:.4f}")


def main() -> None:
    """Reads the command line; trains or evaluates."""
    parser = argparse.ArgumentParser(description="Save every step in the shape of MaxText's loop.")
    parser.add_argument("--root", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--steps", type=int, default=30, help="steps in all (default 30)")
    parser.add_argument("--devices", type=int, help="number of CPU devices")
    parser.add_argument("--evaluate", action="store_true", help="restore the params and end")
    args = parser.parse_args()
    if args.devices:
        jax.config.update("jax_num_cpu_devices", args.devices)
    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    if args.evaluate:
        evaluate(args.root.absolute(), mesh)
    else:
        train(args.root.absolute(), args.steps, mesh)


if __name__ == "__main__":
    main()
