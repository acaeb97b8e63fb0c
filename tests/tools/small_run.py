"""A small training run with deferred steps and metrics, for tests of tools."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import adacheck_jax as adacheck
from adacheck_jax.device import trees

STEPS = 14
RECORDER = adacheck.Recorder(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2))


def initial() -> Any:
    params = {"a": {"kernel": jnp.arange(24.0).reshape(4, 6) / 9}, "b": jnp.ones((5,))}
    return {"params": params, "opt": RECORDER.init(params), "seen": jnp.zeros((), jnp.int32)}


def gradients_at(step: int, params: Any) -> Any:
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


@jax.jit
def applied(state: Any, gradients: Any) -> Any:
    updates, opt = RECORDER.update(gradients, state["opt"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "seen": state["seen"] + 1}


def changed(state: Any, path: str, index: tuple[int, ...], bit: int) -> Any:
    """The state with one bit of one leaf flipped."""
    named, treedef = trees.flatten(state)
    words = np.array(named[path])
    view = words.view(f"u{words.dtype.itemsize}")
    view[index] ^= view.dtype.type(1 << bit)
    return trees.unflatten(treedef, [*(named | {path: jnp.asarray(words)}).values()])


def train(root: Path, fault: Any = None, deferred: tuple[int, ...] = (3, 4)) -> dict[int, Any]:
    """Saves every step but some deferred ones, with metrics.

    Args:
        root: the checkpoint root.
        fault: step, leaf path, index and bit of a bit to flip; a path that begins with
            ``gradient/`` is that of a gradient.
        deferred: steps that are recorded.
    """
    state, states = initial(), {}
    handler = adacheck.AdaCheckHandler(RECORDER, max_deltas=5)
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(root, item_handlers=handler, options=options) as manager:
        for step in range(STEPS):
            gradients = gradients_at(step, state["params"])
            own = fault[1:] if fault and fault[0] == step else None
            if own and own[0].startswith("gradient/"):
                gradients = changed({"gradient": gradients}, *own)["gradient"]
            state = applied(state, gradients)
            if own and not own[0].startswith("gradient/"):
                state = changed(state, *own)
            states[step] = jax.tree.map(np.array, state)
            if step in deferred:
                assert handler.record_step(state, step)
                continue
            args = adacheck.SaveArgs(state)
            manager.save(step, args=args, metrics={"loss": 1 / (step + 1)})
            manager.wait_until_finished()
    return states


def trained(folders: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A root that all tests of a session read, and the state of each step."""
    return _trained(folders.getbasetemp() / "small_run")


@functools.cache
def _trained(root: Path) -> tuple[Path, dict[int, Any]]:
    return root, train(root)
