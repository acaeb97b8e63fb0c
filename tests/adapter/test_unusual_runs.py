"""Odd names and shapes of params, elements of 64 bits, and leaves that lie elsewhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from tests import support
from tests.support import (
    assert_same_bits,
    assert_steps,
    host_copy,
    kinds_of,
    manager_of,
    mesh_of,
    save_steps,
)


def simple_run(params, tx):
    """Gradients come from outside: XLA:CPU would fuse their computation into the update."""
    recorder = adacheck.Recorder(tx)
    state = {"params": params, "opt_state": recorder.init(params)}

    @jax.jit
    def update(state, grads):
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    def step(state, _data):
        return update(state, jax.tree.map(lambda p: jnp.sin(p * 10), state["params"]))

    return support.Run(recorder, state, step)


@pytest.mark.first(2)
@pytest.mark.parametrize(
    "params",
    [
        {
            "a": jnp.ones(16),
            "a/value": jnp.ones(16),
            "layers": [jnp.ones(3), ({"w": jnp.ones(9)},)],
        },
        jnp.linspace(0.0, 1.0, 16),
        {"value": jnp.ones(16), "value/value": jnp.full(16, 2.0)},
        {"tied": jnp.ones(16), "half": jnp.ones(16, jnp.bfloat16)},
    ],
    ids=["a and a/value", "bare array", "value/value", "mixed types"],
)
def test_params_of_odd_shapes_and_names(tmp_path, params):
    run = simple_run(params, optax.adam(1e-2))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        saved = save_steps(manager, run, 3)
    assert kinds_of(tmp_path) == "BDD"
    assert_steps(tmp_path, saved, run.state)


def test_64_bit_types_enabled_around_the_training_alone(tmp_path):
    """Recorded steps are checked on another thread, which does not inherit the setting."""
    with jax.enable_x64(True):
        run = simple_run({"w": jnp.linspace(0.0, 1.0, 64, dtype=jnp.float64)}, optax.adam(1e-2))
        handler = adacheck.AdaCheckHandler(run.recorder)
        with manager_of(tmp_path, handler) as manager:
            saved = save_steps(manager, run, 2)
            held = {}
            for step in (3, 4):
                assert handler.record_step(run.advance(), step)
                held[step] = host_copy(run.state)
            saved |= save_steps(manager, run, 1)
        assert kinds_of(tmp_path) == "BDD"
        assert_steps(tmp_path, saved, run.state)
        for step, expected in held.items():
            found = support.restored(tmp_path, 5, support.abstract(run.state), step=step)
            assert_same_bits(found, expected)


def test_a_leaf_on_one_device_beside_a_mesh_saved_twice(tmp_path):
    run = support.dict_run(mesh_of((4, 2)))
    state = {**run.advance(), "rng": jax.device_put(np.arange(4), jax.devices()[0])}
    with manager_of(tmp_path, adacheck.AdaCheckHandler(run.recorder)) as manager:
        for step in (1, 2):
            manager.save(step, args=adacheck.SaveArgs(state))
    assert kinds_of(tmp_path) == "BD"
    assert_steps(tmp_path, dict.fromkeys((1, 2), host_copy(state)), state)
