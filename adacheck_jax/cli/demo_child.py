"""Child processes of the demonstration: they train and restore on virtual CPU devices.

A small language model reads Python's standard library, byte by byte. Each line that a process
prints is one JSON value: after each step its number and loss, and results at the end::

    python -m adacheck_jax.cli.demo_child train ROOT
    python -m adacheck_jax.cli.demo_child resume ROOT
"""

from __future__ import annotations

import functools
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

import adacheck_jax as adacheck

STEPS, CONTEXT, EMBEDDED, WIDTH, LAYERS, BATCH = 40, 8, 32, 256, 12, 64
MESHES = ("4x2", "2x4", "8x1", "1x1")
State = dict[str, Any]
recorder = adacheck.Recorder(optax.adamw(2e-3), dtype=jnp.bfloat16)


def mesh_of(name: str) -> Mesh:
    """The mesh of a shape such as ``4x2``."""
    data, model = map(int, name.split("x"))
    devices, kinds = jax.devices()[: data * model], (AxisType.Auto, AxisType.Auto)
    return jax.make_mesh((data, model), ("data", "model"), kinds, devices=devices)


def init_state() -> State:
    """Random params, and a fresh optimizer."""
    layers = [(WIDTH, WIDTH)] * LAYERS
    shapes = [(256, EMBEDDED), (CONTEXT * EMBEDDED, WIDTH), *layers, (WIDTH, 256)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    ]
    return {"params": params, "opt_state": recorder.init(params)}


def abstract_state(mesh: Mesh) -> State:
    """Shapes, data types and shardings of the state: matrices are cut along both axes."""

    def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = jax.P("data", "model") if leaf.ndim == 2 else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(placed, jax.eval_shape(init_state))


@functools.cache
def text() -> np.ndarray:
    """The bytes of some modules of the standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:50]
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch(step: int) -> np.ndarray:
    """The bytes of a step, a function of its number: (batch, context and the byte to tell)."""
    starts = np.random.default_rng(step).integers(0, text().size - CONTEXT, BATCH)
    return text()[starts[:, None] + np.arange(CONTEXT + 1)].astype(np.int32)


def train_step(state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
    """One step of the training, and its loss."""

    def loss_of(params: list[jax.Array]) -> jax.Array:
        embed, first, *layers, last = params
        x = jax.nn.gelu(embed[tokens[:, :-1]].reshape(BATCH, -1) @ first)
        for layer in layers:
            x = x + jax.nn.gelu(x @ layer)
        labels = tokens[:, -1]
        return optax.softmax_cross_entropy_with_integer_labels(x @ last, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = recorder.update(gradients, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


@functools.cache
def programs() -> tuple[Any, Any]:
    """The functions that begin a state and train it, on the first mesh; each is compiled once."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(mesh_of(MESHES[0])))
    begin = jax.jit(init_state, out_shardings=shardings)
    return begin, jax.jit(train_step, out_shardings=(shardings, None))


def train(root: Path | None = None) -> Iterator[tuple[int, State, float]]:
    """Train from the newest step under a root, if one is given; yield step, state and loss."""
    begin, compiled = programs()
    state, newest = begin(), 0
    manager = adacheck.checkpoint_manager(root, recorder, max_to_keep=10) if root else None
    if manager and (newest := manager.latest_step() or 0):
        state = manager.restore(newest, args=adacheck.RestoreArgs(state))
    for step in range(newest + 1, STEPS + 1):
        state, loss = compiled(state, batch(step))
        if manager:
            manager.save(step, args=adacheck.SaveArgs(state))
        yield step, state, float(loss)
    if manager:
        manager.close()


def restored(root: Path, expected: State) -> Iterator[tuple[str, float, int]]:
    """Restore the last step on each mesh; yield mesh, seconds, and the number of equal leaves."""
    for name in MESHES:
        with adacheck.checkpoint_manager(root) as manager:
            start_s = time.perf_counter()
            args = adacheck.RestoreArgs(abstract_state(mesh_of(name)))
            state = jax.block_until_ready(manager.restore(STEPS, args=args))
            seconds = time.perf_counter() - start_s
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
        equal = [np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs]
        yield name, seconds, sum(equal)


def main() -> None:
    """Do what the command line names."""
    jax.config.update("jax_num_cpu_devices", 8)
    task, root = sys.argv[1], Path(sys.argv[2])
    for step, _, loss in train(root):
        print(json.dumps([step, loss.hex()]), flush=True)
    if task == "resume":
        uninterrupted = [*train()]
        last = uninterrupted[-1][1]
        result = {
            "expected": [loss.hex() for _, _, loss in uninterrupted],
            "leaf_count": len(jax.tree.leaves(last)),
            "restores": [*restored(root, last)],
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
