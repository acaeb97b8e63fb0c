"""Records and params of eight and sixteen bits: trained, replayed and restored to their bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import Run, abstract, assert_same_bits, manager_of, mesh_of, save_steps


def run_of(record_dtype, params_dtype):
    """A run whose model computes in float32, whatever its params are kept in."""
    recorder, chain = support.recorded(optax.adam(1e-2, eps=1e-3), record_dtype)
    params = jax.tree.map(lambda p: p.astype(params_dtype), support.initial_params())
    state = support.place({"params": params, "opt_state": chain.init(params)}, mesh_of((2,)))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)

    def loss(params, x, y):
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return jnp.mean((support.forward(wide, x) - y) ** 2)

    def train_step(state, data):
        grads = jax.grad(loss)(state["params"], *data)
        updates, opt_state = chain.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    return Run(recorder, state, jax.jit(train_step, donate_argnums=0, out_shardings=shardings))


@pytest.mark.slow
@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("record_dtype", "params_dtype"),
    [
        (jnp.float8_e4m3fn, jnp.float32),
        (jnp.float8_e5m2, jnp.float32),
        (jnp.float8_e5m2, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float16),
        (jnp.float16, jnp.float32),
        (None, jnp.float16),
    ],
    ids=lambda dtype: "own" if dtype is None else jnp.dtype(dtype).name,
)
def test_every_step_is_replayed_and_restored(tmp_path, record_dtype, params_dtype):
    run = run_of(record_dtype, params_dtype)
    with manager_of(
        tmp_path, adacheck.AdaCheckHandler(run.recorder, shadow=adacheck.Shadow(on_devices=True))
    ) as manager:
        saved = save_steps(manager, run, 4)
    state = run.state
    assert state["opt_state"][1].adacheck_record["scale"].dtype == (record_dtype or params_dtype)
    # Moments are as wide as the params, whatever is recorded.
    moments = jax.tree.leaves(state["opt_state"][1].adacheck_inner[0].mu)
    assert {leaf.dtype for leaf in moments} == {jnp.dtype(params_dtype)}
    assert any(np.asarray(leaf, np.float32).any() for leaf in moments)
    _, *rest = [step.manifest for step in roots.steps_of(tmp_path)]
    for manifest in rest:
        assert isinstance(manifest, DeltaManifest)
        assert manifest.has_update
        assert not manifest.unreplayed
        assert manifest.checked == "full"
    for mesh in (mesh_of((2,)), mesh_of((1,))):
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            for step, expected in saved.items():
                target = adacheck.RestoreArgs(abstract(run.state, mesh))
                assert_same_bits(manager.restore(step, args=target), expected)


def quantized(learning_rate):
    """Steps along a sum of gradients that is kept in four bits."""

    def added(kept, gradient):
        wide = kept.astype(jnp.float32) + jnp.round(gradient * 100)
        return jnp.clip(wide, -7, 7).astype(jnp.int4)

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int4), params)

    def update(gradients, kept, params=None):
        kept = jax.tree.map(added, kept, gradients)
        return jax.tree.map(lambda k: -learning_rate * k.astype(jnp.float32), kept), kept

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shadow",
    [adacheck.Shadow(), pytest.param(None, marks=pytest.mark.slow)],
    ids=["shadow", "sample"],
)
def test_an_optimizer_may_keep_four_bits(tmp_path, shadow):
    """Programs compiled ahead are called by layouts, which JAX tells wrong of such arrays."""
    recorder = adacheck.Recorder(quantized(1e-3))
    params = {"kernel": jnp.ones((128, 64)), "bias": jnp.ones(7)}  # one is sampled in part
    state = support.place({"params": params, "opt_state": recorder.init(params)}, mesh_of((2,)))

    def train_step(state, data):
        grads = jax.tree.map(lambda p: jnp.sin(p * 50 + data[0].sum()), state["params"])
        updates, opt_state = recorder.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    run = Run(recorder, state, jax.jit(train_step))
    with manager_of(tmp_path, adacheck.AdaCheckHandler(recorder, shadow=shadow)) as manager:
        saved = save_steps(manager, run, 5)
    kinds = [step.manifest for step in roots.steps_of(tmp_path)]
    assert all(isinstance(each, DeltaManifest) and each.has_update for each in kinds[1:])
    for mesh in (mesh_of((2,)), mesh_of((1,))):
        with manager_of(tmp_path, adacheck.AdaCheckHandler()) as manager:
            for step in (1, 3, 5):
                target = adacheck.RestoreArgs(abstract(run.state, mesh))
                assert_same_bits(manager.restore(step, args=target), saved[step])
