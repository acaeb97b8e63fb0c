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
