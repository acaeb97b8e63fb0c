"""Optimizers that a Recorder cannot wrap: the message names a remedy, and the remedy works."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import RecorderError
from tests import support
from tests.save.loop import Loop


def run_of(recorder, tx, *, fast=False):
    """A run that gives its optimizer what line searches take, or trains the fast params of two."""
    params = support.initial_params()
    params = optax.LookaheadParams.init_synced(params) if fast else params
    state = {"params": params, "opt_state": tx.init(params)}
    state = jax.tree.map(jnp.copy, support.place(state, support.mesh_of((1,))))

    def train_step(state, data):
        loss = lambda p: jnp.mean((support.forward(p, data[0]) - data[1]) ** 2)  # noqa: E731
        params = state["params"]
        value, grads = jax.value_and_grad(loss)(params.fast if fast else params)
        about = {} if fast else {"value": value, "grad": grads, "value_fn": loss}
        updates, opt_state = tx.update(grads, state["opt_state"], params, **about)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}

    return support.Run(recorder, state, jax.jit(train_step, donate_argnums=0))


@pytest.mark.slow
def test_a_recorder_inside_lookahead(tmp_path):
    wrapped = adacheck.Recorder(optax.lookahead(optax.adamw(1e-2), 3, 0.5))
    with pytest.raises(RecorderError, match=r"lookahead\(Recorder\(fast\), .*params/fast"):
        run_of(wrapped, wrapped, fast=True).advance()
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    run = run_of(recorder, optax.lookahead(recorder, 3, 0.5), fast=True)
    loop = Loop(tmp_path, run, params_path="params/fast")
    loop.save(7)
    assert loop.check() == "BRRRRRR"


def lbfgs():
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=3)
    return optax.lbfgs(memory_size=2, linesearch=search)


@pytest.mark.slow
def test_lbfgs_inside_a_recorder_says_how_to_save_it(tmp_path, caplog):
    recorder = adacheck.Recorder(lbfgs())
    loop = Loop(tmp_path, run_of(recorder, recorder), params_path="params")
    loop.save(3)
    loop.check()
    (told,) = [r.getMessage() for r in caplog.records if "Saving bit-pattern" in r.getMessage()]
    assert "a function, as line searches take it (optax.lbfgs)" in told
    assert told.endswith("leave the Recorder out, and save differences with "
                         "AdaCheckHandler(delta='bits').")  # fmt: skip


@pytest.mark.campaign
def test_lbfgs_without_a_recorder_is_saved_as_differences(tmp_path):
    loop = Loop(tmp_path, run_of(None, lbfgs()), delta="bits")
    loop.save(3)
    assert loop.check() == "BDD"
