"""Optimizers that a Recorder cannot wrap: the message names a remedy, and the remedy works."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import adacheck_jax as adacheck
from adacheck_jax.errors import RecorderError
from adacheck_jax.format.manifest import DeltaManifest
from adacheck_jax.store.steps import roots
from tests import support
from tests.support import Run, abstract, assert_same_bits, manager_of, mesh_of, save_steps


def kinds(root):
    """How each step is kept: as a base, a replayed delta, or a delta of differences."""
    return "".join(
        "B" if not isinstance(m, DeltaManifest) else "R" if m.has_update else "D"
        for m in (step.manifest for step in roots.steps_of(root))
    )


def save_and_restore(root, handler, run, steps):
    with manager_of(root, handler) as manager:
        saved = save_steps(manager, run, steps)
    with manager_of(root, adacheck.AdaCheckHandler()) as manager:
        for step, expected in saved.items():
            target = adacheck.RestoreArgs(abstract(run.state))
            assert_same_bits(manager.restore(step, args=target), expected)


def lookahead_run(recorder, tx):
    params = optax.LookaheadParams.init_synced(support.initial_params())
    state = {"params": params, "opt_state": tx.init(params)}
    state = jax.tree.map(jnp.copy, support.place(state, mesh_of((1,))))

    def train_step(state, data):
        loss = lambda p: jnp.mean((support.forward(p, data[0]) - data[1]) ** 2)  # noqa: E731
        grads = jax.grad(loss)(state["params"].fast)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    return Run(recorder, state, jax.jit(train_step, donate_argnums=0))


@pytest.mark.slow
def test_a_recorder_inside_lookahead(tmp_path):
    wrapped = adacheck.Recorder(optax.lookahead(optax.adamw(1e-2), 3, 0.5))
    with pytest.raises(RecorderError, match=r"lookahead\(Recorder\(fast\), .*params/fast"):
        lookahead_run(wrapped, wrapped).advance()
    recorder = adacheck.Recorder(optax.adamw(1e-2))
    run = lookahead_run(recorder, optax.lookahead(recorder, 3, 0.5))
    handler = adacheck.AdaCheckHandler(recorder, params_path="params/fast")
    save_and_restore(tmp_path, handler, run, 7)
    assert kinds(tmp_path) == "BRRRRRR"


def line_search_run(tx, recorder=None):
    params = support.initial_params()
    state = {"params": params, "opt_state": tx.init(params)}
    state = jax.tree.map(jnp.copy, support.place(state, mesh_of((1,))))

    def train_step(state, data):
        loss = lambda p: jnp.mean((support.forward(p, data[0]) - data[1]) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state["params"])
        about = {"value": value, "grad": grads, "value_fn": loss}
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], **about)
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    return Run(recorder, state, jax.jit(train_step, donate_argnums=0))


def lbfgs():
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=3)
    return optax.lbfgs(memory_size=2, linesearch=search)


@pytest.mark.slow
def test_lbfgs_inside_a_recorder_says_how_to_save_it(tmp_path, caplog):
    recorder = adacheck.Recorder(lbfgs())
    run = line_search_run(recorder, recorder)
    handler = adacheck.AdaCheckHandler(recorder, params_path="params")
    save_and_restore(tmp_path, handler, run, 3)
    (told,) = [r.getMessage() for r in caplog.records if "Saving bit-pattern" in r.getMessage()]
    assert "a function, as line searches take it (optax.lbfgs)" in told
    assert told.endswith("leave the Recorder out, and save differences with "
                         "AdaCheckHandler(delta='bits').")  # fmt: skip


@pytest.mark.campaign
def test_lbfgs_without_a_recorder_is_saved_as_differences(tmp_path):
    handler = adacheck.AdaCheckHandler(delta="bits")
    save_and_restore(tmp_path, handler, line_search_run(lbfgs()), 3)
    assert kinds(tmp_path) == "BDD"
